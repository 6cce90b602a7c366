"""Train on several GPUs from one process, the slow way: python dp.py 50 10"""
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

import utils


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
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # correct predictions, samples
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        total[0] += (model(images).argmax(dim=1) == labels).sum()
        total[1] += len(labels)
    return (total[0] / total[1]).item()


def main(args):
    device = torch.device(args.device)
    train_set, val_set = utils.load_data(args.dataset, args.data_dir)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    options = dict(batch_size=args.batch_size, num_workers=args.workers,
                   pin_memory=device.type != "cpu", worker_init_fn=utils.end_with_parent)
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)

    torch.manual_seed(0)
    model = utils.build_model(args.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    epochs_done = 0
    checkpoint = utils.read_checkpoint(args)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        epochs_done = checkpoint["epoch"]
    del checkpoint  # otherwise each process keeps a second copy of model and optimizer
    # Slow: one GIL drives all GPUs; each step copies the model to them and the outputs back.
    parallel = model if device.type == "cpu" else torch.nn.DataParallel(model)

    for epoch in range(epochs_done, args.total_epochs):
        start = time.perf_counter()
        sampler.generator.manual_seed(epoch)  # a new order each epoch, also after a restart
        torch.manual_seed(epoch)  # dropout too: a resumed run draws as if it had never stopped
        loss = train_epoch(parallel, train_loader, optimizer, device)
        accuracy = evaluate(model, val_loader, device)
        utils.report(args, epoch, loss, accuracy, len(train_loader) * args.batch_size, start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            utils.save_checkpoint(args, model.state_dict(), optimizer.state_dict(), epoch)


if __name__ == "__main__":
    args = utils.parse_args(__doc__)
    utils.check_run(args)
    main(args)
