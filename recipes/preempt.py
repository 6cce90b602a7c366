"""Train on one machine; torchrun starts one process per GPU:
torchrun --standalone --nproc_per_node=4 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1\
 -m recipes.preempt 50 10
Saves on SIGTERM or SIGUSR1, resumes at the same step: see docs/recipes.md"""
import atexit
import os
import signal
import time

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])  # train_epoch polls them

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import utils


def ddp_setup(args):
    if args.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # this process's default GPU, instead of GPU 0
    dist.init_process_group(device_id=device)  # selects nccl for NVIDIA and AMD, xccl for Intel
    return device


def train_epoch(model, loader, optimizer, device, stop, control):
    model.train()
    sums = torch.zeros(2, device=device)  # loss, samples
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        torch.manual_seed(torch.initial_seed() + len(labels))  # dropout: new masks each step
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * len(labels)  # not loss.item(), which waits for the GPU
        sums[1] += len(labels)
        stop += len(signal.sigpending())
        dist.all_reduce(stop, group=control)
        if stop:  # on all ranks, after the same step
            break
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
    order = list(sampler)  # this rank's samples left in the epoch
    train_loader = DataLoader(train_set, sampler=order, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)

    torch.manual_seed(0)
    model = utils.build_model(args.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    checkpoint = utils.read_checkpoint(args)
    begun = torch.zeros(2, device=device)  # loss and samples of an interrupted epoch
    if checkpoint:
        begun = checkpoint["model"].pop("begun", begun).to(device)
    epochs_done = utils.resume(checkpoint, model, optimizer)
    del checkpoint  # keep no second copy
    model = DDP(model)  # backward averages all ranks' gradients; device_ids is not needed
    stop, control = torch.zeros(1), dist.new_group(backend="gloo")  # CPU: no wait for the device
    if rank == 0:
        utils.announce(args, epochs_done, world_size)

    for epoch in range(epochs_done, args.total_epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch, the same if resumed
        done = int(begun[1]) // world_size
        order[:] = list(sampler)[done:]
        torch.manual_seed((epoch * world_size + rank) * len(sampler) + done)
        train_sums = train_epoch(model, train_loader, optimizer, device, stop, control)
        if stop:
            dist.all_reduce(train_sums)
            if rank == 0:  # other scripts refuse a model that has "begun"
                weights = {**model.module.state_dict(), "begun": begun + train_sums}
                utils.save(args, weights, optimizer.state_dict(), epoch - 1)
            dist.barrier(group=control)  # otherwise srun ends rank 0 while it saves
            break
        for buffer in model.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        val_sums = evaluate(model.module, val_loader, device)  # the plain model: no collectives
        dist.all_reduce(train_sums)  # adds up all ranks' sums, in place
        dist.all_reduce(val_sums)
        train_sums += begun
        begun.zero_()
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
    atexit.register(lambda: [child.kill() for child in mp.active_children()])  # they block SIGTERM
    main(args, device)
    dist.destroy_process_group()  # after main, because its model keeps the group alive
