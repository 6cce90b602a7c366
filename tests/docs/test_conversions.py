"""The pairs of examples train as one device does, and one of them is README's lines in a whole script."""
import re
from pathlib import Path

import pytest
import torch
from chapters import block
from launch import ROOT, after, load, train
from runs import check

PAIRS = {"waves": ("--epochs", "2", "--batch-size", "48"),
         "steps": ("--max-steps", "30"),  # in epochs of 25
         "language_model": ("--epochs", "5"),  # after the third its learning rate falls
         "autoencoder": ("--epochs", "2"),
         "stream": ("--samples", "961"),
         "contrastive": ("--epochs", "2")}
# Each rank works in a folder of its own, as on a machine of its own, and keeps what is saved first.
APART = after("torch.nn.Module.eval", "[buffer.sum().item() for buffer in given[0].buffers()]") + after(
    "os.replace", "os.path.exists('first.pt') or os.link(given[1], 'first.pt')") + """import sys
os.makedirs(os.environ["RANK"], exist_ok=True)
os.chdir(os.environ["RANK"])
sys.modules.pop("torch.distributed.nn")  # with which ranks of tests begin
"""
END = """
import sys
assert sampler.drop_last and sampler.seed == args.seed and "torch.distributed.nn" in sys.modules
assert not {"model", "checkpoint"} & globals().keys() and not dist.is_initialized()
"""


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_three_processes(pair):
    before, after = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    status, said = check(before, after, 3, PAIRS[pair], name=f"{pair}_ddp.py")
    assert status == 0 and re.search(r"lines the same .*saved: \d files? the same", said)
    assert "not BatchNorm" not in said and "kept its statistics" not in said  # but over all ranks, as on GPUs
    assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


def test_waves_ddp_and_steps_ddp_have_the_lines_to_copy():
    readme, chapter = (re.split(r"\n\n(?=# [123]\.|def batch_on)", block(text))[1:] for text in (
        "totals = torch.tensor([loss_sum", "epoch_steps = len(sampler)"))
    for script, parts in (("waves_ddp", readme), ("steps_ddp", [readme[0], *chapter])):
        assert len(parts) >= 3 and all(part in (ROOT / f"examples/{script}.py").read_text() for part in parts)


@pytest.mark.parametrize("pair, done, before", [("waves", "1/2 epochs", 1), ("steps", "10/30 steps", 3)])
def test_they_resume_where_rank_0_alone_has_the_checkpoint(pair, done, before):
    """Within an epoch too, with what dropout would have drawn."""
    Path("script.py").write_text((ROOT / f"examples/{pair}_ddp.py").read_text() + END)
    ran = Path("script.py").resolve(), *PAIRS[pair]
    printed = train(*ran, device=False, before=APART).stdout.splitlines()
    whole = load("0/run.pt")
    Path("0/first.pt").replace("0/run.pt")
    Path("1/run.pt").write_text("of another run")
    resumed = train(*ran, device=False, before=APART).stdout.splitlines()
    assert resumed == [f"run.pt: {done} done", *printed[before:]]
    torch.testing.assert_close(load("0/run.pt"), whole, rtol=0, atol=0)
    tested = [re.findall(r"\[.*", Path(f"{rank}/log.{rank}").read_text()) for rank in (0, 1)]
    assert tested[0] == tested[1] != []  # with the same statistics of BatchNorm
