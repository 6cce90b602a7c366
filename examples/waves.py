"""Train a classifier of noisy waves on one device: python examples/waves.py --epochs 10"""
import argparse
import math
import os
import zipfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load_data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    frequency = (1 + labels + 0.2 * torch.randn(samples, generator=generator))[:, None]
    phase = torch.rand(samples, 1, generator=generator)
    angle = 2 * math.pi * (frequency * torch.linspace(0, 1, 64) + phase)
    waves = angle.sin() + 0.3 * torch.randn(samples, 64, generator=generator)
    return TensorDataset(waves, labels)


def build_model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 64)),
        nn.Conv1d(1, 16, kernel_size=9, stride=2), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Conv1d(16, 32, kernel_size=5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 4))


def read_checkpoint(path):
    """The checkpoint, on the CPU; None if there is none."""
    if os.path.exists(path):
        # The file is a zip archive. testzip verifies its checksums; torch.load does not.
        assert not zipfile.ZipFile(path).testzip(), f"{path} is damaged"
        return torch.load(path, map_location="cpu", weights_only=True)


def resume(checkpoint, model, optimizer, schedule):
    """Continue from a checkpoint, if there is one; return the epochs done and the best accuracy."""
    if checkpoint is None:
        return 0, 0.0
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    return checkpoint["epoch"], checkpoint["best"]


def save(checkpoint, path):
    """Write a temporary file, then rename it: a kill leaves the old file or the new one, intact."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # random: pids repeat in containers
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        os.fsync(file.fileno())
    os.replace(temporary, path)


def train_epoch(model, loader, optimizer, device):
    model.train()
    sums = torch.zeros(2, device=device)  # loss, samples
    for waves, labels in loader:
        waves, labels = waves.to(device), labels.to(device)
        loss = F.cross_entropy(model(waves), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * len(labels)  # not loss.item(), which waits for the GPU
        sums[1] += len(labels)
    return sums


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)  # correct predictions, samples
    for waves, labels in loader:
        waves, labels = waves.to(device), labels.to(device)
        sums[0] += (model(waves).argmax(dim=1) == labels).sum()
        sums[1] += len(labels)
    return sums


def main(args, device):
    train_set, val_set = load_data(2040, seed=1), load_data(509, seed=2)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, args.batch_size)

    torch.manual_seed(0)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    epochs_done, best = resume(read_checkpoint(args.checkpoint), model, optimizer, schedule)

    for epoch in range(epochs_done, args.epochs):
        train_sums = train_epoch(model, train_loader, optimizer, device)
        val_sums = evaluate(model, val_loader, device)
        schedule.step()
        loss, trained, correct, tested = *train_sums.tolist(), *val_sums.tolist()
        accuracy = correct / tested
        improved = accuracy > best
        best = max(best, accuracy)
        print(f"epoch {epoch + 1}/{args.epochs} | loss {loss / trained:.4f} "
              f"| accuracy {accuracy:.2%}", flush=True)
        if improved:
            save(model.state_dict(), f"{args.checkpoint}.best")
        save({"model": model.state_dict(),
              "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
              "epoch": epoch + 1, "best": best}, args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--checkpoint", default="waves.pt")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    main(args, device)
