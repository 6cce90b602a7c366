"""A recipe is the same training as its base, or in its precision nearly so."""
from pathlib import Path

import pytest
from launch import (
    ADAMW,
    IN_FLOAT64,
    RECIPES,
    ROOT,
    SGD,
    TORCHRUN,
    Job,
    check_close,
    check_equal,
    figures,
    train,
    with_optimizer,
)

# One sets its own optimizer, one needs a compiler, one saves a folder: see their own tests.
ANOTHER_TRAINING = {"loop", "compile", "large"}
ROUNDS = {"bf16", "compress"}


SMALL_WITH_BATCHNORM = """
import torchvision
torchvision.models._api.BUILTIN_MODELS["resnet18"] = torchvision.models.shufflenet_v2_x0_5
"""


@pytest.mark.parametrize("model, optimizer", [("cnn", SGD), ("cnn", ADAMW), ("vit", ADAMW), ("resnet18", SGD)],
                         ids=["cnn-SGD", "cnn-AdamW", "vit-AdamW", "resnet18-SGD"])
def test_recipes_are_the_same_training_with_any_optimizer_and_model_also_when_they_are_resumed(model, optimizer, fashion_mnist):
    options = "--model", model, *fashion_mnist(96, 21), "--batch-size", 48, "--lr", 0.001
    sharp = IN_FLOAT64 + SMALL_WITH_BATCHNORM
    whole = figures(train(with_optimizer("multigpu_torchrun.py", optimizer), 2, *options, before=sharp).stdout)
    for recipe in sorted({Path(recipe).stem for recipe in RECIPES} - ANOTHER_TRAINING):
        script, rounds = with_optimizer(f"recipes/{recipe}.py", optimizer), recipe in ROUNDS
        before = SMALL_WITH_BATCHNORM if rounds else sharp
        printed = figures("".join(train(script, epochs, *options, before=before).stdout for epochs in (1, 2)))
        if rounds:
            check_close(printed, whole, loss=0.1, accuracy=100)
        else:
            assert printed == whole, recipe
            check_equal(f"{recipe}.pt", "multigpu_torchrun.pt")


def test_a_recipe_may_be_started_by_its_path():
    job = Job([*TORCHRUN, "--standalone", "--nproc_per_node=2", ROOT / "recipes/compress.py", 1, "--device", "cpu"])
    assert job.wait() == 0 and "saved compress.pt after epoch 1" in job.stdout, job.stderr
