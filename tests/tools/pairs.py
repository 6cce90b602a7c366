"""A script before and after its conversion, changed here and there, and what the check says of both."""
import contextlib
import io
import os
import re
import sys
from pathlib import Path

from launch import ROOT, train

sys.path.insert(0, str(ROOT / "tools"))
from conversion_check import ending, running, verdict
from conversion_check.workspace import CannotSay, Workspace

BEFORE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(144, 4)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = DataLoader(data, 24, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
best = 100
for epoch in range(2):
    total = 0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    print(f"epoch {epoch} | loss {total / len(data):.4f}", flush=True)
torch.save(model.state_dict(), "model.pt")
"""
AFTER = """
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(144, 4)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, 24 // world_size, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    total = torch.zeros(1)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} | loss {total.item() / len(data):.4f}", flush=True)
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
del model
dist.destroy_process_group()
"""
CURES = re.findall(r"^### (.*)$", (ROOT / "docs/your_own_script.md").read_text(), re.MULTILINE)
START = f"import runpy; runpy.run_path({str(running.START / 'sitecustomize.py')!r})"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
MODEL = "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))"
LOSS = "nn.functional.mse_loss(model(x), y)"
STEP = "        optimizer.step()\n"
REDUCE = "    dist.all_reduce(total)\n"
PART = ("    for x, y in loader:\n", "    for x, y in loader:\n        x, y = x[rank::world_size], y[rank::world_size]\n")
WHOLE = ("24 // world_size, sampler=sampler", "24, shuffle=True, generator=torch.Generator().manual_seed(0)")
NORM = (MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1))")
twice = {}  # the original's two runs, by its text


def changed(text, *changes):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def record(text, *arguments, name="train.py", processes=0, links=(), without=(), keeps_group=False, **noted):
    """A run as by its command line, but its ranks are forked, which takes a second: in a copy of the current folder."""
    Path(name).write_text(text)
    workspace, status, stderr = Workspace(".", links, without), 0, io.StringIO()
    root, copy = workspace.copy()
    records = root.with_name(f"{root.name}.records")
    records.mkdir()
    environment = running.environment(workspace, records, root, copy, noted)
    environment = {key: value for key, value in environment.items()
                   if key.startswith("CHECK_CONVERSION") or key in ("WANDB_MODE", "TORCH_COMPILE_DISABLE")}
    stdout = ""
    try:
        with contextlib.redirect_stdout(stderr):
            stdout = train(copy / name, *arguments, cwd=copy, processes=processes, device=None, keeps_group=keeps_group,
                           before=f"import sys; sys.path.insert(0, {str(copy)!r}); {START}",
                           CUDA_VISIBLE_DEVICES="", **environment).stdout
    except AssertionError:
        status = 1
    (records / "stdout").write_text(stdout)
    (records / "stderr").write_text(stderr.getvalue() if status else "")
    run = running.read_run(f"python {name}", records, status)
    assert not workspace.changed()
    workspace.remove()
    return run


def record_twice(text, *arguments, **noted):
    key = text, arguments, str(noted)
    if key not in twice:
        twice[key] = (record(text, *arguments, **noted), record(text, *arguments, CHECK_CONVERSION_NUDGE=1, **noted))
    return twice[key]


def judge(before, after, processes=2, *arguments, name="train_ddp.py", **noted):
    """Status and words of the check."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            first, again = record_twice(before, *arguments, **noted)
            ending.check_original(first)
            ending.check_again(first, again)
            many = record(after, *arguments, name=name, processes=processes, **noted)
            status = verdict.judge(first, again, many)
        except CannotSay as reason:
            status = 2
            print(f"cannot be judged: {reason}")
    said = said.getvalue()
    print(said)
    assert said.startswith(("the same training: ", "NOT THE SAME TRAINING", "cannot be judged: "))
    assert set(re.findall(r'See "(.*?)" in docs/your_own_script.md', said)) <= {*CURES, "What your script has", "Check it"}
    return status, " ".join(said.split())
