"""Tells noisy waves apart by their frequency; on one device:
python examples/waves.py
"""
import argparse
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_waves(count, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(4, (count,), generator=generator)
    frequency = (1 + targets + 0.2 * torch.randn(count, generator=generator))[:, None]
    phase = torch.rand(count, 1, generator=generator)
    angle = 2 * math.pi * (frequency * torch.linspace(0, 1, 64) + phase)
    waves = angle.sin() + 0.3 * torch.randn(count, 64, generator=generator)
    return TensorDataset(waves, targets)


def train(model, loader):
    model.train()
    loss_sum = trained = 0
    for waves, targets in loader:
        waves, targets = waves.to(device), targets.to(device)
        loss = nn.functional.cross_entropy(model(waves), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(targets)
        trained += len(targets)
    return loss_sum, trained


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = tested = 0
    for waves, targets in loader:
        waves, targets = waves.to(device), targets.to(device)
        correct += (model(waves).argmax(dim=1) == targets).sum().item()
        tested += len(targets)
    return correct, tested


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
epochs, batch_size = args.epochs, args.batch_size

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

train_set, val_set = make_waves(2040, seed=1), make_waves(509, seed=2)

train_loader = DataLoader(train_set, batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size)

torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Unflatten(1, (1, 64)),
    nn.Conv1d(1, 16, kernel_size=9, stride=2), nn.BatchNorm1d(16), nn.ReLU(),
    nn.Conv1d(16, 32, kernel_size=5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
    nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

path, first_epoch, best = "run.pt", 0, 0.0
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    first_epoch, best = checkpoint["epoch"], checkpoint["best"]
    print(f"{path}: {first_epoch}/{epochs} epochs done")

for epoch in range(first_epoch, epochs):
    loss_sum, trained = train(model, train_loader)
    correct, tested = evaluate(model, val_loader)
    schedule.step()

    accuracy = correct / tested
    print(f"loss {loss_sum / trained:.4f} | accuracy {accuracy:.2%}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "epoch": epoch + 1, "best": best}, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
