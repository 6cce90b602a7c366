"""A script before and after its conversion, changed here and there: what a run of it notes, and what the check says."""
import functools
from pathlib import Path

from check_conversion import command, resume, running
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace
from launch import fork

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
for epoch in range(2):
    total = torch.zeros(1)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    print(f"epoch {epoch} | loss {total.item() / len(data):.4f}", flush=True)
torch.save(model.state_dict(), f="model.pt")
"""
MODEL = "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))"
LOSS = "nn.functional.mse_loss(model(x), y)"
STEP = "        optimizer.step()\n"


def changed(text, *changes):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


AFTER = changed(
    BEFORE, ("import torch\n", "import torch\nimport torch.distributed as dist\nimport torch.distributed.nn\n"),
    ("import DataLoader", "import DataLoader, DistributedSampler"),
    ("torch.manual_seed", "DDP = nn.parallel.DistributedDataParallel\n"
                          "dist.init_process_group('gloo')\n"
                          "rank, world_size = dist.get_rank(), dist.get_world_size()\ntorch.manual_seed"),
    ("loader = DataLoader(data, 24, shuffle=True)",
     "sampler = DistributedSampler(data)\nloader = DataLoader(data, 24 // world_size, sampler=sampler)"),
    (MODEL, f"DDP({MODEL})"),
    ("    total = torch", "    sampler.set_epoch(epoch)\n    total = torch"),
    ("    print(", "    dist.all_reduce(total)\n    if rank == 0:\n        print("),
    ("torch.save(model", "if rank == 0:\n    torch.save(model.module")) + "del model\ndist.destroy_process_group()\n"


def both(*changes, before=(), after=(), of=(BEFORE, AFTER)):
    """The two scripts with the same changes, and with those of each alone."""
    return (changed(of[0], *changes, *before),
            changed(of[1], *[change for change in changes if change[0] in of[1]], *after))


NORM = "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))"
# With BatchNorm, autocast, a progress bar, a buffer that nothing trains, and a csv.
RICH = both(
    (MODEL, NORM), ("import torch\n", "import torch\nimport tqdm\n"), ("in loader:", "in tqdm.tqdm(loader):"),
    ("optimizer = ", "scaler, memory = torch.amp.GradScaler('cpu'), nn.Module()\n"
                     "memory.register_buffer('keys', torch.zeros(2, 4))\noptimizer = "),
    (f"        loss = {LOSS}", f"        with torch.autocast('cpu', torch.bfloat16):\n            loss = {LOSS}"),
    ("loss.backward()", "scaler.scale(loss).backward()"),
    (STEP, "        scaler.step(optimizer)\n        scaler.update()\n"
           "        memory.keys += next(model.parameters()).detach().mean()\n"),
    ("print(f", "print(f'{epoch},{total.item():.6f}', file=open('log.csv', 'a')); print(f"),
    before=[("model.state_dict()", "[model.state_dict(), memory.state_dict()]")],
    after=[("model.module.state_dict()", "[model.module.state_dict(), memory.state_dict()]"),
           ("tqdm(loader", "tqdm(loader, disable=rank != 0"), (NORM, f"nn.SyncBatchNorm.convert_sync_batchnorm({NORM})")])

# A fork is to draw other random numbers than pytest, whose fork it is, to have other temporary files, and none of its loggers.
IN_COPY = """
import logging, multiprocessing, os, sys, tempfile, time
import numpy
from check_conversion import observed
sys.path.insert(0, os.getcwd())
tempfile.tempdir = None
multiprocessing.current_process()._config.pop("tempdir", None)
numpy.random.seed()
logging.root.handlers.clear()
time.tzset()
observed.install()
"""


def record(text, processes=0, name="train.py", arguments=(), workspace=None, before="", **options):
    """What the check has of a run; 0 processes: without a launcher."""
    if not workspace:
        Path(name).write_text(text)
    ours = workspace or Workspace(".")
    settings = running.prepare(ours, **options)
    codes = fork(f"{settings.copy}/{name}", arguments, settings.copy, settings.records, processes, IN_COPY + before,
                 running.environment(settings) | {"CUDA_VISIBLE_DEVICES": ""})
    run = running.read_run(name, ours, settings, status=max(code != 0 for code in codes))
    if not workspace:
        ours.remove()
    print(run.text("stdout"), run.stderr)  # which pytest shows where a test has failed
    return run


record_once = functools.cache(record)  # of an original that many tests have


def in_words(verdict):
    """Status and words of the check."""
    try:
        found = verdict()
        status, said = found.status, "\n".join(found.lines)
    except CannotSay as reason:
        status, said = 2, f"cannot be judged: {reason}"
    print(said)
    assert said.startswith(("the same training", "NOT THE SAME", "a killed run goes on", "cannot be judged: "))
    return status, " ".join(said.split())


def check(before, after, processes=2, arguments=(), name="train_ddp.py", **options):
    """As the command does."""
    return in_words(lambda: command.check_conversion(
        functools.partial(record_once, before, arguments=tuple(arguments), **options),
        functools.partial(record, after, processes, name, tuple(arguments), **options)))


# Of a fork, /proc shows the environment of what it was forked from: a run that kills itself goes by its files.
KILL = """
import random, torch
from pathlib import Path
from check_conversion import running
running.processes = lambda records: {int(file.stem) for kind in ("stack", "notes") for file in Path(records).glob(f"*.{kind}")}
random.seed()
torch.seed()
"""


def check_resuming(text, *arguments, processes=2, name="train_ddp.py", before=""):
    """As the command does with --resume."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    workspace = Workspace(".")
    try:
        return in_words(lambda: resume.check_resuming(lambda **options: record(
            text, processes, name, [*map(str, arguments)], workspace, KILL + before, intervene=False, **options)))
    finally:
        workspace.remove()
