"""Each model that can be asked for trains."""
import pytest
from forked import train
from launch import figures


@pytest.mark.parametrize("model", ["resnet50", "convnext_tiny", "vgg11"])
def test_the_models_without_a_test_of_their_own_train_too(model, tmp_path, fashion_mnist):
    job = train("multigpu_torchrun.py", 1, "--model", model, "--batch-size", 8, "--dataset", "FashionMNIST",
                "--data-dir", fashion_mnist(16, 8), cwd=tmp_path, processes=1)
    assert 0 < figures(job.stdout)[1][0] < 10 and "saved" in job.stdout
