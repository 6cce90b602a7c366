"""Each thing that is observed in the user's processes is seen in one live fault, and blamed in no right conversion."""
import re
from pathlib import Path

import pytest
from check_conversion.protocol import Saved
from runs import BEFORE, LESS, LOSS, MODEL, PART, REDUCE, STEP, WHOLE, both, changed, check, record, record_twice

NORM = (MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1))")
NOISE = (LOSS, "nn.functional.mse_loss(model(x + torch.randn_like(x)), y)")
NUMPY = ("import torch\n", "import numpy\nimport torch\n")
AUGMENTED = (LOSS, "nn.functional.mse_loss(model(x * torch.tensor(numpy.random.rand(len(x), 1)).float()), y)")
AVERAGE = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
"""
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
NO_DDP = [("DDP(nn", "(nn"), ("model.module", "model")]
PLATEAU = ("for epoch", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)\nfor epoch")
LIST = [(MODEL, "Net(4, 8)"), ("import torch\n", "import torch\nimport torch.distributed.nn\n"), ("x = torch.randn", """
class Net(torch.nn.Linear):
    def forward(self, images, targets):
        scores = super().forward(torch.stack(images)).square().mean(dim=1)
        return sum((score - one["y"]).square().sum() for score, one in zip(scores, targets)) / len(images)


x = torch.randn"""), (LOSS, "model([*x], [{'y': one} for one in y])")]
MAPPING = [(MODEL, "Net(4, 1)"), ("x = torch.randn", """
class Net(torch.nn.Linear):
    def forward(self, batch):
        return torch.nn.functional.mse_loss(super().forward(batch["x"]), batch["labels"]["y"])


x = torch.randn"""), (LOSS, "model({'x': x, 'labels': {'y': y}})")]
SWAPPED = ("        loss = model", "        y = y.flip(0)\n        loss = model")

# A fault: both scripts, and what is said with two processes.
FAULTS = {
    "a loss that is a sum": (both((LOSS, 'nn.functional.mse_loss(model(x), y, reduction="sum") / 50')),
                             "step 1: all gradients are 0.5 times those of train.py = 1/2,.*Sums and unequal parts"),
    "a loss over the batch": (both((LOSS, "(model(x) - model(x).mean()).square().mean()")),
                              "step 1: the same samples, and a loss of .* neither their mean nor their sum"),
    "unequal parts": (both(LESS, after=[WHOLE, PART]), "step 6: a mean over parts that are not equal.*Sums and unequal parts"),
    "the batch not divided": (both(after=[("24 // world_size", "24")]), "step 1: each rank takes a whole batch.*Two routes"),
    "a shuffle by each rank": (both(after=[("optimizer = ", "torch.manual_seed(rank)\noptimizer = "),
                                           ("24 // world_size, sampler=sampler", "24, shuffle=True"), PART]),
                               "step 1: ranks 0 and 1 shuffle differently, each by random numbers.*Random numbers"),
    "no set_epoch": (both(after=[("    sampler.set_epoch(epoch)\n", "")]), "step 7: .*no set_epoch"),
    "another sampler": (both(before=[("24, shuffle=True", "24, sampler=torch.utils.data.WeightedRandomSampler("
                                      "1 + torch.arange(144), 144)")]),
                        "step 1: the samples are drawn by WeightedRandomSampler in train.py, by DistributedSampler now"),
    "repeated samples": (both(LESS), r"step 6: samples are repeated.*\[13, 4\].*Two routes"),
    "drop_last": (both(LESS, after=[("sampler=sampler", "sampler=sampler, drop_last=True")]),
                  r"step 6: an epoch had 6 steps and has 5: DataLoader\(drop_last=True\) leaves out the last batch"),
    "forward through module": (both(after=[("model(x)", "model.module(x)")]),
                               "step 1: ranks 0 and 1 have different gradients: 0.weight.*Training goes through DDP"),
    "no DDP": (both(after=NO_DDP), "step 1: ranks 0 and 1 .*in no DDP.*Training goes through"),
    "noise, the same in all ranks": (both(NOISE),
                                     r"step 1: both draw random numbers in each step, by torch \(at train.py:16\)"),
    "augmentation by numpy": (both(NUMPY, AUGMENTED, ("manual_seed(0)\n", "manual_seed(0)\nnumpy.random.seed(0)\n")),
                              r"step 1: both draw random numbers in each step, by numpy \(at train.py:\d+\), .*the same"),
    "clipped before averaged": (both((STEP, CLIP + STEP), after=[*NO_DDP, (STEP, AVERAGE + STEP)]),
                                "step 1: gradients are clipped before they are averaged, at norms of"),
    "a score by rank": (both(PLATEAU, before=[("loss.item() * len(x)\n", "loss.item() * len(x)\n    plateau.step(total)\n")],
                             after=[(REDUCE, REDUCE + "    plateau.step(total + rank)\n")]),
                        "step 6: ReduceLROnPlateau is given a different figure on each rank: .*Decisions"),
    "a rate by rank": (both(after=[(REDUCE, "    optimizer.param_groups[0]['lr'] *= 0.5 if rank else 1\n" + REDUCE)]),
                       "step 7: ranks 0 and 1 have different optimizer options: lr 0.025 instead of 0.05. See \"Decisions"),
    "targets of a list in another order": (both(*LIST, after=[SWAPPED]), r"step 1: Net 1\[\].y goes with other samples of Net 0"),
    "a mapping with other targets": (both(*MAPPING, after=[SWAPPED]), r"step 1: Net 0.labels.y goes with other samples of Net 0"),
    "a part of one sample under BatchNorm": (both(("randn(144", "randn(122"), NORM, after=[WHOLE, PART]),
                                             "a part of one sample under BatchNorm"),
    "an error": (both(after=[(STEP, STEP + "        if rank == 1 and epoch == 1:\n            raise ValueError('my own')\n")]),
                 r"it fails after \d, .* steps of the ranks: .*train_ddp.py:\d+: ValueError: my own. See \"Errors")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_step_and_its_cause(fault):
    scripts, says = FAULTS[fault]
    status, said = check(*scripts)
    assert status == 1 and said.startswith("NOT THE SAME TRAINING") and re.search(says, said)


def test_a_whole_batch_on_every_rank_is_not_shared_out():
    status, said = check(*both(after=[WHOLE]))
    assert status == 1 and said.startswith("the same training, but not shared out: 12 steps with 2 processes")


ACCUMULATED = [f"(nn.functional.mse_loss(model(x[{part}]), y[{part}]) / <N>).backward()" for part in (":8", "8:16", "16:")]
SCALER = [("for epoch in", "scaler = torch.amp.GradScaler('cpu')\nfor epoch in"), ("        loss.backward()\n" + STEP, """
        scaler.scale(loss).backward()
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
LOOK = ("for epoch in", "assert next(iter(loader))[0].shape[1:] == (4,)\nfor epoch in")
DRAWN_WHOLE = (LOSS, LOSS.replace("x)", "x + torch.randn_like(x))"))
CLOCKS = ("    print(f", "    print(time.strftime('%H:%M:%S'), datetime.now(), time.perf_counter(), f")
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
RIGHT = {  # both scripts, and with how many processes
    "Adam, BatchNorm and dropout": (both(("SGD(model.parameters(), lr=0.05)", "Adam(model.parameters(), lr=0.01)"), NORM), 2),
    "a recurrent model with dropout": (both(*RECURRENT), 2),
    "lists of images and targets": (both(*LIST), 3),
    "a GradScaler": (both(*SCALER), 2),
    "loader workers": (both(before=[("(data, 24", "(data, 24, num_workers=1")],
                            after=[("24 // world_size", "24 // world_size, num_workers=1")]), 2),
    "an endless sampler": (both(before=[("shuffle=True", ENDLESS_SAMPLER), *ENDLESS],
                                after=[("24 // world_size, sampler=sampler", f"24, {ENDLESS_SAMPLER}"), PART, *ENDLESS]), 3),
    "accumulation": (both(before=[("        loss.backward()\n", "".join(
        f"        {line}\n" for line in ACCUMULATED).replace("<N>", "3"))], after=[("        loss.backward()\n", """
        with model.no_sync():
            (nn.functional.mse_loss(model(x[::2]), y[::2]) / 2).backward()
        (nn.functional.mse_loss(model(x[1::2]), y[1::2]) / 2).backward()
""")]), 3),
    "two optimizers": (both(*GAN, after=[("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"),
                                         ("del model", "del model, other")]), 2),
    "a second pass over the training set": (both(before=[(
        "    print(f", "    with torch.no_grad():\n        for x, y in loader:\n            total += 0 * model(x).sum().item()\n"
        "    print(f")], after=[(REDUCE, "    with torch.no_grad():\n        for x, y in loader:\n"
                                "            total += 0 * model.module(x).sum()\n" + REDUCE)]), 3),
    "a first look at a batch": (both(LOOK), 3),
    "epochs from 1": (both(after=[("set_epoch(epoch)", "set_epoch(epoch + 1)")]), 2),
    "some of the samples": (both(before=[("/ len(data)", "/ 72"), (
        "shuffle=True", "sampler=torch.utils.data.SubsetRandomSampler(range(0, 144, 2))")], after=[
        ("sampler = ", "data = torch.utils.data.Subset(data, range(0, 144, 2))\nsampler = ")]), 2),
    "numbers drawn for the whole batch": (both(before=[DRAWN_WHOLE], after=[
        ("24 // world_size, sampler=sampler", "24, shuffle=True"),
        (PART[0], PART[0] + f"        noise = torch.randn(len(x), 4)[rank::world_size]\n{PART[1][len(PART[0]):]}"),
        (LOSS, LOSS.replace("x)", "x + noise)"))]), 2),
    "times": (both(("import torch\n", "import time\nfrom datetime import datetime\nimport torch\n"), CLOCKS), 2)}


@pytest.mark.parametrize("shape", RIGHT)
def test_what_trains_the_same_is_not_blamed(shape):
    scripts, processes = RIGHT[shape]
    status, said = check(*scripts, processes)
    assert status == 0 and said.startswith("the same training: ") and "2 of 2 lines the same" in said


def test_what_stood_still_is_named_with_what_to_do():
    mixed = (f"loss = {LOSS}", f"with torch.autocast('cpu'):\n            loss = {LOSS}")
    said = check(*both(NORM, mixed))[1]
    assert 'BatchNorm kept its statistics, so it was not compared. See "What your script has"' in said
    assert 'dropout was 0, so it was not compared. See "Random numbers" in docs/your_own_script.md.' in said
    assert "autocast was off" in said


NUMPYS = ("x = torch.randn(144, 4)\n", "x = torch.from_numpy(numpy.random.RandomState(0).randn(144, 4).astype('float32'))\n")


def test_data_of_their_own_precision_are_compared_in_float64_too():
    status, said = check(*both(NUMPY, NUMPYS))
    assert status == 0 and re.search(r"weights within \de-1\d of their norm", said) and "float32" not in said


def test_a_script_that_computes_in_float32_is_compared_in_float32_which_is_said():
    status, said = check(*both((MODEL, MODEL + ".float()"), ("model(x)", "model(x.float())")))
    assert status == 0 and re.search(r"weights within \de-0[78] of their norm", said)
    assert "compared in float32, for it does not bear float64: " in said


STAND_INS = {  # packages that a test must not need: they keep what they are given to themselves
    "tensorboardX": """class SummaryWriter:
    def __init__(self, folder): pass
    def add_scalar(self, tag, scalar_value, global_step=None): pass
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None): pass
""",
    "wandb": "def init(): pass\ndef log(data, step=None): pass\n"}
LOGGED = {"tensorboardX": ("from tensorboardX.writer import SummaryWriter",
                           "SummaryWriter('runs').add_scalar('loss', {}, epoch)"),
          "wandb": ("import wandb", "wandb.log({{'loss': {}, 'epoch': epoch}})")}


@pytest.mark.parametrize("package", LOGGED)
def test_figures_for_tensorboard_and_wandb_are_compared(package):
    Path("tensorboardX").mkdir()
    Path("tensorboardX/__init__.py").touch()
    Path("tensorboardX/writer.py").write_text(STAND_INS["tensorboardX"])
    Path("wandb.py").write_text(STAND_INS["wandb"])
    first, log = LOGGED[package]
    scripts = both(("import torch\n", f"import torch\n{first}\n"),
                   before=[("    print(f", f"    {log.format('total / len(data)')}\n    print(f")],
                   after=[("        print(f", f"        {log.format('total.item() / len(data)')}\n        print(f")])
    status, said = check(*scripts)
    assert status == 0 and ("TensorBoard: 2 figures the same" in said or "wandb: 4 figures the same" in said)
    status, said = check(scripts[0], changed(scripts[1], (log.format("total.item() / len(data)"), log.format("loss.item()"))))
    assert status == 1 and re.search(r"(TensorBoard|wandb): loss is \S+ instead of \S+. See \"Printed figures", said)


def test_a_module_of_the_user_s_own_named_wandb_is_left_as_it_is():
    Path("wandb.py").write_text("offline = True\n")
    assert record("import wandb\n" + BEFORE).status == 0


def test_a_closure_that_is_called_many_times_in_a_step_is_compared_in_float64():
    status, said = check(*both(LBFGS, before=[(STEPS, CLOSURE)], after=[(STEPS, REDUCED)]))
    assert status == 0 and re.search(r"weights within \de-1\d of their norm", said)


def test_tensors_of_a_generator_s_shape_are_compared_unless_they_are_bytes():
    state = 'torch.save({"state": torch.get_rng_state(), "buffer": torch.ones(torch.get_rng_state().shape)}, "model.pt")'
    save = ('torch.save(model.state_dict(), "model.pt")', state)
    original = record_twice(changed(BEFORE, save))[0]
    assert [*original.ranks[0].of(Saved)[0].tensors] == ["buffer"]
