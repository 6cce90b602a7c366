"""README's lines, put into a classifier that has BatchNorm and a schedule and that resumes, train what one device trains."""
from pathlib import Path

import pytest
import torch
from chapters import block, in_ranks
from launch import load, train
from runs import check

SCRIPT = """import argparse
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=5)
args = parser.parse_args()
epochs, batch_size, device = args.epochs, 24, torch.device("cpu")
torch.manual_seed(args.seed)
targets = torch.randint(4, (253,))
images = torch.randn(253, 3, 8, 8) + torch.nn.functional.one_hot(targets, 8)[:, None, None] / 2
train_set, val_set = (TensorDataset(images[part], targets[part]) for part in (slice(204), slice(204, None)))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(288, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)


def train(model, loader):
    model.train()
    loss_sum = trained = 0
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum, trained = loss_sum + loss.item() * len(targets), trained + len(targets)
    return loss_sum, trained


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    found = [(model(images).argmax(dim=1) == targets).sum().item() for images, targets in loader]
    return sum(found), len(loader.dataset)


"""
ALONE = """train_loader = DataLoader(train_set, batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size)
for epoch in range(epochs):
    loss_sum, trained = train(model, train_loader)
    correct, tested = evaluate(model, val_loader)
    schedule.step()
    print(f"loss {loss_sum / trained:.4f} | accuracy {correct / tested:.2%}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(), "epoch": epoch + 1}, "run.pt.tmp")
    os.replace("run.pt.tmp", "run.pt")
"""
LINES = block("totals = torch.tensor([loss_sum")
APART = """import os
os.makedirs(os.environ["RANK"], exist_ok=True)  # each rank in a folder of its own: rank 0 alone finds the checkpoint
os.chdir(os.environ["RANK"])
"""


@pytest.mark.parametrize("processes", [2, 3])
def test_readmes_lines_are_the_same_training_batchnorm_included(processes):
    status, said = check(SCRIPT + ALONE, SCRIPT + LINES, processes)
    assert status == 0 and "not BatchNorm" not in said and "kept its statistics" not in said  # but over all ranks, as on GPUs
    assert "printed: 3 of 3 lines the same" in said and "saved: 3 files the same" in said


def test_readmes_lines_resume_where_rank_0_alone_has_the_checkpoint():
    Path("many.py").write_text(SCRIPT + LINES)
    printed = []
    for epochs, folder in ((3, "whole"), (2, "parts"), (3, "parts")):
        Path(folder).mkdir(exist_ok=True)
        printed.append(train(Path("many.py").resolve(), "--epochs", epochs, device=False, cwd=folder, before=APART).stdout)
    assert printed[1] + printed[2] == printed[0]
    torch.testing.assert_close(load("parts/0/run.pt"), load("whole/0/run.pt"), rtol=0, atol=0)


@pytest.mark.parametrize("whole", [6, 2])  # of which each of three processes takes two, or one
def test_a_loop_of_steps_trains_and_resumes_within_an_epoch_as_one_device_does(whole):
    in_ranks(f"""
import contextlib, types
from torch.utils.data import DistributedSampler, TensorDataset
args, batch, epochs = types.SimpleNamespace(seed=3), 2, 2
inputs, targets, net, criterion = torch.randn(75, 4), torch.randn(75, 1), nn.Linear(4, 1), nn.MSELoss()
train_set, saved = TensorDataset(inputs, targets), {{}}
os = types.SimpleNamespace(replace=lambda new, old: saved.update({{torch.load(new)["step"]: torch.load(new)}}))

def start(model, epoch_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * epoch_steps)

def run(checkpoint, save_steps):
    accumulation, alone = {whole}, copy.deepcopy(net)
    {block("epoch_steps = len(sampler)", 4)}
    optimizer, schedule = start(alone, epoch_steps)
    if checkpoint:
        alone.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
    step, model = checkpoint["step"] if checkpoint else 0, DDP(alone)
    {block("order[:] = [*sampler][done:", 4)}
    return alone.weight.detach(), epoch_steps, batch * accumulation * world_size

weight, epoch_steps, samples = run(None, 4)
assert samples == {12 if whole == 6 else 6}
alone = copy.deepcopy(net)
optimizer, schedule = start(alone, epoch_steps)
for epoch in range(epochs):
    order = torch.randperm(75, generator=torch.Generator().manual_seed(3 + epoch))
    for indices in order[:epoch_steps * samples].split(samples):
        optimizer.zero_grad()
        criterion(alone(inputs[indices]), targets[indices]).backward()
        optimizer.step()
        schedule.step()
torch.testing.assert_close(weight, alone.weight.detach())
sent = [dict(saved)]
dist.broadcast_object_list(sent)
assert [*sent[0]] == [*range(4, epochs * epoch_steps + 1, 4)]
for checkpoint in sent[0].values():  # within the first epoch, within the second, at the end
    torch.testing.assert_close(run(checkpoint, 100)[0], weight)
""")


def test_what_is_done_with_ddps_result_is_averaged_too_and_what_is_done_without_ddp_is_not():
    in_ranks("""
inputs, net = torch.randn(12, 4), nn.Linear(4, 4)
net.head = nn.Linear(4, 1)
net.head(net(inputs)).square().mean().backward()
for way, averaged in ((lambda model, x: model.module.head(model(x)), True),
                      (lambda model, x: model.module.head(model.module(x)), False)):
    model = DDP(copy.deepcopy(net))
    model.zero_grad()
    way(model, inputs[rank::world_size]).square().mean().backward()
    assert averaged == all(torch.allclose(one.grad, whole.grad) for one, whole in zip(model.parameters(), net.parameters()))
""", 2)
