"""Folder, data, hosts and Slurm for tests; also for those of the tools, whose conftest.py imports what they need."""
import struct

import pytest
import torch
from hosts import slurm_on, two_hosts
from launch import needs, started


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
