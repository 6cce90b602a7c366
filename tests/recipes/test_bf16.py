"""recipes/bf16.py: the model computes in bfloat16; weights, gradients and loss stay in float32."""
from pathlib import Path

from launch import LITTLE_DATA, SMALL, after, train
from observe import formats

LOGS_FORMATS = (after("torch.nn.Linear.forward", "'training' if given[0].training else 'evaluation', result.dtype") +
                after("torch.nn.functional.cross_entropy", "'loss', result.dtype") +
                after("torch.optim.SGD.step", "'gradient', *{share.grad.dtype for share in given[0].param_groups[0]['params']}"))


def test_the_model_computes_in_bfloat16_and_weights_gradients_and_loss_stay_in_float32():
    train("multigpu_torchrun.py", 1, *SMALL, before=LITTLE_DATA)
    train("recipes/bf16.py", 1, *SMALL, before=LITTLE_DATA + LOGS_FORMATS)
    for log in ("log.0", "log.1"):
        assert {*Path(log).read_text().splitlines()} == {
            "evaluation torch.bfloat16", "gradient torch.float32", "loss torch.float32", "training torch.bfloat16"}
    assert formats("bf16.pt") == formats("multigpu_torchrun.pt")
