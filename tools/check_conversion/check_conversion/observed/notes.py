"""Where this process writes what it notes, what it prints, and on a signal where it is."""
import faulthandler
import os
import signal
import time

import torch.distributed as dist

from check_conversion import protocol

settings, last_rank, last_sign = None, 0, 0
clock = time.monotonic  # which the second run changes


def rank():
    """The last one that was known: a script may leave its group before it ends."""
    global last_rank
    if dist.is_initialized():
        last_rank = dist.get_rank()
    return last_rank


def note(record):
    protocol.write(settings.file("notes"), rank(), record)


def be_alive():
    """A long evaluation is no hang."""
    global last_sign
    if clock() > last_sign + 1:
        settings.file("alive").touch()
        last_sign = clock()


def install(given):
    global settings, last_rank
    settings, last_rank = given, int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:  # so that the lines of two ranks do not mix
        os.dup2(os.open(settings.file("stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        settings.file("rank").write_text(str(last_rank))  # also where it will note nothing
    stack = open(settings.file("stack"), "w")
    faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
