"""The same command trains the same model in every script, at every world size."""
import pytest
import torch
from launch import figures, run, run_all, weights

WAYS = [("single_gpu.py", 1), ("multigpu_spawn.py", 1), ("multigpu_spawn.py", 2), ("multigpu_spawn.py", 4),
        ("multigpu_torchrun.py", 2)]  # dp.py has a leg of the relay in test_checkpoint.py, multinode.py its own tests


def test_fifty_epochs_print_the_same_losses_and_accuracies_everywhere(tmp_path):
    one, two = [figures(job) for job in run_all(("single_gpu.py", 50, 10, dict(cwd=tmp_path)),
                                                ("multigpu_spawn.py", 50, 10, dict(cwd=tmp_path)))]
    assert list(one) == list(two) == list(range(1, 51))
    assert one[1][1] < 20 and one[5][1] < 60 and one[50][1] > 95  # it learns, and not at once
    for epoch, (loss, accuracy) in one.items():
        assert two[epoch][0] == pytest.approx(loss, abs=1e-3)
        assert two[epoch][1] == pytest.approx(accuracy, abs=100 / 509 + 0.01)  # one sample, rounded


def test_every_script_and_world_size_ends_with_the_same_weights(tmp_path, float64, fashion_mnist):
    def compare(ways, *arguments):
        jobs = run_all(*[(script, *arguments, "--checkpoint", f"{script}{processes}.pt",
                          dict(processes=processes, cwd=tmp_path, **float64)) for script, processes in ways])
        first = weights(tmp_path / "single_gpu.py1.pt")
        for (script, processes), job in zip(ways, jobs):
            assert figures(job) == figures(jobs[0]), script
            start, *lines = job.stdout.splitlines()
            assert start.startswith(f"processes: {processes}, device: ")  # rank 0 alone prints
            assert [line.split()[0] for line in lines] == ["epoch"] * arguments[0] + ["saved"]
            if job.stderr:  # and torch warns of nothing
                pytest.fail(job.stderr)
            other = weights(tmp_path / f"{script}{processes}.pt")
            assert (other - first).norm() <= 1e-9 * first.norm(), (script, processes)
            (tmp_path / f"{script}{processes}.pt").unlink()
    compare(WAYS, 2)
    # Neither the 1,999 samples nor the 15 batches of 132 that fit nor the 211 held-out samples are an even number.
    compare([("single_gpu.py", 1), ("multigpu_torchrun.py", 2)], 1, "--batch-size", 132,
            "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(1999, 211))


READS = """
import os
import torchvision.datasets
get = torchvision.datasets.MNIST.__getitem__
def logged(self, index):
    with open(f"{os.environ['READS']}/{os.getpid()}", "a") as file:
        file.write(f"{'train' if self.train else 'val'} {index}\\n")
    return get(self, index)
torchvision.datasets.MNIST.__getitem__ = logged
"""


def test_the_ranks_share_out_each_sample_once_in_another_order_each_epoch(tmp_path, customize, fashion_mnist):
    train, held_out, epochs = 960, 101, 2
    reads = tmp_path / "reads"
    reads.mkdir()
    run("multigpu_torchrun.py", epochs, "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(train, held_out),
        cwd=tmp_path, READS=str(reads), **customize(READS))
    ranks = [[line.split() for line in file.read_text().splitlines()] for file in reads.iterdir()]
    assert len(ranks) == 2
    orders = []
    for epoch in range(epochs):
        share = slice(epoch * train // 2, (epoch + 1) * train // 2)
        parts = [[int(index) for kind, index in rank if kind == "train"][share] for rank in ranks]
        assert sorted(parts[0] + parts[1]) == list(range(train))
        orders.append(parts[0])
    assert orders[0] != orders[1]
    assert sorted(int(index) for rank in ranks for kind, index in rank if kind == "val") == sorted(
        list(range(held_out)) * epochs)


DRAWS = """
import os
import zlib
import torch
forward = torch.nn.Dropout.forward
def logged(self, images):
    if self.training:  # the mask follows from the generator's state
        with open(f"{os.environ['DRAWS']}/{os.getpid()}", "a") as file:
            file.write(f"{zlib.crc32(torch.get_rng_state().numpy())}\\n")
    return forward(self, images)
torch.nn.Dropout.forward = logged
"""


def test_dropout_differs_by_rank_and_a_resumed_run_is_the_unbroken_one(tmp_path, customize, fashion_mnist):
    script = "multigpu_torchrun.py"
    options = ["--model", "mobilenet_v3_small", "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(480, 20),
               "--workers", 1]  # starting loader processes must not shift the random numbers
    draws = tmp_path / "draws"
    draws.mkdir()
    environment = dict(cwd=tmp_path, DRAWS=str(draws), **customize(DRAWS))
    run_all((script, 2, *options, "--checkpoint", "unbroken.pt", environment),
            (script, 1, *options, "--checkpoint", "resumed.pt", dict(cwd=tmp_path)))
    run(script, 2, *options, "--checkpoint", "resumed.pt", cwd=tmp_path)
    assert torch.equal(weights(tmp_path / "unbroken.pt"), weights(tmp_path / "resumed.pt"))
    drawn = [mask for file in draws.iterdir() for mask in file.read_text().split()]
    assert len(list(draws.iterdir())) == 2  # files, one a rank
    assert len(drawn) == len(set(drawn)) == 2 * 2 * 2  # ranks, epochs, steps


def test_the_models_without_a_test_of_their_own_train_too(tmp_path, fashion_mnist):
    data = fashion_mnist(16, 8)
    for model in ("resnet50", "convnext_tiny", "vgg11"):
        job = run("multigpu_torchrun.py", 1, "--model", model, "--batch-size", 8, "--dataset", "FashionMNIST", "--data-dir", data,
                  "--checkpoint", f"{model}.pt", cwd=tmp_path)
        assert 0 < figures(job)[1][0] < 10 and "saved" in job.stdout


STATISTICS = """
import os
import torch
evaluate = torch.nn.Module.eval
def logged(self):
    with open(f"{os.environ['STATISTICS']}/{os.getpid()}", "a") as file:
        file.write(f"{[buffer.tolist() for buffer in self.buffers()]}\\n")
    return evaluate(self)
torch.nn.Module.eval = logged
"""


def test_all_ranks_evaluate_with_the_statistics_that_are_saved(tmp_path, customize, fashion_mnist):
    seen = tmp_path / "statistics"
    seen.mkdir()
    run("multigpu_spawn.py", 1, "--model", "resnet18", "--batch-size", 60, "--dataset", "FashionMNIST", "--data-dir",
        fashion_mnist(240, 20), cwd=tmp_path, STATISTICS=str(seen), **customize(STATISTICS))
    one, other = [file.read_text() for file in seen.iterdir()]
    assert one == other and "[0." in one
