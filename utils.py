"""Shared by all scripts: model, data, command line, checks before the run, checkpoints, report."""
import argparse
import functools
import multiprocessing
import operator
import os
import pathlib
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_default_backend_for_device
from torch.utils.data import Subset, TensorDataset


def stop(message, status):
    """Print one line and exit: status 2 for wrong usage, 1 otherwise."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)  # all ranks fail: the launcher ends the others before they print it too
    print(f"{os.path.basename(sys.argv[0])}: {' '.join(message.split())[:500]}", file=sys.stderr)
    sys.exit(status)


def build_model(name):
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=4, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    from torchvision import models  # takes seconds: import it only when needed
    if name == "vit":
        return models.VisionTransformer(image_size=32, patch_size=8, num_layers=4, num_heads=4,
                                        hidden_dim=64, mlp_dim=128, num_classes=10)
    return models.get_model(name, weights=None, num_classes=10)


def synthetic_data():
    """Ten noisy patterns, drawn as integers so that every machine gets the same bits."""
    train, held_out = 3840, 509  # 509 is prime, so ranks never get equal shares
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, generator=generator, dtype=torch.int16)
    patterns = draw(-8, 9, (10, 3, 4, 4)).repeat_interleave(8, 2).repeat_interleave(8, 3)
    labels = draw(0, 10, (train + held_out,)).long()
    noise = draw(-36, 37, (train + held_out, 3, 32, 32))
    data = TensorDataset((patterns[labels] + noise) / 4, labels)
    return Subset(data, range(train)), Subset(data, range(train, train + held_out))


@functools.cache  # in a process, check_run and main share it
def load_data(name, data_dir):
    if name == "synthetic":
        return synthetic_data()
    from torchvision import datasets
    from torchvision.transforms import v2
    transform = v2.Compose([
        v2.RGB(), v2.Resize((32, 32)), v2.ToImage(),
        v2.ToDtype(torch.get_default_dtype(), scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])
    dataset_class = getattr(datasets, name)
    try:
        return [dataset_class(data_dir, train, transform, download=True) for train in (True, False)]
    except Exception as error:
        stop(f"--dataset {name} was neither read from {data_dir} nor downloaded to it: {error}", 1)


def end_with_parent(worker):
    """End a loader worker with its parent, or the worker runs on (forever on Python 3.14)."""
    def wait_for_parent():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=wait_for_parent, daemon=True).start()


def count(text, least=1):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def positive_number(text):
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return float(text)


def find_devices():
    """The accelerator, if torch has collectives for it (a Mac's mps has none), and the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        return ["cpu"]
    return [found.type, "cpu"]


def end_at_ctrl_c():
    """Let Ctrl-C kill the process immediately: Python's own handler would wait for a collective."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and keep commands on their own lines, ready to copy."""


def parse_args(doc, spawn=False):
    end_at_ctrl_c()
    devices = find_devices()
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.error = functools.partial(stop, status=2)  # one line, without the usage
    add = parser.add_argument
    whole = functools.partial(count, least=0)
    add("total_epochs", type=count, nargs="?", default=50, help="epochs in total")
    add("save_every", type=count, nargs="?", default=10,
        help="epochs between saves; the last is always saved")
    add("--batch-size", "--batch_size", type=count, default=960,
        help="total batch size, divided among the processes")
    add("--lr", type=positive_number, default=0.018,
        help="learning rate; a resumed run keeps its own")
    add("--dataset", choices=["synthetic", "FashionMNIST", "MNIST", "CIFAR10"], default="synthetic",
        help="synthetic is made in memory")
    add("--data-dir", default="data", help="folder for a real dataset, downloaded if missing")
    add("--model", choices=["cnn", "resnet18", "resnet50", "mobilenet_v3_small", "convnext_tiny",
                            "vgg11", "vit"], default="cnn", help="cnn: the small model in utils.py")
    add("--workers", type=whole, default=0, help="worker processes of each DataLoader")
    add("--device", choices=devices, default=devices[0], help="device to train on")
    add("--backend", choices=[get_default_backend_for_device(device) for device in devices],
        default=argparse.SUPPRESS,
        help="default: the device's own; with gloo, processes can share a CUDA or ROCm device")
    add("--checkpoint", type=lambda path: path.rstrip("/") or ".",
        default=pathlib.Path(sys.argv[0]).stem + ".pt",
        help="file to save to, and to resume from if it exists")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    if spawn:
        add("-n", "--nodes", type=count, default=1, help="machines")
        add("-g", "--gpus", type=count, default=argparse.SUPPRESS,
            help="processes per machine, the same on all; default: one per GPU, else 2 on the CPU")
        add("-nr", "--node-rank", type=whole, default=0, help="this machine's number, from 0")
    args = parser.parse_args()
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes on this machine
    if launched != 1 and "torchrun" not in (doc or "torchrun"):  # python -OO drops the docstring
        stop(f"start it with python: torchrun (LOCAL_WORLD_SIZE) starts it {launched} times", 2)
    if "backend" not in args:
        args.backend = get_default_backend_for_device(args.device)
    if args.backend == "gloo" and args.device != "cpu":
        check_gloo(args.device)
    gpus = torch.accelerator.device_count() if args.device != "cpu" else 0
    if spawn:
        plan_spawn(args, gpus)
        check_gpus(args, gpus, args.gpus, "-g/--gpus")
    else:  # srun may show each process only its own GPU
        gpus = gpus and max(gpus, int(os.environ.get("SLURM_GPUS_ON_NODE", 0)))
        check_gpus(args, gpus, launched, "--backend")
    return args


def plan_spawn(args, gpus):
    """Fill in multigpu_spawn.py's processes, their threads, and the address at which they meet."""
    if args.node_rank >= args.nodes:
        stop(f"argument -nr/--node-rank: {args.node_rank} must be less than -n {args.nodes}", 2)
    args.master_addr, args.master_port = "127.0.0.1", 0  # 0: any free port
    if args.nodes > 1:
        args.master_addr, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not args.master_addr or not port.isdecimal():
            stop("argument -n/--nodes: on each of several machines, set MASTER_ADDR and "
                 "MASTER_PORT to the first machine's address and a free port on it", 2)
        args.master_port = int(port)
    if "gpus" not in args:
        args.gpus = gpus or 2
    threads = max(1, torch.get_num_threads() // args.gpus)  # or each process takes all cores
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def check_gloo(device):
    """Ask a group of this process alone: torch's table of backends lacks what plug-ins add."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.group.WORLD._get_backend(torch.device(device))
    except RuntimeError:
        stop(f"argument --backend: gloo cannot send the tensors of --device {device}", 2)
    dist.destroy_process_group()


def check_gpus(args, gpus, processes, option):
    if args.backend != "gloo" and processes > gpus:
        stop(f"argument {option}: {args.backend} needs a GPU for each process, but with --device "
             f"{args.device} there are {gpus} GPUs for {processes}: use fewer processes or, "
             "with CUDA or ROCm, --backend gloo", 2)


def check_torchrun(doc):
    if "LOCAL_RANK" not in os.environ:
        stop(f"start it with its launcher: {doc.splitlines()[1]}", 2)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    # In the agent's shared store, restarted processes find the addresses of dead ones.
    shared_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts and shared_store and os.environ["LOCAL_RANK"] == "0":
        print("--max-restarts is unlikely to work: it needs --standalone or --rdzv-backend=c10d, "
              "and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment", file=sys.stderr)


def slurm_host():
    """The address of this job step's first machine, n01 of n[01-04,07]."""
    host = re.sub(r"\[(\w+)[^]]*]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
    try:
        return socket.gethostbyname(host)
    except OSError:  # the network may not know Slurm's names
        address = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
        if os.environ["SLURM_PROCID"] == "0" and "MASTER_ADDR" not in os.environ:
            print(f"{host} is not a known host name: trying {address}, where srun was started. "
                  f"If that is a login node, set MASTER_ADDR to {host}'s address", file=sys.stderr)
        return address


def check_run(args, world_size=None, rank=0, kinds=(None,)):
    """Stop a run that cannot work before processes wait for each other; else print the start line.

    kinds: what checkpoint["kind"] may be; most scripts save none and resume only files without one.
    """
    processes = world_size or 1  # None: without a process group
    train_set, _ = load_data(args.dataset, args.data_dir)  # here one process per machine fetches it
    check_batch_size(args.batch_size, processes, len(train_set))
    if rank != 0:
        return  # rank 0 alone reads, saves and prints
    check_checkpoint(args, kinds)
    check_folder(args)
    backend = f", backend: {args.backend}" if world_size else ""
    print(f"processes: {processes}, device: {args.device}{backend}, batch: {args.batch_size}, "
          f"per process: {args.batch_size // processes}", flush=True)


def check_batch_size(batch_size, processes, samples):
    rest = batch_size % processes
    if rest:
        stop(f"argument --batch-size: {batch_size} is not divisible by {processes} processes, "
             f"{batch_size + processes - rest} is", 2)
    if batch_size > samples:
        stop(f"argument --batch-size: {batch_size} exceeds the {samples} training samples", 2)


def check_checkpoint(args, kinds):
    """Print how many epochs are done, and which learning rate is kept."""
    done, note = 0, ""
    if os.path.exists(args.checkpoint):
        done, rates = examine_checkpoint(args, kinds)
        if done >= args.total_epochs:
            note = "; to start afresh, delete it or change --checkpoint"
        elif rates != {args.lr}:
            saved = ", ".join(f"{rate:g}" for rate in sorted(rates))
            note = f"; the saved learning rate, {saved}, is kept, not --lr {args.lr:g}"
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if done or restarted:  # also report a restart from epoch 0
        print(f"{args.checkpoint}: {done} of {args.total_epochs} epochs are done{note}", flush=True)


def examine_checkpoint(args, kinds):
    """Return epochs done and learning rates; stop if this script cannot resume from the file."""
    refusal = f"{args.checkpoint} cannot be resumed and is left as it was:"
    try:
        check_zip(args.checkpoint)
        checkpoint = read_checkpoint(args)
        with torch.device("meta"):  # names and shapes, without memory
            model = build_model(args.model)
        model.load_state_dict(checkpoint["model"], assign=True)  # raises if it does not fit
        done = operator.index(checkpoint["epoch"])  # raises unless it is a whole number
        rates = {group.get("initial_lr", group["lr"])  # initial_lr if there is a schedule
                 for group in checkpoint["optimizer"]["param_groups"]}
    except pickle.UnpicklingError:  # its text says how to load the file anyway
        stop(f"{refusal} it holds more than tensors and plain values", 1)
    except Exception as error:
        stop(f"{refusal} truncated, damaged, of another model or not a checkpoint ({error!r})", 1)
    kind = checkpoint.get("kind")
    if kind not in kinds:
        stop(f"{refusal} only {kind or 'another script'} can resume it", 1)
    return done, rates


def check_zip(file):
    """Raise an error if any byte has changed: torch.load verifies no checksums."""
    with zipfile.ZipFile(file) as archive:
        if archive.testzip():
            raise zipfile.BadZipFile("it is damaged")


def check_folder(args):
    folder = os.path.dirname(os.path.realpath(args.checkpoint))
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        stop(f"argument --checkpoint: cannot write to {folder}: {error.strerror}", 1)


def read_checkpoint(args):
    """The checkpoint, on the CPU; None if there is none."""
    if os.path.exists(args.checkpoint):
        return torch.load(args.checkpoint, map_location="cpu", weights_only=True)


def save_checkpoint(args, model_state, optimizer_state, epoch, **more):
    """Write a temporary file, then rename it: a kill leaves the old file or the new one, intact."""
    path = os.path.realpath(args.checkpoint)
    temporary = f"{path}.tmp"
    checkpoint = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch + 1, **more}
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        pathlib.Path(temporary).unlink(missing_ok=True)
        while error.__context__:  # torch's own error hides the one that says why
            error = error.__context__
        stop(f"{args.checkpoint} was not saved: {error}", 1)
    print(f"saved {args.checkpoint} after epoch {epoch + 1}", flush=True)


def report(args, epoch, loss, accuracy, samples, start):
    seconds = time.perf_counter() - start  # of training and evaluation
    left = round(seconds * (args.total_epochs - epoch - 1))
    width = len(str(args.total_epochs))
    print(f"epoch {epoch + 1:{width}}/{args.total_epochs} | loss {loss:.4f} "
          f"| accuracy {accuracy:.2%} | {samples / seconds:,.0f} samples/s "
          f"| {left // 60}:{left % 60:02} left", flush=True)
