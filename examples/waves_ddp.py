"""Reads the frequency off a noisy wave; with DDP:
torchrun --standalone --nproc_per_node=2 examples/waves_ddp.py
"""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def make_waves(count, seed):
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 + 3 * torch.rand(count, 1, generator=generator)
    phase = torch.rand(count, 1, generator=generator)
    angle = 2 * math.pi * (frequency * torch.linspace(0, 1, 64) + phase)
    waves = angle.sin() + 0.3 * torch.randn(count, 64, generator=generator)
    return TensorDataset(waves, frequency)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--checkpoint", default=f"{Path(__file__).stem}.pt")
args = parser.parse_args()

device = torch.device("cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True)
if accelerator and accelerator.type != "mps":  # a Mac's GPU has no collectives
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # before anything else touches a GPU
dist.init_process_group(dist.get_default_backend_for_device(device),
                        device_id=device if device.type != "cpu" else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
train_set, test_set = make_waves(2048, seed=0), make_waves(509, seed=1)
test_set = Subset(test_set, range(rank, len(test_set), world_size))
sampler = DistributedSampler(train_set, drop_last=True)
assert args.batch_size % world_size == 0, "--batch-size must be divisible by the world size"
train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
test_loader = DataLoader(test_set, args.batch_size)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 16, kernel_size=9, stride=2), nn.GELU(),
    nn.Conv1d(16, 32, kernel_size=5, stride=2), nn.GELU(),
    nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first_epoch = 0
checkpoint = [torch.load(args.checkpoint, map_location="cpu", weights_only=True)
              if rank == 0 and os.path.exists(args.checkpoint) else None]
dist.broadcast_object_list(checkpoint)  # to the other ranks: they may not see the file
checkpoint = checkpoint[0]
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first_epoch = checkpoint["epoch"]
    if rank == 0:
        print(f"{args.checkpoint}: {first_epoch} of {args.epochs} epochs are done")
model = DDP(model)  # also copies rank 0's weights to all

for epoch in range(first_epoch, args.epochs):
    sampler.set_epoch(epoch)
    totals = torch.zeros(4, device=device)  # loss, samples: trained, tested
    for waves, frequency in train_loader:
        waves, frequency = waves.to(device), frequency.to(device)
        loss = nn.functional.mse_loss(model(waves), frequency)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(waves)
        totals[1] += len(waves)
    with torch.no_grad():
        for waves, frequency in test_loader:
            waves, frequency = waves.to(device), frequency.to(device)
            loss = nn.functional.mse_loss(model.module(waves), frequency)
            totals[2] += loss * len(waves)
            totals[3] += len(waves)
    dist.all_reduce(totals)
    if rank != 0:
        continue  # rank 0 alone prints and saves: no collective in the rest of this loop
    trained, tested = totals[0] / totals[1], totals[2] / totals[3]
    print(f"epoch {epoch + 1} | loss {trained:.4f} | test loss {tested:.4f}", flush=True)
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1}, f"{args.checkpoint}.tmp")
    os.replace(f"{args.checkpoint}.tmp", args.checkpoint)

del model  # it holds the group, whose threads must end before Python does
dist.destroy_process_group()
