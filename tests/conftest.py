import shutil
import struct

import pytest
import torch
from hosts import two_hosts
from launch import RECIPES, ROOT
from slurm import slurm_on


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items.sort(key=lambda item: not item.get_closest_marker("long"))  # so that nothing waits for it at the end


@pytest.fixture
def recipes(tmp_path):
    """A folder in which `-m recipes.NAME` finds them, with room for one more, and where jobs write."""
    (tmp_path / "recipes").mkdir()
    for file in [*RECIPES, "utils.py"]:
        (tmp_path / file).symlink_to(ROOT / file)
    return tmp_path


@pytest.fixture(scope="session")
def fashion_mnist(tmp_path_factory):
    """A folder with a FashionMNIST of any size, in its own file format."""
    def write(train, held_out):
        folder = tmp_path_factory.mktemp("data")
        raw = folder / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        generator = torch.Generator().manual_seed(1)
        for name, count in (("train", train), ("t10k", held_out)):
            labels = torch.randint(10, (count,), generator=generator)
            noise = torch.randint(64, (count, 28, 28), generator=generator)
            images = (noise + 19 * labels[:, None, None]).to(torch.uint8)
            (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 28, 28) + images.numpy().tobytes())
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(
                struct.pack(">2i", 0x801, count) + labels.to(torch.uint8).numpy().tobytes())
        return folder
    return write


@pytest.fixture(scope="session")
def small(fashion_mnist):
    """Options for little data, where all is done in float64."""
    return "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(480, 101), "--batch-size", 48


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, each with a folder of its own."""
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    folder = tmp_path_factory.mktemp("slurm")
    with two_hosts(folder) as hosts, slurm_on(hosts, folder) as slurm:
        yield slurm
