"""Each thing that is observed in the user's processes is seen in one live fault, and blamed in no right conversion."""
import re
from pathlib import Path

import pytest
from check_conversion.protocol import Saved
from runs import BEFORE, LESS, LOSS, MODEL, PART, REDUCE, STEP, WHOLE, both, changed, check, record

STAND_INS = {  # packages that a test must not need: they keep what they are given to themselves
    "tensorboardX/__init__.py": "", "wandb.py": "def init(): pass\ndef log(data, step=None): pass\n",
    "tensorboardX/writer.py": """class SummaryWriter:
    def __init__(self, folder): pass
    def add_scalar(self, tag, scalar_value, global_step=None): pass
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None): pass
"""}
FIGURES = ("SummaryWriter('runs').add_scalar('mean', total.item(), epoch); wandb.log({'mean': total.item(), 'epoch': epoch}); "
           "logging.error(f'{time.time()} mean {total.item():.5f}')\n")
# With a second optimizer, clipped gradients, a score and loggers.
MORE = both(
    ("import torch\n", "import logging\nimport time\nimport wandb\nfrom tensorboardX.writer import SummaryWriter\nimport torch\n"),
    ("optimizer = ", "other = nn.Linear(1, 1)\nsecond = torch.optim.Adam(other.parameters(), 0.01)\noptimizer = "),
    (STEP, f"        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n{STEP}        second.zero_grad()\n"
           "        other(model(x).detach()).square().mean().backward()\n        second.step()\n"),
    ("for epoch", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)\nfor epoch"),
    before=[("total = 0\n", "total = torch.zeros(1)\n"), ("{total /", "{total.item() /"),
            ("    print(f", f"    plateau.step(total.item())\n    {FIGURES}    print(f")],
    after=[("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"), ("del model", "del model, other"),
           ("        print(f", f"        {FIGURES}        print(f"), (REDUCE, f"{REDUCE}    plateau.step(total.item())\n")])


def more(*changes):
    return MORE[0], changed(MORE[1], *changes)


# A list and a mapping, given to forward itself.
TREE = [(MODEL, "Net(4, 8)"), ("x = torch.randn", """
class Net(torch.nn.Linear):
    def forward(self, images, batch):
        scores = super().forward(torch.stack(images)).square().mean(dim=1)
        return sum((score - one["y"]).square().sum() for score, one in zip(scores, batch["targets"])) / len(images)


x = torch.randn"""), (LOSS, "model.forward([*x], {'targets': [{'y': one} for one in y]})")]
AVERAGE = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
"""
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
NO_DDP = [("DDP(nn.Seq", "(nn.Seq"), ("model.module", "model")]
RANDOM = ("import torch\n", "import random\nimport numpy\nimport torch\n")
NOISE = [RANDOM, ("manual_seed(0)\n", "manual_seed(0)\nrandom.seed(0)\nnumpy.random.seed(0)\n"), (
    LOSS, "nn.functional.mse_loss(model(x + torch.randn_like(x)\n * torch.tensor(numpy.random.rand(len(x), 1))\n"
          " * torch.tensor([[random.random()] for _ in x])), y)")]
NORMS = ("nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4), nn.BatchNorm1d(4), "
         "nn.Linear(4, 1))")
HALF = [("model = DDP(", "model = nn.SyncBatchNorm.convert_sync_batchnorm("),
        ("optimizer =", "model[5] = nn.BatchNorm1d(4)\nmodel = DDP(model)\noptimizer =")]
LBFGS = ("SGD(model.parameters(), lr=0.05)", "LBFGS(model.parameters(), lr=0.1)")
STEPS = f"        loss = {LOSS}\n        optimizer.zero_grad()\n        loss.backward()\n{STEP}"
CLOSURE = f"""        def closure():
            optimizer.zero_grad()
            loss = {LOSS}
            loss.backward()
            return loss
        loss = optimizer.step(closure)
"""
REDUCED = CLOSURE.replace("return loss", "dist.all_reduce(shown := loss.detach())\n            return shown / world_size")
ACCUMULATED = "".join(f"        (nn.functional.mse_loss(model(x[{part}]), y[{part}]) / 3).backward()\n"
                      for part in (":8", "8:16", "16:"))
IN_TWO = ("        loss.backward()\n", """
        with model.no_sync():
            (nn.functional.mse_loss(model(x[::2]), y[::2]) / 2).backward()
        (nn.functional.mse_loss(model(x[1::2]), y[1::2]) / 2).backward()
""")
RECURRENT = [(MODEL, "nn.LSTM(4, 8, num_layers=2, dropout=0.5, proj_size=1, batch_first=True)"),
             ("model(x)", "model(x[:, None])[0][:, 0]"), RANDOM,
             ("x = torch.randn(144, 4)\n", "x = torch.from_numpy(numpy.random.RandomState(0).randn(144, 4).astype('float32'))\n")]
ENDLESS = [("import torch\n", "import itertools\nimport torch\nfrom torch.utils.data import RandomSampler\n"),
           ("in loader:", "in itertools.islice(loader, 6):")]
ENDLESS_SAMPLER = "sampler=RandomSampler(data, replacement=True, num_samples=10**10)"
SECOND_PASS = "    with torch.no_grad():\n        for x, y in loader:\n            total += 0 * {}(x).sum().item()\n"
BUSY = [("for epoch in", "assert next(iter(loader))[0].shape[1:] == (4,)\nfor epoch in"),
        ("import torch\n", "import time\nfrom datetime import datetime\nbegin = time.time()\nimport torch\n"),
        ("    print(f", "    print(time.strftime('%H:%M:%S'), datetime.now(), int(time.time() - begin) // 100, 's', f")]
DRAWN_WHOLE = (PART[0], PART[0] + f"        noise = torch.randn(len(x), 4)[rank::world_size]\n{PART[1][len(PART[0]):]}")
FSDP = [("import DistributedDataParallel as DDP", "import DistributedDataParallel"), (
    "model = DDP(", "from torch.distributed.fsdp import fully_shard\nmodel = fully_shard("), (
    "nn.Linear(8, 1)))", 'nn.Linear(8, 1)), mesh=dist.init_device_mesh("cpu", (world_size,)))'), (
    'if rank == 0:\n    torch.save(model.module.state_dict(), "model.pt")\n',
    "saved = {name: part.full_tensor() for name, part in model.state_dict().items()}\n"
    'if rank == 0:\n    torch.save(saved, "model.pt")\n')]
ACCELERATE = changed(BEFORE, (
    "import torch\n", "import torch\nimport torch.distributed.nn\nfrom accelerate import Accelerator\n"
                      "accelerator = Accelerator(cpu=True)\n"), (
    "(data, 24", "(data, 24 // accelerator.num_processes"), (
    "best = 100\n", "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"), (
    "loss.backward()", "accelerator.backward(loss)"), (
    "    print(f", "    total = accelerator.reduce(torch.tensor(total)).item()\n    accelerator.print(f"), (
    "torch.save(model", "accelerator.save(accelerator.unwrap_model(model)"))

NOT, SAME = "NOT THE SAME TRAINING ", "the same training: 12 steps .*weights within .e-1. .*2 of 2 lines the same"
LIVE = {  # status, what is said, the two scripts, and with how many processes
    "parts that are not equal": (1, NOT + "step 6: the loss is a mean, but the ranks' parts are not equal", both(LESS, after=[WHOLE, PART]), 2),
    "a last batch that is left out": (1, NOT + r"step 6: an epoch had 6 .* now has 5: DataLoader\(drop_last=True\)", both(
        LESS, after=[("sampler=sampler", "sampler=sampler, drop_last=True")]), 2),
    "a shuffle by each rank": (1, NOT + "step 1: ranks 0 and 1 shuffle differently, each with its own random", both(after=[
        ("optimizer = ", "torch.manual_seed(rank)\noptimizer = "), ("24 // world_size, sampler=sampler", "24, shuffle=True"),
        PART]), 2),
    "no set_epoch": (1, NOT + "step 7: .*set_epoch was not called", both(after=[("    sampler.set_epoch(epoch)\n", "")]), 2),
    "no DDP": (1, NOT + "step 1: ranks 0 and 1 .*not wrapped in DDP.*Training goes through", both(after=NO_DDP), 2),
    "a second optimizer without DDP": (
        1, NOT + "step 2: ranks 0 and 1 .*not wrapped in DDP", more(("other = DDP(nn.Linear(1, 1))", "other = nn.Linear(1, 1)")), 2),
    "noise from three generators": (1, "".join(rf"(?=.* {name} \(at train.py:{line}\))" for name, line in (
        ("torch", 20), ("numpy", 21), ("Python", 22))) + NOT + "step 1: both draw random numbers in each step", both(*NOISE), 2),
    "gradients clipped early": (1, NOT + "step 1: gradients are clipped before they are averaged, at norms of", more(
        *NO_DDP, (CLIP, CLIP + AVERAGE)), 2),
    "a score of each rank": (1, NOT + "step .*: ReduceLROnPlateau is given a different value on each rank", more(
        ("plateau.step(total.item())", "plateau.step(total.item() + rank)")), 2),
    "logged figures of one rank": (1, (
        r"(?=.*TensorBoard: mean is \S+ instead of)(?=.*wandb: mean is \S+ instead of).*written to stderr differently"), more(
        (FIGURES, FIGURES.replace("total", "loss"))), 2),
    "targets of other samples, in a mapping": (1, NOT + r"step 1: Net 1.targets\[\].y is paired with other samples of", both(
        *TREE, after=[("        loss = model", "        y = y.flip(0)\n        loss = model")]), 2),
    "a part of one sample": (1, r"it fails after the ranks took \d, .*train_ddp.py:\d+: .* a rank's part has only one sample", both(
        ("randn(144", "randn(122"), (MODEL, NORMS), after=[WHOLE, PART]), 2),
    "FSDP's first version": (2, "the check cannot follow FullyShardedDataParallel, FSDP's first version", both(after=[
        ("import DistributedDataParallel as DDP", "import DistributedDataParallel\nfrom torch.distributed.fsdp import "
         "FullyShardedDataParallel as FSDP"), ("model = DDP(", "model = FSDP("), ("model.module", "model"),
        ("nn.Linear(8, 1)))", "nn.Linear(8, 1)), use_orig_params=True, device_id=torch.device('cpu'))")]), 2),
    "two optimizers, norms, scores and loggers": (
        0, "the same training: 24 steps .*TensorBoard: 2 figures the same; wandb: 4", MORE, 2),
    "lists and mappings": (0, SAME, both(*TREE), 2),
    "float32 somewhere": (0, "weights within .e-0[78] .*compared in float32, because the script does not work in float64: ", both(
        (MODEL, MODEL + ".float()"), ("model(x)", "model(x.float())")), 2),
    "both kinds of BatchNorm, and dropout": (
        0, "12 steps with 2 processes; .* not BatchNorm, dropout .*BatchNorm kept its statistics, .*dropout was 0, so", both(
            (MODEL, NORMS), after=HALF), 2),
    "loader workers, a first look, a second pass, epochs from 1 and times": (0, SAME, both(
        *BUSY, before=[("(data, 24", "(data, 24, num_workers=1"), (
            "    print(time", SECOND_PASS.format("model") + "    print(time")],
        after=[("24 // world_size", "24 // world_size, num_workers=1"), ("set_epoch(epoch)", "set_epoch(epoch + 1)"),
               ("begin = time.time()", "begin = time.time() - 700"), (REDUCE, SECOND_PASS.format("model.module") + REDUCE)]), 3),
    "a recurrent model of data in float32": (0, SAME, both(*RECURRENT), 2),
    "noise drawn for the whole batch, of an endless sampler": (0, SAME, both(*ENDLESS, before=[
        ("shuffle=True", ENDLESS_SAMPLER), (LOSS, LOSS.replace("x)", "x + torch.randn_like(x))"))], after=[
        ("24 // world_size, sampler=sampler", f"24, {ENDLESS_SAMPLER}"), (LOSS, LOSS.replace("x)", "x + noise)")),
        [one.replace("in loader:", "in itertools.islice(loader, 6):") for one in DRAWN_WHOLE]]), 2),
    "accumulation": (0, SAME, both(before=[("        loss.backward()\n", ACCUMULATED)], after=[IN_TWO]), 2),
    "a closure": (0, SAME, both(LBFGS, before=[(STEPS, CLOSURE)], after=[(STEPS, REDUCED)]), 2),
    "some of the samples": (0, "the same training: 6 steps", both(before=[("/ len(data)", "/ 72"), (
        "shuffle=True", "sampler=torch.utils.data.SubsetRandomSampler(range(0, 144, 2))")], after=[
        ("sampler = ", "data = torch.utils.data.Subset(data, range(0, 144, 2))\nsampler = ")]), 2),
    "FSDP2": (0, "2 of 2 lines the same saved: 1 file the same: model.pt", both(after=FSDP), 2),
    "Accelerate": (0, "2 of 2 lines the same saved: 1 file the same: model.pt", (BEFORE, ACCELERATE), 3)}


@pytest.fixture
def packages():
    Path("tensorboardX").mkdir()
    for name, text in STAND_INS.items():
        Path(name).write_text(text)


@pytest.mark.parametrize("shape", LIVE)
def test_a_fault_is_named_with_its_step_and_its_cause_and_what_trains_the_same_is_not_blamed(shape, packages):
    if shape == "Accelerate":
        pytest.importorskip("accelerate", reason="for want of accelerate")
    status, says, scripts, processes = LIVE[shape]
    found, said = check(*scripts, processes)
    assert found == status and re.search(says, said)


def test_neither_a_module_named_wandb_nor_a_tensor_of_a_generator_s_shape_is_mistaken():
    Path("wandb.py").write_text("offline = True\n")
    state = "{'state': torch.get_rng_state(), 'buffer': torch.ones(torch.get_rng_state().shape), 'best': 'net'}"
    run = record("import wandb\n" + changed(BEFORE, ("save(model.state_dict()", f"save({state}")))
    saved, = run.ranks[0].of(Saved)
    assert [*saved.tensors] == ["buffer"] and saved.strings == {"best": "net"}
