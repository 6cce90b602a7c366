"""README's lines, the examples and a recipe, held by tools/check_conversion."""
import re
import sys
from pathlib import Path

import pytest
from launch import ROOT

sys.path[:0] = [str(ROOT / "tools/check_conversion"), str(ROOT / "tools/check_conversion/tests")]
from runs import check

PAIRS = {"waves": ("--epochs", "2", "--batch-size", "48"),
         "language_model": ("--epochs", "5"),  # after the third its learning rate falls
         "autoencoder": ("--epochs", "2"),
         "stream": ("--samples", "961"),
         "contrastive": ("--epochs", "2")}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_one_two_and_three_processes(pair):
    before, after = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    for processes in (1, 2, 3):
        status, said = check(before, after, processes, PAIRS[pair], name=f"{pair}_ddp.py")
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
    status, said = check(SCRIPT + ALONE, SCRIPT + lines, processes)
    assert status == 0 and "printed: 3 of 3 lines the same" in said and "saved: 3 files the same" in said


def test_a_recipe_is_held_by_the_check():
    Path("utils.py").write_text((ROOT / "utils.py").read_text())
    texts = [(ROOT / name).read_text() for name in ("single_gpu.py", "recipes/fsdp.py")]
    words = ("2", "1", "--batch-size", "480", "--device", "cpu")
    for processes in (1, 3):
        assert check(*texts, processes, words, name="by_fsdp.py")[0] == 0
