"""Train on one machine; torchrun starts one process per GPU:
torchrun --standalone --nproc_per_node=4 -m recipes.accumulate 50 10
Each batch in parts that fit into memory: see docs/recipes.md"""
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import utils

PART = 30  # samples per backward in each process: as many as fit into memory


def ddp_setup(args):
    if args.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # this process's default GPU, instead of GPU 0
    dist.init_process_group(device_id=device)  # selects nccl for NVIDIA and AMD, xccl for Intel
    return device


def train_epoch(model, loader, optimizer, device):
    model.train()
    sums = torch.zeros(2, device=device)  # loss, samples
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        for start in range(0, len(labels), PART):
            part = slice(start, start + PART)
            # Gradients add up here, and cross the network only in the last part's backward.
            with nullcontext() if part.stop >= len(labels) else model.no_sync():
                loss = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
                (loss / len(labels)).backward()
            sums[0] += loss.detach()  # not loss.item(), which waits for the GPU
        optimizer.step()
        sums[1] += len(labels)
    return sums


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)  # correct predictions, samples
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        sums[0] += (model(images).argmax(dim=1) == labels).sum()
        sums[1] += len(labels)
    return sums


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = utils.load_data(args)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))  # each sample on one rank only
    sampler = DistributedSampler(train_set, drop_last=True)  # shuffles; drop_last: no sample twice
    assert args.batch_size % world_size == 0, f"--batch-size must be a multiple of {world_size}"
    options = dict(batch_size=args.batch_size // world_size,
                   num_workers=args.workers, pin_memory=device.type != "cpu")
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)

    torch.manual_seed(0)
    model = utils.build_model(args.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    epochs_done = utils.resume(utils.read_checkpoint(args), model, optimizer)
    model = DDP(model)  # backward averages all ranks' gradients; device_ids is not needed
    if rank == 0:
        utils.announce(args, epochs_done, world_size)

    for epoch in range(epochs_done, args.total_epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch, the same if resumed
        torch.manual_seed(epoch * world_size + rank)  # dropout masks differ by rank and epoch
        train_sums = train_epoch(model, train_loader, optimizer, device)
        for buffer in model.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        val_sums = evaluate(model.module, val_loader, device)  # the plain model: no collectives
        dist.all_reduce(train_sums)  # adds up all ranks' sums, in place
        dist.all_reduce(val_sums)
        if rank == 0:
            utils.report(args, epoch, train_sums, val_sums, start)
            if utils.time_to_save(args, epoch):
                utils.save(args, model.module.state_dict(), optimizer.state_dict(), epoch)


if __name__ == "__main__":
    args = utils.parse_args(__doc__)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        raise SystemExit("several machines might not all see the checkpoint: use multinode.py")
    device = ddp_setup(args)
    if os.environ["LOCAL_RANK"] == "0":
        utils.load_data(args)  # downloads what is missing
    dist.barrier()  # all ranks wait here until local rank 0 has the data
    main(args, device)
    dist.destroy_process_group()  # after main, because its model keeps the group alive
