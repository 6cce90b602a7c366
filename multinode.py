"""Train on several machines; on each, torchrun starts one process per GPU:
torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 multinode.py
Under Slurm, without torchrun, one task per GPU: srun --kill-on-bad-exit=1 python multinode.py"""
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it Python can abort at exit
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import utils


def ddp_setup(local_rank, args):
    utils.end_at_ctrl_c()  # works even inside a collective
    device = torch.device("cpu")
    if args.device != "cpu":  # one for each process; with gloo several may share one
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)  # first: otherwise each process also uses GPU 0
    dist.init_process_group(args.backend, device_id=device if args.backend != "gloo" else None,
                            timeout=timedelta(minutes=10))  # detects dead hosts; must outlast saves
    return device


def train_epoch(model, loader, optimizer, device):
    model.train()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples; read once an epoch
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    epochs_done = 0
    checkpoint = [utils.read_checkpoint(args) if rank == 0 else None]
    dist.broadcast_object_list(checkpoint)  # to the other ranks: they may not see the file
    checkpoint = checkpoint[0]
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        epochs_done = checkpoint["epoch"]
    del checkpoint  # otherwise each process keeps a second copy of model and optimizer
    model = DDP(model, gradient_as_bucket_view=True)  # averages all ranks' gradients, in place

    for epoch in range(epochs_done, args.total_epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch, also after a restart
        torch.manual_seed(epoch * world_size + rank)  # dropout: masks differ by rank and epoch
        loss = train_epoch(model, train_loader, optimizer, device)
        for buffer in model.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        accuracy = evaluate(model.module, val_loader, device)  # DDP's forward may be a collective
        if rank != 0:
            continue  # rank 0 alone prints and saves: no collective in the rest of this loop
        utils.report(args, epoch, loss, accuracy, len(train_loader) * args.batch_size, start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            utils.save_checkpoint(args, model.module.state_dict(), optimizer.state_dict(), epoch)

    del model  # it holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:  # srun, no torchrun
        os.environ.update(RANK=os.environ["SLURM_PROCID"], LOCAL_RANK=os.environ["SLURM_LOCALID"],
                          LOCAL_WORLD_SIZE=str(len(os.environ["SLURM_GTIDS"].split(","))),
                          WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"])
        os.environ.setdefault("MASTER_ADDR", utils.slurm_host())
        os.environ.setdefault("MASTER_PORT", str(15000 + int(os.environ["SLURM_JOB_ID"]) % 15000))
    args = utils.parse_args(__doc__)
    utils.check_torchrun(__doc__)
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank == 0:  # the others wait for it in init_process_group
        utils.check_run(args, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    main(local_rank, args)
