"""Runs scripts in forked processes, so that torch is imported once for all of them.

Its argument is a list, as JSON, of [folder, processes, script, *arguments]: the script alone where
there are 0 processes, else as so many ranks. What a run prints and saves is listed in its folder.
"""
import glob
import json
import os
import socket
import sys

import torch
import torch._dynamo  # DDP and the first optimizer load it
import torch.distributed.nn


def run(folder, rank, processes, port, script, arguments):
    os.chdir(folder)
    for stream, name in ((1, "printed"), (2, "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if processes:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    save = torch.save

    def logged(state, path):
        with open("saved", "a") as file:
            file.write(f"{path}\n")
        save(state, path)
    torch.save, sys.argv = logged, [script, *arguments]
    variables = {"__name__": "__main__", "__file__": script}
    with open(script) as file:
        exec(compile(file.read(), script, "exec"), variables)
    for thread in glob.glob("/proc/self/task/*/comm"):
        with open(thread) as file:
            assert "gloo" not in file.read(), "the script has ended and gloo's threads have not"
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end takes a second of each process


for folder, processes, script, *arguments in json.loads(sys.argv[1]):
    os.makedirs(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(processes or 1):
        ranks.append(os.fork())
        if not ranks[-1]:
            run(folder, rank, processes, port, script, arguments)
    status = [os.waitpid(rank, 0)[1] for rank in ranks]
    with open(os.path.join(folder, "status"), "w") as file:
        json.dump(status, file)
