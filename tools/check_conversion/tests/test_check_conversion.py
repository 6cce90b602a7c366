"""The check of a conversion: a small script before and after it, changed here and there, and what is said of both."""
import functools
import os
import re
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from processes import Job

TOOL = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOL))
from compare import Verdict, compare_lines

check = runpy.run_path(str(TOOL / "__main__.py"))
Workspace = check["Workspace"]
MODEL = "nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))"
LOSS = "F.mse_loss(model(x), y)"
STEP = "        optimizer.step()\n"
BEFORE = f"""
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(144, 4)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = DataLoader(data, 24, shuffle=True)
model = {MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for epoch in range(2):
    total = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = {LOSS}
        loss.backward()
{STEP}        total += loss.detach() * len(x)
    schedule.step()
    print(f"epoch {{epoch}} | loss {{total.item() / len(data):.4f}}")
torch.save(model.state_dict(), "model.pt")
"""


def changed(text, changes):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


AFTER = changed(BEFORE, [
    ("import torch\n", "import torch\nimport torch.distributed as dist\n"),
    ("DataLoader, T", "DataLoader, DistributedSampler, T"),
    ("torch.man", "dist.init_process_group('gloo')\nrank, DDP = dist.get_rank(), nn.parallel.DistributedDataParallel\ntorch.man"),
    ("DataLoader(data, 24, shuffle=True)", "DataLoader(data, 12, sampler=DistributedSampler(data))"),
    (MODEL, f"DDP({MODEL})"), ("    total =", "    loader.sampler.set_epoch(epoch)\n    total ="),
    ("    print(", "    dist.all_reduce(total)\n    if rank == 0:\n        print("),
    ("torch.save(model.", "if rank == 0:\n    torch.save(model.module.")]) + "del model\ndist.destroy_process_group()\n"


TORCHRUN = "torchrun --standalone --nproc_per_node=2 train_ddp.py"


class Shared(Workspace):
    once = functools.cache(Workspace.run)  # the original's serve all cases that have it

    def run(self, command, who, **named):
        return (self.once if who == "the original" else super().run)(command, who, **named)


@pytest.fixture(autouse=True)
def where_checks_work(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))


@functools.cache
def workspace_of(before, batchnorm):
    os.chdir(tempfile.mkdtemp())
    Path("train.py").write_text(before)
    return Shared(20, [], batchnorm=batchnorm, force=True)


def judge(after, both=(), batchnorm=None, command=TORCHRUN):
    workspace = workspace_of(changed(BEFORE, both), batchnorm)
    os.chdir(workspace.folder)
    converted = changed(AFTER, [change for change in both if change[0] in AFTER])
    Path("train_ddp.py").write_text(changed(converted, after))
    os.utime("train_ddp.py", (0, 0))  # as old as in the original's copy, which another case has made
    return words(check["check_conversion"], workspace, "python train.py", command)


def words(verdict, *given):
    try:
        status, text = verdict(*given)
    except Verdict as found:
        status, text = found.args
    print(text)
    return status, " ".join(text.split())


WHOLE = ("DataLoader(data, 12, sampler=DistributedSampler(data))", "DataLoader(data, 24, shuffle=True)")
OWN = "[data[start:start + 24] for start in range(0, 144, 24)]"
SHOWN = ("    total =", "    if rank == 0: next(iter(loader)), next(iter(DataLoader(data, 3, shuffle=True)))\n    total =")
NO_EPOCH = ("    loader.sampler.set_epoch(epoch)\n", "")
UNREDUCED = ("    dist.all_reduce(total)\n", "    total *= 2\n")
SEED = ("schedule =", "torch.manual_seed(7 + rank)\nschedule =")
PART = ("        optimizer.zero_grad()\n", "        x, y = x[rank::2], y[rank::2]\n        optimizer.zero_grad()\n")
TWO = [("SGD(model.parameters()", "SGD([*model.parameters()][2:]"), ("optimizer.zero", "model.zero"),
       ("schedule =", "second = torch.optim.Adam([*model.parameters()][:2])\nschedule ="),
       (STEP, f"{STEP}        second.step()\n")]
CLOSURE = [("SGD(model.parameters(), lr=0.05, momentum=0.9)", "LBFGS(model.parameters(), lr=0.1, max_iter=3)"),
           (f"        optimizer.zero_grad()\n        loss = {LOSS}", f"        def closure():\n            loss = {LOSS}"),
           ("        loss.backward()\n", """            optimizer.zero_grad()
            loss.backward()
            return loss
"""), ("        optimizer.step()", "        loss = optimizer.step(closure)")]
GAN = [("optimizer = torch", "other = nn.Linear(1, 1)\nsecond = torch.optim.Adam(other.parameters())\noptimizer = torch"),
       (f"        loss = {LOSS}\n", """        second.zero_grad()
        F.softplus(other(model(x).detach())).mean().backward()
        second.step()
        loss = F.softplus(-other(model(x))).mean()
""")]
WRAPPED = [("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"), ("del model", "del model, other")]
ACCUMULATED = [(f"        loss = {LOSS}\n        loss.backward()\n", """        loss = 0
        for part in range(2):
            model.require_backward_grad_sync = part == 1
            half = F.mse_loss(model(x[part::2]), y[part::2]) / 2
            scaler.scale(outputs=half).backward()
            loss += half.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
"""), (STEP, "        scaler.step(optimizer)\n        scaler.update()\n"),
               ("schedule =", "scaler = torch.amp.GradScaler('cpu')\nschedule ="),
               ('_dict(), "model', '_dict() | {"rng": torch.get_rng_state()}, "model')]
NORM = (MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))")
META = [NORM, (LOSS, "F.mse_loss(model(x.as_subclass(Meta)), y)"),
        ("schedule =", "Meta = type('Meta', (torch.Tensor,), {'__getitem__': None})\nschedule =")]
LONG = [("x = torch.randn", """
class Long(nn.BatchNorm1d):
    def forward(self, given):
        return super().forward(given.T[None])[0].T
x = torch.randn"""), ("nn.BatchNorm1d(8)", "(nn.BatchNorm1d, Long)[rank](8)")]
CLIPPED = [(STEP, f"        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n{STEP}")]
EVALUATED = [("    schedule.step()\n", """    schedule.step()
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    for y, _ in DataLoader(data, 48, shuffle=True):
        with torch.no_grad():
            model(y)
""")]
BY_HAND = [(LOSS, LOSS.replace("model(", "model.module(")), (STEP, f"""        for one in model.parameters():
            dist.all_reduce(one.grad)
            one.grad /= 2
{STEP}""")]
NEXT = [("torch.manual_seed(0)", "last = 1\ntorch.manual_seed(0)"), ("range(2):\n", """range(last + 1):
    if epoch == last:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
""")]
NOISE = [(LOSS, "F.mse_loss(model(x + torch.randn(x.shape, generator=noise)), y)"),
         ("schedule =", "noise = torch.Generator()\nschedule =")]
FLIP = [("randn(144, 4)", "randn(72, 4)\nx = torch.cat([x, -x])"),
        (LOSS, "F.mse_loss(model(x * (torch.randint(2, (len(x), 1)) * 2 - 1)), y)")]
AUTOCAST = [(f"        loss = {LOSS}", f"        with torch.autocast('cpu'):\n            loss = {LOSS}\n"
             '        with torch.autocast("cpu", enabled=False):\n            loss = loss.float()')]
GRAPH = [("data = TensorDataset(x", "graph = x\ndata = TensorDataset(torch.arange(len(x))"),
         (LOSS, "F.mse_loss(model(graph)[x], y)")]
REFUSED = ("schedule =", "__import__('argparse').ArgumentParser().error('no --lr')\nschedule =")
CHILD = ("import os\n", "import os\nif not os.fork():\n    os._exit(open(f'{os.getpid()}.txt', 'w').close() or 0)\n")
NET = [(MODEL, "Net(4, 1)"), ("x = torch.randn", """
class Net(nn.Linear):
    def forward(self, given, *more):
        return super().forward(getattr(given, "x", given))
x = torch.randn""")]
OBJECT = [*NET, (LOSS, "F.mse_loss(model(__import__('types').SimpleNamespace(x=x, to_dict=lambda: {'x': x})), y)")]
VMAP = [(LOSS, "F.mse_loss(model(x) + torch.func.vmap(other)(x).detach(), y)"),
        ("schedule =", "other = nn.Linear(4, 1)\nschedule =")]
ZERO = [("SGD(model.parameters(), lr=0.05, momentum=0.9)", "Adam(model.parameters(), lr=0.05)"),
        (STEP, f"        [*model.parameters()][-1].grad.zero_()\n{STEP}")]
POSITIVE = "(F.mse_loss(model(x), y, reduction='none') * (x[:, :1] > 0)).sum() / (x[:, 0] > 0).sum()"
LINEAR = [(MODEL, "nn.Linear(4, 1)"), ("lr=0.05, momentum=0.9", "lr=0.27"), ("2)", "3)"), ("r, 1)", "r, 9)"), (
    LOSS, "(F.mse_loss(model(x), y, reduction='none') * (w := 1 + 0.15 * (x[:, :1] > 0))).sum() / w.sum()")]
SEQUENCES = [(MODEL, "nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 1, 2, dropout=0.1))"),
             (LOSS, "F.mse_loss(model(x[None])[0][0], y)")]
SAME = r"changed for the check: .* the same: printed \(\d lines\), saved model.pt"
CASES = {  # status, changes of the converted script, what is said, changes of both scripts
    "a right conversion, with dropout, a schedule, and pictures that rank 0 shows": (0, [SHOWN], SAME),
    "a sampler of some samples": (0, [], SAME, [(WHOLE[1], "DataLoader(data, 24, sampler=SubsetRandomSampler(range(144)))"), (
        "import DataLoader, ", "import SubsetRandomSampler, DataLoader, ")]),
    "samples that each rank evaluates in an order of its own": (0, [], SAME, EVALUATED),
    "a closure": (0, [], SAME, CLOSURE), "two optimizers, as of a GAN": (0, WRAPPED, SAME, GAN),
    "gradients that are accumulated, scaled and clipped": (0, [], SAME, ACCUMULATED),
    "BatchNorm that is synchronised on GPUs alone": (0, [], SAME, [NORM], "sync"),
    "BatchNorm of tensors with metadata, as MONAI's": (0, [], SAME, META, "sync"),
    "BatchNorm of inputs that have another length on each rank": (0, LONG, SAME, [NORM], "sync"),
    "BatchNorm, and a view of its result": (0, [], SAME, [(MODEL, "nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2))"), (
        LOSS, "F.mse_loss(model(x).view(-1, 4)[:, :1], y)")], "sync"),
    "BatchNorm of each rank": (0, [], SAME, [NORM], "rank"), "BatchNorm of one sample": (
        1, [("(data, 12", "(data, 1")], "more than 1 value per channel", [NORM, ("(data, 24", "(data, 2")], "rank"),
    "a graph, of which each step takes nodes, for two optimizers": (0, [], SAME, [*GRAPH, *TWO]),
    "no set_epoch": (1, [NO_EPOCH], "step 7: the sampler has the order of an earlier epoch again: is set_epoch missing"),
    "a full-size batch": (1, [("(data, 12", "(data, 24")], r"not batch_size // world_size \(see \"Two routes"),
    "the whole batch on each rank": (1, [WHOLE, NO_EPOCH], "not split: all ranks"),
    "the whole batch on each rank, while the original plays with gradients on": (
        1, [WHOLE, NO_EPOCH, ("enable_grad", "no_grad")], "not split: all ranks", [
            ("        optimizer.zero", "        with torch.enable_grad(): model(data[:9][0])\n        optimizer.zero")]),
    "the whole batch on each rank, in an object of torch_geometric": (1, [WHOLE, NO_EPOCH], "not split: all ranks", OBJECT),
    "an order of each rank": (1, [WHOLE, NO_EPOCH, PART, SEED], "different seeds .*Random numbers"),
    "an initial weight that is 0 but for rounding": (0, [("zeros_(", "constant_(val=1e-7, tensor=")], SAME, [
        ("optimizer = torch", "nn.init.zeros_([*model.parameters()][1])\noptimizer = torch")]),
    "a gradient that is 0 but for rounding, of which Adam makes a whole step": (
        0, [("grad.zero_()", "grad.fill_(1e-9)")], SAME, ZERO),
    "attention and an LSTM, with dropout": (0, [], SAME, SEQUENCES),
    "layers under torch.func.vmap": (0, [], SAME, VMAP),
    "layers that TorchScript compiles, and saves": (0, [], SAME, [
        (MODEL, f"torch.jit.script({MODEL})"), ("schedule =", "torch.jit.script(nn.Dropout()).save(os.devnull)\nschedule =")]),
    "a gradient that rounding moves in one step, as at a ReLU": (
        0, [("loss.backward()", "(loss * (1.0005 if total == 0 == epoch else 1)).backward()")], SAME),
    "gradients that are a little wrong in each step": (
        1, [("loss.backward()", "(loss * 1.0005).backward()")], "step 1: gradients differ, samples do not"),
    "a sum of losses, and a sample that only this script has": (
        1, [("schedule =", "model(torch.zeros(1, 4))\nschedule =")], "step 1: all gradients are 0.5 times", [
            (LOSS, LOSS.replace("y)", "y, reduction='sum')"))]),
    "a sum, of batches drawn by hand": (1, [(WHOLE[0], OWN), NO_EPOCH, PART, SEED], "step 1: all gradients are 0.5 times", [
        (WHOLE[1], OWN), (LOSS, LOSS.replace("y)", "y, reduction='sum')"))]),
    "parts that count unequally, samples in dimension 1": (
        1, [], "step 1: gradients differ, samples do not: .* count unequally", [
            (MODEL, "nn.Conv1d(4, 1, 1)"), (LOSS, POSITIVE.replace("model(x)", "model(x.T).T"))]),
    "parts that count unequally, offsets and a mask": (1, [], "step 1: gradients differ, samples do not: ", [
        (LOSS, POSITIVE.replace("model(x)", "model(x, torch.arange(len(x)), torch.ones(4, 4).tril())")), *NET]),
    "parts that count unequally, while the last step has little but rounding": (1, [], "step 1: gradients differ", LINEAR),
    "an earlier model that trains for longer": (1, [("last = 1", "last = 2"), ("= nn.Linear(4, 1)", "= DDP(nn.Linear(4, 1))")],
                                                "18 steps instead of 12; step 7: other parameters", NEXT),
    "noise that is drawn for each part": (1, [], "step 1: samples or values that .* part instead of the whole batch", NOISE),
    "an epoch of each rank": (1, [("set_epoch(epoch)", "set_epoch(2 * epoch + rank)")], "different seeds or epochs"),
    "other initial weights": (1, [("model =", "torch.rand(1)\nmodel =")], "step 1: other initial weights: 0.weight"),
    "training that goes around DDP": (1, [(LOSS, LOSS.replace("model(", "model.module("))], "averaged: does it go around DDP"),
    "clipping before averaging": (1, BY_HAND, "clipped before they are averaged", CLIPPED),
    "another dropout": (1, [("Dropout(0.1)", "Dropout(0.5)")], "step 1: dropout 0.1 False instead of True"),
    "no autocast": (1, [("cast('cpu'", "cast('cpu', enabled=False")], "autocast False instead of torch.bfloat16", AUTOCAST),
    "a learning rate times the world size": (1, [("lr=0.05", "lr=0.05 * 2")], "step 1: lr 0.1 instead of 0.05"),
    "a schedule that is not stepped": (1, [("    schedule.step()\n", "")], "step 7: lr 0.05 instead of 0.005.*Decisions"),
    "a schedule of rank 0 alone": (1, [("    schedule.step()", "    if rank == 0: schedule.step()")], "on rank 1: .*Decisions"),
    "a figure of one rank": (1, [UNREDUCED], "OUTPUT: the same training.* printed: "),
    "a figure of one rank, in a log": (1, [UNREDUCED], "OUTPUT: .* printed: ", [("print(", "__import__('logging').warning(")]),
    "lines of all ranks": (1, [("    if rank == 0:\n        print", "    print")],
                           "4 times instead .* printed, or written, by all ranks"),
    "module. in a file that is named by the time": (1, [("model.module.state", "model.state")], "pt: its names begin with", [
        ('"model.pt"', '__import__("time").strftime("model_%a_%H-%M-%S.pt")')]),
    "a time": (0, [], r"not compared .*: number 2 of 'epoch 0 .*time", [
        ("| loss", "{__import__('time').process_time():.3f} time | loss")]),
    "a new file": (0, [("schedule =", "open('new.txt', 'w')\nschedule =")], "is new.: saved new.txt"),
    "a DDP model in a file": (1, [("model.module.state_dict()", "model")], "model.pt holds the DDP model"),
    "a file of two ranks": (1, [("if rank == 0:\n    torch", "torch")], "model.pt is written by ranks 0, 1"),
    "a rank that hangs": (1, [CHILD, (STEP, f"{STEP}        if rank == 0: dist.barrier()\n")],
                          "hangs .* rank 0: File .* rank 1: File"),
    "a rank that stops alone": (1, [("    total =", "    if epoch > rank: break\n    total =")], "another rank .*Decisions"),
    "a script that exits": (1, [("schedule =", "raise SystemExit('no data')\nschedule =")], "ends with 1 .* no data"),
    "a rank that fails": (1, [(STEP, f"{STEP}        assert rank == 0, 'no data'\n")], "ends with 1 .* AssertionError: no data"),
    "an option that it does not have": (1, [REFUSED], "ends with 1 .* error: no --lr"),
    "noise of each rank": (2, [SEED], "random in training", [(LOSS, "F.mse_loss(model(x + torch.randn_like(x)), y)")]),
    "flips of each rank": (2, [SEED], "random in training", FLIP),
    "a command that is not there": (2, [], "cannot be run here: .* command not found", [], None, "no_such_command"),
    "plain BatchNorm": (2, [], "--sync-batchnorm", [NORM]),
    "a write outside": (2, [("schedule =", f"open('{TOOL}/new.txt', 'w')\nschedule =")], "writes to .*/new.txt, outside"),
    "a write beside": (2, [("schedule =", "open('../new.txt', 'w')\nschedule =")], "writes to .*/new.txt, outside")}


@pytest.mark.parametrize("case", CASES)
def test_a_right_conversion_passes_a_fault_is_named_and_what_cannot_be_known_is_not_judged(case):
    status, after, says, *both = CASES[case]
    found, said = judge(after, *both)
    assert found == status and re.search(says, said) and not (TOOL / "new.txt").exists()


def test_processes_that_a_script_starts_itself_differ_if_it_does_not_seed_them():
    Path("spawn.py").write_text("""
import os, runpy, socket, torch.multiprocessing
def run(rank):
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    runpy.run_path("train_ddp.py")
if __name__ == "__main__":
    os.environ["MASTER_PORT"] = f"{socket.create_server(('', 0)).getsockname()[1]}"
    torch.multiprocessing.spawn(run, nprocs=2)""")
    found, said = judge([WHOLE, NO_EPOCH, PART], [("torch.manual_seed(0)\n", "")], None, f"python {Path('spawn.py').resolve()}")
    assert found == 1 and "different seeds" in said


LOAD = "    {0}.load_state_dict(found['{0}'])\n"
OPTIMIZER, SCHEDULE = LOAD.format("optimizer"), LOAD.format("schedule")
RESUMING = [
    ("range(2)", "range(done, 4)"), ("    total =", "    torch.manual_seed(epoch)\n    total ="), ("for epoch", f"""
mean, done = 0, 0
if os.path.exists("run.pt"):
    found = torch.load("run.pt")
    done = found["epoch"]
{LOAD.format("model")}{OPTIMIZER}{SCHEDULE}for epoch"""), ("    schedule.step()\n", """    schedule.step()
    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'schedule': schedule.state_dict(),
                'history': [0.5] * epoch, 'epoch': epoch + 1}, 'run.pt')
""")]
RESUME = {
    "nothing": ([("torch.save(model.state", "print(__import__('time').process_time(), 's')\ntorch.save(model.state")], 0,
                "as if it had never stopped: killed at step 13 of 24 .*5 lines., saved model.pt .*run.pt .* number 1 of"),
    "the optimizer": ([(OPTIMIZER, "    optimizer.param_groups[0]['lr'] = 5e-4\n")], 1, "step 13: the gradients agree, the opt"),
    "the optimizer on rank 1": ([("    torch.save({", "    if rank == 0: torch.save({"), (
        OPTIMIZER, f"    if rank == 0:\n    {OPTIMIZER}")], 1, "at 12: step 13: lr 0.05 instead of 0.0005.* on rank 1", TORCHRUN),
    "the epoch": ([("epoch + 1}", "epoch}")], 1, "at 12: 18 steps instead of 12: does the command resume from"),
    "the schedule": ([(SCHEDULE, "")], 1, "saved run.pt: 'schedule.last_epoch: 2' instead of (?s:.*)best metric so far"),
    "the order": ([("    torch.manual_seed(epoch)\n", "")], 1, "step 13: other samples than in the unbroken run"),
    "the weights": ([(LOAD.format("model"), "")], 1, "weights were changed, not loaded, or not seeded again: 0.weight"),
    "the best metric": ([("mean, done = 0, 0", "mean, done, best = 0, 0, 4"), ("    print", """    if [2, 3, 1, 0][epoch] < best:
        best = [2, 3, 1, 0][epoch]
        os.replace(__import__("shutil").copy("run.pt", os.urandom(4).hex()), "best.pt")
    print""")], 1, "killed at step 7 .*best.pt is saved at step 12 in only one of the two runs"),
    "the best metric, which it prints in the end": ([
        ("mean, done = 0, 0", "mean, done, best = 0, 0, 4"),
        ("    print", "    best = min(best, [2, 1, 3, 4][epoch])\n    print"),
        ("torch.save(model.state", "print('best', best)\ntorch.save(model.state")], 1, "printed: 'best 3' instead of 'best 1'"),
    "nothing, of a file that is not that of the best model": ([
        ("range(done, 4)", "range(done, 6)"), ("    torch.save({'model'", """    if epoch in (0, 1, 4):
        torch.save(model.state_dict(), 'best.pt')
    if epoch % 2: torch.save({'model'""")], 0, "killed at step 13 of 36 "),
    "a count": ([("    print", "    mean += len(x)\n    open('n.txt', 'w').write(f'{mean}')\n    print")], 1, "n.txt: '48' "),
    "what is saved": ([("    print", "    mean += total\n    torch.save(mean, 'mean.pt')\n    print")], 1, "mean.pt: ': norm")}


@pytest.mark.parametrize("case", RESUME)
def test_what_a_restarted_run_has_lost_is_named_by_one_that_nobody_stopped(case):
    changes, status, says, *command = RESUME[case]
    Path("train_ddp.py").write_text(changed(changed(AFTER if command else BEFORE, RESUMING), changes))
    workspace = Workspace(60, [], batchnorm=None, force=False)
    found, said = words(check["check_resume"], workspace, *(command or ["python train_ddp.py"]))
    assert found == status and re.search(says, said)


def test_the_copy_has_what_a_script_reads_and_what_is_large_or_left_out_is_not_copied(monkeypatch):
    for path in ("data/points.txt", "my/.git/config", "my/.venv/pyvenv.cfg", "my/run.pt", "my/a.log", "my/train.py"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("1")
    with open("my/large.bin", "wb") as file:
        file.truncate(2**26)
    monkeypatch.chdir("my")
    _, copy = Workspace(60, ["run.pt", os.path.abspath("*.log")]).copies()
    assert {*os.listdir(copy)} == {".venv", "large.bin", "train.py"} and (copy / "../data/points.txt").read_text() == "1"
    assert os.path.islink(copy / "large.bin") and os.path.islink(copy / ".venv") and not os.path.islink(copy / "train.py")


@pytest.mark.parametrize("lines, differ", [
    (["loss 1.0", "loss 1.0", "loss 1.000004"], 0), (["loss 1.0", "loss 1.0", "loss 1.2"], 1), (["96/96", "96/96", "95/96"], 1),
    (["took 1.0 s", "took 1.5 s", "took 9.0 s"], 0), (["at  1.0 s, loss 1", "at 90.0 s, loss 1", "at  2.0 s, loss 2"], 1),
    (["Sat 28 Nov, loss 1", "Sun 29 Nov, loss 1", "Sat 28 Nov, loss 2"], 1),
    (["28 12:00:07,1 done", "29 12:31:07,1 done", "28 12:00:09,5 done"], 0),
    (["acc 91.4", "acc 91.4", "acc 91.3"], 1), (["0.00", "0.00", "-0.00"], 0), (["nan", "nan", "nan"], 0),
    (["---", "---", "-----"], 0), (["read 5000.", "read 5000.", "read 5001."], 1)])
def test_a_printed_number_may_differ_as_far_as_rounding_and_the_clock_move_it(lines, differ):
    assert len(compare_lines([[line] for line in lines])[0]) == differ


def test_each_section_that_a_verdict_names_is_one_of_the_chapter():
    headings = re.findall(r"^##+ (.*)$", (TOOL.parents[1] / "docs/your_own_script.md").read_text(), re.MULTILINE)
    cited = {section for file in TOOL.glob("*.py") for section in re.findall(r'\(see "(.+?)"\)', file.read_text())}
    assert len(cited) > 10 and cited <= {*headings}


def test_ctrl_c_ends_it_and_all_that_it_has_started():
    waiting = Job([sys.executable, TOOL, "sleep 600", "true"])
    waiting.until(lambda: "running" in waiting.stderr, "it does not begin")
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.wait() == 2 and "interrupted" in waiting.stderr
