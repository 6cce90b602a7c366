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
import torch.distributed.nn  # unused, but without it Python can abort at exit
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import utils

PATIENCE = 10  # epochs without a better accuracy; a cosine gives most of its gain at the end


def ddp_setup(local_rank, args):
    utils.end_at_ctrl_c()  # works even inside a collective
    device = torch.device("cpu")
    if args.device != "cpu":  # one for each process; with gloo several may share one
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)  # first: otherwise each process also uses GPU 0
    dist.init_process_group(args.backend, device_id=device if args.backend != "gloo" else None)
    return device


def train_epoch(model, loader, optimizer, device, schedule, ema):
    model.train()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples; read once an epoch
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # after DDP's mean
        optimizer.step()
        schedule.step()
        values = [*model.parameters(), *model.buffers()]
        for average, value in zip([*ema.parameters(), *ema.buffers()], values):
            if average.is_floating_point():  # BatchNorm's counter is not
                average.detach().lerp_(value.detach(), 0.01)  # about 100 steps; 0.001 for long runs
        total[0] += loss.detach() * len(labels)
        total[1] += len(labels)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # correct predictions, samples
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        total[0] += (model(images).argmax(dim=1) == labels).sum()
        total[1] += len(labels)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@record  # hands a rank's traceback to torchrun's summary
def main(local_rank, args):
    device = ddp_setup(local_rank, args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = utils.load_data(args.dataset, args.data_dir)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))  # no sample twice, no padding
    sampler = DistributedSampler(train_set, drop_last=True)  # otherwise it repeats some samples
    options = dict(batch_size=args.batch_size // world_size, num_workers=args.workers,
                   pin_memory=device.type != "cpu", worker_init_fn=utils.end_with_parent)
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)

    torch.manual_seed(0)
    model = utils.build_model(args.model).to(device)
    if device.type != "cpu":  # BatchNorm over the whole batch; this layer needs a GPU
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]  # norms and biases
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.05)
    steps = args.total_epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(  # warm-up, cosine
        (step + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * min(1, step / steps))))
    ema = copy.deepcopy(model)  # before DDP: plain names
    best, best_epoch = -math.inf, 0
    epochs_done = 0
    checkpoint = [utils.read_checkpoint(args) if rank == 0 else None]
    dist.broadcast_object_list(checkpoint)  # to the other ranks: they may not see the file
    checkpoint = checkpoint[0]
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        ema.load_state_dict(checkpoint["ema"])
        best, best_epoch = checkpoint["best"]
        epochs_done = checkpoint["epoch"]
    del checkpoint  # otherwise each process keeps a second copy of model and optimizer
    model = DDP(model, gradient_as_bucket_view=True)  # averages all ranks' gradients, in place

    for epoch in range(epochs_done, args.total_epochs):
        if epoch > best_epoch + PATIENCE:
            if rank == 0:
                print(f"stopped: no improvement since epoch {best_epoch + 1}", flush=True)
            break  # on all ranks: they compare the reduced accuracy
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch, also after a restart
        torch.manual_seed(epoch * world_size + rank)  # dropout: masks differ by rank and epoch
        loss = train_epoch(model, train_loader, optimizer, device, schedule, ema)
        for buffer in ema.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        accuracy = evaluate(ema, val_loader, device)
        if accuracy > best:
            best, best_epoch = accuracy, epoch
        if rank != 0:
            continue  # rank 0 alone prints and saves: no collective in the rest of this loop
        utils.report(args, epoch, loss, accuracy, len(train_loader) * args.batch_size, start)
        if epoch == best_epoch:
            best_file = SimpleNamespace(checkpoint=f"{args.checkpoint}.best")
            utils.save_checkpoint(best_file, ema.state_dict(), {}, epoch)
        if ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs
                or epoch == best_epoch + PATIENCE):
            utils.save_checkpoint(args, model.module.state_dict(), optimizer.state_dict(), epoch,
                                  schedule=schedule.state_dict(), ema=ema.state_dict(),
                                  best=(best, best_epoch), kind="recipes.loop")

    del model  # it holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    args = utils.parse_args(__doc__)
    utils.check_torchrun(__doc__)
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank == 0:  # the others wait for it in init_process_group
        utils.check_run(args, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]),
                        kinds=["recipes.loop"])
    main(local_rank, args)
