"""The same command trains the same model in every script, at every world size."""
import torch
from forked import train
from launch import IN_FLOAT64, figures, logs, weights


def check_same_weights(ways, *arguments, cwd):
    seen = []
    for script, processes in ways:
        job = train(script, *arguments, "--checkpoint", "run.pt", processes=processes, cwd=cwd, before=IN_FLOAT64)
        begin, *lines = job.stdout.splitlines()
        assert begin.startswith(f"processes: {processes or 1}, device: ")  # rank 0 alone prints
        assert [line.split()[0] for line in lines] == ["epoch"] * arguments[0] + ["saved"]
        assert job.stderr == ""  # and torch warns of nothing
        seen.append((figures(job.stdout), weights(cwd / "run.pt")))
        (printed, saved), (expected, reference) = seen[-1], seen[0]
        assert printed == expected and (saved - reference).norm() <= 1e-9 * reference.norm(), (script, processes)
        (cwd / "run.pt").unlink()


def test_every_script_and_world_size_ends_with_the_same_weights(tmp_path, small):
    check_same_weights([("single_gpu.py", 0), ("dp.py", 0), ("multigpu_spawn.py", 1), ("multigpu_spawn.py", 2),
                        ("multigpu_torchrun.py", 3), ("multigpu_torchrun.py", 4), ("multinode.py", 2)], 2, *small, cwd=tmp_path)


def test_so_they_do_where_nothing_comes_out_even(tmp_path, fashion_mnist):
    """Neither the 1,999 samples nor the 15 batches of 132 that fit nor the 211 held-out samples are an even number."""
    check_same_weights([("single_gpu.py", 0), ("multigpu_torchrun.py", 2)], 1, "--batch-size", 132,
                       "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(1999, 211), cwd=tmp_path)


def test_the_ranks_share_out_each_sample_once_in_another_order_each_epoch(tmp_path, fashion_mnist):
    reads = logs("torchvision.datasets.MNIST.__getitem__", "given[0].train, given[1]")
    data = fashion_mnist(960, 101)
    train("multigpu_torchrun.py", 2, "--dataset", "FashionMNIST", "--data-dir", data, cwd=tmp_path, before=reads)
    ranks = [[line.split() for line in (tmp_path / f"log.{rank}").read_text().splitlines()] for rank in (0, 1)]
    parts = [[int(index) for kind, index in rank if kind == "True"] for rank in ranks]
    for epoch in (slice(0, 480), slice(480, 960)):
        assert sorted(parts[0][epoch] + parts[1][epoch]) == list(range(960))
    assert parts[0][:480] != parts[0][480:]
    assert sorted(int(index) for rank in ranks for kind, index in rank if kind == "False") == sorted([*range(101)] * 2)


def test_dropout_differs_by_rank_and_a_resumed_run_is_the_unbroken_one(tmp_path, fashion_mnist):
    def part(epochs, checkpoint, **options):
        train("multigpu_torchrun.py", epochs, "--model", "mobilenet_v3_small", "--dataset", "FashionMNIST", "--data-dir", data,
              "--workers", 1, "--checkpoint", checkpoint, cwd=tmp_path, **options)  # workers must not shift random numbers
    data = fashion_mnist(480, 20)
    masks = logs("torch.nn.Dropout.forward", "given[0].training and zlib.crc32(result.eq(0).numpy())")
    part(2, "unbroken.pt", before=masks)
    part(1, "resumed.pt")
    part(2, "resumed.pt")
    assert torch.equal(weights(tmp_path / "unbroken.pt"), weights(tmp_path / "resumed.pt"))
    drawn = [mask for rank in (0, 1) for mask in (tmp_path / f"log.{rank}").read_text().split() if mask != "False"]
    assert len(drawn) == len(set(drawn)) == 2 * 2 * 2  # ranks, epochs, steps


def test_all_ranks_evaluate_with_the_statistics_that_are_saved(tmp_path, fashion_mnist):
    train("multigpu_torchrun.py", 1, "--model", "resnet18", "--batch-size", 60, "--dataset", "FashionMNIST", "--data-dir",
          fashion_mnist(240, 20), cwd=tmp_path,
          before=logs("torch.nn.Module.eval", "[buffer.tolist() for buffer in given[0].buffers()]"))
    one, other = ((tmp_path / f"log.{rank}").read_text() for rank in (0, 1))
    assert one == other and "[0." in one
