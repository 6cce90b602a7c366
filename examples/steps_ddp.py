"""Train a small language model in a loop of steps, one process per GPU:
torchrun --standalone --nproc_per_node=2 examples/steps_ddp.py --max-steps 200"""
import argparse
import os
import zipfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; import it before the group exists, or gloo may abort at exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

PART = 4  # sequences that fit into memory at once; the gradients of a step's parts add up


def ddp_setup():
    found = torch.accelerator.current_accelerator(check_available=True)
    if not found or found.type == "mps":  # a Mac's GPU has no collectives
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(found.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # this process's default GPU, instead of GPU 0
    dist.init_process_group(device_id=device)  # selects nccl for NVIDIA and AMD, xccl for Intel
    return device


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


def endless(train_set, batch_size, sampler, steps_done):
    """The batches, epoch after epoch, without those of the steps that are done."""
    epoch, done = divmod(steps_done, len(sampler) // batch_size)
    while True:
        sampler.set_epoch(epoch)  # a new order each epoch, the same if resumed
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())  # for workers, if any
        left = [*sampler][done * batch_size:]
        yield from DataLoader(train_set, batch_size, sampler=left, drop_last=True)
        epoch, done = epoch + 1, 0


def train_step(model, batch, optimizer, device):
    model.train()
    inputs, labels = batch[0].to(device), batch[1].to(device)
    count = (labels != -100).sum()  # without padding
    dist.all_reduce(count)  # adds up all ranks' counts, in place
    loss_sum = torch.zeros((), device=device)
    for start in range(0, len(labels), PART):
        part = slice(start, start + PART)
        # Gradients add up here, and cross the network only in the last part's backward.
        with nullcontext() if part.stop >= len(labels) else model.no_sync():
            scores, targets = model(inputs[part]).flatten(0, 1), labels[part].flatten()
            loss = F.cross_entropy(scores, targets, reduction="sum") / count
            (loss * dist.get_world_size()).backward()  # DDP divides by the world size
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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = load_data(600, seed=1), load_data(101, seed=2)
    assert args.batch_size <= len(train_set), "--batch-size exceeds the training set"
    val_set = Subset(val_set, range(rank, len(val_set), world_size))  # each sample on one rank only
    sampler = DistributedSampler(train_set, drop_last=True)  # shuffles; drop_last: no sample twice
    assert args.batch_size % world_size == 0, f"--batch-size must be a multiple of {world_size}"
    batch_size = args.batch_size // world_size
    val_loader = DataLoader(val_set, PART)

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.max_steps)
    checkpoint = [read_checkpoint(args.checkpoint) if rank == 0 else None]
    dist.broadcast_object_list(checkpoint)  # other machines might not see the file
    steps_done = resume(checkpoint.pop(), model, optimizer, schedule)  # pop frees its memory
    model = DDP(model)  # backward averages all ranks' gradients; device_ids is not needed

    batches = endless(train_set, batch_size, sampler, steps_done)
    for step in range(steps_done + 1, args.max_steps + 1):
        batch = next(batches)
        torch.manual_seed(step * world_size + rank)  # dropout masks differ by rank and step
        loss = train_step(model, batch, optimizer, device)
        schedule.step()
        if step % 5 == 0:
            dist.all_reduce(loss)  # adds up all ranks' parts of it
            if rank == 0:
                print(f"step {step}/{args.max_steps} | loss {loss.item():.4f}", flush=True)
        if step % 10 == 0:
            sums = evaluate(model.module, val_loader, device)  # the plain model: no collectives
            dist.all_reduce(sums)  # adds up all ranks' sums, in place
            loss, correct, count = sums.tolist()
            if rank == 0:
                print(f"step {step}/{args.max_steps} | held-out loss {loss / count:.4f} "
                      f"| accuracy {correct / count:.2%}", flush=True)
        if rank == 0 and (step % 10 == 0 or step == args.max_steps):
            save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                  "schedule": schedule.state_dict(), "step": step}, args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24, help="sequences in a step")
    parser.add_argument("--checkpoint", default="steps.pt")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    device = ddp_setup()
    main(args, device)
    dist.barrier()  # until rank 0 has saved: if that fails, torchrun must restart all ranks
    dist.destroy_process_group()  # after main, because its model keeps the group alive
