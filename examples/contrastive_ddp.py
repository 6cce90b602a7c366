"""Learns from pairs alone which description belongs to which noisy wave; with DDP:
torchrun --standalone --nproc_per_node=2 examples/contrastive_ddp.py
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Matcher(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.listen = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, width))
        self.read = nn.Sequential(nn.EmbeddingBag(30, 64), nn.GELU(), nn.Linear(64, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))  # log of 1 / temperature, learned

    def forward(self, waves, words):
        heard, told = F.normalize(self.listen(waves)), F.normalize(self.read(words))
        return heard, told, self.log_scale.exp()


class Gather(torch.autograd.Function):  # torch's version: missing in 2.10, deprecated in 2.15
    @staticmethod
    def forward(ctx, mine):
        whole = mine.new_empty(dist.get_world_size(), *mine.shape)
        dist.all_gather(list(whole), mine.contiguous())
        return whole.flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)  # summed: each rank's loss depends on these features
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def make_pairs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    traits = torch.rand(count, 3, generator=generator)
    words = (10 * traits).long() + torch.tensor([0, 10, 20])  # one of ten for each trait
    frequency, phase, height = traits.split(1, dim=1)
    angle = torch.pi * ((2 + 4 * frequency) * torch.linspace(0, 1, 64) + phase)
    waves = (1 + height) * angle.sin() + 0.1 * torch.randn(count, 64, generator=generator)
    return TensorDataset(waves, words)


def loss_function(heard, told, scale):
    scores = scale * heard @ told.t()  # each wave with each description in the batch
    pairs = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=96)
args = parser.parse_args()
device = torch.device("cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True)
if accelerator and accelerator.type != "mps":  # a Mac's GPU has no collectives
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # before anything else touches a GPU
dist.init_process_group(dist.get_default_backend_for_device(device),
                        device_id=device if device.type != "cpu" else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
train_set, test_set = make_pairs(4800, seed=0), make_pairs(397, seed=1)
sampler = DistributedSampler(train_set, drop_last=True)
assert args.batch_size % world_size == 0, "--batch-size must be divisible by the world size"
train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = Matcher().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
path, first_epoch = "contrastive.pt", 0
checkpoint = [torch.load(path, map_location="cpu", weights_only=True)
              if rank == 0 and os.path.exists(path) else None]
dist.broadcast_object_list(checkpoint)  # others may not see the file
checkpoint = checkpoint[0]
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first_epoch = checkpoint["epoch"]
    if rank == 0:
        print(f"{path}: {first_epoch}/{args.epochs} epochs done")
del checkpoint
model = DDP(model)  # the temperature is in it: its gradient is averaged too
for epoch in range(first_epoch, args.epochs):
    sampler.set_epoch(epoch)
    total = 0
    for waves, words in train_loader:
        heard, told, scale = model(waves.to(device), words.to(device))
        heard, told = Gather.apply(heard), Gather.apply(told)  # separately, so pairs stay aligned
        loss = loss_function(heard, told, scale)  # of the whole batch, on every rank
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    if rank != 0:
        continue  # rank 0 alone tests, prints, saves: no collective in the rest of this loop
    with torch.no_grad():
        heard, told, scale = model.module(*(tensor.to(device) for tensor in test_set.tensors))
    found = (heard @ told.t()).argmax(dim=1).cpu() == torch.arange(len(test_set))
    print(f"epoch {epoch + 1} | loss {total / len(train_loader):.4f} | temperature {1 / scale:.4f} "
          f"| found {found.float().mean():.1%}", flush=True)
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1}, file)
        os.fsync(file.fileno())  # on disk before it replaces the old file
    os.replace(f"{path}.tmp", path)
del model  # it holds the group, whose threads must end before Python does
dist.destroy_process_group()
