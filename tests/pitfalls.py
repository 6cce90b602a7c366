"""Two ranks that make the well-known mistakes; rank 0 prints what each led to, as JSON."""
import json

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


dist.init_process_group("gloo")
rank, seen = dist.get_rank(), {}

sampler = DistributedSampler(range(100), drop_last=True)
seen["order without set_epoch"] = [list(sampler), list(sampler)]
sampler.set_epoch(1)
seen["order with set_epoch"] = list(sampler)
base = RandomSampler(range(100), generator=torch.Generator().manual_seed(1))
shares = of_each_rank(list(sampler))
seen["global order"], seen["global order of one process"] = [i for pair in zip(*shares) for i in pair], list(base)

seen["padded evaluation"] = sum(of_each_rank(len(DistributedSampler(range(509), shuffle=False))))
seen["exact evaluation"] = sum(of_each_rank(len(range(rank, 509, 2))))

torch.manual_seed(0)
seen["masks under equal seeds"] = of_each_rank(torch.rand(8).tolist())
torch.manual_seed(rank)
seen["masks under a seed for each rank"] = of_each_rank(torch.rand(8).tolist())

model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
seen["keys"], seen["keys of .module"] = list(model.state_dict()), list(model.module.state_dict())
model(torch.randn(8, 4)).sum().backward()
seen["running means"] = of_each_rank(model.module[1].running_mean.tolist())
for buffer in model.buffers():
    dist.broadcast(buffer, src=0)
seen["running means after broadcast"] = of_each_rank(model.module[1].running_mean.tolist())
seen["gradients"] = of_each_rank(model.module[0].weight.grad.tolist())

if rank == 0:
    print(json.dumps(seen), flush=True)
del model
dist.destroy_process_group()
