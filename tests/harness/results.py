"""What runs printed and saved, read and compared."""
import re
from pathlib import Path

import pytest
import torch


def figures(text):
    """Loss and accuracy (in percent) of each epoch that was printed."""
    found = re.findall(r"epoch +(\d+)/\d+ \| loss (\S+) \| accuracy (\S+)% \| \S+ samples/s \| \d+:\d\d left", text)
    assert len(found) == len(re.findall(r"^epoch", text, re.MULTILINE)), "utils.report prints another line"
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def check_close(printed, expected, loss=1e-3, accuracy=100 / 509 + 0.01):  # one sample, rounded
    assert printed.keys() == expected.keys() != set()
    for epoch in printed:
        assert printed[epoch] == (pytest.approx(expected[epoch][0], abs=loss), pytest.approx(expected[epoch][1], abs=accuracy))


def logs(word=""):
    """The lines that each of two ranks has logged, and that begin with this word."""
    return [[line for line in Path(log).read_text().splitlines() if line.startswith(word)] for log in ("log.0", "log.1")]


def load(path):
    return torch.load(path, weights_only=True, map_location="cpu")


def check_equal(path, expected):
    """All that is in two files where all was done in float64, but the optimizer's state, which FSDP saves by names."""
    one, other = load(path), load(expected)
    del one["optimizer"], other["optimizer"]
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def check_same_bits(path, expected):
    """All that is in two checkpoints."""
    one, other = load(path), load(expected)
    assert one["optimizer"].pop("param_groups") == other["optimizer"].pop("param_groups")
    torch.testing.assert_close(one, other, rtol=0, atol=0)
