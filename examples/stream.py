"""Tag each digit of a number with the largest digit so far; the numbers come in a stream:
python examples/stream.py --epochs 3"""
import argparse
import itertools
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def read(self):
        draw = random.Random(0)
        for _ in range(self.samples):
            digits = [draw.randrange(10) for _ in range(draw.randint(1, 20))]
            yield torch.tensor(digits), torch.tensor([*itertools.accumulate(digits, max)])

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return itertools.islice(self.read(), first, None, step)


def collate(samples):
    digits, labels = zip(*samples)
    return pad_sequence(digits), pad_sequence(labels, padding_value=-100)  # ignored by the loss


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(10, 32), nn.GRU(32, 32), nn.Linear(32, 10)

    def forward(self, digits):
        return self.head(self.rnn(self.embed(digits))[0]).flatten(0, 1)


def train_epoch(model, loader, optimizer, device):
    model.train()
    sums = torch.zeros(2, device=device)  # loss, digits
    for digits, labels in loader:
        digits, labels = digits.to(device), labels.flatten().to(device)
        count = (labels != -100).sum()  # without padding
        loss = F.cross_entropy(model(digits), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * count  # not loss.item(), which waits for the GPU
        sums[1] += count
    return sums


def main(args, device):
    loader = DataLoader(Numbers(args.samples), args.batch_size,
                        num_workers=args.workers, collate_fn=collate)

    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        sums = train_epoch(model, loader, optimizer, device)
        loss, trained = sums.tolist()
        print(f"epoch {epoch + 1}/{args.epochs} | loss {loss / trained:.4f}", flush=True)
    torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=3001)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", default="stream.pt")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    main(args, device)
