"""What the launch styles share. Importing it also lets Ctrl-C end a child of multiprocessing."""
import argparse
import functools
import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile

import torch
from torch import nn
from torch.distributed import get_default_backend_for_device
from torch.utils.data import Subset, TensorDataset

if torch.multiprocessing.current_process().name != "MainProcess":  # else parse_args does it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for collectives


def stop(message, status):
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)  # all processes see it, one should say it: the launcher then ends the others
    print(f"{os.path.basename(sys.argv[0])}: {' '.join(message.split())[:500]}", file=sys.stderr)
    sys.exit(status)


def build_model(name):
    if name != "cnn":
        from torchvision import models  # takes seconds: only where it is asked for
        if name == "vit":
            return models.VisionTransformer(image_size=32, patch_size=8, num_layers=4, num_heads=4,
                                            hidden_dim=64, mlp_dim=128, num_classes=10)
        return models.get_model(name, weights=None, num_classes=10)
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=4, stride=4), nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def synthetic():
    """Ten patterns under noise, drawn as whole numbers: the same bits on any machine."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, generator=generator, dtype=torch.int16)
    patterns = draw(-8, 9, (10, 3, 4, 4)).repeat_interleave(8, 2).repeat_interleave(8, 3)
    labels = draw(10, (4349,)).long()
    noise = draw(-36, 37, (4349, 3, 32, 32))
    data = TensorDataset((patterns[labels] + noise) / 4, labels)
    return Subset(data, range(3840)), Subset(data, range(3840, 4349))


@functools.cache  # check_run asks for it, then main
def load_data(name, data_dir):
    if name == "synthetic":
        return synthetic()
    from torchvision import datasets
    from torchvision.transforms import v2
    transform = v2.Compose([
        v2.RGB(), v2.Resize((32, 32)), v2.ToImage(),
        v2.ToDtype(torch.get_default_dtype(), scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])
    dataset = getattr(datasets, name)
    try:
        return [dataset(data_dir, train, transform, download=True) for train in (True, False)]
    except Exception as error:
        stop(f"--dataset {name} was neither read from {data_dir} nor downloaded to it: {error}", 1)


def end_with_parent(worker):  # loader workers outlive a killed parent, under Python 3.14 for ever
    parent = torch.multiprocessing.parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()


def count(text, least=1):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def rate(text):
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def parse_args(doc, spawn=False):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process even where it waits in C++
    found = str(torch.accelerator.current_accelerator(check_available=True))
    devices = ["cpu"] if found in ("None", "mps") else [found, "cpu"]  # mps has no collectives
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = functools.partial(stop, status=2)  # one line, without the usage
    add, whole = parser.add_argument, functools.partial(count, least=0)
    add("total_epochs", type=count, nargs="?", default=50, help="with those of an earlier run")
    add("save_every", type=count, nargs="?", default=10, help="epochs; also saved after the last")
    add("--batch-size", "--batch_size", type=count, default=480, help="samples over all devices")
    add("--lr", type=rate, default=0.009, help="learning rate, also of a resumed run")
    add("--dataset", choices=["synthetic", "FashionMNIST", "MNIST", "CIFAR10"], default="synthetic")
    add("--data-dir", default="data", help="where a real dataset lies, or is downloaded to")
    add("--model", default="cnn", choices=[
        "cnn", "resnet18", "resnet50", "mobilenet_v3_small", "convnext_tiny", "vgg11", "vit"])
    add("--workers", type=whole, default=0, help="loader processes per process and loader")
    add("--device", choices=devices, default=devices[0])
    add("--backend", choices=[*map(get_default_backend_for_device, devices)],
        default=argparse.SUPPRESS, help="default: the device's; with gloo processes may share it")
    add("--checkpoint", default=pathlib.Path(sys.argv[0]).stem + ".pt", help="resumed if it exists")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    if spawn:
        add("-n", "--nodes", type=count, default=1, help="machines")
        add("-g", "--gpus", type=count, default=argparse.SUPPRESS, help="processes: 1 a GPU, or 2")
        add("-nr", "--node-rank", type=whole, default=0, help="which of the machines this is")
    args = parser.parse_args()
    args.backend = getattr(args, "backend", get_default_backend_for_device(args.device))
    gpus = torch.accelerator.device_count() if args.device != "cpu" else 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if spawn:
        processes = args.gpus = getattr(args, "gpus", gpus or 2)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.gpus)))
        args.master_addr = os.environ.get("MASTER_ADDR") if args.nodes > 1 else "127.0.0.1"
        args.master_port = os.environ.get("MASTER_PORT", "") if args.nodes > 1 else "0"  # any free
        if not args.master_addr or not args.master_port.isdecimal():
            parser.error("argument -n/--nodes: several machines need MASTER_ADDR and MASTER_PORT, "
                         "the first one's address and a free port on it, in their environment")
        args.master_port = int(args.master_port)
        if args.node_rank >= args.nodes:
            parser.error(f"argument -nr/--node-rank: {args.node_rank} is not below -n {args.nodes}")
    if args.backend != "gloo" and processes > gpus:
        parser.error(f"argument {'-g/--gpus' if spawn else '--backend'}: {args.backend} needs a "
                     f"GPU for each process, with --device {args.device} there are {gpus} for "
                     f"{processes}: use --backend gloo, or fewer")
    return args


def check_torchrun(doc):
    if "LOCAL_RANK" not in os.environ:
        stop(f"a launcher has to start it: {doc.partition(':')[2]}", 2)
    if (os.environ["LOCAL_RANK"] == "0" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        print("--max-restarts will hardly recover: that needs --standalone or --rdzv-backend=c10d, "
              "and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment", file=sys.stderr)


def slurm_host():
    """The first machine of this job step, n01 of n[01-04,07], or the one that srun runs on."""
    host = re.sub(r"\[(\w+)[^]]*]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
    try:
        return socket.gethostbyname(host)
    except OSError:  # Slurm's name for a machine need not be the network's
        return os.environ["SLURM_LAUNCH_NODE_IPADDR"]


def check_run(args, world_size=None, rank=0, inside=False, loop=False):
    """Say on what this trains; or that it cannot, before processes wait for each other."""
    processes = world_size or 1  # None: without a process group
    if args.batch_size % processes:
        stop(f"argument --batch-size: {args.batch_size} does not divide by {processes} processes, "
             f"as {args.batch_size + processes - args.batch_size % processes} would", 2)
    samples = len(load_data(args.dataset, args.data_dir)[0])
    if args.batch_size > samples:
        stop(f"argument --batch-size: {args.batch_size} exceeds the {samples} training samples", 2)
    if rank != 0:
        return  # rank 0 alone reads, saves and prints
    check_checkpoint(args, inside, loop)
    backend = f", backend: {args.backend}" if world_size else ""
    print(f"processes: {processes}, device: {args.device}{backend}, batch: {args.batch_size}, "
          f"per process: {args.batch_size // processes}", flush=True)


def check_checkpoint(args, inside, loop):
    """Say how many epochs are done, or why the file cannot be resumed or its folder written to."""
    path, done, checkpoint = args.checkpoint, 0, {}
    if os.path.exists(path):
        try:
            if zipfile.ZipFile(path).testzip():  # torch.load compares no checksums
                raise zipfile.BadZipFile("it is damaged")
            checkpoint, model = read_checkpoint(args), build_model(args.model)
            model.load_state_dict(checkpoint["model"])
            trained = sum(len(group["params"]) for group in checkpoint["optimizer"]["param_groups"])
            if trained != len(list(model.parameters())) or ("ema" in checkpoint) != loop:
                raise ValueError("its optimizer is another one")
            done = checkpoint["epoch"].__index__()  # an error where it is no whole number
        except Exception as error:
            reason = f"it is cut off, damaged, of another model or no checkpoint ({error!r})"
            if "weights_only" in str(error):  # torch's words, which say how to load it even so
                reason = "it holds more than tensors and plain values"
            stop(f"{path} cannot be resumed and is left as it was: {reason}", 1)
    if "total" in checkpoint and not inside:
        stop(f"{path} was saved inside epoch {done + 1}, where only recipes.preempt goes on", 1)
    if done or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # then 0 is worth a word
        hint = "; to start afresh, delete it or change --checkpoint" * (done >= args.total_epochs)
        print(f"{path}: {done} of {args.total_epochs} epochs are done{hint}", flush=True)
    folder = os.path.dirname(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        stop(f"argument --checkpoint: {folder} takes no file: {error.strerror}", 1)


def read_checkpoint(args):
    """What was saved, with this run's learning rate, on the CPU; None where nothing was."""
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        for group in checkpoint["optimizer"]["param_groups"]:
            group["lr"] = group["lr"] if "initial_lr" in group else args.lr  # a schedule's stays
        return checkpoint


def save_checkpoint(args, model, optimizer, epoch, **more):
    """A kill at any moment leaves the old file or the new one, whole."""
    path = os.path.realpath(args.checkpoint)
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save({"model": model, "optimizer": optimizer, "epoch": epoch + 1, **more}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:
        pathlib.Path(f"{path}.tmp").unlink(missing_ok=True)
        while error.__context__:  # torch's own error, on top of the one that says why
            error = error.__context__
        stop(f"{args.checkpoint} was not saved: {error}", 1)
    print(f"saved {args.checkpoint} after epoch {epoch + 1}", flush=True)


def report(args, epoch, loss, accuracy, samples, start):
    seconds = time.perf_counter() - start
    left = round(seconds * (args.total_epochs - epoch - 1))
    print(f"epoch {epoch + 1:{len(str(args.total_epochs))}}/{args.total_epochs} | loss {loss:.4f} "
          f"| accuracy {accuracy:.2%} | {samples / seconds:,.0f} samples/s "
          f"| {left // 60}:{left % 60:02} left", flush=True)
