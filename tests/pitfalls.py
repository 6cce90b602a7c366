"""Two ranks that make the well-known mistakes, and then do what README's table says instead."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made: imported later it would keep it alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, RandomSampler


def of_each_rank(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def equal_in_both(value):
    one, other = of_each_rank(value)
    return one == other


dist.init_process_group("gloo")
rank = dist.get_rank()

sampler = DistributedSampler(range(100), drop_last=True)
first = list(sampler)
assert list(sampler) == first
sampler.set_epoch(1)
assert list(sampler) != first
base = RandomSampler(range(100), generator=torch.Generator().manual_seed(1))
assert [i for pair in zip(*of_each_rank(list(sampler))) for i in pair] == list(base)

assert sum(of_each_rank(len(DistributedSampler(range(509), shuffle=False)))) == 510
assert sum(of_each_rank(len(range(rank, 509, 2)))) == 509

torch.manual_seed(0)
assert equal_in_both(torch.rand(8).tolist())
torch.manual_seed(rank)
assert not equal_in_both(torch.rand(8).tolist())

model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
assert list(model.state_dict()) == [f"module.{key}" for key in model.module.state_dict()]
model(torch.randn(8, 4)).sum().backward()
assert equal_in_both(model.module[0].weight.grad.tolist())
assert not equal_in_both(model.module[1].running_mean.tolist())
for buffer in model.buffers():
    dist.broadcast(buffer, src=0)
assert equal_in_both(model.module[1].running_mean.tolist())

del model
dist.destroy_process_group()
