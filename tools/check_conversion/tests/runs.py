"""A script before and after its conversion, changed here and there: what a run of it notes, and what the check says."""
import functools
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from check_conversion import command, judge, new_files, observed, running
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace

TOOL = Path(__file__).resolve().parents[1]
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
# Lines of theirs that tests change.
MODEL = "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))"
LOSS = "nn.functional.mse_loss(model(x), y)"
STEP = "        optimizer.step()\n"
REDUCE = "    dist.all_reduce(total)\n"
PART = ("    for x, y in loader:\n", "    for x, y in loader:\n        x, y = x[rank::world_size], y[rank::world_size]\n")
WHOLE = ("24 // world_size, sampler=sampler", "24, shuffle=True, generator=torch.Generator().manual_seed(0)")
LESS = ("randn(144", "randn(133")  # the last batch has 13 samples

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["runs", "torch._dynamo", "torch.distributed.nn", "torch.distributed.tensor", "torch.utils.data"])


def changed(text, *changes):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def be_process(script, arguments, records, environment):
    gc.freeze()  # what was preloaded need not be looked through for modules
    os.chdir(Path(script).parent)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{records}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment)
    tempfile.tempdir = None  # what it was forked from has another,
    multiprocessing.current_process()._config.pop("tempdir", None)  # and may have used it
    numpy.random.seed()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    observed.install()
    runpy.run_path(script, run_name="__main__")


def record(text, processes=0, name="train.py", arguments=(), workspace=None, **options):
    """What the check has of a run, whose processes are forked, in a second; 0 processes: without a launcher."""
    Path(name).write_text(text)
    ours = workspace or Workspace(".")
    settings = running.prepare(ours, **options)
    environment = {**settings.as_environment(), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(ours.temporary)}
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
             for rank in range(processes)]
    given = f"{settings.copy}/{name}", arguments, settings.records
    started = [forks.Process(target=be_process, args=(*given, environment | rank)) for rank in ranks or [{}]]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(60)
    finally:
        for process in started:
            process.kill()
    run = running.read_run(name, Path(settings.records), status=max(process.exitcode != 0 for process in started))
    run.new_files = new_files.read(settings.copy, ours.unchanged(Path(settings.copy)))
    if not workspace:
        ours.remove()
    print(run.stdout, run.stderr)  # which pytest shows where a test has failed
    return run


record_once = functools.cache(record)  # of an original that many tests have


def record_twice(text, **options):
    """The original's two runs."""
    return record_once(text, **options), record_once(text, nudged=True, **options)


def in_words(verdict):
    """Status and words of the check."""
    try:
        found = verdict()
        status, said = found.status, "\n".join(found.lines)
    except CannotSay as reason:
        status, said = 2, f"cannot be judged: {reason}"
    print(said)
    assert said.startswith(("the same training", "NOT THE SAME TRAINING", "cannot be judged: "))
    return status, " ".join(said.split())


def verdict(original, nudged, converted):
    def say():
        judge.check_original(original)
        return judge.judge(original, nudged, converted)
    return in_words(say)


def check(before, after, processes=2, arguments=(), name="train_ddp.py", float32=False):
    """As the command does."""
    return in_words(lambda: command.compare(
        functools.partial(record_once, before, arguments=arguments),
        functools.partial(record, after, processes, name, arguments), float32))


def both(*changes, before=(), after=()):
    """The two scripts with the same changes, and with those of each alone."""
    return (changed(BEFORE, *changes, *before),
            changed(AFTER, *[change for change in changes if change[0] in AFTER], *after))
