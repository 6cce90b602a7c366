"""Each converted example trains as its original does, and the lines of code of docs/your_own_script.md do what it says."""
from pathlib import Path

import pytest
import torch
from launch import IN_FLOAT64, ROOT, after, run, train
from results import load

COMPARABLE = IN_FLOAT64 + """
import functools, itertools
torch.nn.Dropout.forward = lambda module, input: input
torch.nn.BatchNorm1d = functools.partial(torch.nn.GroupNorm, 1)  # of each sample, not of a rank's part of the batch
def as_distributed(sampler, epochs=itertools.count()):
    return iter(torch.randperm(len(sampler.data_source), generator=torch.Generator().manual_seed(next(epochs))).tolist())
torch.utils.data.RandomSampler.__iter__ = as_distributed
"""


@pytest.mark.parametrize("name, arguments, stops", [  # which suit three processes; the epoch or step in which it is stopped
    ("waves", ["--epochs", 6, "--batch-size", 120], 5), ("steps", ["--max-steps", 22, "--batch-size", 36], 11),
    ("contrastive", ["--epochs", 1], None), ("stream", ["--epochs", 2, "--samples", 961], None)])
def test_a_converted_example_trains_prints_and_saves_the_same_with_three_processes(name, arguments, stops, folder, monkeypatch):
    """One that resumes is stopped once, and started again."""
    stop = after("torch.manual_seed", f"if given[0] // 3 == {stops}: torch.distributed.barrier(), os._exit(1)")
    printed, saved = [], []
    for file, processes in ((f"{name}.py", 0), (f"{name}_ddp.py", 3)):
        (folder / file).mkdir()
        monkeypatch.chdir(folder / file)
        line = f"examples/{file}", *arguments
        begun = train(*line, processes=3, before=COMPARABLE + stop, status=1).stdout if stops and processes else ""
        printed.append(begun + train(*line, processes=processes, before=COMPARABLE).stdout)
        saved.append({path.name: load(path) for path in Path().iterdir()})
    assert printed[1] == printed[0] != "" and saved[0]
    torch.testing.assert_close(saved[1], saved[0], rtol=0, atol=1e-12)


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    run(ROOT / "tests/docs/lines_to_copy.py", processes=3)
