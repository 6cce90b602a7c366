"""A character language model that learns to write the sentences it reads; on one device:
python examples/language_model.py
"""
import argparse
import os
import random

import torch
from torch import nn


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
    return codes.view(args.batch_size, rows).t().to(device)


@torch.no_grad()
def evaluate(data):
    model.eval()
    scores, _ = model(data[:-1], model.init_hidden(args.batch_size))
    return nn.functional.cross_entropy(scores.flatten(0, 1), data[1:].flatten()).item()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=24)
parser.add_argument("--save", default="language_model.pt")
args = parser.parse_args()
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first_epoch, best = checkpoint["epoch"], checkpoint["best"]
    print(f"{path}: {first_epoch}/{args.epochs} epochs done")
for epoch in range(first_epoch, args.epochs):
    model.train()
    total, hidden = 0, model.init_hidden(args.batch_size)
    for start in range(0, len(train_data) - 1, window):
        part = train_data[start:start + window + 1]
        scores, hidden = model(part[:-1], hidden.detach())
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), part[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * (len(part) - 1)
    loss, val_loss = total / (len(train_data) - 1), evaluate(val_data)
    print(f"epoch {epoch + 1} | loss {loss:.4f} | val loss {val_loss:.4f}", flush=True)
    if val_loss < best:
        best = val_loss
        torch.save(model.state_dict(), args.save)
    else:
        optimizer.param_groups[0]["lr"] /= 4
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1, "best": best}, file)
        os.fsync(file.fileno())  # on disk before it replaces the old file
    os.replace(f"{path}.tmp", path)
model.load_state_dict(torch.load(args.save, map_location=device))
print(f"test loss {evaluate(test_data):.4f}")
