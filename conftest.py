import os

import pytest

pytest.register_assert_rewrite("chapters", "runs")  # their assertions too show what differs
pytest_plugins = ["launch", "hosts"]  # their fixtures


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="what scripts and recipes train on, where a test does not say otherwise")


def pytest_configure(config):
    os.environ["TEST_DEVICE"] = config.getoption("--device")
