"""Prints what each launch style costs on this machine, as a table: python tools/benchmark.py

It starts the scripts by their command lines and reads what they print. The rounds are interleaved,
a figure is the median over them, and a ratio is taken within a round, because machines drift. Each
process has one thread on the CPU, as torchrun gives it, also where it is the only one. A model with
BatchNorm has SyncBatchNorm under DDP on GPUs: what that costs is part of DDP's figures.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils

SCRIPTS = ("single_gpu.py", "dp.py", "multigpu_spawn.py", "multigpu_torchrun.py", "multinode.py")
EPOCH = re.compile(r"epoch +\d+/\d+ \| loss (\S+) \| accuracy \S+% \| (\S+) samples/s")
WARM_UP = 2  # epochs left out
ON_GPU = """  # runs a script on another GPU than the first
import runpy, sys, torch
torch.accelerator.set_device_index({})
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PEAK = """  # each process writes down, as it ends, the most memory that its tensors had on a device
import atexit, os, sys
def write():
    found = getattr(sys.modules.get("torch"), "accelerator", None)
    if found and (peaks := [*map(found.max_memory_allocated, range(found.device_count()))]):
        open(f"{os.getpid()}.peak", "w").write(str(max(peaks)))
atexit.register(write)
"""
HEAD = ("style", "processes", "samples/s", "speed-up", "relative to independent runs",
        "seconds to the first epoch's end", "host memory of the largest process, MB",
        "most memory of tensors on one GPU, MB", "final loss")


def parse_args(gpus):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="SCRIPT",
        help="what to compare with single_gpu.py (default: all)")
    add("--gpus", type=utils.positive, nargs="+", metavar="N", help="numbers of processes, one for "
        "each GPU, or where there is none on the CPU's cores (default: 1, 2, 4, ... and all)")
    add("--model", default="cnn", help="(default: cnn)")
    add("--dataset", default="synthetic", help="(default: synthetic)")
    add("--batch-size", type=utils.positive, default=960,
        help="samples a step over all devices (default: 960)")
    add("--epochs", type=utils.positive, default=200 if gpus else 12,
        help=f"of a run; {WARM_UP} of them warm up (default: %(default)s)")
    add("--rounds", type=utils.positive, default=3, help="of all the runs (default: 3)")
    args = parser.parse_args()
    if args.epochs <= WARM_UP:
        parser.error(f"argument --epochs: {args.epochs} is not above {WARM_UP}, which warm up")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = gpus or cores
    usual = [n for n in (1, 2, 4, 8, 16, most) if n <= most and args.batch_size % n == 0]
    args.gpus = sorted({*(args.gpus or usual)})
    return args


def count_gpus():
    return torch.accelerator.device_count() if utils.find_device() != "cpu" else 0


def jobs_of(args):
    """What a round consists of: name, processes and devices, and how to measure it."""
    jobs = {("single_gpu.py", 1, 1): partial(run, "single_gpu.py", 1, args, args.batch_size)}
    if "dp.py" in args.scripts and (n := count_gpus()):  # it uses all of them
        jobs[f"dp.py on {n} GPUs", 1, n] = partial(run, "dp.py", n, args, args.batch_size)
    for script in SCRIPTS[2:]:
        for n in args.gpus if script in args.scripts else []:
            jobs[script, n, n] = partial(run, script, n, args, args.batch_size)
    for n in sorted({2, max(args.gpus)} & {*args.gpus} - {1}):
        share = args.batch_size // n
        jobs[alone(share), 1, 1] = partial(run, "single_gpu.py", 1, args, share)
        jobs[alone(share), n, n] = partial(run_apart, n, args, share)
    return jobs


def alone(batch_size):
    return f"single_gpu.py --batch-size {batch_size}"


def run(script, devices, args, batch_size, gpu=0):
    """One run of a script: its speed, the seconds to its first epoch, its memory, its last loss."""
    command = [sys.executable, str(ROOT / script)]
    if gpu:
        command[1:1] = ["-c", ON_GPU.format(gpu)]
    if script in ("multigpu_torchrun.py", "multinode.py"):
        command[1:1] = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={devices}"]
    command += [str(args.epochs), str(args.epochs), "--batch-size", str(batch_size), "--model",
                args.model, "--dataset", args.dataset, "--data-dir", str(ROOT / "data")]
    if script == "multigpu_spawn.py":
        command += ["-g", str(devices)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, losses, seconds = None, [], []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        if count_gpus():
            Path(folder, "sitecustomize.py").write_text(PEAK)
            env["PYTHONPATH"] = ":".join(filter(None, (env.get("PYTHONPATH"), folder)))
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
        peaks = [int(file.read_text()) for file in Path(folder).glob("*.peak")]
    return {"samples/s": 1 / statistics.mean(seconds[WARM_UP:]), "first epoch, s": first,
            "memory, MB": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
            "GPU, MB": max(peaks, default=0) / 2**20, "loss": losses[-1]}  # 0: not known


def run_apart(devices, args, batch_size):
    """As many single_gpu.py at once: all the arithmetic of a DDP job, and no communication."""
    with ThreadPoolExecutor(devices) as pool:
        runs = list(pool.map(lambda gpu: run("single_gpu.py", 1, args, batch_size, gpu),
                             range(devices) if count_gpus() else [0] * devices))
    return {name: (sum if name == "samples/s" else max)(run[name] for run in runs)
            for name in runs[0]}


def measure(args, jobs):
    """The runs of each job, a round of all jobs after the other."""
    measured = {job: [] for job in jobs}
    for number in range(1, args.rounds + 1):
        for job, start in jobs.items():
            print(f"round {number} of {args.rounds}: {job[0]}, processes: {job[1]}",
                  file=sys.stderr, flush=True)
            measured[job].append(start())
    return measured


def ratios(runs, others):
    return [run["samples/s"] / other["samples/s"] for run, other in zip(runs, others)]


def spread(values, digits=0):
    if not values:
        return ""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main():
    args = parse_args(count_gpus())
    measured = measure(args, jobs_of(args))
    rows = [HEAD, ["---"] * len(HEAD)]
    for (style, processes, devices), runs in measured.items():
        apart = measured.get((alone(args.batch_size // devices), devices, devices), [])
        rows.append([style, processes, spread([run["samples/s"] for run in runs]),
                     spread(ratios(runs, measured["single_gpu.py", 1, 1]), 2),
                     spread(ratios(runs, apart), 2) if style in SCRIPTS[2:] else "",
                     f"{statistics.median(run['first epoch, s'] for run in runs):.1f}",
                     f"{statistics.median(run['memory, MB'] for run in runs):,.0f}",
                     f"{peak:,.0f}" if (peak := max(run["GPU, MB"] for run in runs)) else "",
                     f"{runs[-1]['loss']:.4f}"])
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
