"""Train a classifier of noisy waves, one process per GPU:
torchrun --standalone --nproc_per_node=2 examples/waves_ddp.py --epochs 10"""
import argparse
import math
import os
import zipfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused; import it before the group exists, or gloo may abort at exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


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
    labels = torch.randint(4, (samples,), generator=generator)
    frequency = (1 + labels + 0.2 * torch.randn(samples, generator=generator))[:, None]
    phase = torch.rand(samples, 1, generator=generator)
    angle = 2 * math.pi * (frequency * torch.linspace(0, 1, 64) + phase)
    waves = angle.sin() + 0.3 * torch.randn(samples, 64, generator=generator)
    return TensorDataset(waves, labels)


def build_model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 64)),
        nn.Conv1d(1, 16, kernel_size=9, stride=2), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Conv1d(16, 32, kernel_size=5, stride=2), nn.BatchNorm1d(32), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 4))


def read_checkpoint(path):
    """The checkpoint, on the CPU; None if there is none."""
    if os.path.exists(path):
        # The file is a zip archive. testzip verifies its checksums; torch.load does not.
        assert not zipfile.ZipFile(path).testzip(), f"{path} is damaged"
        return torch.load(path, map_location="cpu", weights_only=True)


def resume(checkpoint, model, optimizer, schedule):
    """Continue from a checkpoint, if there is one; return the epochs done and the best accuracy."""
    if checkpoint is None:
        return 0, 0.0
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    return checkpoint["epoch"], checkpoint["best"]


def save(checkpoint, path):
    """Write a temporary file, then rename it: a kill leaves the old file or the new one, intact."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # random: pids repeat in containers
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        os.fsync(file.fileno())
    os.replace(temporary, path)


def train_epoch(model, loader, optimizer, device):
    model.train()
    sums = torch.zeros(2, device=device)  # loss, samples
    for waves, labels in loader:
        waves, labels = waves.to(device), labels.to(device)
        loss = F.cross_entropy(model(waves), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * len(labels)  # not loss.item(), which waits for the GPU
        sums[1] += len(labels)
    return sums


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)  # correct predictions, samples
    for waves, labels in loader:
        waves, labels = waves.to(device), labels.to(device)
        sums[0] += (model(waves).argmax(dim=1) == labels).sum()
        sums[1] += len(labels)
    return sums


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = load_data(2040, seed=1), load_data(509, seed=2)
    val_set = Subset(val_set, range(rank, len(val_set), world_size))  # each sample on one rank only
    sampler = DistributedSampler(train_set, drop_last=True)  # shuffles; drop_last: no sample twice
    assert args.batch_size % world_size == 0, f"--batch-size must be a multiple of {world_size}"
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    val_loader = DataLoader(val_set, args.batch_size // world_size)

    torch.manual_seed(0)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    checkpoint = [read_checkpoint(args.checkpoint) if rank == 0 else None]
    dist.broadcast_object_list(checkpoint)  # other machines might not see the file
    epochs_done, best = resume(checkpoint.pop(), model, optimizer, schedule)  # pop frees its memory
    if device.type != "cpu":  # normalise over the whole batch; on CPUs, over each rank's part
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model)  # backward averages all ranks' gradients; device_ids is not needed

    for epoch in range(epochs_done, args.epochs):
        sampler.set_epoch(epoch)  # a new order each epoch, the same if resumed
        torch.manual_seed(epoch * world_size + rank)  # dropout masks differ by rank and epoch
        train_sums = train_epoch(model, train_loader, optimizer, device)
        for buffer in model.buffers():  # evaluate with the BatchNorm statistics that rank 0 saves
            dist.broadcast(buffer, src=0)
        val_sums = evaluate(model.module, val_loader, device)  # the plain model: no collectives
        dist.all_reduce(train_sums)  # adds up all ranks' sums, in place
        dist.all_reduce(val_sums)
        schedule.step()
        loss, trained, correct, tested = *train_sums.tolist(), *val_sums.tolist()
        accuracy = correct / tested
        improved = accuracy > best  # the same on all ranks, so that all decide alike
        best = max(best, accuracy)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | loss {loss / trained:.4f} "
                  f"| accuracy {accuracy:.2%}", flush=True)
            if improved:
                save(model.module.state_dict(), f"{args.checkpoint}.best")
            save({"model": model.module.state_dict(),
                  "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                  "epoch": epoch + 1, "best": best}, args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--checkpoint", default="waves.pt")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    device = ddp_setup()
    # To download data, let local rank 0 do it here; then all ranks must call dist.barrier().
    main(args, device)
    dist.barrier()  # until rank 0 has saved: if that fails, torchrun must restart all ranks
    dist.destroy_process_group()  # after main, because its model keeps the group alive
