"""A character language model that learns to write the sentences it reads; with DDP:
torchrun --standalone --nproc_per_node=2 examples/language_model_ddp.py
"""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class CharModel(nn.Module):
    def __init__(self, n_chars, width=64):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(n_chars, width), nn.GRU(width, width)
        self.head, self.dropout = nn.Linear(width, n_chars), nn.Dropout(0.1)

    def forward(self, codes, hidden):
        output, hidden = self.rnn(self.dropout(self.embed(codes)), hidden)
        return self.head(output), hidden

    def init_hidden(self, columns):
        return self.head.weight.new_zeros(1, columns, self.rnn.hidden_size)


def batchify(text):
    rows = len(text) // args.batch_size
    codes = torch.tensor([chars.index(char) for char in text[:rows * args.batch_size]])
    return codes.view(args.batch_size, rows)[rank::world_size].t().to(device)


@torch.no_grad()
def evaluate(data):
    model.eval()
    scores, _ = model.module(data[:-1], model.module.init_hidden(columns))
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), data[1:].flatten())
    dist.all_reduce(loss)  # all ranks must make the same decisions
    return loss.item() / world_size


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=24)
parser.add_argument("--save", default="language_model.pt")
args = parser.parse_args()
device = torch.device("cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True)
if accelerator and accelerator.type != "mps":  # a Mac's GPU has no collectives
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # before anything else touches a GPU
dist.init_process_group(dist.get_default_backend_for_device(device),
                        device_id=device if device.type != "cpu" else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
assert args.batch_size % world_size == 0, "--batch-size must be divisible by the world size"
columns = args.batch_size // world_size  # columns of text that this rank trains on
pick = random.Random(0).choice
text = "".join(f"{pick(['Ada', 'Ben', 'Cleo'])} {pick(['sees', 'finds', 'buys'])} "
               f"{pick(range(1000, 10000))} {pick(['boats', 'red lamps', 'houses'])}. "
               for _ in range(500))
chars = sorted(set(text))
train_data, val_data, test_data = map(batchify, (text[:-4000], text[-4000:-2000], text[-2000:]))

torch.manual_seed(0)
model = CharModel(len(chars)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
best, window = float("inf"), 25
path, first_epoch = "language_model_run.pt", 0
checkpoint = [torch.load(path, map_location="cpu", weights_only=True)
              if rank == 0 and os.path.exists(path) else None]
dist.broadcast_object_list(checkpoint)  # others may not see the file
checkpoint = checkpoint[0]
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first_epoch, best = checkpoint["epoch"], checkpoint["best"]
    if rank == 0:
        print(f"{path}: {first_epoch}/{args.epochs} epochs done")
del checkpoint
model = DDP(model)  # backward averages all ranks' gradients
for epoch in range(first_epoch, args.epochs):
    model.train()
    torch.manual_seed(epoch * world_size + rank)  # dropout: masks differ by rank and epoch
    total, hidden = 0, model.module.init_hidden(columns)
    for start in range(0, len(train_data) - 1, window):
        part = train_data[start:start + window + 1]
        scores, hidden = model(part[:-1], hidden.detach())
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), part[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * (len(part) - 1)
    total = torch.tensor(total / world_size, device=device)
    dist.all_reduce(total)
    loss, val_loss = total / (len(train_data) - 1), evaluate(val_data)
    if rank == 0:
        print(f"epoch {epoch + 1} | loss {loss:.4f} | val loss {val_loss:.4f}", flush=True)
    if val_loss < best:
        best = val_loss
        if rank == 0:
            torch.save(model.module.state_dict(), args.save)
    else:
        optimizer.param_groups[0]["lr"] /= 4
    if rank == 0:
        with open(f"{path}.tmp", "wb") as file:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch + 1, "best": best}, file)
            os.fsync(file.fileno())  # on disk before it replaces the old file
        os.replace(f"{path}.tmp", path)
saved = [torch.load(args.save, map_location="cpu") if rank == 0 else None]
dist.broadcast_object_list(saved)  # to the other ranks: they may not see the file
model.module.load_state_dict(saved[0])
test_loss = evaluate(test_data)
if rank == 0:
    print(f"test loss {test_loss:.4f}")

del model  # it holds the group, whose threads must end before Python does
dist.destroy_process_group()
