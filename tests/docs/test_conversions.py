"""Each converted example trains as its original does, and the lines of code of docs/your_own_script.md do what it says."""
import re
from pathlib import Path
from textwrap import indent

import pytest
from chapters import block
from launch import ROOT, run
from runs import check, check_resuming

EXAMPLES = {  # and arguments that suit three processes
    "waves": ["--epochs", "2"], "steps": ["--max-steps", "20", "--batch-size", "36"],
    "contrastive": ["--epochs", "1"], "stream": ["--epochs", "1", "--samples", "961"]}


def read(name):
    return (ROOT / f"examples/{name}.py").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_converted_example_trains_prints_and_saves_the_same_with_three_processes(name):
    original, converted = read(name), read(f"{name}_ddp")
    status, said = check(original, converted, 3, EXAMPLES[name], name=f"{name}_ddp.py", batchnorm="sync")
    assert status == 0 and re.search(r"lines? the same .*written: (\d) of \1 files? the same", said)
    assert "not compared: BatchNorm" not in said  # all ranks' is compared, as on GPUs


@pytest.mark.parametrize("name, arguments", [("waves", ["--epochs", 4]), ("steps", ["--max-steps", 40])])
def test_a_killed_example_goes_on_as_if_it_had_never_stopped(name, arguments):
    status, said = check_resuming(read(f"{name}_ddp"), *arguments)
    assert status == 0, said


PARTS = {  # what three ranks do
    "unequal and empty parts, and what is done with DDP's result": f"""
net = nn.Linear(4, 4)
net.head = nn.Linear(4, 3)
for samples in (9, 8, 2):  # the last part is empty
    batch, target = torch.randn(samples, 4), torch.randint(3, (samples,))
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters())
    whole = F.cross_entropy(alone.head(alone(batch)), target)
    whole.backward()
    {indent(block("perhaps none"), "    ").strip().replace("model(batch[part])", "model.module.head(model(batch[part]))")}
    check(model, alone)
    torch.testing.assert_close(shown, whole.detach())
""",
    "a mean with class weights and padding": f"""
alone, inputs, labels, weight = nn.Linear(4, 5), torch.randn(12, 4), torch.randint(5, (12,)), torch.rand(5)
labels[5:8] = -100
model = DDP(copy.deepcopy(alone))
F.cross_entropy(alone(inputs), labels, weight).backward()
scores, labels = model(inputs[rank::world_size]), labels[rank::world_size]
{block("count = weight")}
check(model, alone)
""",
    "a ratio of sums, and a gradient penalty": f"""
inputs, masks = torch.randn(13, 4, requires_grad=True), torch.randint(2, (13, 1)).double()
alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
model, scores = DDP(copy.deepcopy(alone)), alone(inputs)
(1 - 2 * (scores * masks).sum() / (scores + masks).sum()).backward()
scores, target = model(inputs[rank::world_size]), masks[rank::world_size]
{block("overlap, area = Gather")}
check(model, alone)
for net, rows in ((alone, slice(12)), (model, slice(rank, 12, world_size))):
    net.zero_grad()
    slope, = torch.autograd.grad(net(inputs[rows]).sum(), inputs, create_graph=True)
    (net(inputs[rows]).square().mean() + (slope[rows].norm(dim=1) - 1).square().mean()).backward()
check(model, alone)
""",
    "a weighted sampler": f"""
from torch.utils.data import DistributedSampler
weights = torch.rand(30)
{block("class WeightedSampler")}
for epoch in range(2):
    order = torch.multinomial(weights, 30, replacement=True, generator=torch.Generator().manual_seed(epoch)).tolist()
    sampler = WeightedSampler(range(30), drop_last=True)
    sampler.set_epoch(epoch)
    assert [*sampler] == order[rank::world_size]
""",
    "predictions gathered": f"""
predictions = torch.arange(7)[rank::world_size]
{block("all_gather_object(gathered, predictions.cpu())")}
assert all(gathered[i % world_size][i // world_size] == i for i in range(7))
"""}


IN_RANKS = f"""import copy
import runpy
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

Gather = runpy.run_path("{ROOT}/examples/contrastive_ddp.py")["Gather"]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

def check(model, alone):
    for one, whole in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(one.grad, whole.grad, rtol=0, atol=1e-12)

def main():
    %s

main()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", PARTS)
def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does(name):
    Path("ranks.py").write_text(IN_RANKS % indent(PARTS[name], "    "))
    run(Path("ranks.py").resolve(), processes=3)
