import os

import pytest

pytest.register_assert_rewrite("chapters", "hosts", "launch", "processes", "results")  # their assertions too show what differs

from hosts import hosts, slurm  # noqa: F401
from processes import folder  # noqa: F401


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="what scripts and recipes train on, where a test does not say otherwise")


def pytest_configure(config):
    os.environ["TEST_DEVICE"] = config.getoption("--device")
