"""What all scripts share: model, data, arguments, checkpoint file, printed lines."""
import argparse
import functools
import os
import pathlib
import socket
import sys
import tempfile
import time
import zipfile

import torch
import torch.distributed.nn  # unused; import it before the group exists, or gloo may abort at exit
from torch import nn
from torch.utils.data import Subset, TensorDataset


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
    return models.get_model(name, num_classes=10)


def synthetic_data():
    """Ten noisy patterns, drawn as integers so that every machine gets the same bits."""
    train, held_out = 3840, 509  # 509 is prime, so several ranks get unequal shares
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, generator=generator, dtype=torch.int16)
    patterns = draw(-8, 9, (10, 3, 4, 4))
    patterns = patterns.repeat_interleave(8, 2).repeat_interleave(8, 3)  # enlarged to 32x32
    labels = draw(0, 10, (train + held_out,)).long()
    images = (patterns[labels] + draw(-36, 37, (train + held_out, 3, 32, 32))) / 4
    data = TensorDataset(images, labels)
    return Subset(data, range(train)), Subset(data, range(train, train + held_out))


def load_data(args):
    """Training and held-out samples; a real dataset is downloaded if it is missing."""
    if args.dataset == "synthetic":
        return synthetic_data()
    from torchvision import datasets
    from torchvision.transforms import v2
    transform = v2.Compose([v2.RGB(), v2.Resize((32, 32)), v2.ToImage(),
                            v2.ToDtype(torch.get_default_dtype(), scale=True),
                            v2.Normalize([0.5] * 3, [0.5] * 3)])
    dataset = getattr(datasets, args.dataset)
    return [dataset(args.data_dir, train, transform, download=True) for train in (True, False)]


def find_device():
    """The accelerator, if torch has collectives for it (a Mac's mps has none), else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type != "mps" else "cpu"


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and keep commands on their own lines, ready to copy."""


def parse_args(doc, spawn=False):
    device = find_device()
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("total_epochs", type=positive, nargs="?", default=50,
        help="epochs in total, including those of an earlier run")
    add("save_every", type=positive, nargs="?", default=10,
        help="epochs between saves; the last epoch is always saved")
    add("--batch-size", "--batch_size", type=positive, default=960,
        help="samples per step, of all processes together")
    add("--lr", type=float, default=0.018, help="for new runs; resumed ones keep theirs")
    add("--dataset", choices=["synthetic", "FashionMNIST", "MNIST", "CIFAR10"], default="synthetic",
        help="synthetic is made in memory")
    add("--data-dir", default="data", help="folder for a real dataset, downloaded if missing")
    add("--model", default="cnn", help="cnn, vit, or torchvision's: resnet18, convnext_tiny, ...")
    add("--workers", type=int, default=0, help="worker processes of each DataLoader")
    add("--device", choices=sorted({device, "cpu"}), default=device, help="device to train on")
    add("--checkpoint", type=pathlib.Path, default=f"{pathlib.Path(sys.argv[0]).stem}.pt",
        help="file to save to, and to resume from if it exists")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    if spawn:
        gpus = torch.accelerator.device_count() if device != "cpu" else 2
        add("-n", "--nodes", type=positive, default=1, help="machines")
        add("-g", "--gpus", type=positive, default=gpus, help="processes on each machine")
        add("-nr", "--node-rank", type=int, default=0, help="this machine's number, from 0")
    args = parser.parse_args()
    if spawn and args.node_rank not in range(args.nodes):
        parser.error(f"--node-rank must be between 0 and {args.nodes - 1}")
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.checkpoint.parent).close()  # fail here, not at the first save
    return args


def read_checkpoint(args):
    """The checkpoint, on the CPU; None if there is none."""
    if args.checkpoint.exists():
        # The file is a zip archive. testzip verifies its checksums; torch.load does not.
        assert not zipfile.ZipFile(args.checkpoint).testzip(), f"{args.checkpoint} is damaged"
        return torch.load(args.checkpoint, map_location="cpu", weights_only=True)


def resume(checkpoint, model, optimizer):
    """Continue from a checkpoint, if there is one; return how many epochs are done."""
    if checkpoint is None:
        return 0
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"]


def time_to_save(args, epoch):
    return (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs


def save(args, model_state, optimizer_state, epoch, **more):
    """Write a temporary file, then rename it: a kill leaves the old file or the new one, intact."""
    checkpoint = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch + 1, **more}
    temporary = f"{args.checkpoint}.{os.urandom(4).hex()}.tmp"  # random: pids repeat in containers
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        os.fsync(file.fileno())
    os.replace(temporary, args.checkpoint)
    print(f"saved {args.checkpoint} after epoch {epoch + 1}", flush=True)


def announce(args, epochs_done, processes):
    print(f"processes: {processes}, device: {args.device}, batch: {args.batch_size}, "
          f"{args.checkpoint}: {epochs_done} of {args.total_epochs} epochs done", flush=True)
    if epochs_done >= args.total_epochs:
        print("Nothing is left to train. To continue, ask for more epochs; "
              f"to start over, delete {args.checkpoint}.", flush=True)


def report(args, epoch, train_sums, val_sums, start):
    loss, trained, correct, tested = *train_sums.tolist(), *val_sums.tolist()
    assert trained, "--batch-size exceeds the training set"
    seconds = time.perf_counter() - start  # after tolist(), which waits for the GPU
    left = round(seconds * (args.total_epochs - epoch - 1))
    print(f"epoch {epoch + 1}/{args.total_epochs} | loss {loss / trained:.4f} "
          f"| accuracy {correct / tested:.2%} | {trained / seconds:,.0f} samples/s "
          f"| {left // 60}:{left % 60:02} left", flush=True)
