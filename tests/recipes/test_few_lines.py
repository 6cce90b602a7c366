"""Recipes of a few lines, files or blocks of docs/recipes.md: each does what it is for, and trains as its base does."""
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from chapters import block, blocks
from launch import EXACT, IN_FLOAT64, RECIPES, ROOT, SMALL, after, little_data, needs, train
from results import check_close, check_equal, figures, load, logs

import utils

BASE, BLOCKS = "multigpu_torchrun.py", [lines for lines in blocks("diff") if lines.startswith("@@")]
# A torch for CPUs alone refuses the hook of the second block by its name; graphs are made, but no code of them, which needs g++.
ANYWHERE = """import functools, torch, torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
hooks.bf16_compress_hook.__name__ = "hook"
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""


def patched(script, diffs):
    """A copy of a script with these blocks, as a reader adds them."""
    needs("patch")
    copy = shutil.copy(ROOT / script, Path("patched.py").resolve())
    for diff in diffs:
        done = subprocess.run(["patch", "-F0", copy], input=diff, text=True, stdout=subprocess.PIPE)
        assert done.returncode == 0, f"docs/recipes.md's block does not fit in {script}: {done.stdout}{diff}"
    return copy


def check_trains_as_its_base(script, before, options=(2, "--batch-size", 240, "--lr", 0.009)):
    """Twice the bound is less than what it learns; names stay, and weights in float32."""
    expected = figures(train(BASE, *options).stdout)
    assert expected[1][0] - expected[2][0] > 0.1
    job = train(script, *options, "--checkpoint", "run.pt", before=before)
    check_close(figures(job.stdout), expected, loss=0.005, accuracy=2)
    saved = {name: weight.dtype for name, weight in load("run.pt")["model"].items()}
    assert saved == dict.fromkeys(utils.build_model("cnn").state_dict(), torch.float32)


@pytest.mark.parametrize("batch, parts", [(250, [*["False"] * 4, "True"]), (240, [*["False"] * 3, "True"])])
def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step(batch, parts):
    """In each step four parts of 30 samples, and one of 5 or none."""
    options, few = (1, "--batch-size", batch), IN_FLOAT64 + little_data(760)
    without = train(BASE, *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward", "log(given[0].require_backward_grad_sync)")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    assert logs() == [parts * 3] * 2


@pytest.mark.parametrize("script, evaluation", [("recipes/bf16.py", "bfloat16"), ("recipes/accumulate.py", "float32")])
def test_bf16_computes_in_bfloat16_but_for_the_loss_and_so_does_accumulation_with_the_lines_for_both(script, evaluation):
    both = Path("both.py").resolve()
    both.write_text(re.sub(r" +with nullcontext[\s\S]*?\.backward\(\)", block("with nullcontext"), (ROOT / script).read_text()))
    check_trains_as_its_base(both, after("torch.nn.Linear.forward", "log(given[0].training, result.dtype)") +
                             after("torch.nn.functional.cross_entropy", "log('loss', result.dtype)"))
    for lines in logs():
        assert {*lines} == {"True torch.bfloat16", f"False torch.{evaluation}", "loss torch.float32"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_file_that_is_merged_with_multinode_resumes_from_what_rank_0_alone_reads_and_trains_the_same(recipe):
    needs("git")
    command = block("git merge-file", "sh").partition(">")[0].replace("recipes/preempt.py", recipe)
    text = subprocess.check_output(["sh", "-c", command], cwd=ROOT, text=True)
    read = r"    checkpoint = utils.read_checkpoint\(args\)\n|(?=    epochs_done = utils.resume\(utils.read)"
    text = re.sub(read, block("checkpoint = checkpoint.pop()"), text)
    text = text.replace("resume(utils.read_checkpoint(args)", "resume(checkpoint")
    merged = Path("train.py").resolve()
    merged.write_text(text)
    options = 2, 1, *SMALL, "--checkpoint"
    keep = after("utils.save", "if os.path.exists('whole.pt') > os.path.exists('run.pt'): os.link('whole.pt', 'run.pt')")
    whole = figures(train(recipe, *options, "whole.pt", before=EXACT + keep).stdout)
    alone = after("utils.read_checkpoint", "assert torch.distributed.get_rank() == 0")
    assert figures(train(merged, *options, "run.pt", before=EXACT + alone).stdout) == {2: whole[2]}
    check_equal("run.pt", "whole.pt")


@pytest.mark.parametrize("script", [BASE, "multinode.py", *RECIPES])
def test_the_blocks_fit_in_any_order(script):
    fitting = [diff for diff in BLOCKS if script != "recipes/fsdp.py" or "profiler" in diff]
    one, other = (Path(patched(script, order)).read_text() for order in (fitting, fitting[::-1]))
    assert one == other


@pytest.mark.parametrize("script", [BASE, "multinode.py"])
def test_the_blocks_compile_in_the_first_epoch_send_gradients_in_bfloat16_and_leave_a_trace_of_each_rank(script):
    graphs = after("utils.report", "log('graphs', torch._dynamo.utils.counters['stats']['unique_graphs'])")
    sends = after("torch.distributed.all_reduce", "log(given[0].dtype, given[0].numel())")
    check_trains_as_its_base(patched(script, BLOCKS), ANYWHERE + graphs + sends)
    first, second = (int(line.split()[1]) for line in logs()[0] if line.startswith("graphs"))
    assert first == second > 1 or torch.__version__ < (2, 14)  # for training and evaluation; torch 2.11 compiles no nn.Sequential
    weights = sum(weight.numel() for weight in load("run.pt")["model"].values())
    for rank, lines in enumerate(logs()):
        sent = [int(line.split()[1]) for line in lines if line.startswith("torch.bfloat16")]
        assert sum(sent) == 2 * 16 * weights  # of epochs and steps
        names = [event["name"] for event in json.loads(Path(f"run.pt.rank{rank}.json").read_text())["traceEvents"]]
        assert {name for name in names if "ProfilerStep" in name} == {"ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"}
        assert sum("all_reduce" in name for name in names) >= 3  # gloo:all_reduce, or the device's own backend's
