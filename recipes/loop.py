"""Train on one machine; torchrun starts one process per GPU:
torchrun --standalone --nproc_per_node=4 -m recipes.loop 50 10
AdamW, schedule, gradient clipping, EMA, best model, early stopping: see docs/recipes.md"""
import copy
import math
import os
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import utils

PATIENCE = 10  # epochs without a better accuracy; a cosine gives most of its gain at the end


def ddp_setup(args):
    if args.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device)  # this process's default GPU, instead of GPU 0
    dist.init_process_group(device_id=device)  # selects nccl for NVIDIA and AMD, xccl for Intel
    return device


def train_epoch(model, loader, optimizer, device, schedule, ema):
    model.train()
    sums = torch.zeros(2, device=device)  # loss, samples
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # after DDP's mean
        optimizer.step()
        schedule.step()
        for average, value in zip(ema.state_dict().values(), model.module.state_dict().values()):
            if average.is_floating_point():  # BatchNorm's counter is not
                average.lerp_(value, 1 / min(schedule.last_epoch, 100))  # steps; 1000 for long runs
        sums[0] += loss.detach() * len(labels)  # not loss.item(), which waits for the GPU
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
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]  # norms and biases
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.05)
    steps = args.total_epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(  # warm-up, cosine
        (step + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))))
    ema = copy.deepcopy(model)  # before DDP: plain names
    best, best_epoch = -1, 0
    checkpoint = utils.read_checkpoint(args)
    epochs_done = utils.resume(checkpoint, model, optimizer)
    if checkpoint:
        schedule.load_state_dict(checkpoint["schedule"])
        ema.load_state_dict(checkpoint["ema"])
        best, best_epoch = checkpoint["best"]
    del checkpoint  # keep no second copy
    model = DDP(model)  # backward averages all ranks' gradients; device_ids is not needed
    if rank == 0:
        utils.announce(args, epochs_done, world_size)

    for epoch in range(epochs_done, args.total_epochs):
        if epoch > best_epoch + PATIENCE:
            if rank == 0:
                print(f"stopped: no improvement since epoch {best_epoch + 1}", flush=True)
            break  # on all ranks: they compare the reduced sums
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch, the same if resumed
        torch.manual_seed(epoch * world_size + rank)  # dropout masks differ by rank and epoch
        train_sums = train_epoch(model, train_loader, optimizer, device, schedule, ema)
        for buffer in ema.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        val_sums = evaluate(ema, val_loader, device)
        dist.all_reduce(train_sums)  # adds up all ranks' sums, in place
        dist.all_reduce(val_sums)
        if val_sums[0] > best:
            best, best_epoch = val_sums[0].item(), epoch
        if rank == 0:
            utils.report(args, epoch, train_sums, val_sums, start)
            if epoch == best_epoch:
                best_file = SimpleNamespace(checkpoint=f"{args.checkpoint}.best")
                utils.save(best_file, ema.state_dict(), {}, epoch)
            if utils.time_to_save(args, epoch) or epoch == best_epoch + PATIENCE:
                utils.save(args, model.module.state_dict(), optimizer.state_dict(), epoch,
                           schedule=schedule.state_dict(), ema=ema.state_dict(),
                           best=(best, best_epoch))


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
