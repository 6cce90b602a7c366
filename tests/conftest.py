import os
import signal
import struct

import pytest
import torch

pytest.register_assert_rewrite("launch")  # its assertions too show what differs
from launch import PACKAGES, needs, started
from machines import slurm_on, two_hosts

# Memory stays with the process that has freed it: to map it anew for each step in float64 costs a quarter of the time.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
signal.signal(signal.SIGINT, signal.default_int_handler)  # else all that is started ignores it, as tests in the background do


def pytest_collection_modifyitems(items):
    """Those with several machines mostly wait: they are spread among the others, so that there is always something to do."""
    waiting = [item for item in items if "cluster" in item.nodeid]
    others = [item for item in items if "cluster" not in item.nodeid]
    for place, item in enumerate(waiting):
        others.insert(place * max(1, int(0.75 * len(items) / len(waiting))), item)
    items[:] = others


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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, and leaves no process behind."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    while started:
        job = started.pop()
        job.kill()
        print(job.stdout, *job.read(), job.stderr)  # which pytest shows where a test has failed


@pytest.fixture(scope="session")
def fashion_mnist(tmp_path_factory):
    """Options for a FashionMNIST of any size, written in its own file format."""
    def write(train, held_out):
        folder = tmp_path_factory.mktemp("data")
        raw = folder / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for name, count in (("train", train), ("t10k", held_out)):
            generator = torch.Generator().manual_seed(count)
            labels = torch.randint(10, (count,), generator=generator)
            images = torch.randint(64, (count, 28, 28), generator=generator) + 19 * labels[:, None, None]
            for what, values in (("images-idx3", images), ("labels-idx1", labels)):
                head = struct.pack(f">{1 + values.dim()}i", 0x800 + values.dim(), *values.shape)
                (raw / f"{name}-{what}-ubyte").write_bytes(head + values.to(torch.uint8).numpy().tobytes())
        return "--dataset", "FashionMNIST", "--data-dir", folder
    return write


@pytest.fixture(scope="session")
def small(fashion_mnist):
    """Options for little data, where all is done in float64."""
    return *fashion_mnist(480, 101), "--batch-size", 48


@pytest.fixture
def hosts(folder):
    """Two hosts, each with a folder of its own."""
    with two_hosts(folder) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    needs("munged", "slurmctld", "slurmd", "srun")
    folder = tmp_path_factory.mktemp("slurm")
    with two_hosts(folder) as hosts, slurm_on(hosts, folder) as slurm:
        yield slurm
