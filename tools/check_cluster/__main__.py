"""Finds out why training fails on a cluster (needs Linux and IPv4). Start it on each machine, with torchrun's options:
python tools/check_cluster --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400
or by Slurm, with MASTER_ADDR and MASTER_PORT set as for multinode.py:
srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python tools/check_cluster
The machine that hosts the rendezvous leads: it queries all processes and prints what it finds.
"""
import argparse
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

if sys.platform != "linux":
    sys.exit("check_cluster: it needs Linux")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's own alarms would bury what is found
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where utils.py is
import torch.distributed as dist
from follow import follow, nccl_log
from lead import lead
from messages import HERE
from torch.distributed.elastic.rendezvous import utils as rendezvous
from torch.distributed.run import config_from_args, get_args_parser

import utils


def stop(message):
    sys.exit(f"check_cluster: {message}")


def parse_args():
    """Where all processes meet, and which of them start here: as torchrun has it, or Slurm."""
    parser = argparse.ArgumentParser(
        prog="python tools/check_cluster", description=__doc__, epilog="All other options are torchrun's: torchrun --help",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--wait", type=utils.positive, default=60, help="seconds for each step (default: 60)")
    parser.add_argument("--device", choices=sorted({utils.find_device(), "cpu"}), help="default: what torch finds")
    args, torchruns = parser.parse_known_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop("start it by python instead of torchrun, with the same options")
    args.device_was_found = args.device is None
    args.device = args.device or utils.find_device()
    args.backend = dist.get_default_backend_for_device(args.device)
    torchruns = get_args_parser().parse_args([*torchruns, __file__])
    torchruns.master_port = torchruns.master_port or 29500
    config, _, _ = config_from_args(torchruns)
    args.machines, args.processes = config.max_nodes, config.max_nodes * config.nproc_per_node
    args.local_ranks = range(config.nproc_per_node)
    if args.machines == 1 and "SLURM_STEP_NUM_TASKS" in os.environ:
        args.machines, args.processes, rank, local_rank = (int(os.environ[f"SLURM_{name}"]) for name in (
            "STEP_NUM_NODES", "STEP_NUM_TASKS", "PROCID", "LOCALID"))
        args.leads, args.local_ranks = rank == 0, [local_rank]
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            stop("set MASTER_ADDR and MASTER_PORT, as for multinode.py")
        args.host, args.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return args
    args.host, args.port = rendezvous.parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)
    if args.machines > 1 and (args.host == "localhost" or args.host.startswith("127.")):
        stop(f"--nnodes={args.machines} needs --rdzv-backend=c10d --rdzv-endpoint=HOST:29400: through {args.host}, each "
             "machine finds only itself")
    for name in (args.host, HERE):  # torchrun looks up both
        try:
            socket.gethostbyname(name)
        except OSError as error:
            stop(f"{HERE} knows no IPv4 address of {name}: {error}")
    if torchruns.rdzv_backend == "static":
        args.leads = torchruns.node_rank == 0
    else:
        args.leads = rendezvous._matches_machine_hostname(args.host)  # torchrun's own rule
    return args


def meeting_place(args):
    try:
        return socket.create_server(("", args.port), backlog=1024)
    except OSError as error:
        stop(f"{HERE} cannot use port {args.port}, where all processes are to meet: {error.strerror}. End what uses it, "
             "or choose another port on all machines")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also ends a process inside a collective
    args = parse_args()
    server = meeting_place(args) if args.leads else None
    spawn = multiprocessing.get_context("spawn")
    told = spawn.Event()  # that all is over
    children = [spawn.Process(target=follow, args=(args, local_rank, told), daemon=True) for local_rank in args.local_ranks]
    for local_rank, child in zip(args.local_ranks, children):
        os.environ["LOCAL_RANK"] = str(local_rank)
        child.start()
    if args.leads:
        lead(args, server)
    longest = time.monotonic() + 8 * args.wait + 60  # of all steps together
    while any(child.is_alive() for child in children) and time.monotonic() < longest and not told.wait(0.5):
        pass
    for child in children:
        child.join(5)
        child.kill()  # it may be stopped
        child.join()
        nccl_log(child.pid).unlink(missing_ok=True)
    sys.exit(int(any(child.exitcode for child in children)))
