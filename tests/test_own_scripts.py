"""The scripts in docs/ and their copies for torchrun are the same training at any number of processes."""
import json
import re
import sys

import pytest
import torch
from launch import ROOT, Job, load

PAIRS = {"own_script": ["--epochs", "2", "--batch-size", "48", "--checkpoint", "own_script.pt"],
         "own_language_model": ["--epochs", "5"],  # after the third its learning rate falls
         "own_autoencoder": ["--epochs", "2"],
         "own_stream": ["--samples", "961"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, float64):
    folder = tmp_path_factory.mktemp("runs")
    calls = [(str(folder / f"{pair} {processes}"), processes,
              str(ROOT / "docs" / f"{pair}{'_ddp' if processes else ''}.py"), *arguments)
             for pair, arguments in PAIRS.items() for processes in (0, 1, 2, 3)]
    job = Job([sys.executable, ROOT / "tests" / "forked.py", json.dumps(calls)], folder,
              CUDA_VISIBLE_DEVICES="", **float64)
    assert job.wait(120) == 0, job.stderr
    return folder


def weights(folder, pair):
    state = load(folder / f"{pair}.pt")
    return torch.cat([tensor.flatten() for tensor in state.get("model", state).values()])


@pytest.mark.parametrize("pair", PAIRS)
def test_losses_and_weights_are_the_same_with_one_two_and_three_processes(pair, runs):
    folders = [runs / f"{pair} {processes}" for processes in (0, 1, 2, 3)]
    for folder in folders:
        assert not any(json.loads((folder / "status").read_text())), (folder / "errors").read_text()
    alone, *shared = [(folder / "printed").read_text() for folder in folders]
    losses = [float(loss) for loss in re.findall(r"\bloss (\S+)", alone)]
    assert min(losses) < 0.8 * losses[0]
    assert shared == [alone] * 3
    alone, *shared = [weights(folder, pair) for folder in folders]
    assert max((other - alone).norm() / alone.norm() for other in shared) <= 1e-9
    alone, *shared = [(folder / "saved").read_text() for folder in folders]
    assert shared == [alone] * 3
    assert all(sorted(path.name for path in folder.iterdir()) == sorted(
        ["errors", f"{pair}.pt", "printed", "saved", "status"]) for folder in folders)
