"""A small causal language model, trained in a loop of steps as Hugging Face's are; on one device:
python examples/steps.py
"""
import argparse
import itertools
import os
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


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

def loss_and_correct(model, batch):  # sums; shifted by one, as in Hugging Face's causal models
    # with torch.autocast(device.type, torch.bfloat16): around these lines
    scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    scores, targets = scores.flatten(0, 1), batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(scores, targets, reduction="sum")
    return loss, (scores.argmax(dim=1) == targets).sum()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=6)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
max_steps, batch_size, accumulation = args.max_steps, args.batch_size, args.accumulation
log_steps, eval_steps, save_steps = 5, 10, 10

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

train_set, val_set = make_rows(600, seed=1), make_rows(101, seed=2)

step_samples = batch_size * accumulation
epoch_steps = len(train_set) // step_samples
train_loader = DataLoader(train_set, batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size)

torch.manual_seed(args.seed)
model = CausalModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=max_steps)

path, step, best = "run.pt", 0, 0.0
if os.path.exists(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    step, best = checkpoint["step"], checkpoint["best"]
    print(f"{path}: {step}/{max_steps} steps done")

while step < max_steps:  # once an epoch
    epoch = step // epoch_steps
    epoch_batches = iter(train_loader)
    for step in range(step + 1, min(max_steps, (epoch + 1) * epoch_steps) + 1):
        batches = [*map(batch_on_device, itertools.islice(epoch_batches, accumulation))]
        count = sum(count_targets(batch) for batch in batches)
        loss_sum = torch.zeros((), device=device)
        model.train()
        for batch in batches:
            loss, _ = loss_and_correct(model, batch)
            (loss / count).backward()
            loss_sum += loss.detach()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        if step % log_steps == 0:
            print(f"step {step} | loss {(loss_sum / count).item():.4f}")
        if step % eval_steps == 0:
            model.eval()
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            with torch.no_grad():
                for batch in map(batch_on_device, val_loader):
                    loss, correct = loss_and_correct(model, batch)
                    totals += torch.stack([loss, correct, count_targets(batch)])
            loss, accuracy = (totals[:2] / totals[2]).tolist()
            print(f"step {step} | held-out loss {loss:.4f} | accuracy {accuracy:.2%}")
            if accuracy > best:
                best = accuracy
                torch.save(model.state_dict(), "best.pt")
        if step % save_steps == 0 or step == max_steps:
            with open(f"{path}.tmp", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "schedule": schedule.state_dict(), "step": step, "best": best,
                            "step_samples": step_samples}, file)
                os.fsync(file.fileno())  # on disk before it replaces the old file
            os.replace(f"{path}.tmp", path)
