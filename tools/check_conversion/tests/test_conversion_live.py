"""Each thing that is observed in the user's processes is seen in one live fault, and blamed in no right conversion."""
import re
from pathlib import Path

import pytest
from runs import LOSS, MODEL, NORM, STEP, both, check

# Packages that a test must not need: they keep what they are given to themselves.
STAND_INS = {
    "wandb/__init__.py": "from .sdk.wandb_run import Run\nlog = Run().log\n",
    "wandb/sdk/wandb_run.py": "class Run:\n    def log(self, data): pass\n",
    "tensorboardX/writer.py": "class SummaryWriter:\n    def __init__(*_): pass\n    add_scalar = add_scalars = __init__\n"}
FIGURES = ("SummaryWriter('runs').add_scalar('mean', total.item(), epoch); "
           "wandb.log({'mean': total.item(), 'epoch': epoch}); "
           "logging.error(f'{time.time()} mean {total.item():.5f}'); ")
REDUCE = "    dist.all_reduce(total)\n"
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
# With a second optimizer, clipped gradients, a score and loggers.
MORE = both(
    ("import torch\n", "import logging, os, time, wandb\nfrom tensorboardX.writer import SummaryWriter\nimport torch\n"),
    ("optimizer = ", "other = nn.Linear(1, 1)\nsecond = torch.optim.Adam(other.parameters(), 0.01)\noptimizer = "),
    (STEP, f"{CLIP}{STEP}        second.zero_grad()\n"
           "        other(model(x).detach()).square().mean().backward()\n        second.step()\n"),
    ("for epoch", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)\nfor epoch"),
    ("print(f", f"{FIGURES}print(f"), before=[("    SummaryWriter", "    plateau.step(total.item())\n    SummaryWriter")],
    after=[("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"), ("del model", "del model, other"),
           (REDUCE, f"{REDUCE}    plateau.step(total.item())\n"),
           ('"model.pt")', '"model.tmp")\n    os.rename("model.tmp", "model.pt")')])

LESS = ("randn(144", "randn(133")  # the last batch has 13 samples
SLOWER = ("    total = torch", "    optimizer.param_groups[0]['lr'] = 0.05 / (epoch + 1)\n    total = torch")
WHOLE = ("24 // world_size, sampler=sampler", "24, shuffle=True")
PART = ("        loss =", "        whole, x, y = len(x), x[rank::world_size], y[rank::world_size]\n        loss =")
# A list and a mapping.
TREE = [(MODEL, "Net(4, 1)"), ("x = torch.randn", """
class Net(nn.Linear):
    def forward(self, images, batch):
        return nn.functional.mse_loss(super().forward(torch.stack(images)), torch.stack(batch["y"]))


x = torch.randn"""), (LOSS, "model([*x], {'y': [*y]})")]
NOISE = [("import torch\n", "import random\nimport numpy\nimport torch\n"),
         ("manual_seed(0)\n", "manual_seed(0)\nrandom.seed(0)\nnumpy.random.seed(0)\n"),
         (LOSS, "nn.functional.mse_loss(model(x + torch.randn_like(x)\n * torch.tensor(numpy.random.rand(len(x), 1))\n"
                " * torch.tensor([[random.random()] for _ in x])), y)")]
DRAWN = ("in loader:\n", "in loader:\n        x = x + torch.randn_like(x)\n")
BY_RANK = ("optimizer = ", "torch.manual_seed(rank); random.seed(rank); numpy.random.seed(rank)\noptimizer = ")
NORMS = "nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))"
HALF = [(f"DDP({NORMS})", f"nn.SyncBatchNorm.convert_sync_batchnorm({NORMS})"),
        ("optimizer =", "model[3] = nn.BatchNorm1d(8)\nmodel = DDP(model)\noptimizer =")]
ON_GPUS = ("optimizer =", "if torch.cuda.is_available():\n    nn.SyncBatchNorm.convert_sync_batchnorm(model)\noptimizer =")
LATER = [("for epoch", "more = nn.Linear(1, 1)\nfor epoch"),
         ("    total = torch", "    if epoch: optimizer.add_param_group(param_group={'params': [more.bias]})\n    total = torch")]
SECOND_PASS = "    with torch.no_grad():\n        for x, y in loader:\n            total += 0 * model(x).sum().item()\n"
BUSY = [("for epoch in", "assert next(iter(loader))[0].shape[1:] == (4,)\nfor epoch in"),
        ("import torch\n", "import time\nfrom datetime import datetime\nbegin = time.time()\nimport torch\n"),
        ("print(f", "print(time.strftime('%H:%M:%S'), datetime.now(), int(time.time() - begin) // 100, 's', f")]
ACCUMULATED = ("        loss.backward()\n", "        for part in range(3):\n"
               "            (nn.functional.mse_loss(model(x[part::3]), y[part::3]) / 3).backward()\n")
FSDP = [(f"DDP({MODEL})", f"fully_shard({MODEL}, mesh=dist.init_device_mesh('cpu', (world_size,)))"),
        ("import torch\n", "import torch\nfrom torch.distributed.fsdp import fully_shard\n"),
        ("if rank == 0:\n    torch.save(model.module.state_dict()",
         "saved = {name: part.full_tensor() for name, part in model.state_dict().items()}\nif rank == 0:\n    torch.save(saved")]
NOT, SAME = "NOT THE SAME TRAINING ", "the same training: 12 steps .*weights within .e-1. .*2 of 2 lines the same"
LIVE = {  # status, what is said, and the two scripts
    "parts that are not equal": (
        1, NOT + "step 6: the loss is a mean, but the ranks' parts are not equal", both(LESS, after=[WHOLE, PART])),
    "a sum of losses": (1, NOT + "step 1: all gradients are 0.5 times .*the sum of the ranks' losses is the original's", both(
        (LOSS, LOSS.replace(", y)", ", y, reduction='sum')")))),
    "a last batch that is left out": (
        1, NOT + r"step 6: an epoch had 6 .* now has 5: .*; there is DataLoader\(drop_last=True\) in train_ddp.py", both(
            LESS, SLOWER, after=[("sampler=sampler", "sampler=sampler, drop_last=True")])),
    "a shuffle by each rank": (1, NOT + "step 1: ranks 0 and 1 shuffle differently, each with its own random", both(
        after=[("optimizer = ", "torch.manual_seed(rank)\noptimizer = "), WHOLE, PART])),
    "no set_epoch": (1, NOT + "step 7: .*set_epoch was not called", both(after=[("    sampler.set_epoch(epoch)\n", "")])),
    "the whole batch on each rank": (
        1, "^the same training, but not split between ranks: 12 steps .*each rank computes all of it.", both(after=[WHOLE])),
    "values of each rank, drawn by nothing": (1, NOT + "step 1: Sequential 0 has values that train.py never .*draw nothing", both(
        after=[("        loss =", "        x = x + rank\n        loss =")])),
    "a second optimizer without DDP": (1, NOT + "step 2: ranks 0 and 1 .*not wrapped in DDP.*Training goes through", both(
        of=MORE, after=[("other = DDP(nn.Linear(1, 1))", "other = nn.Linear(1, 1)")])),
    "noise from three generators, the same on all ranks": (
        1, "by torch and Python and numpy, and all", both(*NOISE)),
    "noise of each rank": (2, "step 1: both draw random numbers in each step, by .*, and each rank draws its own", both(
        *NOISE, after=[BY_RANK])),
    "labels in another order, where noise is drawn for the whole batch": (
        1, NOT + "step 1: the same samples, but the ranks' losses are .*or are labels", both(
            DRAWN, after=[WHOLE, PART, (LOSS, LOSS.replace(" y)", " y.flip(0))"))])),
    "parameters that are added later, without DDP": (
        1, NOT + "step 7: ranks 0 and 1 have different gradients: bias .*not wrapped in DDP", both(*LATER, (LOSS, LOSS.replace(
            "model(x)", "model(x) + more.bias")))),
    "a score of each rank": (1, NOT + "step .*: ReduceLROnPlateau is given a different value on each rank", both(
        of=MORE, after=[("plateau.step(total.item())", "plateau.step(total.item() + rank)")])),
    "logged figures of one rank": (1, "to stderr differently.*logged differently: .*Board: mean .*wandb: mean ", both(
        of=MORE, after=[(FIGURES, FIGURES.replace("total", "loss"))])),
    "a pass over the data that draws random numbers before the model": (
        1, NOT + "step 1: it begins with .*: both scripts are seeded alike, but before the model is made .*Load first", both(
            before=[("model = ", "labels = torch.cat([y for _, y in loader])\nmodel = ")])),
    "targets of other samples, in a mapping": (1, NOT + r"step 1: Net 1.y\[\] is paired with other samples of", both(
        *TREE, after=[("        loss = model", "        y = y.flip(0)\n        loss = model")])),
    "gradients clipped to another norm": (1, NOT + "step 1: gradients are clipped to another norm: they are 2 times", both(
        of=MORE, after=[(CLIP, CLIP.replace("0.1", "0.2"))])),
    "values clipped in one of them": (1, NOT + "step 1: clipping of values at 0.1 is on in train.py and off in", both(
        before=[(STEP, f"        nn.utils.clip_grad_value_(model.parameters(), 0.1)\n{STEP}")])),
    "training that converges, of parameters in another order": (0, "weights within .e-1. ", both(
        (MODEL, "nn.Linear(4, 1)"), ("range(2)", "range(60)"), ("lr=0.05", "lr=0.3"),
        after=[("model.parameters(), ", "[*model.parameters()][::-1], ")])),
    "two optimizers, norms, scores and loggers": (
        0, "the same training: 24 .*logged: 6 of 6 figures the same written: 1 of 1 file the same", MORE),
    "float32 somewhere": (0, "weights within .e-1", both((MODEL, MODEL + ".float()"), ("model(x)", "model(x.float())"))),
    "both kinds of BatchNorm, and dropout": (0, "not compared: BatchNorm, dropout weights within .e-1", both(
        (MODEL, NORMS), after=HALF), "rank"),
    "plain BatchNorm": (2, "has plain BatchNorm on several processes", both((MODEL, NORM))),
    "unequal parts, and BatchNorm that is synchronised on GPUs alone": (0, "12 steps with 2 processes, SyncBatchNorm", both(
        LESS, (MODEL, NORM), after=[
            WHOLE, PART, ON_GPUS, ("loss.backward()", "(loss * len(x) * world_size / whole).backward()")]), "sync"),
    "loader workers and times": (0, SAME, both(
        *BUSY, before=[("(data, 24", "(data, 24, num_workers=1"), ("    print(time", f"{SECOND_PASS}    print(time")],
        after=[("24 // world_size", "24 // world_size, num_workers=1"), ("set_epoch(epoch)", "set_epoch(epoch + 1)"),
               ("begin = time.time()", "begin = time.time() - 700"), (REDUCE, SECOND_PASS + REDUCE)])),
    "accumulation": (0, SAME, both(ACCUMULATED, after=[
        ("range(3):\n", "range(3):\n            model.require_backward_grad_sync = part == 2\n")])),
    "FSDP2": (0, "2 of 2 lines the same written: 1 of 1 file the same", both(after=FSDP))}


@pytest.mark.parametrize("shape", LIVE)
def test_a_fault_is_named_with_its_step_and_its_cause_and_what_trains_the_same_is_not_blamed(shape):
    for name, text in STAND_INS.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    status, says, scripts, *batchnorm = LIVE[shape]
    found, said = check(*scripts, batchnorm=(*batchnorm, "")[0])
    assert found == status and re.search(says, said)
