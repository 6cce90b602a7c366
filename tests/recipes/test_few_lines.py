"""Recipes of a few lines, alone and together: each does what it is for, and trains as its base does."""
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from chapters import block
from launch import IN_FLOAT64, LITTLE_DATA, ROOT, SMALL, after, little_data, train
from results import check_close, check_equal, figures, load

compiles = pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch before 2.14 compiles no nn.Sequential")
# Graphs are made, but no code of them, for which g++ takes half a minute.
EAGERLY = """
import functools, torch
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""


def of_both_ranks():
    return [Path(log).read_text().splitlines() for log in ("log.0", "log.1")]


def formats(path):
    saved = load(path)
    return {tensor.dtype for part in (saved["model"], *saved["optimizer"]["state"].values()) for tensor in part.values()}


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step():
    options, few = (1, "--batch-size", 250), IN_FLOAT64 + little_data(760)
    without = train("multigpu_torchrun.py", *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward", "log(given[0].require_backward_grad_sync)")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    assert of_both_ranks() == [[*["False"] * 4, "True"] * 3] * 2  # in each step four parts of 30 samples, and one of 5


def check_learns_as_fast(recipe, before):
    options = 2, "--batch-size", 240, "--lr", 0.009
    base = figures(train("multigpu_torchrun.py", *options).stdout)
    assert base[1][0] - base[2][0] > 0.1  # twenty times the bound, which a recipe that does not train misses
    check_close(figures(train(f"recipes/{recipe}.py", *options, before=before).stdout), base, loss=0.005, accuracy=2)
    assert formats(f"{recipe}.pt") == {torch.float32}


def test_bf16_computes_in_bfloat16_but_for_the_loss_learns_as_fast_and_keeps_weights_in_float32():
    check_learns_as_fast("bf16", after("torch.nn.Linear.forward", "log(given[0].training, result.dtype)") +
                         after("torch.nn.functional.cross_entropy", "log('loss', result.dtype)"))
    for lines in of_both_ranks():
        assert {*lines} == {"True torch.bfloat16", "False torch.bfloat16", "loss torch.float32"}


def test_compress_sends_all_gradients_in_bfloat16_learns_as_fast_and_keeps_weights_in_float32():
    for_cpus_alone = "import torch; torch.version.cuda = None\n"  # as torch is built there, which refuses the bare hook
    check_learns_as_fast("compress", for_cpus_alone + after(
        "torch.distributed.all_reduce", "log(given[0].dtype, given[0].numel())"))
    weights = sum(weight.numel() for weight in load("compress.pt")["model"].values())
    for lines in of_both_ranks():
        sent = [int(line.split()[1]) for line in lines if line.startswith("torch.bfloat16")]
        assert sum(sent) == 2 * 16 * weights and len(lines) - len(sent) == 2 * 2  # of epochs and steps; of epochs the sums


@compiles
def test_compilation_takes_place_in_the_first_epoch_alone_trains_the_same_and_keeps_the_names():
    counts = after("utils.report", "log(torch._dynamo.utils.counters['stats']['unique_graphs'])")
    job = train("recipes/compile.py", 3, *SMALL, before=LITTLE_DATA + EAGERLY + counts)
    without = train("multigpu_torchrun.py", 3, *SMALL, before=LITTLE_DATA)
    first, *later = map(int, Path("log.0").read_text().split())
    assert later == [first] * 2 and first > 1  # for training, and for evaluation
    check_close(figures(job.stdout), figures(without.stdout))
    assert load("compile.pt")["model"].keys() == load("multigpu_torchrun.pt")["model"].keys()


def test_each_rank_leaves_a_trace_of_the_sixth_step_to_the_eighth():
    train("recipes/profiler.py", 1, "--batch-size", 24, before=LITTLE_DATA)
    for rank in (0, 1):
        trace = json.loads(Path(f"profiler.pt.rank{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]
                 if event.get("ph") == "X" and event["cat"] != "gpu_user_annotation"]  # the same names in a GPU's rows
        steps = sorted(name for name in names if name.startswith("ProfilerStep"))
        assert trace["distributedInfo"]["rank"] == rank and steps == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
        assert sum("all_reduce" in name for name in names) >= 3  # gloo:all_reduce, or the device's own backend's


@compiles
def test_accumulation_bfloat16_compilation_and_a_profile_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    base, together = ROOT / "multigpu_torchrun.py", Path("together.py").resolve()
    shutil.copy(base, together)
    for recipe in ("accumulate", "compile", "profiler"):  # which all change the docstring: the first one's stays
        subprocess.run(["git", "merge-file", "--ours", together, base, ROOT / f"recipes/{recipe}.py"], check=True)
    step, text = re.compile(r" +with nullcontext.*?\.backward\(\)", re.DOTALL), together.read_text()
    assert len(step.findall(text)) == 1
    together.write_text(step.sub(block("with nullcontext"), text))

    job = train(together, 2, *SMALL, before=LITTLE_DATA + EAGERLY)
    without = train("multigpu_torchrun.py", 2, *SMALL, before=LITTLE_DATA)
    check_close(figures(job.stdout), figures(without.stdout), loss=5e-3, accuracy=100)
    assert formats("together.pt") == {torch.float32} and Path("together.pt.rank1.json").exists()
