import os
import tempfile

import pytest

pytest.register_assert_rewrite("launch", "chapters", "hosts", "runs")  # their assertions too show what differs
from hosts import hosts, slurm  # noqa: F401
from launch import folder  # noqa: F401


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="what scripts and recipes train on, where a test does not say otherwise")


def pytest_configure(config):
    os.environ["TEST_DEVICE"] = config.getoption("--device")
    # What was compiled for one instruction set fails with another, and torch 2.15 keeps both under one name.
    place = f"torchinductor_tests_{os.getuid()}_{os.environ.get('ATEN_CPU_CAPABILITY', 'default')}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), place)
