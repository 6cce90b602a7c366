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
import torch.distributed.nn  # unused, but without it Python can abort at exit
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


def batch_on_device(batch, device):
    return {name: value.to(device) for name, value in batch.items()}

def count_targets(batch):  # without padding
    return (batch["labels"][:, 1:] != -100).sum()

def sums(model, batch):  # loss, correct, predictions; shifted as in Hugging Face's causal models
    # with torch.autocast(device.type, torch.bfloat16): around these lines
    scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    scores, targets = scores.flatten(0, 1), batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(scores, targets, reduction="sum")
    return loss, (scores.argmax(dim=1) == targets).sum(), (targets != -100).sum()

class ResumableSampler(DistributedSampler):  # a resumed epoch continues where it stopped
    done = 0  # samples that this rank has trained on in this epoch
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
if rank == 0: print(f"training on {world_size} x {device.type}")

train_set, val_set = make_rows(600, seed=1), make_rows(101, seed=2)

# 2. The data; keep your loaders' other options.
# Set batch_size and accumulation to your single-GPU values
step_samples = batch_size * accumulation
assert step_samples % world_size == 0, \
    f"batch_size x accumulation = {step_samples} must be divisible by {world_size}"
rank_samples = step_samples // world_size  # of each rank, in one step: in batches of equal size
batch_size = max(size for size in range(1, batch_size + 1) if rank_samples % size == 0)
accumulation = rank_samples // batch_size
sampler = ResumableSampler(train_set, seed=args.seed, drop_last=True)
epoch_steps = len(sampler) // rank_samples
assert epoch_steps > 0, f"{len(train_set)} samples are too few: one step takes {step_samples}"
train_loader = DataLoader(train_set, batch_size, sampler=sampler)
val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size)

torch.manual_seed(args.seed)
model = CausalModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=max_steps)

# 3. Insert after the lines that create the model (on its device), the optimizer and the schedule
path, step, best = "run.pt", 0, 0.0
checkpoint = [torch.load(path, map_location="cpu", weights_only=True)
              if rank == 0 and os.path.exists(path) else None]
dist.broadcast_object_list(checkpoint)  # others may not see the file
checkpoint = checkpoint[0]
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    # if checkpoint["scaler"]: scaler.load_state_dict(checkpoint["scaler"])
    step, best = checkpoint["step"], checkpoint.get("best", best)
    saved = checkpoint.get("step_samples", step_samples)
    assert saved == step_samples, f"{path} was saved with batch_size x accumulation = {saved}"
    if rank == 0: print(f"{path}: {step}/{max_steps} steps done")
del checkpoint
model = DDP(model)  # backward averages all ranks' gradients

while step < max_steps:  # once an epoch
    epoch, done = divmod(step, epoch_steps)
    sampler.set_epoch(epoch)
    sampler.done = done * rank_samples
    torch.manual_seed(args.seed + step * world_size + rank)  # for augmentation in loader workers
    epoch_batches = iter(train_loader)
    for step in range(step + 1, min(max_steps, (epoch + 1) * epoch_steps) + 1):
        torch.manual_seed(args.seed + step * world_size + rank)  # each rank draws different dropout
        batches = [batch_on_device(batch, device)
                   for batch in itertools.islice(epoch_batches, accumulation)]
        count = sum(count_targets(batch) for batch in batches)
        dist.all_reduce(count)  # the targets of the whole step
        loss_sum = torch.zeros((), device=device)
        model.train()
        for batch in batches:
            # DDP averages the gradients in the last backward; before it, they only add up
            with contextlib.nullcontext() if batch is batches[-1] else model.no_sync():
                loss, _, _ = sums(model, batch)
                (loss * world_size / count).backward()  # DDP divides by world_size
            loss_sum += loss.detach()
        optimizer.step()  # clip the gradients before this line
        schedule.step()
        optimizer.zero_grad()

        # 4. Every rank runs this, except the code under `if rank == 0`
        if step % log_steps == 0:
            dist.all_reduce(loss_sum)
            if rank == 0: print(f"step {step} | loss {(loss_sum / count).item():.4f}")
        if step % eval_steps == 0:
            model.eval()
            totals = torch.zeros(4, dtype=torch.float64, device=device)
            with torch.no_grad():
                for batch in val_loader:
                    batch = batch_on_device(batch, device)
                    totals += torch.stack([*sums(model.module, batch), count_targets(batch)])
            dist.all_reduce(totals)
            loss_sum, correct, predictions, count = totals.tolist()
            loss, accuracy = loss_sum / count, correct / predictions
            if rank == 0: print(f"step {step} | held-out loss {loss:.4f} | accuracy {accuracy:.2%}")
            if accuracy > best:
                best = accuracy  # the same on all ranks
                if rank == 0: torch.save(model.module.state_dict(), "best.pt")
        if rank == 0 and (step % save_steps == 0 or step == max_steps):
            with open(f"{path}.tmp", "wb") as file:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                            "schedule": schedule.state_dict(),  # "scaler": scaler.state_dict(),
                            "step": step, "best": best, "step_samples": step_samples}, file)
                os.fsync(file.fileno())  # on disk before it replaces the old file
            os.replace(f"{path}.tmp", path)

del model  # it holds the process group
dist.destroy_process_group()
