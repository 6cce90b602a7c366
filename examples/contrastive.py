"""Learn from pairs alone which words describe which wave, on one device:
python examples/contrastive.py --epochs 10"""
import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load_data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    traits = torch.rand(samples, 3, generator=generator)
    words = (10 * traits).long() + torch.tensor([0, 10, 20])  # one of ten for each trait
    frequency, phase, height = traits.split(1, dim=1)
    angle = math.pi * ((2 + 4 * frequency) * torch.linspace(0, 1, 64) + phase)
    waves = (1 + height) * angle.sin() + 0.1 * torch.randn(samples, 64, generator=generator)
    return TensorDataset(waves, words)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.listen = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
        self.read = nn.Sequential(nn.EmbeddingBag(30, 64), nn.GELU(), nn.Linear(64, 32))
        self.log_scale = nn.Parameter(torch.tensor(2.0))  # log of 1 / temperature, learned

    def forward(self, waves, words):
        heard, told = F.normalize(self.listen(waves)), F.normalize(self.read(words))
        return heard, told, self.log_scale.exp()


def contrastive_loss(heard, told, scale):
    scores = scale * heard @ told.t()  # each wave with the words of every wave in the batch
    pairs = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


def train_epoch(model, loader, optimizer, device):
    model.train()
    loss_sum = torch.zeros((), device=device)
    for waves, words in loader:
        heard, told, scale = model(waves.to(device), words.to(device))
        loss = contrastive_loss(heard, told, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()  # not loss.item(), which waits for the GPU
    return loss_sum / len(loader)


@torch.no_grad()
def evaluate(model, val_set, device):
    model.eval()
    waves, words = val_set.tensors
    heard, told, _ = model(waves.to(device), words.to(device))
    found = (heard @ told.t()).argmax(dim=1) == torch.arange(len(val_set), device=device)
    return found.sum() / len(val_set)


def main(args, device):
    train_set, val_set = load_data(4800, seed=0), load_data(397, seed=1)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)

    torch.manual_seed(0)
    model = Matcher().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        loss = train_epoch(model, train_loader, optimizer, device)
        accuracy = evaluate(model, val_set, device)
        print(f"epoch {epoch + 1}/{args.epochs} | loss {loss:.4f} "
              f"| accuracy {accuracy:.2%}", flush=True)
    torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--save", default="contrastive.pt")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    main(args, device)
