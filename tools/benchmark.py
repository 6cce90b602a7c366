"""What each launch style costs on this machine, and whether more devices pay:
python tools/benchmark.py

It starts the scripts by their command lines and reads what they print. The rounds are interleaved,
a figure is the median over them, and a ratio is taken within a round, because machines drift.
"""
import argparse
import importlib.util
import json
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
import torchvision

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402

DDP_SCRIPTS = ("multigpu_spawn.py", "multigpu_torchrun.py", "multinode.py")
EPOCH = re.compile(r"epoch +\d+/\d+ \| loss (\S+) \| accuracy \S+% \| (\S+) samples/s")
WARM_UP = 2  # epochs left out
COLOURS = ("#1f77b4", "#d55e00", "#009e73", "#9467bd", "#b8860b")  # 3 to 1 on white and on black
AHEAD = (2, 4, 8, 64, 512, 1024)  # devices


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
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def run_apart(devices, args, batch_size):
    """As many single_gpu.py at once: all the arithmetic of a DDP job, and no communication."""
    with ThreadPoolExecutor(devices) as pool:
        runs = list(pool.map(lambda device: run("single_gpu.py", 1, args, batch_size, device),
                             range(devices)))
    return {name: (sum if name == "samples/s" else max)(run[name] for run in runs)
            for name in runs[0]}


def jobs_of(args):
    """What a round consists of: a name and a number of processes, and how to measure it."""
    jobs = {("single_gpu.py", 1): lambda: run("single_gpu.py", 1, args, args.batch_size)}
    for n in args.gpus:
        if n == 1 or visible_gpus():
            name = "dp.py" if n == 1 else f"dp.py on {n} GPUs"
            jobs[name, 1] = lambda n=n: run("dp.py", n, args, args.batch_size)
        for script in DDP_SCRIPTS:
            jobs[script, n] = lambda s=script, n=n: run(s, n, args, args.batch_size)
    for n in sorted({2, max(args.gpus)} & {*args.gpus} - {1}):
        share = args.batch_size // n
        jobs[alone(share), 1] = lambda share=share: run("single_gpu.py", 1, args, share)
        jobs[alone(share), n] = lambda n=n, share=share: run_apart(n, args, share)
    return jobs


def alone(batch_size):
    return f"single_gpu.py --batch-size {batch_size}"


def time_all_reduce(rank, port, backend, results):
    """Seconds of an all-reduce between two processes of this machine: one number, and 32 MB."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    for numbers in (1, 2**23):
        tensor, seconds = torch.ones(numbers, device=device), []
        for _ in range(20):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # a GPU's work is done only then
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            results.append(statistics.median(seconds))
    dist.barrier()
    dist.destroy_process_group()


def ring(devices, size, bandwidth, latency):
    """Seconds of an all-reduce: 2(N - 1) rounds, in each of which a device sends an N-th of it."""
    return 2 * (devices - 1) * (size / devices / bandwidth + latency)


def efficiency(step, communication):
    """Without overlap, and with it: backward, two thirds of a step, hides what fits behind it."""
    return (step / (step + communication),
            step / (step + max(0, communication - 2 / 3 * step)))


def spread(values, digits=0):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def table(head, rows):
    print(*("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)),
          sep="\n", flush=True)


def measure(args, jobs):
    """The runs of each job, a round of all jobs after the other."""
    measured, begin, done = {job: [] for job in jobs}, time.perf_counter(), 0
    for number in range(1, args.rounds + 1):
        for (name, processes), job in jobs.items():
            share = done / (args.rounds * len(jobs))
            minutes = (time.perf_counter() - begin) / 60 * (1 / share - 1) if done else None
            left = f", {minutes:.1f} minutes left" if done else ""
            print(f"round {number} of {args.rounds}: {name}, processes: {processes}{left}",
                  file=sys.stderr, flush=True)
            measured[name, processes].append(job())
            done += 1
    return measured


def look_ahead(args, measured):
    """What more devices would give, each with the share that one has on the most of them here."""
    share = args.batch_size // max(args.gpus)
    runs = measured.get((alone(share), 1), measured["single_gpu.py", 1])
    step = statistics.median(share / run["samples/s"] for run in runs)
    size = sum(parameter.nbytes for parameter in utils.build_model(args.model).parameters())
    ahead = {n: efficiency(step, ring(n, size, args.network * 1e9 / 8, args.latency / 1e6))
             for n in AHEAD}
    print(f"\nLook ahead: {share} samples a device, {1000 * step:.1f} ms a step without "
          f"communication, {size:,} bytes of gradients,\n{args.network:g} Gbit/s and "
          f"{args.latency:g} microseconds a message between devices:\n")
    table(["devices", "efficiency", "with overlap"],
          [[f"{n:,}", f"{plain:.0%}", f"{over:.0%}"] for n, (plain, over) in ahead.items()])
    return {"samples a device": share, "step, s": step, "gradients, bytes": size,
            "Gbit/s": args.network, "latency, microseconds": args.latency,
            "efficiency: without overlap, with it": ahead}


def check_model(args, measured):
    """The model's efficiency of two processes here, beside the measured one."""
    share = args.batch_size // 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with mp.Manager() as manager:
        results = manager.list()
        backend = "nccl" if visible_gpus() else "gloo"
        mp.spawn(time_all_reduce, (store.port, backend, results), nprocs=2)
        small, large = results
    # two processes: two latencies and the bytes once, in both measurements
    size = sum(parameter.nbytes for parameter in utils.build_model(args.model).parameters())
    communication = ring(2, size, 2**25 / max(large - small, 1e-9), small / 2)
    apart = measured[alone(share), 2]
    step = statistics.median(2 * share / run["samples/s"] for run in apart)
    plain, overlapped = efficiency(step, communication)
    reached = {script: [run["samples/s"] / free["samples/s"]
                        for run, free in zip(measured[script, 2], apart)] for script in DDP_SCRIPTS}
    print(f"\nThe model checked: two processes here, {1000 * step:.1f} ms a step without and "
          f"{1000 * communication:.2f} ms of communication\n(an all-reduce of one number takes "
          f"{1e6 * small:,.0f} microseconds, one of 32 MB {1000 * large:.1f} ms):\n")
    table(["efficiency of two processes", ""],
          [["model, without overlap", f"{plain:.2f}"], ["model, with overlap", f"{overlapped:.2f}"],
           *([f"measured, {script}", spread(values, 2)] for script, values in reached.items())])
    return {"step, s": step, "communication, s": communication, "measured": reached,
            "all-reduce of one number, s": small, "all-reduce of 32 MB, s": large,
            "model: without overlap, with it": [plain, overlapped]}


def draw(rows, path):
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    grey = "#767676"  # readable on white and on black; the style below is for browsers
    colors = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color",
                            "ytick.color"), grey)
    plt.rcParams.update({**colors, "svg.fonttype": "none", "svg.hashsalt": "benchmark"})
    figure, axes = plt.subplots(figsize=(7, 4.5))
    curves = {}
    for row in rows:
        if "--batch-size" not in row["style"]:
            speeds = [run["samples/s"] for run in row["runs"]]
            curves.setdefault(row["style"].split()[0], []).append((row["devices"], speeds))
    ticks = sorted({devices for points in curves.values() for devices, _ in points})
    base, most = statistics.median(curves["single_gpu.py"][0][1]), ticks[-1]
    axes.plot([1, most], [base, base * most], "--", color=grey, label="ideal")
    for i, (style, points) in enumerate(curves.items()):
        shift = (i / len(curves) - 0.4) * most / 25  # side by side, not on top of each other
        middle = [statistics.median(speeds) for _, speeds in points]
        error = [[m - min(speeds) for m, (_, speeds) in zip(middle, points)],
                 [max(speeds) - m for m, (_, speeds) in zip(middle, points)]]
        axes.errorbar([devices + shift for devices, _ in points], middle, error, capsize=4,
                      label=style, marker="osD^v"[i], color=COLOURS[i])
    axes.set(xlabel="processes (of dp.py: GPUs)", ylabel="samples/s", ylim=(0, None), xticks=ticks)
    axes.legend(frameon=False)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    style = "<style>@media (prefers-color-scheme: dark) { text { fill: #ddd !important } }</style>"
    path.write_text(path.read_text().replace("</metadata>", f"</metadata>\n {style}", 1))


def cpu_model():
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    return names[0] if names else platform.processor()


def main():
    gpus = len(visible_gpus())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        description=__doc__.partition(":")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=utils.whole, nargs="+", metavar="N",
        default=sorted(n for n in {1, 2, 4, 8, 16, gpus or cores}
                       if n <= (gpus or cores) and 240 % n == 0),
        help="numbers of processes, one for each GPU, or where there is none on the CPU's cores")
    add("--model", default="cnn")
    add("--dataset", default="synthetic")
    add("--batch-size", type=utils.whole, default=240, help="samples a step over all devices")
    add("--epochs", type=utils.whole, default=12, help=f"of a run; {WARM_UP} of them warm up")
    add("--rounds", type=utils.whole, default=3, help="of all the runs")
    add("--network", type=float, default=25, help="for the look ahead: Gbit/s between devices")
    add("--latency", type=float, default=20, help="for the look ahead: microseconds a message")
    add("--output", type=Path, default=ROOT / "docs/benchmark", help="where .json and .svg go")
    args = parser.parse_args()
    args.gpus = sorted({*args.gpus})
    if args.epochs <= WARM_UP:
        parser.error(f"argument --epochs: {args.epochs} is not above {WARM_UP}, which warm up")
    if not min(args.network, args.latency) > 0:
        parser.error("argument --network and --latency: give numbers above 0")
    for n in args.gpus:
        if gpus and n > gpus:
            parser.error(f"argument --gpus: {n}, but there are {gpus}")
        if args.batch_size % n:
            parser.error(f"argument --batch-size: {args.batch_size} does not divide by {n}")
    if not args.output.parent.is_dir():
        parser.error(f"argument --output: there is no folder {args.output.parent}")
    if not (picture := importlib.util.find_spec("matplotlib")):
        print("the picture will not be drawn: that needs matplotlib (pip install matplotlib)",
              file=sys.stderr)

    measured = measure(args, jobs_of(args))
    base = measured["single_gpu.py", 1]
    rows = [{"style": name, "processes": processes, "runs": runs,
             "devices": int((re.search(r" on (\d+) GPUs", name) or [None, processes])[1]),
             "speed-up": [run["samples/s"] / one["samples/s"] for run, one in zip(runs, base)]}
            for (name, processes), runs in measured.items()]
    lines = []
    for row in rows:
        column = {name: [run[name] for run in row["runs"]] for name in row["runs"][0]}
        lines.append([row["style"], row["processes"], spread(column["samples/s"]),
                      spread(row["speed-up"], 2),
                      f"{statistics.median(row['speed-up']) / row['devices']:.0%}",
                      spread(column["first epoch, s"], 1), spread(column["memory, MB"]),
                      f"{column['loss'][-1]:.4f}"])
    table(["style", "processes", "samples/s", "speed-up", "efficiency",
           "seconds to the first epoch's end", "memory of the largest process, MB", "final loss"],
          lines)
    ahead = look_ahead(args, measured)
    check = check_model(args, measured) if 2 in args.gpus else None

    record = {"command": " ".join(["python", "tools/benchmark.py", *sys.argv[1:]]),
              "torch": torch.__version__, "torchvision": torchvision.__version__,
              "python": platform.python_version(), "system": platform.system(),
              "cpu": cpu_model(), "cores": cores,
              "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
              "rows": rows, "look ahead": ahead, "model checked": check}
    Path(f"{args.output}.json").write_text(json.dumps(record, indent=1) + "\n")
    if picture:
        draw(rows, Path(f"{args.output}.svg"))


if __name__ == "__main__":
    main()
