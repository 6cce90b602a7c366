"""Python files run to their end in forks of this process, which has loaded all that takes seconds to load."""
import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.nn
import torchvision.models  # noqa: F401
from jobs import ROOT, SECONDS

import utils

forks = multiprocessing.get_context("fork")


def let_gloo_rest():
    """Before Python 3.11.10, a fork hangs if a thread of gloo takes up Python meanwhile (python/cpython#112275)."""
    threads = [*Path("/proc/self/task").glob("*/stat")]
    with contextlib.suppress(OSError):  # one has ended
        while any("(pt_gloo_runloop) R " in thread.read_text() for thread in threads):
            time.sleep(0.001)


os.register_at_fork(before=let_gloo_rest)


def be_rank(file, arguments, folder, output, before, environment):
    """In a fork: become what a launcher starts."""
    os.setsid()
    os.chdir(folder)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.update({name: str(value) for name, value in environment.items()})
    multiprocessing.set_start_method("fork", force=True)  # of loader workers
    torch.multiprocessing.spawn = lambda function, args, nprocs: torch.multiprocessing.start_processes(
        function, args, nprocs, start_method="fork")
    sys.path.insert(0, str(ROOT))
    sys.argv = [file, *arguments]
    exec(before, {})
    runpy.run_path(file, run_name="__main__")


def fork(file, arguments, folder, output, processes, before, environment):
    """Run a file in so many ranks and return their exit codes. 0 processes: one, without what a launcher sets."""
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": utils.free_port(), "WORLD_SIZE": processes,
                "LOCAL_WORLD_SIZE": processes}
    ranks = [{**launched, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)] or [{}]
    forked = [forks.Process(target=be_rank, args=(file, arguments, folder, output, before, {**environment, **rank}))
              for rank in ranks]
    for process in forked:
        process.start()
    try:
        for process in forked:
            process.join(SECONDS)
        return [process.exitcode for process in forked]
    finally:
        for process in forked:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its loader workers
            process.join()
