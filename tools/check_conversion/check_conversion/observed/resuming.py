"""For --resume: notes when a checkpoint is saved, and kills the run at the step that the check has chosen."""
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from check_conversion import running
from check_conversion.observed import process, steps
from check_conversion.observed.process import note, on_return, settings


def kill_at_step(*_):
    """Within the step of the rank that saves: what it saved before is whole, and no rank writes anything more."""
    if process.steps != settings.killed_at or not process.steps:  # 0: a first step that only makes an optimizer's state
        return
    sys.stdout.flush()
    if process.rank != settings.killer:
        threading.Event().wait()
    for one in sorted(running.processes(settings.records), key=lambda pid: pid == os.getpid()):  # itself last
        os.kill(one, signal.SIGKILL)


def install():
    on_return(torch, "save", lambda *_, **__: note("saved"))
    on_return(DataLoader, "__iter__", lambda *_: steps.disregard_draws())  # of its workers' seed, if it has any
    # DDP forms its buckets anew after the first step: a restarted run would do so later, and round its sums otherwise.
    dist.Reducer._rebuild_buckets = lambda *_: False
    register_optimizer_step_post_hook(kill_at_step)  # after steps.py has counted the step
