"""recipes/fsdp.py: each rank holds its shard, and trains what a whole model does."""
from pathlib import Path

import pytest
from launch import IN_FLOAT64, after, little_data, train
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
