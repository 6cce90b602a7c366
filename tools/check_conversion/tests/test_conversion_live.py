"""Each thing that is observed in the user's processes is seen in one live fault, and blamed in no right conversion."""
import re
from pathlib import Path

import pytest
from check_conversion.protocol import Saved
from runs import BEFORE, LESS, LOSS, MODEL, PART, REDUCE, STEP, WHOLE, both, changed, check, record

NORM = (MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1))")
NOISE = (LOSS, "nn.functional.mse_loss(model(x + torch.randn_like(x)), y)")
NUMPY = ("import torch\n", "import numpy\nimport torch\n")
AUGMENTED = (LOSS, "nn.functional.mse_loss(model(x * torch.tensor(numpy.random.rand(len(x), 1)).float()), y)")
AVERAGE = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
"""
CLIP = (STEP, "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP)
NO_DDP = [("DDP(nn", "(nn"), ("model.module", "model")]
PLATEAU = ("for epoch", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)\nfor epoch")
SCORE = ("loss.item() * len(x)\n", "loss.item() * len(x)\n    plateau.step(total)\n")
NET = (MODEL, "Net(4, 8)")
LIST = [NET, ("x = torch.randn", """
class Net(torch.nn.Linear):
    def forward(self, images, targets):
        scores = super().forward(torch.stack(images)).square().mean(dim=1)
        return sum((score - one["y"]).square().sum() for score, one in zip(scores, targets)) / len(images)


x = torch.randn"""), (LOSS, "model([*x], [{'y': one} for one in y])")]
MAPPING = [NET, ("x = torch.randn", """
class Net(torch.nn.Linear):
    def forward(self, batch):
        return torch.nn.functional.mse_loss(super().forward(batch["x"]).mean(1), batch["labels"]["y"])


x = torch.randn"""), (LOSS, "model({'x': x, 'labels': {'y': y[:, 0]}})")]
SWAPPED = ("        loss = model", "        y = y.flip(0)\n        loss = model")
BY_RANK = [("sampler=sampler", "sampler=torch.utils.data.SequentialSampler(data)"), ("    for x, y in loader:\n", """
    order = numpy.random.RandomState(rank).permutation(144).reshape(6, -1)
    for indices in order[:, :24 // world_size]:
        x, y = data[indices]
""")]
BY_NUMPY = ("    for x, y in loader:\n", """
    for indices in numpy.random.RandomState(0).permutation(144).reshape(6, -1):
        x, y = data[indices]
""")
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
ACCUMULATED = [f"(nn.functional.mse_loss(model(x[{part}]), y[{part}]) / <N>).backward()" for part in (":8", "8:16", "16:")]
IN_THREE = ("        loss.backward()\n", "".join(f"        {line}\n" for line in ACCUMULATED).replace("<N>", "3"))
IN_TWO = ("        loss.backward()\n", """
        with model.no_sync():
            (nn.functional.mse_loss(model(x[::2]), y[::2]) / 2).backward()
        (nn.functional.mse_loss(model(x[1::2]), y[1::2]) / 2).backward()
""")
GAN = [("optimizer = ", "other = nn.Linear(1, 1)\nsecond = torch.optim.Adam(other.parameters(), 0.01)\noptimizer = "),
       (STEP, f"{STEP}        second.zero_grad()\n        other(model(x).detach()).square().mean().backward()\n"
              "        second.step()\n")]
RECURRENT = [(MODEL, "nn.LSTM(4, 8, num_layers=2, dropout=0.5, proj_size=1, batch_first=True)"),
             ("model(x)", "model(x[:, None])[0][:, 0]")]
ENDLESS = [("import torch\n", "import itertools\nimport torch\nfrom torch.utils.data import RandomSampler\n"),
           ("in loader:", "in itertools.islice(loader, 6):")]
ENDLESS_SAMPLER = "sampler=RandomSampler(data, replacement=True, num_samples=10**10)"
SECOND_PASS = "    with torch.no_grad():\n        for x, y in loader:\n            total += 0 * {}(x).sum().item()\n"
DRAWN_WHOLE = (LOSS, LOSS.replace("x)", "x + torch.randn_like(x))"))
TIMES = [("import torch\n", "import time\nfrom datetime import datetime\nbegin = time.time()\nimport torch\n"),
         ("    print(f", "    print(time.strftime('%H:%M:%S'), datetime.now(), int(time.time() - begin) // 100, 's', f")]
FLOATS = ("x = torch.randn(144, 4)\n", "x = torch.from_numpy(numpy.random.RandomState(0).randn(144, 4).astype('float32'))\n")

NOT, SAME = "NOT THE SAME TRAINING ", "the same training: 12 steps .*weights within .e-1. .*2 of 2 lines the same"
LIVE = {  # status, what is said, the two scripts, and with how many processes
    "a loss that is a sum": (1, NOT + "step 1: all gradients are 0.5 times those of train.py, which is 1 / the number", both(
        (LOSS, 'nn.functional.mse_loss(model(x), y, reduction="sum") / 50')), 2),
    "unequal parts": (1, NOT + "step 6: a mean over parts that are not equal", both(LESS, after=[WHOLE, PART]), 2),
    "not shared out": (1, "the same training, but not shared out: 12 steps with 2 processes", both(after=[WHOLE]), 2),
    "a shuffle by each rank": (1, NOT + "step 1: ranks 0 and 1 shuffle differently, each by random numbers", both(after=[
        ("optimizer = ", "torch.manual_seed(rank)\noptimizer = "), ("24 // world_size, sampler=sampler", "24, shuffle=True"),
        PART]), 2),
    "no set_epoch": (1, NOT + "step 7: .*set_epoch was not called", both(after=[("    sampler.set_epoch(epoch)\n", "")]), 2),
    "another sampler": (1, NOT + "step 1: the samples are drawn by WeightedRandomSampler in train.py, by Distributed", both(
        before=[("24, shuffle=True", "24, sampler=torch.utils.data.WeightedRandomSampler(1 + torch.arange(144), 144)")]), 2),
    "repeated samples": (1, NOT + r"step 6: samples are repeated.*\[13, 4\]", both(LESS), 2),
    "drop_last": (1, NOT + r"step 6: an epoch had 6 steps in train.py and now has 5: DataLoader\(drop_last=True\)", both(
        LESS, after=[("sampler=sampler", "sampler=sampler, drop_last=True")]), 2),
    "no DDP": (1, NOT + "step 1: ranks 0 and 1 .*in no DDP.*Training goes through", both(after=NO_DDP), 2),
    "noise": (1, NOT + r"step 1: both draw random numbers in each step, by torch \(at train.py:16\)", both(NOISE), 2),
    "augmentation": (1, NOT + r"step 1: both draw random numbers in each step, by numpy \(at train.py:\d+\)", both(
        NUMPY, AUGMENTED, ("manual_seed(0)\n", "manual_seed(0)\nnumpy.random.seed(0)\n")), 2),
    "clipped early": (1, NOT + "step 1: gradients are clipped before they are averaged, at norms of", both(
        CLIP, after=[*NO_DDP, (STEP, AVERAGE + STEP)]), 2),
    "a score by rank": (1, NOT + "step 6: ReduceLROnPlateau is given a different figure on each rank", both(
        PLATEAU, before=[SCORE], after=[(REDUCE, REDUCE + "    plateau.step(total + rank)\n")]), 2),
    "targets of a list": (1, NOT + r"step 1: Net 1\[\].y goes with other samples of Net 0", both(*LIST, after=[SWAPPED]), 2),
    "targets of a mapping": (1, NOT + "step 1: Net 0.labels.y goes with other samples of Net 0", both(
        *MAPPING, after=[SWAPPED]), 2),
    "forward, with samples by rank": (1, NOT + "step 1: other samples than train.py has in this step, in Sequential 0", both(
        NUMPY, ("model(x)", "model.forward(x)"), before=[BY_NUMPY], after=BY_RANK), 2),
    "a part of one sample": (1, "a part of one sample under BatchNorm", both(
        ("randn(144", "randn(122"), NORM, after=[WHOLE, PART]), 2),
    "an error": (1, r"it fails after \d, .* steps of the ranks: .*train_ddp.py:\d+: ValueError: my own. See \"Errors", both(
        after=[(STEP, STEP + "        if rank == 1 and epoch == 1:\n            raise ValueError('my own')\n")]), 2),
    "float32": (0, "weights within .e-0[78] .*compared in float32, because the script does not work in float64: ", both(
        (MODEL, MODEL + ".float()"), ("model(x)", "model(x.float())")), 2),
    "data in float32": (0, SAME, both(NUMPY, FLOATS), 2),
    "BatchNorm and dropout": (0, 'not BatchNorm, dropout .*BatchNorm kept its statistics, .*dropout was 0, so', both(NORM), 2),
    "a recurrent model": (0, SAME, both(*RECURRENT), 2),
    "lists": (0, SAME, both(*LIST), 3),
    "loader workers": (0, SAME, both(before=[("(data, 24", "(data, 24, num_workers=1")],
                                     after=[("24 // world_size", "24 // world_size, num_workers=1")]), 2),
    "an endless sampler": (0, SAME, both(before=[("shuffle=True", ENDLESS_SAMPLER), *ENDLESS], after=[
        ("24 // world_size, sampler=sampler", f"24, {ENDLESS_SAMPLER}"), PART, *ENDLESS]), 3),
    "accumulation": (0, SAME, both(before=[IN_THREE], after=[IN_TWO]), 3),
    "a closure": (0, SAME, both(LBFGS, before=[(STEPS, CLOSURE)], after=[(STEPS, REDUCED)]), 2),
    "two optimizers": (0, "the same training: 24 steps", both(*GAN, after=[
        ("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"), ("del model", "del model, other")]), 2),
    "a second pass over the samples": (0, SAME, both(
        before=[("    print(f", SECOND_PASS.format("model") + "    print(f")],
        after=[(REDUCE, SECOND_PASS.format("model.module") + REDUCE)]), 3),
    "a first look": (0, SAME, both(("for epoch in", "assert next(iter(loader))[0].shape[1:] == (4,)\nfor epoch in")), 3),
    "epochs from 1": (0, SAME, both(after=[("set_epoch(epoch)", "set_epoch(epoch + 1)")]), 2),
    "some of the samples": (0, "the same training: 6 steps", both(before=[("/ len(data)", "/ 72"), (
        "shuffle=True", "sampler=torch.utils.data.SubsetRandomSampler(range(0, 144, 2))")], after=[
        ("sampler = ", "data = torch.utils.data.Subset(data, range(0, 144, 2))\nsampler = ")]), 2),
    "drawn for the whole batch": (0, SAME, both(before=[DRAWN_WHOLE], after=[
        ("24 // world_size, sampler=sampler", "24, shuffle=True"),
        (PART[0], PART[0] + f"        noise = torch.randn(len(x), 4)[rank::world_size]\n{PART[1][len(PART[0]):]}"),
        (LOSS, LOSS.replace("x)", "x + noise)"))]), 2),
    "times": (0, SAME, both(*TIMES, after=[("begin = time.time()", "begin = time.time() - 700")]), 2)}


@pytest.mark.parametrize("shape", LIVE)
def test_a_fault_is_named_with_its_step_and_its_cause_and_what_trains_the_same_is_not_blamed(shape):
    status, says, scripts, processes = LIVE[shape]
    found, said = check(*scripts, processes)
    assert found == status and re.search(says, said)


STAND_INS = {  # packages that a test must not need: they keep what they are given to themselves
    "tensorboardX/__init__.py": "", "wandb.py": "def init(): pass\ndef log(data, step=None): pass\n",
    "tensorboardX/writer.py": """class SummaryWriter:
    def __init__(self, folder): pass
    def add_scalar(self, tag, scalar_value, global_step=None): pass
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None): pass
"""}
LOG = ("import torch\n", "import wandb\nfrom tensorboardX.writer import SummaryWriter\nimport torch\n")
FIGURES = "SummaryWriter('runs').add_scalar('{0}', {0}, epoch); wandb.log({{'{0}': {0}, 'epoch': epoch}})\n"


def test_figures_for_tensorboard_and_wandb_are_compared():
    Path("tensorboardX").mkdir()
    for name, text in STAND_INS.items():
        Path(name).write_text(text)
    scripts = both(LOG, before=[("    print(f", f"    mean = total / 144; {FIGURES.format('mean')}    print(f")],
                   after=[("        print(f", f"        mean = total.item() / 144; {FIGURES.format('mean')}        print(f")])
    status, said = check(*scripts)
    assert status == 0 and "TensorBoard: 2 figures the same; wandb: 4 figures the same" in said
    status, said = check(scripts[0], changed(scripts[1], ("mean = total.item() / 144", "mean = loss.item()")))
    assert status == 1 and all(re.search(rf"{to}: mean is \S+ instead of", said) for to in ("TensorBoard", "wandb"))


def test_neither_a_module_named_wandb_nor_a_tensor_of_a_generator_s_shape_is_mistaken():
    Path("wandb.py").write_text("offline = True\n")
    state = "{'state': torch.get_rng_state(), 'buffer': torch.ones(torch.get_rng_state().shape)}"
    run = record("import wandb\n" + changed(BEFORE, ("save(model.state_dict()", f"save({state}")))
    assert [*run.ranks[0].of(Saved)[0].tensors] == ["buffer"]
