"""Learn from pairs alone which words describe which wave, one process per GPU:
torchrun --standalone --nproc_per_node=2 examples/contrastive_ddp.py --epochs 10"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; import it before the group exists, or gloo may abort at exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def ddp_setup():
    found = torch.accelerator.current_accelerator(check_available=True)
    if not found or found.type == "mps":  # a Mac's GPU has no collectives
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(found.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # this process's default GPU, instead of GPU 0
    dist.init_process_group(device_id=device)  # selects nccl for NVIDIA and AMD, xccl for Intel
    return device


def load_data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    traits = torch.rand(samples, 3, generator=generator)
    words = (10 * traits).long() + torch.tensor([0, 10, 20])  # one of ten for each trait
    frequency, phase, height = traits.split(1, dim=1)
    angle = math.pi * ((2 + 4 * frequency) * torch.linspace(0, 1, 64) + phase)
    waves = (1 + height) * angle.sin() + 0.1 * torch.randn(samples, 64, generator=generator)
    return TensorDataset(waves, words)


class Gather(torch.autograd.Function):  # torch.distributed.nn's all_gather is deprecated
    @staticmethod
    def forward(ctx, mine):
        parts = mine.new_empty(dist.get_world_size(), *mine.shape)
        dist.all_gather(list(parts), mine.contiguous())
        return parts.flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)  # every rank's loss depends on the features of this rank
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.listen = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
        self.read = nn.Sequential(nn.EmbeddingBag(30, 64), nn.GELU(), nn.Linear(64, 32))
        self.log_scale = nn.Parameter(torch.tensor(2.0))  # log of 1 / temperature, learned

    def forward(self, waves, words):
        heard, told = F.normalize(self.listen(waves)), F.normalize(self.read(words))
        return heard, told, self.log_scale.exp()


def contrastive_loss(heard, told, scale):
    scores = scale * heard @ told.t()  # each wave with the words of every wave in the batch
    pairs = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2


def train_epoch(model, loader, optimizer, device):
    model.train()
    loss_sum = torch.zeros((), device=device)
    for waves, words in loader:
        heard, told, scale = model(waves.to(device), words.to(device))
        heard, told = Gather.apply(heard), Gather.apply(told)  # separately, so pairs stay aligned
        loss = contrastive_loss(heard, told, scale)  # of the whole batch, on every rank
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()  # not loss.item(), which waits for the GPU
    return loss_sum / len(loader)


@torch.no_grad()
def evaluate(model, val_set, device):
    model.eval()
    waves, words = val_set.tensors
    heard, told, _ = model(waves.to(device), words.to(device))
    found = (heard @ told.t()).argmax(dim=1) == torch.arange(len(val_set), device=device)
    return found.sum() / len(val_set)


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = load_data(4800, seed=0), load_data(397, seed=1)
    sampler = DistributedSampler(train_set, drop_last=True)  # shuffles; drop_last: no sample twice
    assert args.batch_size % world_size == 0, f"--batch-size must be a multiple of {world_size}"
    train_loader = DataLoader(
        train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = Matcher().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model = DDP(model)  # the temperature is in it, so its gradient is averaged too

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # a new order each epoch
        loss = train_epoch(model, train_loader, optimizer, device)
        accuracy = evaluate(model.module, val_set, device)  # all samples, on every rank
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | loss {loss:.4f} "
                  f"| accuracy {accuracy:.2%}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--save", default="contrastive.pt")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    device = ddp_setup()
    main(args, device)
    dist.destroy_process_group()  # after main, because its model keeps the group alive
