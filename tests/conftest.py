import contextlib
import shutil
import struct
import subprocess

import pytest
import torch
from hosts import give_folders, two_hosts
from launch import RECIPES, ROOT
from slurm import slurm_on

IN_FLOAT64 = "import torch\ntorch.set_default_dtype(torch.float64)\n"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU, and is skipped without one")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def customize(tmp_path_factory):
    """An environment in which every Python process runs these lines before all others."""
    def environment(lines):
        folder = tmp_path_factory.mktemp("customize")
        (folder / "sitecustomize.py").write_text(lines)
        return {"PYTHONPATH": str(folder)}
    return environment


@pytest.fixture(scope="session")
def float64(customize):
    """In float64 the order of a sum hardly matters: what is the same training ends the same."""
    return customize(IN_FLOAT64)


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
            (raw / f"{name}-images-idx3-ubyte").write_bytes(
                struct.pack(">4i", 0x803, count, 28, 28) + images.numpy().tobytes())
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(
                struct.pack(">2i", 0x801, count) + labels.to(torch.uint8).numpy().tobytes())
        return folder
    return write


@pytest.fixture(scope="session")
def network():
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs the right to make network namespaces: {error}")
        yield hosts


@pytest.fixture
def hosts(network, tmp_path):
    """Two hosts, each with a folder of its own."""
    give_folders(network, tmp_path)
    return network


@pytest.fixture(scope="session")
def slurm(network, tmp_path_factory):
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        if not shutil.which(program):
            pytest.skip(f"needs {program}")
    with slurm_on(network, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm
