"""A variational autoencoder that learns to draw spots of any size, anywhere; with DDP:
torchrun --standalone --nproc_per_node=2 examples/autoencoder_ddp.py
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 64), nn.Tanh(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.Tanh(), nn.Linear(64, 144))

    def forward(self, images, rows):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        # Drawn for the whole batch; each rank takes its part, matching one device.
        noise = torch.randn(rows, mean.size(1), device=mean.device)[rank::world_size]
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
device = torch.device("cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True)
if accelerator and accelerator.type != "mps":  # a Mac's GPU has no collectives
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # before anything else touches a GPU
dist.init_process_group(dist.get_default_backend_for_device(device),
                        device_id=device if device.type != "cpu" else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
train_loader = DataLoader(draw_spots(2041), args.batch_size, shuffle=True)
test_loader = DataLoader(draw_spots(397), args.batch_size)
model = Autoencoder().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
path, first_epoch = args.save, 0
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
model = DDP(model)  # backward averages all ranks' gradients
for epoch in range(first_epoch, args.epochs):
    torch.manual_seed(epoch)  # a resumed run draws what an unbroken one draws
    trained = tested = 0
    for images, in train_loader:
        rows, images = len(images), images[rank::world_size].to(device)  # may be empty
        loss = loss_function(images, *model(images, rows))
        optimizer.zero_grad()
        (loss * world_size).backward()  # DDP averages over the ranks; this makes it a sum
        optimizer.step()
        trained += loss.item()
    with torch.no_grad():
        for images, in test_loader:
            rows, images = len(images), images[rank::world_size].to(device)
            tested += loss_function(images, *model.module(images, rows)).item()
    sums = torch.tensor([trained, tested], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    if rank != 0:
        continue  # rank 0 alone prints and saves: no collective in the rest of this loop
    trained, tested = sums.tolist()
    trained, tested = trained / len(train_loader.dataset), tested / len(test_loader.dataset)
    print(f"epoch {epoch + 1} | loss {trained:.4f} | test loss {tested:.4f}", flush=True)
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1}, file)
        os.fsync(file.fileno())  # on disk before it replaces the old file
    os.replace(f"{path}.tmp", path)

if rank == 0:
    for row in model.module.decode(torch.randn(1, 4, device=device))[0]:
        print("".join(" .:+*#"[int(6 * value)] for value in row))

del model  # it holds the group, whose threads must end before Python does
dist.destroy_process_group()
