import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; what is forked later must not have used threads
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # another way to look for GPUs cannot be followed by a fork
pytest.register_assert_rewrite("chapters", "launch", "results")  # their assertions too show what differs
pytest_plugins = ["processes", "hosts"]  # their fixtures


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="what scripts and recipes train on, where a test does not say otherwise")


def pytest_configure(config):
    os.environ["TEST_DEVICE"] = config.getoption("--device")
