"""Each converted example trains as its original does, and the lines of code of docs/your_own_script.md do what it says."""
from pathlib import Path
from textwrap import indent

import pytest
import torch
from chapters import block
from launch import IN_FLOAT64, ROOT, killed_after, run
from results import check_same_bits, load

ON_THE_CPU = "import torch; torch.accelerator.current_accelerator = lambda *_, **__: None\n"  # for which there are always three
COMPARABLE = IN_FLOAT64 + ON_THE_CPU + """
import functools, itertools
torch.nn.Dropout.forward = lambda module, input: input
torch.nn.BatchNorm1d = functools.partial(torch.nn.GroupNorm, 1)  # of each sample, not of a rank's part of the batch
def as_distributed(sampler, epochs=itertools.count()):
    return iter(torch.randperm(len(sampler.data_source), generator=torch.Generator().manual_seed(next(epochs))).tolist())
torch.utils.data.RandomSampler.__iter__ = as_distributed
"""


@pytest.mark.parametrize("name, arguments", [  # which suit three processes
    ("waves", ["--epochs", 2]), ("steps", ["--max-steps", 20, "--batch-size", 36]),
    ("contrastive", ["--epochs", 1]), ("stream", ["--epochs", 2, "--samples", 961])])
def test_a_converted_example_trains_prints_and_saves_the_same_with_three_processes(name, arguments, folder, monkeypatch):
    printed, saved = [], []
    for file, processes in ((f"{name}.py", 0), (f"{name}_ddp.py", 3)):
        (folder / file).mkdir()
        monkeypatch.chdir(folder / file)
        printed.append(run(ROOT / "examples" / file, *arguments, processes=processes, before=COMPARABLE).stdout)
        saved.append({path.name: load(path) for path in Path().iterdir()})
    assert printed[1] == printed[0] != "" and saved[0]
    torch.testing.assert_close(saved[1], saved[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name, arguments, kill", [  # kill: after this backward pass
    ("waves", ["--epochs", 3], 65), ("steps", ["--max-steps", 20], 44)])
def test_a_killed_example_goes_on_as_if_it_had_never_stopped(name, arguments, kill):
    def go(checkpoint, **settings):
        job = run(ROOT / f"examples/{name}_ddp.py", *arguments, "--checkpoint", checkpoint, **settings)
        return {*job.stdout.splitlines()}

    whole = go("whole.pt", before=ON_THE_CPU)
    killed = go("run.pt", before=ON_THE_CPU + killed_after(kill), status=-9)
    resumed = go("run.pt", before=ON_THE_CPU)
    assert killed | resumed == whole and resumed < whole
    check_same_bits("run.pt", "whole.pt")


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
