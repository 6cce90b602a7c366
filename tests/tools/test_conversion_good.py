"""tools/check_conversion.py finds nothing where all is well."""
import re
from pathlib import Path

import pytest
from launch import ROOT
from pairs import AFTER, BEFORE, CURES, LOSS, MODEL, NORM, PART, REDUCE, STEP, changed, judge


def of_parts(parts, whole):
    """Gradient accumulation in the place of one backward."""
    lines = ["        loss.backward()\n".replace("loss", f"(nn.functional.mse_loss(model(x[{part}]), y[{part}]) / {len(parts)})")
             for part in parts]
    if not whole:
        lines[:-1] = ["        with model.no_sync():\n    " + line for line in lines[:-1]]
    return [("        loss.backward()\n", "".join(lines))]


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
LOOK = ("for epoch in", "assert next(iter(loader))[0].shape[1:] == (4,)\nfor epoch in")
SCALED = ("data = TensorDataset(x, x.sum(dim=1, keepdim=True))\n", """
class Scaled(nn.Module):
    def forward(self, x):
        return (x - 0.1) / 1.1


class Data(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return scale(x), y


scale, data = Scaled(), Data(x, x.sum(dim=1, keepdim=True))
""")
DRAWN_WHOLE = (LOSS, LOSS.replace("x)", "x + torch.randn_like(x))"))
LAZY = MODEL.replace("nn.Linear(4, 8)", "nn.LazyLinear(8)")
GOOD = {  # what is changed in the first script, and in the converted one
    "adam": [[("SGD(model.parameters(), lr=0.05)", "Adam(model.parameters(), lr=0.01)"), NORM]] * 2,
    "adamw": [[("SGD(model.parameters(), lr=0.05)", "AdamW(model.parameters(), lr=0.01)"), NORM]] * 2,
    "recurrent": [RECURRENT] * 2,
    "a lazy layer": [[(MODEL, LAZY), ("    for x, y in loader:\n", "    for x, y in loader:\n        torch.manual_seed(1)\n")],
                     [(f"model = DDP({MODEL})", f"model = {LAZY}\ntorch.manual_seed(1)\nmodel(x[:1])\nmodel = DDP(model)")]],
    "scaler": [SCALER] * 2,
    "lbfgs": [[LBFGS, (STEPS, CLOSURE)], [LBFGS, (STEPS, REDUCED)]],
    "workers": [[("(data, 24", "(data, 24, num_workers=1")], [("24 // world_size", "24 // world_size, num_workers=1")]],
    "an endless sampler": [[*ENDLESS, ("shuffle=True", ENDLESS_SAMPLER)],
                           [("24 // world_size, sampler=sampler", f"24, {ENDLESS_SAMPLER}"), PART, *ENDLESS]],
    "accumulation": [of_parts([":8", "8:16", "16:"], True), of_parts([":len(x) // 2", "len(x) // 2:"], False)],
    "two optimizers": [GAN, [*GAN, ("other = nn.Linear(1, 1)", "other = DDP(nn.Linear(1, 1))"),
                             ("del model", "del model, other")]],
    "a second pass over the training set": [[("    print(f", "    with torch.no_grad():\n        for x, y in loader:\n"
                                             "            total += 0 * model(x).sum().item()\n    print(f")], [
        (REDUCE, "    with torch.no_grad():\n        for x, y in loader:\n            total += 0 * model.module(x).sum()\n"
         + REDUCE)]],
    "a first look at a batch": [[LOOK], [LOOK]],
    "epochs from 1, beside another sampler": [[], [("set_epoch(epoch)", "set_epoch(epoch + 1)"), (
        REDUCE, "    for x, y in DataLoader(data, 24, sampler=DistributedSampler(data, shuffle=False)):\n"
                "        total += 0 * model.module(x).detach().sum()\n" + REDUCE)]],
    "a loader for each epoch": [[("    total = 0\n", "    total = 0\n    loader = DataLoader(data, 24, shuffle=True)\n")], []],
    "a module in the dataset": [[SCALED], [SCALED]],
    "some of the samples": [[("/ len(data)", "/ 72"), (
        "shuffle=True", "sampler=torch.utils.data.SubsetRandomSampler(range(0, 144, 2))")], [
        ("sampler = ", "data = torch.utils.data.Subset(data, range(0, 144, 2))\nsampler = ")]],
    "numbers drawn for the whole batch": [[DRAWN_WHOLE], [("24 // world_size, sampler=sampler", "24, shuffle=True"), (
        PART[0], PART[0] + f"        noise = torch.randn(len(x), 4)[rank::world_size]\n{PART[1][len(PART[0]):]}"),
        (LOSS, LOSS.replace("x)", "x + noise)"))]],
    "printed more": [[], [("del model", "print('rank', rank, 'of', world_size, 'is done')\ndel model")]]}
PAIRS = {"waves": ["--epochs", "2", "--batch-size", "48"],
         "language_model": ["--epochs", "5"],  # after the third its learning rate falls
         "autoencoder": ["--epochs", "2"],
         "stream": ["--samples", "961"],
         "contrastive": ["--epochs", "2"]}


AT_THREE_TOO = {  # which were once refused, or whose parts are unequal then
    "a second pass over the training set", "a first look at a batch", "epochs from 1, beside another sampler",
    "a module in the dataset", "accumulation", "an endless sampler"}


@pytest.mark.parametrize("shape, processes", [*((shape, 2) for shape in GOOD), *((shape, 3) for shape in sorted(AT_THREE_TOO))])
def test_what_trains_the_same_is_not_blamed(shape, processes):
    status, said = judge(changed(BEFORE, *GOOD[shape][0]), changed(AFTER, *GOOD[shape][1]), processes)
    assert status == 0 and said.startswith("the same training: ")


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_one_two_and_three_processes(pair):
    before, after = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    for processes in (1, 2, 3):
        status, said = judge(before, after, processes, *PAIRS[pair], name=f"{pair}_ddp.py", CHECK_CONVERSION_FLOAT64=1)
        assert status == 0 and re.search(r"lines the same .*saved: \d files? the same", said)
        assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


SCRIPT = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = torch.randn(240, 8), torch.randint(3, (240,))
train_set, val_set = (TensorDataset(images[part], labels[part]) for part in (slice(192), slice(192, None)))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epochs, batch_size = 3, 24


def train(model, loader):
    model.train()
    loss_sum = trained = 0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum, trained = loss_sum + loss.item() * len(labels), trained + len(labels)
    return loss_sum, trained


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    found = [(model(images).argmax(dim=1) == labels).sum().item() for images, labels in loader]
    return sum(found), len(loader.dataset)


"""
ALONE = """train_loader = DataLoader(train_set, batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size)
for epoch in range(epochs):
    loss_sum, trained = train(model, train_loader)
    correct, tested = evaluate(model, val_loader)
    print(f"loss {loss_sum / trained:.4f} | accuracy {correct / tested:.2%}")
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.parametrize("processes", [2, 3])
def test_readmes_lines_put_into_a_small_script_are_the_same_training(processes):
    lines, = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    status, said = judge(SCRIPT + ALONE, SCRIPT + lines, processes)
    assert status == 0 and "printed: 3 of 3 lines the same" in said and "saved: 3 files the same" in said


def test_where_rounding_has_grown_large_the_verdict_says_from_which_step_on():
    status, said = judge(*(changed(text, *changes) for text, changes in zip((BEFORE, AFTER), GOOD["lbfgs"])), 2)
    assert status == 0 and re.search(r"from step [2-5] on rounding alone moves the weights by 1% .*--float64 sees farther", said)


def test_what_stood_still_is_named_with_what_to_do():
    said = judge(changed(BEFORE, NORM), changed(AFTER, NORM), 2)[1]
    assert 'BatchNorm kept its statistics, so it was not compared. See "What your script has"' in said
    assert said.endswith('dropout was 0, so it was not compared. See "Random numbers" in docs/your_own_script.md.')
    mixed = (f"loss = {LOSS}", f"with torch.autocast('cpu'):\n            loss = {LOSS}")
    assert "autocast was off" in judge(changed(BEFORE, mixed), changed(AFTER, mixed), 2)[1]


def test_each_cure_of_the_chapter_is_one_that_a_verdict_names():
    tool = "".join(file.read_text() for file in (ROOT / "tools/conversion_check").glob("*.py"))
    assert len(CURES) > 10 and all(f'"{cure}"' in tool for cure in CURES)


def test_a_recipe_is_held_by_the_check():
    Path("utils.py").write_text((ROOT / "utils.py").read_text())
    texts = [(ROOT / name).read_text() for name in ("single_gpu.py", "recipes/fsdp.py")]
    words = ["2", "1", "--batch-size", "480", "--device", "cpu"]
    for processes in (1, 3):
        assert judge(*texts, processes, *words, name="by_fsdp.py")[0] == 0
