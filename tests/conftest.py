import os

pytest_plugins = ["processes", "launch", "results", "chapters", "hosts"]  # their fixtures, and what their assertions compare


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="what scripts and recipes train on, where a test does not say otherwise")


def pytest_configure(config):
    os.environ["TEST_DEVICE"] = config.getoption("--device")
