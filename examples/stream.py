"""Tags each digit of a number in a stream with the largest digit so far; on one device:
python examples/stream.py
"""
import argparse
import itertools
import os
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        draw = random.Random(0)
        for index in range(self.count):
            digits = [draw.randrange(10) for _ in range(draw.randint(1, 20))]
            if index % step == first:
                yield torch.tensor(digits), torch.tensor([*itertools.accumulate(digits, max)])


def collate(samples):
    digits, largest = zip(*samples)
    return pad_sequence(digits), pad_sequence(largest, padding_value=-100)  # ignored by the loss


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(10, width), nn.GRU(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, digits):
        return self.head(self.rnn(self.embed(digits))[0]).flatten(0, 1)


def main(args):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    loader = DataLoader(Numbers(args.samples), args.batch_size,
                        collate_fn=collate, num_workers=args.workers)
    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path, total, tokens, done = "stream_run.pt", 0, 0, 0
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        total, tokens, done = checkpoint["total"], checkpoint["tokens"], checkpoint["step"]
        print(f"{path}: {done * args.batch_size} samples done")
    left = itertools.islice(loader, done, None)  # a resumed run skips what it has trained on
    for step, (digits, largest) in enumerate(left, done + 1):
        digits, largest = digits.to(device), largest.flatten().to(device)
        count = (largest != -100).sum()
        loss = nn.functional.cross_entropy(model(digits), largest)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * count.item()
        tokens += count.item()
        if step % 20 == 0:
            print(f"{step * args.batch_size} samples | loss {loss.item():.4f}", flush=True)
            with open(f"{path}.tmp", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "total": total, "tokens": tokens, "step": step}, file)
                os.fsync(file.fileno())  # on disk before it replaces the old file
            os.replace(f"{path}.tmp", path)
    print(f"{tokens} digits | mean loss {total / tokens:.4f}")
    torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3001)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", default="stream.pt")
    main(parser.parse_args())
