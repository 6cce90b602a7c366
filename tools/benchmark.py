"""What each launch style costs on this machine, and whether more devices pay: python tools/benchmark.py

It starts the scripts by their command line and reads what they print. Figures are medians over rounds
of interleaved runs, ratios are taken within a round, because machines drift.
"""
import argparse
import contextlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402

EPOCH = re.compile(r"epoch +\d+/\d+ \| loss (\S+) \| accuracy \S+% \| (\S+) samples/s")
DEVICES = (2, 4, 8, 64, 512, 1024)  # of the look ahead
SKIPPED = 2  # epochs that warm up


def command(style, devices):
    """How the devices are handed to a script, as README has it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"]
    return [sys.executable, *(torchrun if style in ("multigpu_torchrun.py", "multinode.py") else []), str(ROOT / style),
            *(["-g", str(devices)] if style == "multigpu_spawn.py" else [])]


def run(style, devices, options):
    """One run of a script: what it printed, how long it took to its first epoch, its largest process."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if torch.cuda.is_available():
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(devices)))
        start, first, losses, speeds = time.perf_counter(), None, [], []
        errors = open(Path(folder, "errors"), "w+")
        process = subprocess.Popen([*command(style, devices), *map(str, options)], cwd=folder, env=env, text=True,
                                   stdout=subprocess.PIPE, stderr=errors)
        for line in process.stdout:
            if epoch := EPOCH.match(line):
                first = first or time.perf_counter() - start
                losses.append(float(epoch[1]))
                speeds.append(float(epoch[2].replace(",", "")))
        _, status, usage = os.wait4(process.pid, 0)  # with the largest of the processes that it waited for
        process.returncode = status
        if status or len(speeds) <= SKIPPED:
            errors.seek(0)
            sys.exit(f"{style} with {devices} devices failed:\n{errors.read()}")
    steady = speeds[SKIPPED:]
    return {"samples/s": len(steady) / sum(1 / speed for speed in steady), "first epoch after s": first,
            "memory MB": usage.ru_maxrss / 1024, "loss": losses[-1]}


def run_apart(devices, options):
    """As many single_gpu.py at once, each with one process's share of the batch: all computing, no communication."""
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: run("single_gpu.py", 1, options), range(devices)))
    return {name: (sum if name == "samples/s" else max)(run[name] for run in runs) for name in runs[0]}


def time_all_reduce(rank, port, backend, results):
    """Latency and bandwidth between two processes of this machine."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2)
    for numbers in (1, 2**23):
        tensor, seconds = torch.ones(numbers, device=device), []
        for _ in range(20):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if backend == "nccl":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            results.append(statistics.median(seconds))
    dist.barrier()
    dist.destroy_process_group()


def ring(devices, size, bandwidth, latency):
    """Seconds of an all-reduce: 2(N - 1) rounds, in each of which every device sends an N-th."""
    return 2 * (devices - 1) * (size / devices / bandwidth + latency)


def efficiency(step, communication, overlap):
    """Backward is about two thirds of a step; DDP sends while it runs."""
    return step / (step + max(0, communication - (2 / 3 * step if overlap else 0)))


def spread(values, digits=0):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main():
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = gpus or len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2**i for i in range(most.bit_length()) if 2**i <= most],
                        help="numbers of devices: GPUs, or processes on CPU cores")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--batch-size", type=int, default=240, help="over all devices")
    parser.add_argument("--epochs", type=int, default=12, help=f"of a run; the first {SKIPPED} are left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", type=float, default=25, help="between machines, Gbit/s, for the look ahead")
    parser.add_argument("--latency", type=float, default=20, help="of one message there, microseconds")
    parser.add_argument("--output", default=str(ROOT / "docs" / "benchmark"), help="name of the .json and .svg")
    args = parser.parse_args()
    if args.epochs <= SKIPPED:
        parser.error(f"argument --epochs: {args.epochs} is not above {SKIPPED}")
    for devices in args.gpus:
        if devices < 1 or gpus and devices > gpus or args.batch_size % devices:
            parser.error(f"argument --gpus: {devices} exceeds the {gpus} GPUs or does not divide {args.batch_size}")

    options = [args.epochs, args.epochs, "--model", args.model, "--dataset", args.dataset, "--data-dir",
               str(ROOT / "data"), "--batch-size"]
    largest = max(args.gpus)
    jobs = {("single_gpu.py", 1): lambda: run("single_gpu.py", 1, [*options, args.batch_size])}
    for devices in args.gpus:
        if devices == 1 or gpus:
            jobs["dp.py", devices] = lambda n=devices: run("dp.py", n, [*options, args.batch_size])
        for style in ("multigpu_spawn.py", "multigpu_torchrun.py", "multinode.py"):
            jobs[style, devices] = lambda s=style, n=devices: run(s, n, [*options, args.batch_size])
    if largest > 1:
        jobs["single_gpu.py, each its share", largest] = lambda: run_apart(
            largest, [*options, args.batch_size // largest])
    jobs["single_gpu.py, one share", 1] = lambda: run("single_gpu.py", 1, [*options, args.batch_size // largest])

    measured, begin, done = {job: [] for job in jobs}, time.perf_counter(), 0
    for number in range(args.rounds):
        for (style, devices), job in jobs.items():
            left = (time.perf_counter() - begin) / done * (args.rounds * len(jobs) - done) if done else math.nan
            print(f"round {number + 1} of {args.rounds}: {style} on {devices}"
                  + (f", {left / 60:.0f} minutes left" if done else ""), file=sys.stderr, flush=True)
            measured[style, devices].append(job())
            done += 1

    base = measured["single_gpu.py", 1]
    rows = []
    for (style, devices), runs in measured.items():
        speedups = [run["samples/s"] / alone["samples/s"] for run, alone in zip(runs, base)]
        rows.append({"style": style, "processes": 1 if style == "dp.py" else devices, "devices": devices, "runs": runs,
                     "speed-up": speedups})
    print("| style | devices | samples/s | speed-up | efficiency | first epoch after | memory | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        column = {name: [run[name] for run in row["runs"]] for name in row["runs"][0]}
        print(f"| {row['style']} | {row['devices']} | {spread(column['samples/s'])} | {spread(row['speed-up'], 2)} "
              f"| {statistics.median(row['speed-up']) / row['devices']:.0%} | {spread(column['first epoch after s'], 1)} s "
              f"| {statistics.median(column['memory MB']):,.0f} MB | {column['loss'][-1]:.4f} |")

    share = args.batch_size // largest
    step = statistics.median(share / run["samples/s"] for run in measured["single_gpu.py, one share", 1])
    size = sum(parameter.nbytes for parameter in utils.build_model(args.model).parameters())
    ahead = [{"devices": devices, "plain": efficiency(step, seconds, False), "overlapped": efficiency(step, seconds, True)}
             for devices in DEVICES for seconds in [ring(devices, size, args.network * 1e9 / 8, args.latency / 1e6)]]
    print(f"\nLook ahead: {share} samples a device, {1000 * step:.1f} ms a step without communication, {size:,} bytes of "
          f"gradients,\n{args.network:g} Gbit/s and {args.latency:g} microseconds a message between devices:\n")
    print("| devices | efficiency | with overlap |\n| --- | --- | --- |")
    for row in ahead:
        print(f"| {row['devices']:,} | {row['plain']:.0%} | {row['overlapped']:.0%} |")
    check = None
    if largest == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        with mp.Manager() as manager:
            results = manager.list()
            mp.spawn(time_all_reduce, (store.port, "nccl" if gpus else "gloo", results), nprocs=2)
            small, large = results
        # Two devices send half of it, two times: 2 latencies, and once the bytes.
        seconds = ring(2, size, 4 * 2**23 / max(large - small, 1e-9), small / 2)
        reached = {job: [run["samples/s"] / apart["samples/s"] for run, apart in zip(
            measured[job, 2], measured["single_gpu.py, each its share", 2])]
            for job in ("multigpu_spawn.py", "multigpu_torchrun.py", "multinode.py")}
        check = {"all-reduce s": seconds, "plain": efficiency(step, seconds, False),
                 "overlapped": efficiency(step, seconds, True), "measured": reached}
        print(f"\nThe model checked, for two devices here: {1000 * seconds:.2f} ms of communication a step (by the all-reduce of "
              f"one number, {1e6 * small:.0f} microseconds,\nand of {4 * 2**23:,} bytes, {1000 * large:.1f} ms). "
              f"Efficiency {check['plain']:.0%} without and {check['overlapped']:.0%} with overlap; measured, against two "
              "processes that do not communicate: "
              + ", ".join(f"{style} {spread(values, 2)}" for style, values in reached.items()))

    record = {"command": " ".join(["python", "tools/benchmark.py", *sys.argv[1:]]), "torch": torch.__version__,
              "python": platform.python_version(), "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)),
              "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)], "rows": rows,
              "look ahead": {"step s": step, "gradient bytes": size, "rows": ahead}, "check": check}
    Path(args.output + ".json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, args.output + ".svg")


def cpu_model():
    with contextlib.suppress(OSError):  # not Linux
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()


def draw(rows, path):
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"{path} was not drawn: pip install matplotlib")
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    grey = "#767676"  # readable on white and on black
    plt.rcParams.update({"svg.fonttype": "none", "text.color": grey, "axes.edgecolor": grey, "axes.labelcolor": grey,
                         "xtick.color": grey, "ytick.color": grey, "svg.hashsalt": "benchmark"})
    figure, axes = plt.subplots(figsize=(7, 4.5))
    curves = {}
    for row in rows:
        if "," not in row["style"]:
            curves.setdefault(row["style"], []).append((row["devices"], [run["samples/s"] for run in row["runs"]]))
    for (style, points), marker in zip(curves.items(), "osD^v"):
        devices = [devices for devices, _ in points]
        middle = [statistics.median(values) for _, values in points]
        below = [statistics.median(values) - min(values) for _, values in points]
        above = [max(values) - statistics.median(values) for _, values in points]
        axes.errorbar(devices, middle, yerr=[below, above], marker=marker, capsize=4, label=style)
    alone, most = statistics.median(run["samples/s"] for run in rows[0]["runs"]), max(row["devices"] for row in rows)
    axes.plot([1, most], [alone, alone * most], "--", color=grey, label="ideal")
    axes.set(xlabel="devices", ylabel="samples/s", xticks=sorted({row["devices"] for row in rows}), ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
