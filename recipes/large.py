"""Train on one machine; torchrun starts one process per GPU:
torchrun --standalone --nproc_per_node=4 -m recipes.large 50 10
A model too large for one process to hold or write: see docs/recipes.md"""
import os
import shutil
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn  # unused, but without it Python can abort at exit
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as state
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, DistributedSampler, Subset

import utils

BLOCKS = "EncoderBlock", "BasicBlock", "Bottleneck", "CNBlock"  # your model's repeated blocks


def ddp_setup(local_rank, args):
    utils.end_at_ctrl_c()  # works even inside a collective
    device = torch.device("cpu")
    if args.device != "cpu":  # one for each process; with gloo several may share one
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)  # first: otherwise each process also uses GPU 0
    dist.init_process_group(args.backend, device_id=device if args.backend != "gloo" else None)
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
    if len(loader) * loader.batch_size * dist.get_world_size() < len(loader.dataset.dataset):
        model(loader.dataset.dataset[0][0][None].to(device))  # collective: others have 1 more batch
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
    weights = utils.build_model(args.model).state_dict() if rank == 0 else {}  # drawn, or read
    with torch.device("meta"):  # names and shapes, without memory
        model = utils.build_model(args.model)
    if device.type != "cpu":  # BatchNorm over the whole batch; this layer needs a GPU
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    shapes = model.state_dict()
    if left := {name for name, _ in model.named_buffers()} - {*shapes}:
        utils.stop(f"checkpoints lack these buffers; recompute them after to_empty(): {left}", 1)
    epochs_done = 0
    checkpoint = utils.read_checkpoint(args) if rank == 0 else None
    if checkpoint:
        epochs_done = checkpoint["epoch"]
    if rank == 0:
        os.makedirs(f"{args.checkpoint}.shards", exist_ok=True)
    epochs_done = torch.tensor(epochs_done, device=device)
    dist.broadcast(epochs_done, src=0)
    if not os.path.isdir(f"{args.checkpoint}.shards"):
        utils.stop(f"--checkpoint {args.checkpoint} is not on storage that all machines share", 1)
    mesh = dist.init_device_mesh(device.type, (world_size,))
    blocks = [block for block in model.modules() if type(block).__name__ in BLOCKS]
    for block in blocks:  # keep only its input; backward computes the rest again
        block.forward = partial(recompute, block.forward, use_reentrant=False)
    for block in [*reversed(blocks), model]:  # innermost first; the root takes everything else
        fully_shard(block, mesh=mesh)
    model.to_empty(device=device)  # this rank's shards, yet to be filled
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)  # of the shards
    full = state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state.set_model_state_dict(model, weights, options=full)
    folder = f"{args.checkpoint}.shards/{epochs_done}"
    if epochs_done:  # not in a new run, where Adam would begin with step 1 instead of 0
        saved = dict(zip(("model", "optimizer"), state.get_state_dict(model, optimizer)))
        dcp.load(saved, checkpoint_id=folder)  # fills the model in place
        state.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    del weights  # a whole model

    for epoch in range(epochs_done, args.total_epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch, also after a restart
        torch.manual_seed(epoch * world_size + rank)  # dropout: masks differ by rank and epoch
        loss = train_epoch(model, train_loader, optimizer, device)
        for buffer in model.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        accuracy = evaluate(model, val_loader, device)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            previous, folder = folder, f"{args.checkpoint}.shards/{epoch + 1}"
            saved = dict(zip(("model", "optimizer"), state.get_state_dict(model, optimizer)))
            dcp.save({**saved, "epoch": epoch + 1}, checkpoint_id=folder)  # each rank its shards
        if rank != 0:
            continue  # rank 0 alone prints and saves: no collective in the rest of this loop
        utils.report(args, epoch, loss, accuracy, len(train_loader) * args.batch_size, start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            groups = {"param_groups": optimizer.state_dict()["param_groups"]}
            utils.save_checkpoint(args, shapes, groups, epoch, kind="recipes.large")
            shutil.rmtree(previous, ignore_errors=True)

    del model  # it holds the process group
    dist.destroy_process_group()
    time.sleep(0.1)  # DTensor's caches keep gloo's threads; one of them may abort at exit


if __name__ == "__main__":
    args = utils.parse_args(__doc__)
    utils.check_torchrun(__doc__)
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank == 0:  # the others wait for it in init_process_group
        utils.check_run(args, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]),
                        kinds=["recipes.large"])
    main(local_rank, args)
