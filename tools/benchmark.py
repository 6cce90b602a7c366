"""What each launch style costs on this machine: python tools/benchmark.py

It starts the scripts by their command lines and reads what they print. The rounds are interleaved,
a figure is the median over them, and a ratio is taken within a round, because machines drift. Each
process has one thread on the CPU, as torchrun gives it, also where it is the only one.
"""
import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from timed_run import ROOT, WARM_UP, run, run_apart, visible_gpus

sys.path.insert(0, str(ROOT))
import utils

DDP_SCRIPTS = ("multigpu_spawn.py", "multigpu_torchrun.py", "multinode.py")


def jobs_of(args):
    """What a round consists of: name, processes and devices, and how to measure it."""
    jobs = {("single_gpu.py", 1, 1): partial(run, "single_gpu.py", 1, args, args.batch_size)}
    for n in args.gpus if visible_gpus() else [1]:
        name = "dp.py" if n == 1 else f"dp.py on {n} GPUs"
        jobs[name, 1, n] = partial(run, "dp.py", n, args, args.batch_size)
    for n in args.gpus:
        for script in DDP_SCRIPTS:
            jobs[script, n, n] = partial(run, script, n, args, args.batch_size)
    for n in sorted({2, max(args.gpus)} & {*args.gpus} - {1}):
        share = args.batch_size // n
        jobs[alone(share), 1, 1] = partial(run, "single_gpu.py", 1, args, share)
        jobs[alone(share), n, n] = partial(run_apart, n, args, share)
    return jobs


def alone(batch_size):
    return f"single_gpu.py --batch-size {batch_size}"


def spread(values, digits=0):
    if not values:
        return ""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def figures(row):
    column = {name: [run[name] for run in row["runs"]] for name in row["runs"][0]}
    return [row["style"], row["processes"], spread(column["samples/s"]), spread(row["speed-up"], 2),
            spread(row["of as many apart"], 2), f"{statistics.median(column['first epoch, s']):.1f}",
            f"{statistics.median(column['memory, MB']):,.0f}", f"{column['loss'][-1]:.4f}"]


def measure(args, jobs):
    """The runs of each job, a round of all jobs after the other."""
    measured = {job: [] for job in jobs}
    for number in range(1, args.rounds + 1):
        for job, start in jobs.items():
            print(f"round {number} of {args.rounds}: {job[0]}, processes: {job[1]}",
                  file=sys.stderr, flush=True)
            measured[job].append(start())
    return measured


def cpu_model():
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    return names[0] if names else platform.processor()


def main():
    gpus = len(visible_gpus())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=utils.count, nargs="+", metavar="N", help="numbers of processes, one for "
        "each GPU, or where there is none on the CPU's cores (default: 1, 2, 4, … and all)")
    add("--model", default="cnn")
    add("--dataset", default="synthetic")
    add("--batch-size", type=utils.count, default=960, help="samples a step over all devices")
    add("--epochs", type=utils.count, default=200 if gpus else 12,
        help=f"of a run; {WARM_UP} of them warm up")
    add("--rounds", type=utils.count, default=3, help="of all the runs")
    add("--output", type=Path, default=ROOT / "docs/benchmark.json", help="the record")
    args = parser.parse_args()
    most = gpus or cores
    args.gpus = sorted({*(args.gpus or (n for n in (1, 2, 4, 8, 16, most)
                                        if n <= most and args.batch_size % n == 0))})
    if args.epochs <= WARM_UP:
        parser.error(f"argument --epochs: {args.epochs} is not above {WARM_UP}, which warm up")
    if not os.access(args.output.parent, os.W_OK):
        parser.error(f"argument --output: nothing can be written to {args.output.parent}")

    measured = measure(args, jobs_of(args))

    def ratios(runs, to):
        return [run["samples/s"] / other["samples/s"] for run, other in zip(runs, to)]

    rows = []
    for (style, processes, devices), runs in measured.items():
        apart = measured.get((alone(args.batch_size // devices), devices, devices), [])
        rows.append({"style": style, "processes": processes, "devices": devices, "runs": runs,
                     "speed-up": ratios(runs, measured["single_gpu.py", 1, 1]),
                     "of as many apart": ratios(runs, apart) if style in DDP_SCRIPTS else []})
    head = ["style", "processes", "samples/s", "speed-up", "relative to independent runs",
            "seconds to the first epoch's end", "memory of the largest process, MB", "final loss"]
    for line in (head, ["---"] * len(head), *map(figures, rows)):
        print(f"| {' | '.join(map(str, line))} |")

    record = {"command": " ".join(["python", "tools/benchmark.py", *sys.argv[1:]]),
              "torch": torch.__version__, "torchvision": importlib.metadata.version("torchvision"),
              "python": platform.python_version(), "system": platform.system(),
              "cpu": cpu_model(), "cores": cores, "OMP_NUM_THREADS": "1",
              "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
              "rows": rows}
    args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
