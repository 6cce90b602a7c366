"""What no launch style changes: model, data, command line, checkpoint file and what is printed."""
import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process even where it waits in C++


def stop(message, status):
    """End this process with one line on stderr."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)  # all processes see it, one should say it: the launcher then ends the others
    print(f"{os.path.basename(sys.argv[0])}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def end_with_parent(worker_id=None):
    """End this process as soon as the one that started it is gone, even if that was killed."""
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def build_model(name):
    if name != "cnn":
        from torchvision import models  # takes seconds: only where it is asked for
        return models.get_model(name, weights=None, num_classes=10)
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=4, stride=4), nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@functools.cache  # check_run asks for it, then main
def load_data(name, data_dir):
    """Training set and held-out set: 3x32x32 images of ten classes, downloaded where missing."""
    if name == "synthetic":  # ten patterns under noise: whole numbers, the same bits on any machine
        draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(0),
                                 dtype=torch.int16)
        patterns = draw(-8, 9, (10, 3, 4, 4)).repeat_interleave(8, 2).repeat_interleave(8, 3)
        labels = draw(10, (4349,)).long()
        data = TensorDataset((patterns[labels] + draw(-36, 37, (4349, 3, 32, 32))) / 4, labels)
        return Subset(data, range(3840)), Subset(data, range(3840, len(data)))
    from torchvision import datasets
    from torchvision.transforms import v2
    transform = v2.Compose([v2.RGB(), v2.Resize((32, 32)), v2.ToImage(),
                            v2.ToDtype(torch.get_default_dtype(), scale=True),
                            v2.Normalize(mean=[0.5] * 3, std=[0.5] * 3)])
    dataset = getattr(datasets, name)
    try:
        with contextlib.suppress(RuntimeError):  # not there yet
            return [dataset(data_dir, train, transform) for train in (True, False)]
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir) as beside:
            dataset(beside, download=True)
            for file in filter(os.path.isfile, [*pathlib.Path(beside).rglob("*")]):
                place = pathlib.Path(data_dir, file.relative_to(beside))
                place.parent.mkdir(parents=True, exist_ok=True)
                file.replace(place)  # at once: another job may do or read the same
        return [dataset(data_dir, train, transform) for train in (True, False)]
    except Exception as error:
        stop(f"--dataset {name} was neither read from {data_dir} nor downloaded to it: {error}", 1)


def whole(text, least=1):
    if not text.isdecimal() or not least <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} to 2**31-1")
    return int(text)


def parse_args(doc, spawn=False):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # old drivers count too
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = functools.partial(stop, status=2)  # one line, without the usage
    add, natural = parser.add_argument, functools.partial(whole, least=0)
    add("total_epochs", type=whole, nargs="?", default=50, help="with those of an earlier run")
    add("save_every", type=whole, nargs="?", default=10, help="epochs; also saved after the last")
    add("--batch-size", "--batch_size", type=whole, default=240, help="samples over all devices")
    add("--lr", type=float, default=0.003, help="learning rate, also of a resumed run")
    add("--dataset", choices=["synthetic", "FashionMNIST", "MNIST", "CIFAR10"], default="synthetic")
    add("--data-dir", default="data", help="where a real dataset lies, or is downloaded to")
    add("--model", default="cnn", help="or a classification model of torchvision, e.g. resnet18")
    add("--workers", type=natural, default=0, help="loader processes per process and loader")
    add("--backend", choices=["nccl", "gloo", "mpi"], default="nccl" if gpus else "gloo",
        help="of the DDP scripts; with gloo several processes may share a GPU")
    add("--checkpoint", default=pathlib.Path(sys.argv[0]).stem + ".pt", help="resumed if it exists")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    if spawn:
        parser.set_defaults(master_addr="127.0.0.1", master_port=0)  # 0: any free one
        add("-n", "--nodes", type=whole, default=1, help="machines")
        add("-g", "--gpus", type=whole, default=gpus or 2, help="processes on this machine")
        add("-nr", "--node-rank", type=natural, default=0, help="which of the machines this is")
    args = parser.parse_args()
    if not args.checkpoint:
        parser.error("argument --checkpoint: the name of the file is empty")
    if not 0 < args.lr < math.inf:
        parser.error(f"argument --lr: {args.lr} is not a number above 0")
    if args.model != "cnn":
        from torchvision import models
        if args.model not in models.list_models(models, exclude=["googlenet", "inception_v3"]):
            parser.error(f"argument --model: {args.model} is neither cnn nor a torchvision model "
                         "that gives class scores alone, such as resnet18")
    processes = args.gpus if spawn else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.backend == "nccl" and processes > gpus:
        parser.error(f"argument {'-g/--gpus' if spawn else '--backend'}: nccl needs a GPU for each "
                     f"process, torch sees {gpus} for {processes}: use --backend gloo, or fewer")
    if args.backend == "mpi":
        parser.error("argument --backend: mpi needs mpirun and a torch built for it: use gloo")
    if spawn and args.node_rank >= args.nodes:
        parser.error(f"argument -nr/--node-rank: {args.node_rank} is not below -n {args.nodes}")
    if spawn and args.nodes > 1:
        args.master_addr, port = (os.environ.get(f"MASTER_{word}", "") for word in ("ADDR", "PORT"))
        if not args.master_addr or not port.isdecimal() or not 0 < int(port) < 2**16:
            parser.error("argument -n/--nodes: several machines need MASTER_ADDR and MASTER_PORT, "
                         "the first one's address and a free port on it, in their environment")
        args.master_port = int(port)
    return args


def check_torchrun(doc):
    if unset := {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {*os.environ}:
        stop(f"{', '.join(sorted(unset))} not set; start it by: {doc.partition(':')[2]}", 2)
    if (os.environ["LOCAL_RANK"] == "0" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        print("--max-restarts will hardly recover: that needs --standalone or --rdzv-backend=c10d, "
              "and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment", file=sys.stderr)


def slurm_host():
    """The first machine of this job step, n01 of n[01-04,07], or the one that srun runs on."""
    host = re.sub(r"\[(\w+)[^]]*]", r"\1", os.environ["SLURM_STEP_NODELIST"]).split(",")[0]
    with contextlib.suppress(OSError):  # Slurm's name for a machine need not be the network's
        return socket.gethostbyname(host)
    return os.environ["SLURM_LAUNCH_NODE_IPADDR"]


def check_run(args, world_size=1, node_rank=0):
    """Fetch the data, and end here, before processes wait for each other, if this cannot train."""
    sizes, command = [world_size], pathlib.Path(f"/proc/{os.getppid()}/cmdline")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local and command.exists():  # torchrun does not tell its workers what --nnodes=1:2 allows
        words = f"--nnodes={os.environ.get('PET_NNODES', 1)}\0{command.read_text('latin-1')}"
        least, most = re.findall(r"--nn\w*[=\0](\d+):?(\d*)\0", words)[-1]  # the last one counts
        sizes += range(int(least) * local, int(most or 0) * local + 1, local)
    for size in sizes:
        if args.batch_size % size:
            stop(f"argument --batch-size: {args.batch_size} does not divide by {size} processes, "
                 f"as {(args.batch_size // math.lcm(*sizes) + 1) * math.lcm(*sizes)} would", 2)
    share = args.batch_size // max(sizes)
    model = build_model(args.model).to("meta")  # shapes alone, no arithmetic
    try:
        if args.model != "cnn":  # which is known to fit, and this takes two seconds
            model(torch.empty(share, 3, 32, 32, device="meta")).view(share, 10)
    except Exception as error:
        stop(f"argument --model: {args.model} does not train on {share} images of 3x32x32 at once, "
             f"as cnn would: {error}", 2)
    if args.batch_size > (samples := len(load_data(args.dataset, args.data_dir)[0])):
        stop(f"argument --batch-size: {args.batch_size} exceeds the {samples} training samples", 2)
    if node_rank > 0:
        return
    done = (read_checkpoint(args.checkpoint, model) or {"epoch": 0})["epoch"]
    if done or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # then 0 is worth a word
        hint = "; to start afresh, delete it or name another --checkpoint"
        print(f"{args.checkpoint}: {done} of {args.total_epochs} epochs are done"
              f"{hint if done >= args.total_epochs else ''}", flush=True)
    if done < args.total_epochs and os.environ.get("RANK", "0") == "0":  # which alone will save
        folder, name = os.path.split(os.path.realpath(args.checkpoint))
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=name, suffix=".tmp") as file:
                file.write(bytes(2**16 + 2 * sum(t.nbytes for t in model.state_dict().values())))
        except OSError as error:
            stop(f"argument --checkpoint: {name} cannot be saved, as {folder} takes no file "
                 f"of its size: {error.strerror}", 1)


def read_checkpoint(path, model):
    """What was saved to path, on the CPU; None where nothing was."""
    if not os.path.exists(path):
        return None
    reason = "it cannot be read, is cut off, damaged or never was a checkpoint"
    with contextlib.suppress(Exception):  # zipfile, pickle and torch have many, none for a user
        if os.path.isfile(path) and zipfile.ZipFile(path).testzip() is None:  # torch checks no sums
            reason = "it holds more than tensors and plain values"
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            reason = "it is of another model, or not from these scripts"
            state, groups = (checkpoint.get("optimizer")[key] for key in ("state", "param_groups"))
            parameters = list(model.parameters())
            if ({name: tensor.shape for name, tensor in model.state_dict().items()}
                    == {name: tensor.shape for name, tensor in checkpoint["model"].items()}
                    and [i for g in groups for i in g["params"]] == [*range(len(parameters))]
                    and (len(groups) > 1 or all(  # several groups may be in another order
                        value.shape == parameters[i].shape for i in state
                        for value in state[i].values() if torch.is_tensor(value) and value.dim()))
                    and type(checkpoint["epoch"]) is int and checkpoint["epoch"] > 0):
                return checkpoint
    stop(f"{path} cannot be resumed and is left as it was: {reason}", 1)


def save_checkpoint(args, model, optimizer, epoch):
    """A kill at any moment leaves the old file or the new one, whole."""
    path = os.path.realpath(args.checkpoint)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save({"model": model, "optimizer": optimizer, "epoch": epoch + 1}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        pathlib.Path(temporary).unlink(missing_ok=True)
        while error.__context__:  # torch's own error, on top of the one that says why
            error = error.__context__
        stop(f"{args.checkpoint} was not saved: {error}", 1)
    print(f"saved {args.checkpoint} after epoch {epoch + 1}", flush=True)


def report(args, epoch, loss, accuracy, samples, start):
    seconds = time.perf_counter() - start
    left = round(seconds * (args.total_epochs - epoch - 1))
    print(f"epoch {epoch + 1:{len(str(args.total_epochs))}}/{args.total_epochs} | loss {loss:.4f} "
          f"| accuracy {accuracy:.2%} | {samples / seconds:,.0f} samples/s "
          f"| {left // 60}:{left % 60:02} left", flush=True)
