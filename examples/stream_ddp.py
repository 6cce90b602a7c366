"""Tag each digit of a number with the largest digit so far; the numbers come in a stream:
torchrun --standalone --nproc_per_node=2 examples/stream_ddp.py --epochs 3"""
import argparse
import itertools
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; import it before the group exists, or gloo may abort at exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def ddp_setup():
    found = torch.accelerator.current_accelerator(check_available=True)
    if not found or found.type == "mps":  # a Mac's GPU has no collectives
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(found.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # this process's default GPU, instead of GPU 0
    dist.init_process_group(device_id=device)  # selects nccl for NVIDIA and AMD, xccl for Intel
    return device


class Numbers(IterableDataset):
    def __init__(self, samples, rank, world_size):
        self.samples, self.rank, self.world_size = samples, rank, world_size

    def read(self):
        draw = random.Random(0)
        for _ in range(self.samples):
            digits = [draw.randrange(10) for _ in range(draw.randint(1, 20))]
            yield torch.tensor(digits), torch.tensor([*itertools.accumulate(digits, max)])

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        first, step = first + step * self.rank, step * self.world_size  # among all ranks' workers
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
    nothing = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), -100)
    # Each backward needs all ranks: one without data trains on nothing until all have run out.
    for digits, labels in itertools.chain(loader, itertools.repeat(nothing)):
        digits, labels = digits.to(device), labels.flatten().to(device)
        count = (labels != -100).sum()  # without padding
        total = count.clone()
        dist.all_reduce(total)  # adds up all ranks' counts, in place
        if total == 0:
            break
        loss = F.cross_entropy(model(digits), labels, reduction="sum")
        optimizer.zero_grad()
        (loss * dist.get_world_size() / total).backward()  # DDP divides by the world size
        optimizer.step()
        sums[0] += loss.detach()  # not loss.item(), which waits for the GPU
        sums[1] += count
    return sums


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert args.batch_size % world_size == 0, f"--batch-size must be a multiple of {world_size}"
    loader = DataLoader(Numbers(args.samples, rank, world_size), args.batch_size // world_size,
                        num_workers=args.workers, collate_fn=collate)

    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = DDP(model)  # backward averages all ranks' gradients; device_ids is not needed

    for epoch in range(args.epochs):
        sums = train_epoch(model, loader, optimizer, device)
        dist.all_reduce(sums)  # adds up all ranks' sums, in place
        loss, trained = sums.tolist()
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | loss {loss / trained:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=3001)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", default="stream.pt")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    device = ddp_setup()
    main(args, device)
    dist.destroy_process_group()  # after main, because its model keeps the group alive
