"""recipes/preempt.py: a preempted run loses no step."""
import os
import re
import signal
from pathlib import Path

import torch
from launch import figures, hold_for_a_signal, load, start, train


def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one(fashion_mnist):
    """With dropout and BatchNorm; whether one process gets the signal or all do, loader workers too, as Slurm sends it."""
    options = 3, "--model", "mobilenet_v3_small", "--batch-size", 240, *fashion_mnist(1440, 100)
    whole = train("recipes/preempt.py", *options, "--checkpoint", "whole.pt")
    printed, stopped = {}, []
    for number, to_all, step in ((signal.SIGUSR1, True, 8), (signal.SIGTERM, False, 6)):
        job = start("recipes/preempt.py", *options, "--workers", 1, before=hold_for_a_signal(step),
                    torchrun=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"])
        job.wait_for("epoch ")
        for pid in job.processes() if to_all else [job.workers()[1]]:
            os.kill(pid, number)
        if not to_all:
            Path("go").touch()  # for the other
        assert job.wait() == (1 if to_all else 0), job.stderr  # 1: torchrun's own after a signal
        printed |= figures(job.stdout)
        stopped.append(load("preempt.pt"))
    assert [saved["epoch"] for saved in stopped] == [1, 2] and all(0 < saved["total"][1] < 1440 for saved in stopped)
    refused = train("single_gpu.py", *options, "--checkpoint", "preempt.pt", status=1)
    assert re.search("preempt.pt cannot be resumed .*only recipes.preempt can resume it", refused.stderr)
    printed |= figures(train("recipes/preempt.py", *options).stdout)
    assert printed == figures(whole.stdout)
    torch.testing.assert_close(load("preempt.pt"), load("whole.pt"), rtol=0, atol=0)
