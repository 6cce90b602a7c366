"""Three ranks run the lines of code of docs/your_own_script.md, and do what one process does."""
import copy
import runpy

import torch
import torch.distributed as dist
import torch.distributed.nn
from chapters import block
from launch import ROOT
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler  # noqa: F401  for the block of WeightedSampler

Gather = runpy.run_path(f"{ROOT}/examples/contrastive_ddp.py")["Gather"]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


def check(model, alone):
    for one, whole in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(one.grad, whole.grad, rtol=0, atol=1e-12)


# Unequal and empty parts, and what is done with DDP's result
net = nn.Linear(4, 4)
net.head = nn.Linear(4, 3)
for samples in (9, 8, 2):  # the last part of two is empty
    batch, target = torch.randn(samples, 4), torch.randint(3, (samples,))
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters())
    whole = F.cross_entropy(alone.head(alone(batch)), target)
    whole.backward()
    exec(block("perhaps none").replace("model(batch[part])", "model.module.head(model(batch[part]))"))
    check(model, alone)
    torch.testing.assert_close(globals()["shown"], whole.detach())

# A mean with class weights and padding
alone, inputs, labels, weight = nn.Linear(4, 5), torch.randn(12, 4), torch.randint(5, (12,)), torch.rand(5)
labels[5:8] = -100
model = DDP(copy.deepcopy(alone))
F.cross_entropy(alone(inputs), labels, weight).backward()
scores, labels = model(inputs[rank::world_size]), labels[rank::world_size]
exec(block("count = weight"))
check(model, alone)

# A ratio of sums, and a gradient penalty
inputs, masks = torch.randn(13, 4, requires_grad=True), torch.randint(2, (13, 1)).double()
alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
model, scores = DDP(copy.deepcopy(alone)), alone(inputs)
(1 - 2 * (scores * masks).sum() / (scores + masks).sum()).backward()
scores, target = model(inputs[rank::world_size]), masks[rank::world_size]
exec(block("overlap, area = Gather"))
check(model, alone)
for net, rows in ((alone, slice(12)), (model, slice(rank, 12, world_size))):
    net.zero_grad()
    slope, = torch.autograd.grad(net(inputs[rows]).sum(), inputs, create_graph=True)
    (net(inputs[rows]).square().mean() + (slope[rows].norm(dim=1) - 1).square().mean()).backward()
check(model, alone)

# A weighted sampler
weights = torch.rand(30)
exec(block("class WeightedSampler"))
for epoch in range(2):
    order = torch.multinomial(weights, 30, replacement=True, generator=torch.Generator().manual_seed(epoch)).tolist()
    sampler = globals()["WeightedSampler"](range(30), drop_last=True)
    sampler.set_epoch(epoch)
    assert [*sampler] == order[rank::world_size]

# Predictions, gathered
predictions = torch.arange(7)[rank::world_size]
exec(block("all_gather_object(gathered, predictions.cpu())"))
assert all(globals()["gathered"][i % world_size][i // world_size] == i for i in range(7))
