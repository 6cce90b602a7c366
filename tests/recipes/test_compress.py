"""recipes/compress.py: gradients cross the network in half the bytes."""
from pathlib import Path

import torch
from launch import after, load, train
from observe import formats


def test_gradients_cross_the_network_in_half_the_bytes():
    sent = after("torch.distributed.all_reduce", "given[0].dtype, given[0].numel()")
    train("recipes/compress.py", 1, "--batch-size", 480, before=sent)
    weights = sum(weight.numel() for weight in load("compress.pt")["model"].values())
    for log in ("log.0", "log.1"):
        lines = [line.split() for line in Path(log).read_text().splitlines()]
        compressed = [int(count) for dtype, count in lines if dtype == "torch.bfloat16"]
        assert sum(compressed) == 8 * weights  # each step, all of them
        assert len(lines) - len(compressed) == 2  # loss and accuracy
    assert formats("compress.pt") == [torch.float32] * len(formats("compress.pt"))
