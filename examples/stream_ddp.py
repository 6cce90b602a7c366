"""Tags each digit of a number in a stream with the largest digit so far; with DDP:
torchrun --standalone --nproc_per_node=2 examples/stream_ddp.py
"""
import argparse
import itertools
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __init__(self, count, rank, world_size):
        self.count, self.rank, self.world_size = count, rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        first, step = first + step * self.rank, step * self.world_size  # all ranks' workers
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
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator and accelerator.type != "mps":  # a Mac's GPU has no collectives
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)  # before anything else touches a GPU
    dist.init_process_group(dist.get_default_backend_for_device(device),
                            device_id=device if device.type != "cpu" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert args.batch_size % world_size == 0, "--batch-size must be divisible by the world size"
    loader = DataLoader(Numbers(args.samples, rank, world_size), args.batch_size // world_size,
                        collate_fn=collate, num_workers=args.workers)
    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path, total, tokens, done = "stream_run.pt", 0, 0, 0
    checkpoint = [torch.load(path, map_location="cpu", weights_only=True)
                  if rank == 0 and os.path.exists(path) else None]
    dist.broadcast_object_list(checkpoint)  # others may not see the file
    checkpoint = checkpoint[0]
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        total, tokens, done = checkpoint["total"], checkpoint["tokens"], checkpoint["step"]
        if rank == 0:
            print(f"{path}: {done * args.batch_size} samples done")
    del checkpoint
    model = DDP(model)  # backward averages all ranks' gradients
    # Each backward needs all ranks: one without data uses `nothing` until all are done.
    nothing = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), -100)
    batches = itertools.chain(loader, itertools.repeat(nothing))
    left = itertools.islice(batches, done, None)  # a resumed run skips what it has trained on
    for step, (digits, largest) in enumerate(left, done + 1):
        digits, largest = digits.to(device), largest.flatten().to(device)
        count = (largest != -100).sum()
        dist.all_reduce(count)
        if count == 0:
            break
        loss = nn.functional.cross_entropy(model(digits), largest, reduction="sum") / count
        optimizer.zero_grad()
        (loss * world_size).backward()  # DDP averages over the ranks; this makes it a sum
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        total += loss.item() * count.item()
        tokens += count.item()
        if rank == 0 and step % 20 == 0:
            print(f"{step * args.batch_size} samples | loss {loss.item():.4f}", flush=True)
            with open(f"{path}.tmp", "wb") as file:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                            "total": total, "tokens": tokens, "step": step}, file)
                os.fsync(file.fileno())  # on disk before it replaces the old file
            os.replace(f"{path}.tmp", path)
    if rank == 0:
        print(f"{tokens} digits | mean loss {total / tokens:.4f}")
        torch.save(model.module.state_dict(), args.save)
    del model  # it holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3001)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save", default="stream.pt")
    main(parser.parse_args())
