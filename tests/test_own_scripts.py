"""The scripts in docs/ and their copies for torchrun are the same training at any number of processes."""
import re

import pytest
from forked import train
from launch import IN_FLOAT64, logs, weights

PAIRS = {"own_script": ["--epochs", "2", "--batch-size", "48", "--checkpoint", "own_script.pt"],
         "own_language_model": ["--epochs", "5"],  # after the third its learning rate falls
         "own_autoencoder": ["--epochs", "2"],
         "own_stream": ["--samples", "961"]}

@pytest.mark.parametrize("pair", PAIRS)
def test_losses_and_weights_are_the_same_with_one_two_and_three_processes(pair, tmp_path):
    seen = []
    for processes in (0, 1, 2, 3):
        folder = tmp_path / str(processes)
        folder.mkdir()
        job = train(f"docs/{pair}{'_ddp' if processes else ''}.py", *PAIRS[pair], cwd=folder, processes=processes, device=None,
                    before=IN_FLOAT64 + logs("torch.save", "given[1]"), CUDA_VISIBLE_DEVICES="")
        files = sorted(path.name for path in folder.iterdir() if path.suffix not in (".out", ".err"))
        seen.append((job.stdout, (folder / "log.0").read_text(), files))
    losses = [float(loss) for loss in re.findall(r"\bloss (\S+)", seen[0][0])]
    assert min(losses) < 0.8 * losses[0]
    assert seen == [seen[0]] * 4 and seen[0][2] == ["log.0", f"{pair}.pt"]
    alone, *shared = [weights(tmp_path / str(processes) / f"{pair}.pt") for processes in (0, 1, 2, 3)]
    assert max((other - alone).norm() / alone.norm() for other in shared) <= 1e-9


def test_own_script_resumes_what_its_copy_for_torchrun_has_saved(tmp_path):
    def losses(script, epochs, processes, *more):
        job = train(f"docs/{script}.py", "--epochs", epochs, *more, cwd=tmp_path, processes=processes, device=None,
                    CUDA_VISIBLE_DEVICES="")
        return re.findall(r"epoch (\d+) \| loss (\S+) \| test loss (\S+)", job.stdout)

    alone = losses("own_script", 6, 0)
    assert [int(epoch) for epoch, _, _ in alone] == [1, 2, 3, 4, 5, 6]
    assert losses("own_script_ddp", 4, 2) == alone[:4]
    assert losses("own_script", 6, 0, "--checkpoint", "own_script_ddp.pt") == alone[4:]
