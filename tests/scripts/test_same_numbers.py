"""The same command trains the same model in every script, at every world size."""
from pathlib import Path

import torch
from launch import IN_FLOAT64, after, check_close, check_equal, figures, load, train


def test_every_script_and_world_size_ends_with_the_same_weights(fashion_mnist):
    """Where nothing comes out even: neither the 499 samples, nor the batches of 48 that fit, nor the 101 held-out samples."""
    data = *fashion_mnist(499, 101), "--batch-size", 48
    ways = [("single_gpu.py", 1), ("dp.py", 1), ("multigpu_spawn.py", 1), ("multigpu_spawn.py", 2),
            ("multigpu_torchrun.py", 3), ("multigpu_torchrun.py", 4), ("multinode.py", 2)]
    printed = []
    for number, (script, processes) in enumerate(ways):
        job = train(script, 2, *data, "--checkpoint", f"{number}.pt", processes=processes, before=IN_FLOAT64)
        begin, *lines = job.stdout.splitlines()
        assert begin.startswith(f"processes: {processes}, device: ")  # rank 0 alone prints
        assert [line.split()[0] for line in lines] == ["epoch", "epoch", "saved"]
        assert job.stderr == ""  # and torch warns of nothing
        check_equal(f"{number}.pt", "0.pt")
        printed.append(figures(job.stdout))
        assert printed[-1] == printed[0]


def test_the_ranks_share_out_each_sample_once_in_another_order_each_epoch(fashion_mnist):
    reads = "import torchvision.datasets\n" + after("torchvision.datasets.MNIST.__getitem__", "given[0].train, given[1]")
    train("multigpu_torchrun.py", 2, "--batch-size", 240, *fashion_mnist(960, 101), before=reads)
    ranks = [[line.split() for line in Path(log).read_text().splitlines()] for log in ("log.0", "log.1")]
    parts = [[int(index) for kind, index in rank if kind == "True"] for rank in ranks]
    for epoch in (slice(0, 480), slice(480, 960)):
        assert sorted(parts[0][epoch] + parts[1][epoch]) == list(range(960))
    assert parts[0][:480] != parts[0][480:]
    assert sorted(int(index) for rank in ranks for kind, index in rank if kind == "False") == sorted([*range(101)] * 2)


def test_dropout_differs_by_rank_and_a_resumed_run_is_the_unbroken_one(fashion_mnist):
    def part(epochs, checkpoint, **options):
        train("multigpu_torchrun.py", epochs, "--model", "mobilenet_v3_small", *data, "--batch-size", 240,
              "--checkpoint", checkpoint, "--workers", 1, **options)  # which must not shift random numbers
    data = fashion_mnist(480, 20)
    masks = after("torch.nn.Dropout.forward", "given[0].training and zlib.crc32(result.eq(0).numpy())")
    part(2, "unbroken.pt", before=masks)
    part(1, "resumed.pt")
    part(2, "resumed.pt")
    torch.testing.assert_close(load("resumed.pt"), load("unbroken.pt"), rtol=0, atol=0)
    drawn = [mask for log in ("log.0", "log.1") for mask in Path(log).read_text().split() if mask != "False"]
    assert len(drawn) == len(set(drawn)) == 2 * 2 * 2  # ranks, epochs, steps


def test_all_ranks_evaluate_with_the_statistics_that_are_saved(fashion_mnist):
    statistics = after("torch.nn.Module.eval", "[buffer.tolist() for buffer in given[0].buffers()]")
    train("multigpu_torchrun.py", 1, "--model", "resnet18", "--batch-size", 60, *fashion_mnist(240, 20), before=statistics)
    one, other = Path("log.0").read_text(), Path("log.1").read_text()
    assert one == other and "[0." in one


def test_twelve_epochs_of_the_plain_command_learn_and_print_the_same_with_one_process_and_two():
    one, two = (figures(train(script, 12).stdout) for script in ("single_gpu.py", "multigpu_torchrun.py"))
    assert list(one) == list(range(1, 13))
    assert one[1][1] < 20 and one[12][1] > 50  # it learns, and not at once
    check_close(two, one)
