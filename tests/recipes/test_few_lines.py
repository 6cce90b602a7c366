"""Recipes of a few lines, files or blocks of docs/recipes.md: each does what it is for, and trains as its base does."""
import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from chapters import CHAPTERS, block
from launch import IN_FLOAT64, LITTLE_DATA, RECIPES, ROOT, SMALL, after, little_data, needs, train
from results import check_close, check_equal, figures, load

import utils

BLOCKS = ["Compilation", "Compressed gradients", "Traces"]
BASE = "multigpu_torchrun.py"
compiles = pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch before 2.14 compiles no nn.Sequential")
# Graphs are made, but no code of them, for which g++ takes half a minute.
EAGERLY = """
import functools, torch
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""


def patched(script, *headings):
    """A copy of a script with the blocks under these headings, as a reader adds them."""
    needs("patch")
    copy = shutil.copy(ROOT / script, Path("patched.py").resolve())
    for heading in headings:
        _, _, section = CHAPTERS[ROOT / "docs/recipes.md"].partition(f"\n## {heading}\n")
        lines = re.search(r"^```diff\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[1]
        subprocess.run(["patch", "-F0", copy], input=lines, text=True, check=True)
    return copy


@functools.cache
def base(*options, before=""):
    return figures(train(BASE, *options, before=before).stdout)


def of_both_ranks():
    return [Path(log).read_text().splitlines() for log in ("log.0", "log.1")]


def formats(path):
    saved = load(path)
    return {tensor.dtype for part in (saved["model"], *saved["optimizer"]["state"].values()) for tensor in part.values()}


def check_traces(path):
    for rank in (0, 1):
        trace = json.loads(Path(f"{path}.rank{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]
                 if event.get("ph") == "X" and event["cat"] != "gpu_user_annotation"]  # the same names in a GPU's rows
        steps = sorted(name for name in names if name.startswith("ProfilerStep"))
        assert trace["distributedInfo"]["rank"] == rank and steps == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
        assert sum("all_reduce" in name for name in names) >= 3  # gloo:all_reduce, or the device's own backend's


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step():
    options, few = (1, "--batch-size", 250), IN_FLOAT64 + little_data(760)
    without = train(BASE, *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward", "log(given[0].require_backward_grad_sync)")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    assert of_both_ranks() == [[*["False"] * 4, "True"] * 3] * 2  # in each step four parts of 30 samples, and one of 5


def check_learns_as_fast(script, before):
    options = 2, "--batch-size", 240, "--lr", 0.009
    expected = base(*options)
    assert expected[1][0] - expected[2][0] > 0.1  # twenty times the bound, which a recipe that does not train misses
    check_close(figures(train(script, *options, "--checkpoint", "run.pt", before=before).stdout), expected,
                loss=0.005, accuracy=2)
    assert formats("run.pt") == {torch.float32}


def test_bf16_computes_in_bfloat16_but_for_the_loss_learns_as_fast_and_keeps_weights_in_float32():
    check_learns_as_fast("recipes/bf16.py", after("torch.nn.Linear.forward", "log(given[0].training, result.dtype)") +
                         after("torch.nn.functional.cross_entropy", "log('loss', result.dtype)"))
    for lines in of_both_ranks():
        assert {*lines} == {"True torch.bfloat16", "False torch.bfloat16", "loss torch.float32"}


def test_compressed_gradients_are_sent_in_bfloat16_learn_as_fast_and_keep_weights_in_float32():
    for_cpus_alone = "import torch; torch.version.cuda = None\n"  # as torch is built there, which refuses the bare hook
    sends = after("torch.distributed.all_reduce", "log(given[0].dtype, given[0].numel())")
    check_learns_as_fast(patched(BASE, "Compressed gradients"), for_cpus_alone + sends)
    weights = sum(weight.numel() for weight in load("run.pt")["model"].values())
    for lines in of_both_ranks():
        sent = [int(line.split()[1]) for line in lines if line.startswith("torch.bfloat16")]
        assert sum(sent) == 2 * 16 * weights and len(lines) - len(sent) == 2 * 2  # of epochs and steps; of epochs the sums


@compiles
def test_compilation_takes_place_in_the_first_epoch_alone_trains_the_same_and_keeps_the_names():
    graphs = after("utils.report", "log(torch._dynamo.utils.counters['stats']['unique_graphs'])")
    job = train(patched(BASE, "Compilation"), 3, *SMALL, before=LITTLE_DATA + EAGERLY + graphs)
    check_close(figures(job.stdout), base(3, *SMALL, before=LITTLE_DATA))
    first, *later = map(int, Path("log.0").read_text().split())
    assert later == [first] * 2 and first > 1  # for training, and for evaluation
    assert load("patched.pt")["model"].keys() == utils.build_model("cnn").state_dict().keys()


def test_each_rank_leaves_a_trace_of_the_sixth_step_to_the_eighth_of_the_same_training():
    job = train(patched(BASE, "Traces"), 3, *SMALL, before=LITTLE_DATA)
    assert figures(job.stdout) == base(3, *SMALL, before=LITTLE_DATA)
    check_traces("patched.pt")


@pytest.mark.parametrize("script", [BASE, "multinode.py", *RECIPES])
def test_the_blocks_fit_in_any_order(script):
    fitting = ["Traces"] if script == "recipes/fsdp.py" else BLOCKS
    one, other = (Path(patched(script, *order)).read_text() for order in (fitting, fitting[::-1]))
    assert one == other


def check_go_together(script, before=""):
    job = train(script, 3, *SMALL, before=LITTLE_DATA + EAGERLY + before)
    check_close(figures(job.stdout), base(3, *SMALL, before=LITTLE_DATA), loss=5e-3, accuracy=100)
    assert formats("patched.pt") == {torch.float32}
    check_traces("patched.pt")


@compiles
def test_all_blocks_go_together_in_multinode():
    check_go_together(patched("multinode.py", *BLOCKS))


@compiles
def test_accumulation_bfloat16_compilation_and_traces_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    script = Path(patched("recipes/accumulate.py", "Compilation", "Traces"))
    text, found = re.subn(r" +with nullcontext[\s\S]*?\.backward\(\)", block("with nullcontext"), script.read_text())
    assert found == 1
    script.write_text(text)
    check_go_together(script, after("torch.nn.functional.cross_entropy", "log(given[0].dtype)"))
    assert [{*lines} for lines in of_both_ranks()] == [{"torch.bfloat16"}] * 2
