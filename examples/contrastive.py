"""Learns from pairs alone which description belongs to which noisy wave; on one device:
python examples/contrastive.py
"""
import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Matcher(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.listen = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, width))
        self.read = nn.Sequential(nn.EmbeddingBag(30, 64), nn.GELU(), nn.Linear(64, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))  # log of 1 / temperature, learned

    def forward(self, waves, words):
        heard, told = F.normalize(self.listen(waves)), F.normalize(self.read(words))
        return heard, told, self.log_scale.exp()


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
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
train_set, test_set = make_pairs(4800, seed=0), make_pairs(397, seed=1)
sampler = RandomSampler(train_set, generator=torch.Generator())
train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = Matcher().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
path, first_epoch = "contrastive.pt", 0
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first_epoch = checkpoint["epoch"]
    print(f"{path}: {first_epoch}/{args.epochs} epochs done")
for epoch in range(first_epoch, args.epochs):
    sampler.generator.manual_seed(epoch)
    total = 0
    for waves, words in train_loader:
        heard, told, scale = model(waves.to(device), words.to(device))
        loss = loss_function(heard, told, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    with torch.no_grad():
        heard, told, scale = model(*(tensor.to(device) for tensor in test_set.tensors))
    found = (heard @ told.t()).argmax(dim=1).cpu() == torch.arange(len(test_set))
    print(f"epoch {epoch + 1} | loss {total / len(train_loader):.4f} | temperature {1 / scale:.4f} "
          f"| found {found.float().mean():.1%}", flush=True)
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1}, file)
        os.fsync(file.fileno())  # on disk before it replaces the old file
    os.replace(f"{path}.tmp", path)
