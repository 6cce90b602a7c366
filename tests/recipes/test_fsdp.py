"""recipes/fsdp.py and recipes/large.py: each rank holds its shard, and trains what a whole model does."""
import importlib.util
import re
from pathlib import Path

import pytest
from launch import IN_FLOAT64, ROOT, SMALL, after, little_data, run, train
from results import check_equal, figures

import utils

LOGS_BYTES = after("torch.optim.SGD.step", """
    shards = [each for shard, state in given[0].state.items() for each in (shard, shard.grad, state["momentum_buffer"])]
    log(sum(each.to_local().nbytes for each in shards))
""")


def test_a_model_trains_as_it_does_whole_and_each_rank_holds_its_shard_of_weights_gradients_and_momentum():
    """11 and 10 held-out samples in batches of 5: rank 0 has a batch more, whose forward rank 1 must attend."""
    options, few = (1, "--batch-size", 10, "--model", "resnet18"), IN_FLOAT64 + little_data(20, 21)
    whole = train("multigpu_torchrun.py", *options, before=few)
    assert figures(train("recipes/fsdp.py", *options, before=few + LOGS_BYTES).stdout) == figures(whole.stdout)
    check_equal("fsdp.pt", "multigpu_torchrun.pt")
    weights = sum(weight.numel() for weight in utils.build_model("resnet18").parameters())
    for log in ("log.0", "log.1"):
        assert int(Path(log).read_text().split()[-1]) == pytest.approx(3 * 8 * weights / 2, rel=0.03)


LITTLE_DATA = little_data(96, 21)
MODELS = after("utils.build_model", "log(next(result.parameters()).device)")


def test_large_trains_what_fsdp_trains_resumes_on_another_number_of_processes_and_becomes_a_plain_file():
    """With AdamW, whose state has numbers too. Rank 0 alone makes the weights."""
    def leg(script, epochs, *more, processes=2):
        copy = Path("copies", script).resolve()
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / script).read_text().replace(
            "torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)", "torch.optim.AdamW(model.parameters(), lr=args.lr)"))
        before = IN_FLOAT64 + LITTLE_DATA + (MODELS if script == "recipes/large.py" else "")
        options = "--model", "vit", "--lr", 0.002, *SMALL, *more
        return figures(train(copy, epochs, *options, processes=processes, before=before).stdout)

    whole = leg("recipes/fsdp.py", 1) | leg("recipes/fsdp.py", 3)
    printed = leg("recipes/large.py", 1)
    assert Path("log.0").read_text().split() == ["cpu", "meta"] and Path("log.1").read_text().split() == ["meta"]
    printed |= leg("recipes/large.py", 2, processes=3)
    assert [folder.name for folder in Path("large.pt.shards").iterdir()] == ["2"]  # one checkpoint is kept
    command, = re.findall(r"^python -m (torch.distributed.checkpoint.*)", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    module, *words = command.replace("shards/50", "shards/2").split()
    run(importlib.util.find_spec(module).origin, *words, processes=0)
    assert printed | leg("single_gpu.py", 3, "--checkpoint", words[-1]) == whole
    check_equal(words[-1], "fsdp.pt")


@pytest.mark.parametrize("before, says", [
    (after("utils.build_model", "result.register_buffer('table', torch.ones(2), persistent=False)"),  # as rotary tables are
     "recompute them after to_empty(): {'table'}"),
    ("import os; os.makedirs(os.environ['RANK'], exist_ok=True); os.chdir(os.environ['RANK'])",
     "not on storage that all machines share")])
def test_what_large_would_train_as_garbage_or_could_not_resume_is_refused_before_training(before, says):
    job = train("recipes/large.py", 1, *SMALL, status=1, before=before)
    assert says in job.stderr and " | loss " not in job.stdout
