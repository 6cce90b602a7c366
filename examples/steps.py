"""Train a small language model in a loop of steps, on one device:
python examples/steps.py --max-steps 200"""
import argparse
import os
import zipfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PART = 4  # sequences that fit into memory at once; the gradients of a step's parts add up


def load_data(samples, seed):
    """Sequences that rise by 1, 2 or 3, modulo 15, padded: inputs with 0, labels with -100."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(15, (samples, 1), generator=generator)
    rise = torch.randint(1, 4, (samples, 1), generator=generator)
    length = torch.randint(5, 13, (samples, 1), generator=generator)
    tokens = 1 + (first + rise * torch.arange(12)) % 15
    padding = torch.arange(12) >= length
    inputs, labels = tokens.masked_fill(padding, 0), tokens.masked_fill(padding, -100)
    return TensorDataset(inputs[:, :-1], labels[:, 1:])


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.dropout = nn.Embedding(16, 32), nn.Dropout(0.1)
        self.rnn, self.head = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 16)

    def forward(self, inputs):
        return self.head(self.rnn(self.dropout(self.embed(inputs)))[0])


def read_checkpoint(path):
    """The checkpoint, on the CPU; None if there is none."""
    if os.path.exists(path):
        # The file is a zip archive. testzip verifies its checksums; torch.load does not.
        assert not zipfile.ZipFile(path).testzip(), f"{path} is damaged"
        return torch.load(path, map_location="cpu", weights_only=True)


def resume(checkpoint, model, optimizer, schedule):
    """Continue from a checkpoint, if there is one; return how many steps are done."""
    if checkpoint is None:
        return 0
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    return checkpoint["step"]


def save(checkpoint, path):
    """Write a temporary file, then rename it: a kill leaves the old file or the new one, intact."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # random: pids repeat in containers
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        os.fsync(file.fileno())
    os.replace(temporary, path)


def endless(loader):
    """The batches, epoch after epoch."""
    while True:
        yield from loader


def train_step(model, batch, optimizer, device):
    model.train()
    inputs, labels = batch[0].to(device), batch[1].to(device)
    count = (labels != -100).sum()  # without padding
    loss_sum = torch.zeros((), device=device)
    for start in range(0, len(labels), PART):
        part = slice(start, start + PART)
        scores, targets = model(inputs[part]).flatten(0, 1), labels[part].flatten()
        loss = F.cross_entropy(scores, targets, reduction="sum") / count
        loss.backward()
        loss_sum += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(3, device=device)  # loss, correct predictions, labels without padding
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.flatten().to(device)
        scores = model(inputs).flatten(0, 1)
        sums[0] += F.cross_entropy(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(dim=1) == labels).sum()
        sums[2] += (labels != -100).sum()
    return sums


def main(args, device):
    train_set, val_set = load_data(600, seed=1), load_data(101, seed=2)
    assert args.batch_size <= len(train_set), "--batch-size exceeds the training set"
    batch_size = args.batch_size
    train_loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, PART)

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.max_steps)
    steps_done = resume(read_checkpoint(args.checkpoint), model, optimizer, schedule)

    batches = endless(train_loader)
    for step in range(steps_done + 1, args.max_steps + 1):
        batch = next(batches)
        loss = train_step(model, batch, optimizer, device)
        schedule.step()
        if step % 5 == 0:
            print(f"step {step}/{args.max_steps} | loss {loss.item():.4f}", flush=True)
        if step % 10 == 0:
            sums = evaluate(model, val_loader, device)
            loss, correct, count = sums.tolist()
            print(f"step {step}/{args.max_steps} | held-out loss {loss / count:.4f} "
                  f"| accuracy {correct / count:.2%}", flush=True)
        if step % 10 == 0 or step == args.max_steps:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                  "schedule": schedule.state_dict(), "step": step}, args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24, help="sequences in a step")
    parser.add_argument("--checkpoint", default="steps.pt")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    main(args, device)
