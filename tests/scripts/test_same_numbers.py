"""The same command trains the same model in every script, at every world size."""
import itertools
from pathlib import Path

import torch
from launch import BASES, IN_FLOAT64, SMALL, after, check_close, check_equal, figures, little_data, load, start, train


def test_every_script_trains_the_same_weights_with_one_to_six_processes():
    """Where nothing comes out even: neither the 259 samples, nor the batches of 60 that fit, nor the 101 held-out samples."""
    ways = [("single_gpu.py", 1), ("dp.py", 1), *itertools.product(["multigpu_torchrun.py"], range(1, 7)),
            *itertools.product(["multigpu_spawn.py", "multinode.py"], [1, 3])]
    printed = []
    for number, (script, processes) in enumerate(ways):
        job = train(script, 2, "--batch-size", 60, "--checkpoint", f"{number}.pt", processes=processes,
                    before=IN_FLOAT64 + little_data(259, 101))
        begin, *lines = job.stdout.splitlines()
        assert begin.startswith(f"processes: {processes}, device: ")  # rank 0 alone prints
        assert [line.split()[0] for line in lines] == ["epoch", "epoch", "saved"] and job.stderr == ""
        check_equal(f"{number}.pt", "0.pt")
        printed.append(figures(job.stdout))
        assert printed[-1] == printed[0]
