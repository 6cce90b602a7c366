"""Tells noisy waves apart by their frequency; with DDP:
torchrun --standalone --nproc_per_node=2 examples/waves_ddp.py
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


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

# 1. Replaces device = ...; compare device.type, not device, with "cuda"
device = torch.device("cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True)
if accelerator and accelerator.type != "mps":  # mps has no collectives
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # before any GPU call
dist.init_process_group(dist.get_default_backend_for_device(device),
                        device_id=device if device.type != "cpu" else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == 0: print(f"training on {world_size} x {device.type}")

train_set, val_set = make_waves(2040, seed=1), make_waves(509, seed=2)

# 2. The data; keep your loaders' other options
assert batch_size % world_size == 0, f"{batch_size} is not divisible by {world_size} processes"
sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # replaces shuffle=True
train_loader = DataLoader(train_set, batch_size // world_size, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size // world_size)

torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Unflatten(1, (1, 64)),
    nn.Conv1d(1, 16, kernel_size=9, stride=2), nn.BatchNorm1d(16), nn.ReLU(),
    nn.Conv1d(16, 32, kernel_size=5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
    nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

# 3. After the lines that create the model (on its device), the optimizer and the schedule;
# it replaces your lines for resuming, your loop over epochs, and your lines for saving
path, first_epoch, best = "run.pt", 0, 0.0
checkpoint = [torch.load(path, map_location="cpu", weights_only=True)
              if rank == 0 and os.path.exists(path) else None]
dist.broadcast_object_list(checkpoint)  # others may not see the file
checkpoint = checkpoint[0]
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    # if checkpoint["scaler"]: scaler.load_state_dict(checkpoint["scaler"])
    first_epoch, best = checkpoint["epoch"], checkpoint["best"]
    if rank == 0: print(f"{path}: {first_epoch}/{epochs} epochs done")
del checkpoint
if device.type != "cpu":  # BatchNorm over the whole batch
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DDP(model)  # backward averages all ranks' gradients

for epoch in range(first_epoch, epochs):
    sampler.set_epoch(epoch)  # otherwise every epoch has the same order
    torch.manual_seed(args.seed + epoch * world_size + rank)  # dropout, augmentation differ by rank
    loss_sum, trained = train(model, train_loader)  # sum of loss.item() * len(targets), samples
    for buffer in model.buffers():  # use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    # The plain model: DDP's forward may wait for other ranks. Correct predictions, and samples:
    correct, tested = evaluate(model.module, val_loader)
    schedule.step()

    # 4. Sums over all ranks
    totals = torch.tensor([loss_sum, trained, correct, tested], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    loss_sum, trained, correct, tested = totals.tolist()
    if rank == 0:  # no collective in here
        accuracy = correct / tested
        print(f"loss {loss_sum / trained:.4f} | accuracy {accuracy:.2%}")
        if accuracy > best:
            best = accuracy
            torch.save(model.module.state_dict(), "best.pt")
        with open(f"{path}.tmp", "wb") as file:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),  # "scaler": scaler.state_dict(),
                        "epoch": epoch + 1, "best": best}, file)
            os.fsync(file.fileno())  # on disk before it replaces the old file
        os.replace(f"{path}.tmp", path)

del model  # it holds the process group
dist.destroy_process_group()
