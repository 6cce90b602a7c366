"""README's lines, put into a classifier that has BatchNorm and a schedule and that resumes, train what one device trains."""
import re
from pathlib import Path

import pytest
from chapters import block, in_ranks
from launch import IN_FLOAT64, check_equal, train

SCRIPT = """import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--seed", type=int, default=5)
parser.add_argument("--parts", type=int, default=1)
args = parser.parse_args()
epochs, batch_size, first_epoch = args.epochs, 24, 0
device = torch.device("cpu")
torch.manual_seed(args.seed)
targets = torch.randint(4, (253,))
images = torch.randn(253, 3, 8, 8) + torch.nn.functional.one_hot(targets, 8)[:, None, None] / 2
train_set, val_set = (TensorDataset(images[part], targets[part]) for part in (slice(204), slice(204, None)))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.9), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)


def forward(model, images):
    if args.parts == 1:
        return model(images)
    scores = torch.zeros(len(images), 4)  # BatchNorm sees a part of the batch, as each rank on a CPU does
    for part in range(args.parts):  # and keeps the statistics of the first
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if part > 0 else {}
        scores[part::args.parts] = torch.func.functional_call(model, buffers, images[part::args.parts])
    return scores


def train(model, loader):
    model.train()
    loss_sum = trained = 0
    for images, targets in loader:
        loss = nn.functional.cross_entropy(forward(model, images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum, trained = loss_sum + loss.item() * len(targets), trained + len(targets)
    return loss_sum, trained


@torch.no_grad()
def evaluate(model, loader):
    model.eval()  # probabilities instead of right answers: they show a small difference too
    found = [model(images).softmax(dim=1).gather(1, targets[:, None]).sum().item() for images, targets in loader]
    return sum(found), len(loader.dataset)


"""
ALONE = """sampler = RandomSampler(train_set, generator=torch.Generator())
train_loader, val_loader = DataLoader(train_set, batch_size, sampler=sampler), DataLoader(val_set, batch_size)
for epoch in range(epochs):
    sampler.generator.manual_seed(args.seed + epoch)
    loss_sum, trained = train(model, train_loader)
    correct, tested = evaluate(model, val_loader)
    schedule.step()
    print(f"loss {loss_sum / trained:.4f} | accuracy {correct / tested:.2%}")
torch.save({"model": model.state_dict()}, "alone.pt")
"""
APART = """import os
os.makedirs(os.environ["RANK"], exist_ok=True)  # each rank in a folder of its own: rank 0 alone finds the checkpoint
os.chdir(os.environ["RANK"])
""" + IN_FLOAT64


@pytest.mark.parametrize("processes", [2, 3])
def test_readmes_lines_train_and_resume_as_one_device_does_where_rank_0_alone_has_the_checkpoint(processes):
    Path("alone.py").write_text(SCRIPT + ALONE)
    Path("many.py").write_text(SCRIPT + block("totals = torch.tensor([loss_sum"))
    alone = train(Path("alone.py").resolve(), "--epochs", 6, "--parts", processes, processes=0, device=False, before=IN_FLOAT64)
    assert len(set(alone.stdout.splitlines())) == 6
    assert all(re.fullmatch(r"loss \d\.\d{4} \| accuracy \d\d\.\d\d%", line) for line in alone.stdout.splitlines())
    printed = [train(Path("many.py").resolve(), "--epochs", epochs, processes=processes, device=False, before=APART,
                     CUDA_VISIBLE_DEVICES="").stdout for epochs in (4, 6)]  # the second run resumes after four epochs
    assert "".join(printed) == alone.stdout
    check_equal("0/run.pt", "alone.pt")


@pytest.mark.parametrize("processes", [2, 3])
def test_a_loop_of_steps_trains_and_resumes_within_an_epoch_as_one_device_does(processes):
    in_ranks(f"""
from torch.utils.data import DistributedSampler, TensorDataset
inputs, targets, net, criterion = torch.randn(75, 4), torch.randn(75, 1), nn.Linear(4, 1), nn.MSELoss()
train_set, batch, whole_accumulation, epochs = TensorDataset(inputs, targets), 2, 6, 2  # 6 steps an epoch, 3 samples left
saved = {{}}

def start(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

def resume(step, save_steps):
    accumulation, alone = whole_accumulation, copy.deepcopy(net)
    optimizer, schedule = start(alone)
    if step:
        for one, state in zip((alone, optimizer, schedule), saved[step]):
            one.load_state_dict(state)
    model = DDP(alone)

    def save(step):
        saved[step] = copy.deepcopy([one.state_dict() for one in (alone, optimizer, schedule)])

    {block("order[:] = [*sampler][done:", 4)}
    return alone.weight.detach()

alone = copy.deepcopy(net)
optimizer, schedule = start(alone)
for epoch in range(epochs):
    order = torch.randperm(75, generator=torch.Generator().manual_seed(epoch))[:72]
    for indices in order.split(batch * whole_accumulation):
        optimizer.zero_grad()
        criterion(alone(inputs[indices]), targets[indices]).backward()
        optimizer.step()
        schedule.step()
torch.testing.assert_close(resume(0, 4), alone.weight.detach())
saved = [saved]
dist.broadcast_object_list(saved)
saved, = saved
assert [*saved] == [4, 8, 12]
for step in (4, 8):  # within the first epoch and the second
    torch.testing.assert_close(resume(step, 100), alone.weight.detach())
""", processes)


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
