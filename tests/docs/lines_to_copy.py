"""Three ranks run the lines of code of docs/your_own_script.md, and do what one process does."""
import copy
import itertools
import runpy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from chapters import block
from launch import ROOT
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler  # noqa: F401  for the block of WeightedSampler

Gather, Numbers = (runpy.run_path(f"{ROOT}/examples/{file}_ddp.py")[name]
                   for file, name in [("contrastive", "Gather"), ("stream", "Numbers")])
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
part = slice(rank, None, world_size)
alone = torch.nn.Linear(4, 5)
model = DDP(copy.deepcopy(alone))
optimizer = torch.optim.SGD(model.parameters(), lr=0)


def check(text, whole):
    """The block gives the model of all ranks the gradients that the loss of the whole batch gives the one alone."""
    alone.zero_grad()
    model.zero_grad()
    whole.backward()
    exec(block(text), globals())
    for one, other in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


for samples in (9, 8, 2):  # equal parts, unequal ones, and an empty one
    batch, target = torch.randn(samples, 4), torch.randint(5, (samples,))
    whole = F.cross_entropy(alone(batch), target)
    check("perhaps none", whole)
    torch.testing.assert_close(globals()["shown"], whole.detach())

batch, target, weight = torch.randn(12, 4), torch.randint(5, (12,)), torch.rand(5)
target[5:8] = -100
scores, labels = model(batch[part]), target[part]
check("count = weight", F.cross_entropy(alone(batch), target, weight))
whole = torch.randn(11, 4)
predictions = whole[part]
exec(block("all_gather_object(gathered"))
torch.testing.assert_close(globals()["ordered"], whole)

masks, labels = torch.randint(2, (12, 5)), torch.randint(5, (12,))
mine, whole = model(batch[part]), alone(batch)
scores, target = mine.sigmoid(), masks[part]
cross_entropy = F.cross_entropy(mine, labels[part], reduction="sum") / 12
dice = 1 - 2 * (whole.sigmoid() * masks).sum() / (whole.sigmoid() + masks).sum()
check("overlap, area = Gather", dice + F.cross_entropy(whole, labels))

train_set, your_weights = range(30), [*range(30)]
exec(block("class WeightedSampler"))
sampler = globals()["sampler"]
sampler.set_epoch(1)
order = torch.multinomial(torch.arange(30).double(), 30, replacement=True, generator=torch.Generator().manual_seed(1))
assert [*sampler] == order[part].tolist()


def read(number):
    """What one of two loader workers of this rank reads."""
    Numbers.__iter__.__globals__["get_worker_info"] = lambda: SimpleNamespace(id=number, num_workers=2)
    return [*Numbers(31, rank, world_size)]


Numbers.read, parts = lambda self: iter(range(self.samples)), [None] * world_size
dist.all_gather_object(parts, read(0) + read(1))
assert sorted(itertools.chain(*parts)) == [*range(31)]  # each sample once
