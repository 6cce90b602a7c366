"""A run whose processes are killed goes on to the same weights."""
import os
import signal

import torch
from launch import LITTLE_DATA, RESTARTS, SMALL, after, figures, hold, load, start, train


def test_a_killed_worker_costs_no_bit_under_torchrun_with_restarts():
    not_yet = "os.environ['TORCHELASTIC_RESTART_COUNT'] != '0' or saves.append(0) or len(saves) < 2"
    held = LITTLE_DATA + "saves = []\n" + hold("os.replace", unless=not_yet)  # it does not end before that kill
    job = start("multigpu_torchrun.py", 6, 2, *SMALL, torchrun=["--max-restarts=3"], before=held, **RESTARTS)
    job.wait_for("epoch 3/6")
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.wait() == 0, job.stderr
    undisturbed = train("multigpu_torchrun.py", 6, 2, *SMALL, "--checkpoint", "undisturbed.pt", before=LITTLE_DATA)
    assert figures(job.stdout) == figures(undisturbed.stdout)
    torch.testing.assert_close(load("multigpu_torchrun.pt"), load("undisturbed.pt"), rtol=0, atol=0)
    assert "--max-restarts is unlikely to work" not in job.stderr


AUGMENTED = LITTLE_DATA + """
import random
import numpy, torch
plain = torch.utils.data.TensorDataset.__getitem__
def augmented(self, index):
    assert torch.utils.data.get_worker_info()
    image, label = plain(self, index)
    return image + random.gauss() + numpy.random.normal() + torch.randn(image.shape), label
torch.utils.data.TensorDataset.__getitem__ = augmented
"""
KILLED = "steps = []\n" + after("torch.optim.SGD.step", "steps.append(0) or len(steps) == 13 and os.kill(os.getpid(), 9)")


def test_augmentation_in_a_loader_worker_is_the_same_after_a_kill():
    def part(checkpoint, before=AUGMENTED, status=0):
        options = 4, 2, "--workers", 1, "--checkpoint", checkpoint, *SMALL
        return train("multigpu_torchrun.py", *options, before=before, status=status)

    unbroken, killed = part("unbroken.pt"), part("run.pt", AUGMENTED + KILLED, -signal.SIGKILL)
    resumed = part("run.pt")
    assert [*figures(killed.stdout)] == [1, 2] and [*figures(resumed.stdout)] == [3, 4]
    assert figures(killed.stdout) | figures(resumed.stdout) == figures(unbroken.stdout)
    torch.testing.assert_close(load("run.pt"), load("unbroken.pt"), rtol=0, atol=0)
