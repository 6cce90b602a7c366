"""tools/check_conversion.py names what a conversion does otherwise, and says nothing where all is well."""
import os
import re
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import ROOT, Job, train

CHECK = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_conversion.py")))
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
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
MODEL = "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))"
LOSS = "nn.functional.mse_loss(model(x), y)"
STEP = "        optimizer.step()\n"
REDUCE = "    dist.all_reduce(total)\n"
AVERAGE = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
"""
BEST = """        if loss.item() < best:
            best = loss.item()
            torch.save(optimizer.state_dict(), "best.pt")
"""
SUM = (LOSS, 'nn.functional.mse_loss(model(x), y, reduction="sum") / 50')
NOISE = (LOSS, "nn.functional.mse_loss(model(x + torch.randn_like(x)), y)")
LESS = ("randn(144", "randn(133")  # the last batch has 13 samples
TWO_MODELS = [("model = ", "other = nn.Linear(1, 1)\nmodel = "), ("mse_loss(model(x)", "mse_loss(other(model(x))"),
              ("(model.parameters()", "([*model.parameters(), *other.parameters()]")]
PART = ("    for x, y in loader:\n", "    for x, y in loader:\n        x, y = x[rank::world_size], y[rank::world_size]\n")
WHOLE = ("24 // world_size, sampler=sampler", "24, shuffle=True, generator=torch.Generator().manual_seed(0)")

# A fault: what is changed in both scripts, what in the converted one alone, and what is said.
FAULTS = {
    "a loss that is a sum": ([SUM], [], r"step 1: .*gradients are 0.\d+ times those of before.py = 1/N,.*Sums and unequal parts"),
    "a mean multiplied": ([], [(LOSS, f"world_size * {LOSS}")], "step 1: .*all gradients are N times .*Sums and unequal parts"),
    "a mean divided": ([], [(LOSS, f"{LOSS} / 4")], "step 1: .*all gradients are 0.25 times"),
    "unequal parts": ([LESS], [WHOLE, PART], "step 6: .*a mean over parts that are not equal.*Sums and unequal parts"),
    "the batch not divided": ([], [("24 // world_size", "24")], "step 1: .*each rank takes a whole batch"),
    "the batch divided twice": ([], [("24 //", "24 // world_size //")], "step 1: .*the batch is divided twice"),
    "no sampler": ([], [("sampler=sampler", "shuffle=True")], "step 1: .*each rank goes through all samples"),
    "no sampler, whole batches": ([], [WHOLE], "each rank goes through all samples"),
    "a shuffle by each rank": ([], [("seed(0)\nx", "seed(0)\nx"), ("optimizer = ", "torch.manual_seed(rank)\noptimizer = "),
                                    ("24 // world_size, sampler=sampler", "24, shuffle=True"), PART],
                               "step 1: ranks 0 and 1 shuffle differently.*Random numbers"),
    "no set_epoch": ([], [("    sampler.set_epoch(epoch)\n", "")], "step 7: .*no set_epoch"),
    "a shuffle where was none": ([], [("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)")],
                                 "step 1: .*one of the two shuffles"),
    "repeated samples": ([LESS], [], r"step 6: .*repeated or left out.*\[13, 4\].*Two routes"),
    "left out samples": ([LESS], [("Sampler(data)", "Sampler(data, drop_last=True)")],
                         r"step 6: .*repeated or left out.*\[13, 4\].*Two routes"),
    "drop_last": ([LESS], [("sampler=sampler", "sampler=sampler, drop_last=True")], "step 6: .*an epoch had 6 steps and has 5"),
    "forward through module": ([], [("model(x)", "model.module(x)")],
                               "step 1: ranks 0 and 1 have other gradients: 0.weight.*Training goes through DDP"),
    "no DDP": ([], [("DDP(nn", "(nn"), ("model.module", "model")], "step 1: ranks 0 and 1 .*in no DDP.*Training goes through"),
    "one of two models": (TWO_MODELS, [], "step 1: ranks 0 and 1 have other gradients: .*in no DDP"),
    "weights of one rank": ([], [("optimizer = ", "if rank == 0:\n    nn.init.ones_(model.module[0].weight)\noptimizer = ")],
                            "step 1: ranks 0 and 1 have other weights: 0.weight. See \"Load first, then DDP"),
    "weights of one rank later": ([], [(REDUCE, REDUCE + "    model.module[2].bias.data += rank\n")],
                                  "step 7: ranks 0 and 1 have other weights: 2.bias"),
    "another seed": ([], [("model = ", "torch.manual_seed(7)\nmodel = ")], "step 1: it begins with other weights"),
    "a rate by rank": ([], [(REDUCE, "    optimizer.param_groups[0]['lr'] *= 0.5 if rank else 1\n" + REDUCE)],
                       r"step 7: ranks 0 and 1 have other options .*: lr 0.025 instead of 0.05. See \"Decisions"),
    "another rate": ([], [("lr=0.05", "lr=0.05 * world_size")], r"step 1: other options .*: lr 0.\d+ instead of 0.05"),
    "another momentum": ([], [("lr=0.05", "lr=0.05, momentum=0.9")], "step 1: other options .*: momentum 0.9 instead of 0"),
    "a model that is not trained": ([], [("optimizer = ", "other = nn.Linear(1, 1)\noptimizer = "),
                                         ("SGD(model", "SGD(other")], "step 1: it begins with other weights"),
    "an optimizer made before": ([], [("optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n", ""), (
        "model = DDP(" + MODEL, "model = DDP(old := " + MODEL), ("for epoch", "import copy\nmodel = DDP(copy.deepcopy(old))\n"
        "optimizer = torch.optim.SGD(old.parameters(), lr=0.05)\nfor epoch")], "step 1: .*there are none now"),
    "by hand, of unequal parts": ([("in loader:", "in [data[:]]:")], [
        ("loss = nn", "x, y = (x[:40], y[:40]) if rank == 0 else (x[40:], y[40:])\n        loss = nn")],
                                  "step 1: .*(parts that are not equal|left out)"),
    "noise": ([NOISE], [], "step 1: .*draw random numbers in each step, the ranks the same.*Random numbers"),
    "a figure not reduced": ([], [(REDUCE, "")], "printed otherwise:.*before.py: epoch 0.*after.py: epoch 0.*Printed figures"),
    "printed by all": ([], [("    if rank == 0:\n        print", "    if 1:\n        print")],
                       "printed . times .*by all ranks"),
    "names": ([], [("model.module.state", "model.state")], "model.pt: the saved names begin with `module.`"),
    "saved by all": ([], [("if rank == 0:\n    torch.save", "if 1:\n    torch.save")], "model.pt is saved by more than one rank"),
    "another model saved": ([], [("    torch.save", "    model.module[0].bias.data += 1\n    torch.save")], "another 0.bias"),
    "an early stop by a rank's own figure": ([], [(REDUCE, "    if rank == 1:\n        break\n" + REDUCE)],
                                            r"it fails after \d+, .* steps of the ranks: .*Connection.*Hangs"),
    "the best model by a rank's own figure": ([(STEP, STEP + BEST)], [
        ("if loss.item() < best", "if rank == 0 and loss.item() < best"), ("sampler = ", "best = 100\nsampler = ")],
                                              r"best.pt is saved \d+ times instead of \d+.*Decisions"),
    "clipped before averaged": ([(STEP, "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP)], [
        ("DDP(nn", "(nn"), ("model.module", "model"), (STEP, AVERAGE + STEP)],
                                "step 1: .*by no common factor.*clipped or unscaled before"),
    "an abort at exit": ([], [("destroy_process_group()\n", "destroy_process_group()\nimport ctypes\n"
                               "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()\n")],
                         "it aborts when it ends.*The end of a run"),
    "an error": ([], [(STEP, STEP + "        if rank == 1 and epoch == 1:\n            raise ValueError('my own')\n")],
                 r"it fails after \d, .* steps of the ranks: .*after.py:\d+: ValueError: my own. See \"Errors")}


def changed(text, *changes):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def record(name, text, processes, *arguments, capsys, **environment):
    """What is recorded of a script, whose ranks are forked: as by its command line, but in a second."""
    here = Path(f"{name}.{processes}")
    (here / "records").mkdir(parents=True)
    script = here / f"{name}.py"
    script.write_text(text)
    status, stdout, stderr = 0, "", ""
    try:
        stdout = train(script.resolve(), *arguments, cwd=here, processes=processes, device=None, CUDA_VISIBLE_DEVICES="",
                       before=f"import runpy; runpy.run_path({str(ROOT / 'tools/recorder/sitecustomize.py')!r})",
                       CHECK_CONVERSION=(here / "records").resolve(), **environment).stdout
    except AssertionError:
        status, stderr = 1, capsys.readouterr().out
    capsys.readouterr()
    (here / "records/stdout").write_text(stdout)
    (here / "records/stderr").write_text(stderr)
    return CHECK.read_run(f"{name}.py", here / "records", status)


def verdict(before, after, capsys):
    status = CHECK.judge(before, before, after)
    said = capsys.readouterr().out
    print(said)
    assert status == (0 if said.startswith("the same training: ") else 1)
    assert set(re.findall(r'See "(.*?)" in docs/your_own_script.md', said)) <= {*CURES}
    return " ".join(said.split())


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_step_and_its_cause(fault, processes, capsys):
    both, converted, says = FAULTS[fault]
    before = record("before", changed(BEFORE, *both), 0, capsys=capsys)
    after = record("after", changed(AFTER, *both, *converted), processes, capsys=capsys)
    said = verdict(before, after, capsys)
    assert said.startswith("NOT THE SAME") and re.search(says.replace("N", str(processes)), said)


def of_parts(parts, whole):
    """Gradient accumulation in the place of one backward."""
    lines = ["        loss.backward()\n".replace("loss", f"(nn.functional.mse_loss(model(x[{part}]), y[{part}]) / {len(parts)})")
             for part in parts]
    if not whole:
        lines[:-1] = ["        with model.no_sync():\n    " + line for line in lines[:-1]]
    return [("        loss.backward()\n", "".join(lines))]


BATCHNORM = (MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1))")
CLOSURE = f"""        def closure():
            optimizer.zero_grad()
            loss = {LOSS}
            loss.backward()
            return loss
        loss = optimizer.step(closure)
"""
REDUCED = CLOSURE.replace("return loss", "dist.all_reduce(shown := loss.detach())\n            return shown / world_size")
STEPS = f"        loss = {LOSS}\n        optimizer.zero_grad()\n        loss.backward()\n{STEP}"
LBFGS = ("SGD(model.parameters(), lr=0.05)", "LBFGS(model.parameters(), lr=0.1)")
SCALER = [("for epoch in", "scaler = torch.amp.GradScaler('cpu')\nfor epoch in"),
          ("        loss.backward()\n" + STEP, """        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        scaler.step(optimizer)
        scaler.update()
""")]
GAN = [("optimizer = ", "other = nn.Linear(1, 1)\nsecond = torch.optim.Adam(other.parameters(), 0.01)\noptimizer = "),
       (STEP, f"{STEP}        second.zero_grad()\n        other(model(x).detach()).square().mean().backward()\n"
              "        second.step()\n")]
RECURRENT = [(MODEL, "nn.LSTM(4, 8, num_layers=2, dropout=0.5, proj_size=1, batch_first=True)"),
             ("model(x)", "model(x[:, None])[0][:, 0]")]
ENDLESS = [("import torch\n", "import itertools\nimport torch\nfrom torch.utils.data import RandomSampler\n"),
           ("in loader:", "in itertools.islice(loader, 6):")]
ENDLESS_SAMPLER = "sampler=RandomSampler(data, replacement=True, num_samples=10**10)"
GOOD = {  # what is changed in the first script, and in the converted one
    "adam": [[("SGD(model.parameters(), lr=0.05)", "Adam(model.parameters(), lr=0.01)"), BATCHNORM]] * 2,
    "adamw": [[("SGD(model.parameters(), lr=0.05)", "AdamW(model.parameters(), lr=0.01)"), BATCHNORM]] * 2,
    "recurrent": [RECURRENT] * 2,
    "scaler": [SCALER] * 2,
    "lbfgs": [[LBFGS, (STEPS, CLOSURE)], [LBFGS, (STEPS, REDUCED)]],
    "workers": [[("(data, 24", "(data, 24, num_workers=1")], [("24 // world_size", "24 // world_size, num_workers=1")]],
    "an endless sampler": [[*ENDLESS, ("shuffle=True", ENDLESS_SAMPLER)],
                           [("24 // world_size, sampler=sampler", f"24, {ENDLESS_SAMPLER}"), PART, *ENDLESS]],
    "accumulation": [of_parts([":8", "8:16", "16:"], True), of_parts([":len(x) // 2", "len(x) // 2:"], False)],
    "two optimizers": [GAN, [*GAN, ("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"),
                             ("del model", "del model, other")]],
    "printed more": [[], [("del model", "print('rank', rank, 'of', world_size, 'is done')\ndel model")]]}
PAIRS = {"waves": ["--epochs", "2", "--batch-size", "48"],
         "language_model": ["--epochs", "5"],  # after the third its learning rate falls
         "autoencoder": ["--epochs", "2"],
         "stream": ["--samples", "961"], "contrastive": ["--epochs", "2"]}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("shape", GOOD)
def test_what_trains_the_same_is_not_blamed(shape, processes, capsys):
    before = record("before", changed(BEFORE, *GOOD[shape][0]), 0, capsys=capsys)
    after = record("after", changed(AFTER, *GOOD[shape][1]), processes, capsys=capsys)
    assert verdict(before, after, capsys).startswith("the same training: ")


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_one_two_and_three_processes(pair, capsys):
    texts = [(ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp")]
    sharp = {"capsys": capsys, "CHECK_CONVERSION_FLOAT64": 1}
    before = record(pair, texts[0], 0, *PAIRS[pair], **sharp)
    losses = [float(loss) for loss in re.findall(r"\bloss (\S+)", before.stdout)]
    assert min(losses) < 0.8 * losses[0]
    for processes in (1, 2, 3):
        after = record(f"{pair}_ddp", texts[1], processes, *PAIRS[pair], **sharp)
        said = verdict(before, after, capsys)
        assert said.startswith("the same training: ") and said.endswith("printed and saved the same")
        assert all(float(figure) < 1e-9 for figure in re.findall(r"within (\d\S+?)[,;]", said)), said


def test_each_cure_of_the_chapter_is_one_that_a_verdict_names():
    tool = (ROOT / "tools/check_conversion.py").read_text()
    assert len(CURES) > 10 and all(f'"{cure}"' in tool for cure in CURES)


def check(*words, status, cwd="."):
    job = Job([sys.executable, ROOT / "tools/check_conversion.py", *words], cwd=cwd, CUDA_VISIBLE_DEVICES="", PATH=PATH)
    assert job.wait() == status, job.stdout + job.stderr
    return job


def by_torchrun(script):
    return f"torchrun --standalone --nproc_per_node=2 {script}"


def test_two_commands_are_compared_and_nothing_is_left_in_the_folder():
    Path("train.py").write_text("def main(args):\n" + re.sub("^", "    ", BEFORE, flags=re.MULTILINE) + "\nmain([])\n")
    Path("train_ddp.py").write_text(AFTER)
    said = check("python train.py", by_torchrun("train_ddp.py"), status=0).stdout
    assert re.match(r"the same training: 12 steps with 2 processes, gradients within \de-0[67], weights within \de-0[678]", said)
    assert sorted(os.listdir()) == ["train.py", "train_ddp.py"]


def test_ranks_that_their_script_spawns_are_compared_too():
    for name in ("single_gpu.py", "multigpu_spawn.py", "utils.py"):
        shutil.copy(ROOT / name, ".")
    said = check("python single_gpu.py 1", "python multigpu_spawn.py 1 -g 2", status=0).stdout
    assert said.startswith("the same training: 8 steps with 2 processes")


@pytest.mark.parametrize("change, says", [
    (("model = DDP", "if rank == 0:\n    dist.barrier()\nmodel = DDP"),
     "  rank 0, after 0 steps, waits at train_ddp.py:17, in barrier\n"
     "  rank 1, after 0 steps, waits at train_ddp.py:18, in __init__. See"),
    ((STEP, STEP + "        if rank == 1 and epoch == 1:\n            time.sleep(6000)\n"),
     "  rank 0, after 7 steps, waits at train_ddp.py:24, in backward\n"
     "  rank 1, after 7 steps, waits at train_ddp.py:27. See")], ids=["a collective in a branch", "a rank that does not come"])
def test_a_hang_is_shown_by_the_line_at_which_each_rank_waits(change, says):
    Path("train.py").write_text(BEFORE)
    Path("train_ddp.py").write_text(changed(AFTER, change).replace("import torch\n", "import time, torch\n", 1))
    said = check("--patience", 20, "python train.py", by_torchrun("train_ddp.py"), status=1).stdout
    assert f"it hangs:\n{says}" in said, said


@pytest.mark.parametrize("before, says", [
    ("no_such_command train.py", "cannot be started: .*no_such_command.*not found"),
    ("python -c 'import torch'", "takes no optimizer step"),
    ("python resumes.py", "resumes.py takes other steps the second time: .*--before-each"),
    ("python unseeded.py", r"draws other numbers each time \(step 1: it begins with other weights\): begin it with torch.manual"),
    ("python fails.py", "fails.py itself fails: it at fails.py:2: ZeroDivisionError: division by zero")])
def test_what_cannot_be_judged_gets_one_line(before, says, folder):
    resumes = BEFORE.replace("\n", "\n    ").replace("model.pt", f"{folder}/was.here")
    Path("resumes.py").write_text(f"import os\nif not os.path.exists('{folder}/was.here'):{resumes}")
    Path("unseeded.py").write_text(BEFORE.replace("torch.manual_seed(0)", "torch.seed()"))
    Path("fails.py").write_text("import torch\n1 / 0\n")
    said = check(before, "python -c 'import torch'", status=2).stderr
    last = [line for line in said.splitlines() if not line.startswith("running: ")]
    assert len(last) == 1 and re.search(says, last[0]), said


def test_a_process_that_outlives_its_script_is_a_fault_and_is_ended():
    Path("train.py").write_text(BEFORE)
    said = check("python train.py", "sleep 600 & python train.py", status=1).stdout
    assert said.startswith("NOT THE SAME TRAINING\nit leaves processes behind. See"), said


def test_nothing_is_left_where_it_is_interrupted():
    Path("train.py").write_text(BEFORE.replace("range(2)", "range(10 ** 9)"))
    job = Job([sys.executable, ROOT / "tools/check_conversion.py", "python train.py", "python train.py"], PATH=PATH)
    while not any(b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != job.process.pid for pid in job.processes()):
        time.sleep(0.1)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 2 and job.stderr.splitlines()[-1] == "cannot be judged: interrupted"
