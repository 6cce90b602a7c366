"""The ranks of a script, forked from a process that has torch: a start of Python with it takes four seconds."""
import functools
import multiprocessing
import os
import runpy
import socket
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing
from launch import ROOT

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["forked", "torch._dynamo", "torch.distributed.nn", "torchvision.models"])  # loaded later else


def be_rank(script, arguments, folder, output, environment, before):
    os.chdir(folder)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers; what is forked here has another default
    exec(before, {})
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    sys.argv = [script, *arguments]
    if script.startswith("recipes."):
        sys.path.insert(0, str(folder))
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
    if script != "recipes.fsdp":  # DTensor's caches keep the group
        threads = [thread.read_text() for thread in Path("/proc/self/task").glob("*/comm")]
        assert "gloo" not in "".join(threads), "the script has ended and gloo's threads have not"


def train(script, *arguments, cwd, processes=2, device="cpu", before="", status=0, timeout=180, **environment):
    """Run a script to its end, by itself where there are 0 processes, else as so many ranks, as torchrun would."""
    arguments = [str(argument) for argument in (*arguments, *(["--device", device] if device else []))]
    output, ranks = Path(cwd) / str(uuid.uuid4()), []
    if script == "multigpu_spawn.py" and processes:
        arguments, processes = [*arguments, "-g", str(processes)], 0
    if processes:
        with socket.create_server(("127.0.0.1", 0)) as free:
            environment.update(WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1",
                               MASTER_PORT=free.getsockname()[1])
    for rank in range(processes or 1):
        if processes:
            environment.update(RANK=rank, LOCAL_RANK=rank)
        ranks.append(context.Process(target=be_rank, args=(
            script if str(script).startswith("recipes.") else str(ROOT / script), arguments, cwd, output,
            {name: str(value) for name, value in environment.items()}, before)))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(timeout)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    stdout, stderr = (output.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
    assert [process.exitcode for process in ranks] == [status] * len(ranks), stdout + stderr
    return SimpleNamespace(stdout=stdout, stderr=stderr)
