"""A variational autoencoder that learns to draw spots of any size, anywhere; on one device:
python examples/autoencoder.py
"""
import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 64), nn.Tanh(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.Tanh(), nn.Linear(64, 144))

    def forward(self, images):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        return self.decoder(mean + noise * torch.exp(log_var / 2)), mean, log_var

    def decode(self, codes):
        return self.decoder(codes).sigmoid().view(-1, 12, 12)


def draw_spots(count):
    place, size = 2 + 7 * torch.rand(count, 2, 1), 2 + torch.rand(count, 1, 1)
    shape = torch.exp(-((torch.arange(12) - place) / size) ** 2)
    return TensorDataset((shape[:, 0, :, None] * shape[:, 1, None, :]).flatten(1))


def loss_function(images, scores, mean, log_var):
    difference = F.binary_cross_entropy_with_logits(scores, images, reduction="sum")
    divergence = (mean ** 2 + log_var.exp() - 1 - log_var).sum() / 2
    return difference + divergence


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=60)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--save", default="autoencoder.pt")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
train_loader = DataLoader(draw_spots(2041), args.batch_size, shuffle=True)
test_loader = DataLoader(draw_spots(397), args.batch_size)
model = Autoencoder().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
path, first_epoch = args.save, 0
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first_epoch = checkpoint["epoch"]
    print(f"{path}: {first_epoch}/{args.epochs} epochs done")
for epoch in range(first_epoch, args.epochs):
    torch.manual_seed(epoch)  # a resumed run draws what an unbroken one draws
    trained = tested = 0
    for images, in train_loader:
        images = images.to(device)
        loss = loss_function(images, *model(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained += loss.item()
    with torch.no_grad():
        for images, in test_loader:
            images = images.to(device)
            tested += loss_function(images, *model(images)).item()
    trained, tested = trained / len(train_loader.dataset), tested / len(test_loader.dataset)
    print(f"epoch {epoch + 1} | loss {trained:.4f} | test loss {tested:.4f}", flush=True)
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1}, file)
        os.fsync(file.fileno())  # on disk before it replaces the old file
    os.replace(f"{path}.tmp", path)

for row in model.decode(torch.randn(1, 4, device=device))[0]:
    print("".join(" .:+*#"[int(6 * value)] for value in row))
