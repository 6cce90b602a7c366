"""Recipes of a few lines do what they are for; those of fewer digits learn as fast as their base."""
import functools
import json
from pathlib import Path

import pytest
from launch import IN_FLOAT64, LITTLE_DATA, after, check_close, check_equal, figures, formats, little_data, load, train


@functools.cache  # their base, which both recipes are compared with, trains once
def two_epochs(script, *options, before=""):
    return figures(train(script, 2, *options, before=before).stdout)


def of_both_ranks():
    return [Path(log).read_text().splitlines() for log in ("log.0", "log.1")]


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step():
    options, few = (1, "--batch-size", 250), IN_FLOAT64 + little_data(760)
    without = train("multigpu_torchrun.py", *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward",
                  "given[0].training, given[0].require_backward_grad_sync")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    assert of_both_ranks() == [[*["True False"] * 4, "True True"] * 3] * 2  # four parts of 30 samples, and one of 5


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
    assert formats(f"{recipe}.pt") == {"torch.float32"}
    weights = sum(weight.numel() for weight in load(f"{recipe}.pt")["model"].values())
    for lines in of_both_ranks():
        if recipe == "bf16":
            assert {*lines} == {"training torch.bfloat16", "evaluation torch.bfloat16", "loss torch.float32"}
        else:
            sent = [int(line.split()[1]) for line in lines if line.startswith("torch.bfloat16")]
            assert sum(sent) == 32 * weights  # all gradients of each step
            assert len(lines) - len(sent) == 4  # loss and accuracy
