"""Prints what each launch style costs on this machine, as a table: python tools/benchmark.py

It trains on 1, 2, 4 and 8 GPUs, as many as there are, or in 1 and 2 processes on the CPU. In each round all take
turns, because machines drift: a speed-up compares runs of one round. Each process has one thread on the CPU, as
torchrun gives it. Other options go to the scripts, for example --model resnet18
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils

EPOCH = re.compile(r"epoch \d+/\d+ \| loss (\S+) \| .* \| ([\d,]+) samples/s")
WARM_UP = 2  # epochs left out


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=utils.HelpFormatter)
    parser.add_argument("--rounds", type=utils.positive, default=3, help="rounds of all the runs")
    parser.add_argument("--epochs", type=utils.positive, default=20, help=f"epochs of a run; {WARM_UP} of them warm up")
    parser.add_argument("--devices", type=utils.positive, nargs="+", help="numbers of devices, instead of those above")
    parser.add_argument("--device", default=utils.find_device(), help="device to train on")
    args, args.others = parser.parse_known_args()
    if args.epochs <= WARM_UP:
        parser.error(f"argument --epochs: {args.epochs} is not above {WARM_UP}, which warm up")
    return args


def find_jobs(args):
    """Each script, and on how many devices; the first is what the others are compared with."""
    on_cpu = args.device == "cpu"
    most = 2 if on_cpu else torch.accelerator.device_count()
    counts = args.devices or [n for n in (1, 2, 4, 8) if n <= most]
    scripts = ["dp.py", "multigpu_spawn.py", "multigpu_torchrun.py"]
    return [("single_gpu.py", 1), *((script, n) for script in scripts[on_cpu:] for n in counts)]  # dp.py needs GPUs


def environment(devices):
    """One thread for each process, and so many GPUs visible: dp.py uses all that it sees."""
    changed = {"OMP_NUM_THREADS": "1"}
    for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):  # of NVIDIA and AMD; of Intel
        visible = os.environ.get(name, "0,1,2,3,4,5,6,7").split(",")
        changed[name] = ",".join(visible[:devices])
    return {**os.environ, **changed}


def run(script, devices, args):
    """The samples/s in the median of a run's epochs, and its last loss."""
    command = [sys.executable, ROOT / script, str(args.epochs), str(args.epochs), "--device", args.device,
               "--data-dir", ROOT / "data", *args.others]
    if script == "multigpu_spawn.py":
        command += ["-g", str(devices)]
    if script == "multigpu_torchrun.py":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"]
    with tempfile.TemporaryDirectory() as folder:  # for the checkpoint
        done = subprocess.run(command, cwd=folder, env=environment(devices), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    epochs = EPOCH.findall(done.stdout)
    return median(float(speed.replace(",", "")) for _, speed in epochs[WARM_UP:]), epochs[-1][0]


def measure(args):
    """The runs of each job."""
    runs = {job: [] for job in find_jobs(args)}
    for number in range(1, args.rounds + 1):
        for script, devices in runs:
            print(f"round {number} of {args.rounds}: {script}, devices: {devices}", file=sys.stderr)
            runs[script, devices].append(run(script, devices, args))
    return runs


def spread(values, form):
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def describe(device):
    if device == "cpu":
        return "CPU"
    name = getattr(torch.get_device_module(device), "get_device_name", lambda: device)
    return f"{torch.accelerator.device_count()} of {name()}"


def main():
    args = parse_args()
    runs = measure(args)
    print(" ".join(["python tools/benchmark.py", *sys.argv[1:]]), "on", describe(args.device),
          f"with {os.cpu_count()} CPU cores and torch {torch.__version__}\n")
    print("| script | devices | samples/s | speed-up | final loss |\n|---|---|---|---|---|")
    speeds = {job: [speed for speed, _ in done] for job, done in runs.items()}
    for (script, devices), done in speeds.items():
        speed_up = [speed / alone for speed, alone in zip(done, speeds["single_gpu.py", 1])]
        losses = sorted({loss for _, loss in runs[script, devices]})
        print(f"| {script} | {devices} | {spread(done, ',.0f')} | {spread(speed_up, '.2f')} | {', '.join(losses)} |")


if __name__ == "__main__":
    main()
