"""One run of a script, by its command line, for tools/benchmark.py: what it prints, and what it takes."""
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
EPOCH = re.compile(r"epoch +\d+/\d+ \| loss (\S+) \| accuracy \S+% \| (\S+) samples/s")
WARM_UP = 2  # epochs left out


def run(script, devices, args, batch_size, first_device=0):
    """One run of a script: its speed, the seconds to its first epoch, its memory, its last loss."""
    command = [sys.executable, str(ROOT / script)]
    if script in ("multigpu_torchrun.py", "multinode.py"):
        command[1:1] = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={devices}"]
    command += [str(args.epochs), str(args.epochs), "--batch-size", str(batch_size), "--model",
                args.model, "--dataset", args.dataset, "--data-dir", str(ROOT / "data")]
    if script == "multigpu_spawn.py":
        command += ["-g", str(devices)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gpus := visible_gpus():
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first_device:first_device + devices])
    first, losses, seconds = None, [], []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=env, text=True,
                                   stdout=subprocess.PIPE, stderr=errors)
        for line in process.stdout:
            if epoch := EPOCH.match(line):
                first = first or time.perf_counter() - start
                losses.append(float(epoch[1]))
                seconds.append(1 / float(epoch[2].replace(",", "")))  # a sample, in this epoch
        _, process.returncode, usage = os.wait4(process.pid, 0)  # usage: also of what it waited for
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()}")
    return {"samples/s": 1 / statistics.mean(seconds[WARM_UP:]), "first epoch, s": first,
            "memory, MB": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
            "loss": losses[-1]}


def visible_gpus():
    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()  # fewer than given, where some do not exist
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def run_apart(devices, args, batch_size):
    """As many single_gpu.py at once: all the arithmetic of a DDP job, and no communication."""
    with ThreadPoolExecutor(devices) as pool:
        runs = list(pool.map(lambda device: run("single_gpu.py", 1, args, batch_size, device),
                             range(devices)))
    return {name: (sum if name == "samples/s" else max)(run[name] for run in runs)
            for name in runs[0]}
