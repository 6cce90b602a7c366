"""What no launch style changes: model, data, command line, checks, checkpoint, printed line."""
import argparse
import functools
import operator
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


def stop(message, status):
    """End this process with one line."""
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


def end_with_parent(worker):
    """For each loader worker: it would outlive a killed parent, under Python 3.14 for ever."""
    def wait_for_parent():
        torch.multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=wait_for_parent, daemon=True).start()


def count(text, least=1):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def rate(text):
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def find_devices():
    """The accelerator, if torch has collectives for it (a Mac's mps has none), and the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":
        return ["cpu"]
    return [found.type, "cpu"]


def end_at_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for collectives


def parse_args(doc, spawn=False):
    end_at_ctrl_c()
    devices = find_devices()
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = functools.partial(stop, status=2)  # one line, without the usage
    add, whole = parser.add_argument, functools.partial(count, least=0)
    add("total_epochs", type=count, nargs="?", default=50, help="with those of an earlier run")
    add("save_every", type=count, nargs="?", default=10, help="epochs; also saved after the last")
    add("--batch-size", "--batch_size", type=count, default=960, help="samples over all devices")
    add("--lr", type=rate, default=0.018, help="learning rate of a new run")
    add("--dataset", choices=["synthetic", "FashionMNIST", "MNIST", "CIFAR10"], default="synthetic")
    add("--data-dir", default="data", help="where a real dataset lies, or is downloaded to")
    add("--model", default="cnn", choices=[
        "cnn", "resnet18", "resnet50", "mobilenet_v3_small", "convnext_tiny", "vgg11", "vit"])
    add("--workers", type=whole, default=0, help="loader processes per process and loader")
    add("--device", choices=devices, default=devices[0])
    add("--backend", choices=[get_default_backend_for_device(device) for device in devices],
        default=argparse.SUPPRESS, help="default: the device's; with gloo processes may share it")
    add("--checkpoint", default=pathlib.Path(sys.argv[0]).stem + ".pt", help="resumed if it exists")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    if spawn:
        add("-n", "--nodes", type=count, default=1, help="machines")
        add("-g", "--gpus", type=count, default=argparse.SUPPRESS, help="processes: 1 a GPU, or 2")
        add("-nr", "--node-rank", type=whole, default=0, help="which of the machines this is")
    args = parser.parse_args()
    if "backend" not in args:
        args.backend = get_default_backend_for_device(args.device)
    gpus = torch.accelerator.device_count() if args.device != "cpu" else 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if spawn:
        plan_spawn(args, gpus)
        processes = args.gpus
    if args.backend != "gloo" and processes > gpus:
        stop(f"argument {'-g/--gpus' if spawn else '--backend'}: {args.backend} needs a GPU for "
             f"each process, with --device {args.device} there are {gpus} for {processes}: use "
             "--backend gloo, or fewer", 2)
    return args


def plan_spawn(args, gpus):
    """Settle how many processes multigpu_spawn.py starts, their threads, and where they meet."""
    if "gpus" not in args:
        args.gpus = gpus or 2
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.gpus)))
    if args.node_rank >= args.nodes:
        stop(f"argument -nr/--node-rank: {args.node_rank} is not below -n {args.nodes}", 2)
    args.master_addr, args.master_port = "127.0.0.1", 0  # any free port
    if args.nodes > 1:
        args.master_addr, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not args.master_addr or not port.isdecimal():
            stop("argument -n/--nodes: several machines need MASTER_ADDR and MASTER_PORT, the "
                 "first one's address and a free port on it, in their environment", 2)
        args.master_port = int(port)


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


def check_run(args, world_size=None, rank=0, kind=(None,)):
    """Say on what this trains; or that it cannot, before processes wait for each other.

    `kind`: the kinds of checkpoint that this script can go on from, as they say; most say none.
    """
    processes = world_size or 1  # None: without a process group
    check_batch_size(args, processes)
    if rank != 0:
        return  # rank 0 alone reads, saves and prints
    check_checkpoint(args, kind)
    check_folder(args)
    backend = f", backend: {args.backend}" if world_size else ""
    print(f"processes: {processes}, device: {args.device}{backend}, batch: {args.batch_size}, "
          f"per process: {args.batch_size // processes}", flush=True)


def check_batch_size(args, processes):
    size, left = args.batch_size, args.batch_size % processes
    if left:
        stop(f"argument --batch-size: {size} is not divisible by {processes} processes, "
             f"{size + processes - left} is", 2)
    samples = len(load_data(args.dataset, args.data_dir)[0])
    if size > samples:
        stop(f"argument --batch-size: {size} exceeds the {samples} training samples", 2)


def check_checkpoint(args, kind):
    """Say how many epochs are done, or why the file cannot be resumed."""
    path, done, note = args.checkpoint, 0, ""
    if os.path.exists(path):
        try:
            done, rates = examine_checkpoint(args, kind)
        except Exception as error:
            reason = f"it is cut off, damaged, of another model or no checkpoint ({error!r})"
            if "weights_only" in str(error):  # torch's words, which say how to load it even so
                reason = "it holds more than tensors and plain values"
            stop(f"{path} cannot be resumed and is left as it was: {reason}", 1)
        if done >= args.total_epochs:
            note = "; to start afresh, delete it or change --checkpoint"
        elif rates != {args.lr}:
            saved = ", ".join(f"{rate:g}" for rate in sorted(rates))
            note = f"; the learning rate goes on as saved, {saved}, not as --lr {args.lr:g}"
    if done or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # then 0 is worth a word
        print(f"{path}: {done} of {args.total_epochs} epochs are done{note}", flush=True)


def examine_checkpoint(args, kind):
    """The epochs done and the learning rates; an error where this script cannot go on from them."""
    if zipfile.ZipFile(args.checkpoint).testzip():  # torch.load compares no checksums
        raise zipfile.BadZipFile("it is damaged")
    checkpoint = read_checkpoint(args)
    if checkpoint.get("kind") not in kind:
        raise ValueError(f"only {checkpoint.get('kind', 'another script')} can go on from it")
    build_model(args.model).load_state_dict(checkpoint["model"])
    rates = {group["lr"] for group in checkpoint["optimizer"]["param_groups"]}
    return operator.index(checkpoint["epoch"]), rates


def check_folder(args):
    folder = os.path.dirname(os.path.realpath(args.checkpoint))
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        stop(f"argument --checkpoint: {folder} takes no file: {error.strerror}", 1)


def read_checkpoint(args):
    """What was saved, on the CPU; None where nothing was."""
    if os.path.exists(args.checkpoint):
        return torch.load(args.checkpoint, map_location="cpu", weights_only=True)


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
