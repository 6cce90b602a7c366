"""A small causal language model, trained in a loop of steps as Hugging Face's are; with DDP:
torchrun --standalone --nproc_per_node=2 examples/steps_ddp.py
"""
import argparse
import contextlib
import itertools
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn  # keeps Python from aborting at exit
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset


class CausalModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(16, 32), nn.Dropout(0.1)
        self.mix, self.read = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 16)

    def forward(self, input_ids, attention_mask):
        vectors = self.drop(self.embed(input_ids)) * attention_mask[:, :, None]
        return SimpleNamespace(logits=self.read(self.mix(vectors)[0]))


def make_rows(count, seed):
    """Sequences that rise by 1, 2 or 3, modulo 15; 0 is padding."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(15, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    length = torch.randint(5, 13, (count, 1), generator=generator)
    place = torch.arange(12)
    tokens, used = 1 + (start + stride * place) % 15, place < length
    columns = {"input_ids": tokens * used, "attention_mask": used.long(),
               "labels": tokens.where(used, -100)}
    return [{name: column[row] for name, column in columns.items()} for row in range(count)]


def batch_on_device(batch):
    return {name: value.to(device) for name, value in batch.items()}

def count_targets(batch):  # without padding
    return (batch["labels"][:, 1:] != -100).sum()

def summed_loss(model, batch):  # shifted by one, as Hugging Face's causal models do
    # with torch.autocast(device.type, torch.bfloat16): around both lines
    scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")

class Rest(DistributedSampler):  # an interrupted epoch goes on where it was
    done = 0  # samples of this rank
    def __iter__(self):
        return itertools.islice(super().__iter__(), self.done, None)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=6)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
max_steps, batch_size, accumulation = args.max_steps, args.batch_size, args.accumulation
log_steps, eval_steps, save_steps = 5, 10, 10

# 1. Replaces device = ...; compare device.type, not device, with "cuda"
device = torch.device("cpu")
accelerator = torch.accelerator.current_accelerator(check_available=True)
if accelerator and accelerator.type != "mps":  # mps has no collectives
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # before any GPU call
dist.init_process_group(dist.get_default_backend_for_device(device),
                        device_id=device if device.type != "cpu" else None)
rank, world_size = dist.get_rank(), dist.get_world_size()

train_set, val_set = make_rows(600, seed=1), make_rows(101, seed=2)

# 2. The data; keep your loaders' other options; batch_size and accumulation: as on your one GPU
step_samples = batch_size * accumulation
batch_size = min(batch_size, max(1, step_samples // world_size))
accumulation = step_samples // (batch_size * world_size)
assert batch_size * accumulation * world_size == step_samples, "change batch_size or accumulation"
rank_samples = batch_size * accumulation  # of this rank, in one step
sampler = Rest(train_set, seed=args.seed, drop_last=True)
epoch_steps = len(sampler) // rank_samples
train_loader = DataLoader(train_set, batch_size, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size)

torch.manual_seed(args.seed)
model = CausalModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=max_steps)

# 3. Below your model (on device), optimizer and schedule
path, step = "run.pt", 0
checkpoint = [torch.load(path, map_location="cpu", weights_only=True)
              if rank == 0 and os.path.exists(path) else None]
dist.broadcast_object_list(checkpoint)  # others may not see the file
checkpoint = checkpoint[0]
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    step = checkpoint["step"]
    assert step_samples == checkpoint["step_samples"], "resume with the same total"
    if rank == 0: print(f"{path}: {step}/{max_steps} steps done")
del checkpoint
model = DDP(model)

while step < max_steps:  # once an epoch
    epoch, done = divmod(step, epoch_steps)
    sampler.set_epoch(epoch)
    sampler.done = done * rank_samples
    torch.manual_seed(args.seed + step * world_size + rank)  # for augmentation in loader workers
    batches = iter(train_loader)
    for step in range(step + 1, min(max_steps, (epoch + 1) * epoch_steps) + 1):
        torch.manual_seed(args.seed + step * world_size + rank)  # different dropout
        parts = [batch_on_device(batch) for batch in itertools.islice(batches, accumulation)]
        count = sum(count_targets(batch) for batch in parts)
        dist.all_reduce(count)  # the targets of the whole step
        loss_sum = torch.zeros((), device=device)
        model.train()
        for batch in parts:
            last = batch is parts[-1]  # before it, gradients only add up
            with contextlib.nullcontext() if last else model.no_sync():
                loss = summed_loss(model, batch)
                (loss * world_size / count).backward()
            loss_sum += loss.detach()
        optimizer.step()  # clip before it
        schedule.step()
        optimizer.zero_grad()

        # 4. On all ranks, except what stands below rank == 0
        if step % log_steps == 0:
            dist.all_reduce(loss_sum)
            if rank == 0: print(f"step {step} | loss {(loss_sum / count).item():.4f}")
        if step % eval_steps == 0:
            model.eval()
            totals = torch.zeros(2, dtype=torch.float64, device=device)
            with torch.no_grad():
                for batch in map(batch_on_device, val_loader):
                    totals[0] += summed_loss(model.module, batch)
                    totals[1] += count_targets(batch)
            dist.all_reduce(totals)
            if rank == 0: print(f"step {step} | held-out loss {(totals[0] / totals[1]).item():.4f}")
        if rank == 0 and (step % save_steps == 0 or step == max_steps):
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(), "step": step,
                        "step_samples": step_samples}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)

del model  # it holds the process group
dist.destroy_process_group()
