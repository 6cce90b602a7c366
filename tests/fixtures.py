"""Folder, data, hosts and Slurm for tests; also for those of the tools, whose conftest.py imports what they need."""
import pytest
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
