import os
import tempfile

import pytest

pytest.register_assert_rewrite("launch", "chapters", "hosts", "runs")  # their assertions too show what differs
from fixtures import folder, hosts, slurm  # noqa: F401
from launch import PACKAGES


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="what scripts and recipes train on, where a test does not say otherwise")


def pytest_configure(config):
    os.environ["TEST_DEVICE"] = config.getoption("--device")
    # What was compiled for one instruction set fails with another, and torch 2.15 keeps both under one name.
    place = f"torchinductor_tests_{os.getuid()}_{os.environ.get('ATEN_CPU_CAPABILITY', 'default')}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), place)


def pytest_unconfigure(config):
    """The last line of all says what was skipped for want of what."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", [])] if reporter else []
    wants = [reason.partition("for want of ")[2].split(", ") for reason in reasons if "for want of " in reason]
    if wants:
        names = sorted({name for names in wants for name in names})
        packages = " ".join(name for name in names if name in PACKAGES.values())
        cure = f"; apt-get install {packages}" if packages else ""
        reporter.write_line(f"skipped for want of {', '.join(names)}: {len(wants)}{cure}")
