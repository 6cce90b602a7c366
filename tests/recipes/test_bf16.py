"""recipes/bf16.py: bfloat16 trains as well as float32."""
from pathlib import Path

import pytest
from launch import after, check_close, figures, train
from observe import formats

LOGS_FORMATS = (after("torch.nn.Linear.forward", "'training' if given[0].training else 'evaluation', result.dtype") +
                after("torch.nn.functional.cross_entropy", "'loss', result.dtype") +
                after("torch.optim.SGD.step", "'gradient', *{share.grad.dtype for share in given[0].param_groups[0]['params']}"))


def test_bfloat16_trains_and_evaluates_as_well_as_float32_which_keeps_weights_and_loss():
    plain = figures(train("multigpu_torchrun.py", 20).stdout)
    found = figures(train("recipes/bf16.py", 20, before=LOGS_FORMATS).stdout)
    for log in ("log.0", "log.1"):
        assert {*Path(log).read_text().splitlines()} == {
            "evaluation torch.bfloat16", "gradient torch.float32", "loss torch.float32", "training torch.bfloat16"}
    check_close(found, plain, loss=5e-3, accuracy=100)
    assert found[20][1] == pytest.approx(plain[20][1], abs=1) and found[20][1] > 90
    assert formats("bf16.pt") == formats("multigpu_torchrun.pt")
