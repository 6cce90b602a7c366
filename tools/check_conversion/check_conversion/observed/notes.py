"""Where this process writes what it notes, what it prints, and on a signal where it is."""
import faulthandler
import os
import re
import signal
import sys
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


def by_users_line(frame):
    """Whether a line of the copy writes, perhaps by a logger; what packages warn of is not the script's."""
    while frame and re.search("/(logging|loguru)/", frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(settings.copy)


def note_lines():
    """In a file of its own, so that the lines of two ranks do not mix; not where the user has them elsewhere."""
    if os.path.samestat(os.fstat(1), os.stat(os.path.join(settings.records, "stdout"))):
        os.dup2(os.open(settings.file("stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)


def note_errors():
    write = sys.stderr.write

    def write_and_note(text):
        if by_users_line(sys._getframe(1)):
            with open(settings.file("errors"), "a") as file:
                file.write(text)
        return write(text)
    sys.stderr.write = write_and_note


def install(given):
    global settings, last_rank
    settings, last_rank = given, int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        note_lines()
        settings.file("rank").write_text(str(last_rank))  # also where it will note nothing
    note_errors()
    stack = open(settings.file("stack"), "w")
    faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
