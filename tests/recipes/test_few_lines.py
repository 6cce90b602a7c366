"""Recipes of a few lines, alone and together: each does what it is for, and trains as its base does."""
import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from launch import IN_FLOAT64, LITTLE_DATA, ROOT, SMALL, after, check_close, check_equal, figures, little_data, load, train

compiles = pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch before 2.14 compiles no nn.Sequential")
# Graphs are made, but no code of them, for which g++ takes half a minute.
EAGERLY = """
import functools, torch
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""


@functools.cache  # their base, which two recipes are compared with, trains once
def two_epochs(script, *options, before=""):
    return figures(train(script, 2, *options, before=before).stdout)


def of_both_ranks():
    return [Path(log).read_text().splitlines() for log in ("log.0", "log.1")]


def formats(path):
    saved = load(path)
    return {tensor.dtype for part in (saved["model"], *saved["optimizer"]["state"].values()) for tensor in part.values()}


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step():
    options, few = (1, "--batch-size", 250), IN_FLOAT64 + little_data(760)
    without = train("multigpu_torchrun.py", *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward",
                  "given[0].training, given[0].require_backward_grad_sync")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    assert of_both_ranks() == [[*["True False"] * 4, "True True"] * 3] * 2  # four parts of 30 samples, and one of 5


CALM = "--batch-size", 240, "--lr", 0.009
FORMATS = (after("torch.nn.Linear.forward", "'training' if given[0].training else 'evaluation', result.dtype") +
           after("torch.nn.functional.cross_entropy", "'loss', result.dtype"))
SENT = "import torch; torch.version.cuda = None\n" + after(  # as where torch is built for CPUs alone
    "torch.distributed.all_reduce", "given[0].dtype, given[0].numel()")


@pytest.mark.parametrize("recipe, logs", [("bf16", FORMATS), ("compress", SENT)])
def test_recipes_with_fewer_digits_learn_as_fast_and_keep_weights_loss_and_checkpoint_in_float32(recipe, logs):
    base = two_epochs("multigpu_torchrun.py", *CALM)
    assert base[1][0] - base[2][0] > 0.1  # twenty times the bound, which a recipe that does not train misses
    check_close(two_epochs(f"recipes/{recipe}.py", *CALM, before=logs), base, loss=0.005, accuracy=2)
    assert formats(f"{recipe}.pt") == {torch.float32}
    weights = sum(weight.numel() for weight in load(f"{recipe}.pt")["model"].values())
    for lines in of_both_ranks():
        if recipe == "bf16":
            assert {*lines} == {"training torch.bfloat16", "evaluation torch.bfloat16", "loss torch.float32"}
        else:
            sent = [int(line.split()[1]) for line in lines if line.startswith("torch.bfloat16")]
            assert sum(sent) == 32 * weights  # all gradients of each step
            assert len(lines) - len(sent) == 4  # the sums


@compiles
def test_compilation_takes_place_in_the_first_epoch_alone_trains_the_same_and_keeps_the_names():
    options, count = (3, *SMALL), "torch._dynamo.utils.counters['stats']['unique_graphs']"
    job = train("recipes/compile.py", *options, before=LITTLE_DATA + EAGERLY + "import utils\n" + after("utils.report", count))
    without = train("multigpu_torchrun.py", *options, before=LITTLE_DATA)
    first, *later = map(int, Path("log.0").read_text().split())
    assert later == [first] * 2 and first > 1  # for training, and for evaluation
    check_close(figures(job.stdout), figures(without.stdout))
    assert load("compile.pt")["model"].keys() == load("multigpu_torchrun.pt")["model"].keys()


def test_each_rank_leaves_a_trace_of_the_sixth_step_to_the_eighth():
    train("recipes/profiler.py", 1, "--batch-size", 24, before=LITTLE_DATA)
    for rank in (0, 1):
        trace = json.loads(Path(f"profiler.pt.rank{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"].partition("#")[0] for event in trace["traceEvents"]
                 if event.get("ph") == "X" and event["cat"] != "gpu_user_annotation"]  # the same names in a GPU's rows
        for name in ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.step"):  # which the chapter reads
            assert sum(each.startswith(name) for each in names) == 3, name
        assert sum("all_reduce" in each for each in names) >= 3  # gloo:all_reduce, or the device's own backend's


@compiles
def test_accumulation_bfloat16_compilation_and_a_profile_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    together = Path("recipes/together.py").resolve()
    together.parent.mkdir()
    base, *recipes = ((ROOT / script).read_text() for script in (
        "multigpu_torchrun.py", "recipes/accumulate.py", "recipes/compile.py", "recipes/profiler.py"))
    for file in (Path("base.py"), together):
        file.write_text(base)
    for recipe in recipes:
        Path("recipe.py").write_text(base[:base.index("import os")] + recipe[recipe.index("import os"):])  # with one docstring
        subprocess.run(["git", "merge-file", together, "base.py", "recipe.py"], check=True)
    lines = re.search(r"```python\n( +with nullcontext.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)[1]
    text, count = re.subn(r" +with nullcontext.*?\.backward\(\)\n", lines, together.read_text(), flags=re.DOTALL)
    assert count == 1 and "torch.autocast" in lines
    together.write_text(text)

    options = 2, *SMALL
    job = train(together, *options, before=LITTLE_DATA + EAGERLY)
    without = train("multigpu_torchrun.py", *options, before=LITTLE_DATA)
    check_close(figures(job.stdout), figures(without.stdout), loss=5e-3, accuracy=100)
    assert formats("together.pt") == {torch.float32} and Path("together.pt.rank1.json").exists()
