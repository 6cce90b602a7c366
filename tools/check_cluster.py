"""Why does my cluster not train? Started on each machine, with the options that torchrun takes:
python tools/check_cluster.py --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400
or by Slurm: srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python tools/check_cluster.py
The machine of the rendezvous leads: it asks all processes, and prints what it finds.
"""
import multiprocessing
import os
import select
import socket
import sys
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's own alarms would bury what is found
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.distributed as dist
from cluster_check.follow import follow, nccl_log
from cluster_check.lead import lead
from cluster_check.lines import HERE, meet
from torch.distributed.elastic.rendezvous import utils as rendezvous
from torch.distributed.run import config_from_args, get_args_parser

import utils


def parse_args():
    """Where all processes meet, and which of them start here: as torchrun has it, or Slurm."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit("check_cluster.py: start it by python instead of torchrun, with the same options")
    parser = get_args_parser()
    parser.description = __doc__
    parser.add_argument("--wait", type=utils.count, default=60, help="seconds for each step (60)")
    parser.add_argument("--device", help="cpu, or what torch finds by default")
    args = parser.parse_args([*sys.argv[1:], __file__])
    args.found = not args.device  # not asked for
    args.device = args.device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    args.backend = dist.get_default_backend_for_device(args.device)
    args.master_port = args.master_port or 29500
    config = config_from_args(args)[0]
    args.machines, args.total = config.max_nodes, config.max_nodes * config.nproc_per_node
    args.local_ranks = range(config.nproc_per_node)
    args.host, args.port = rendezvous.parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)
    if args.machines == 1 and "SLURM_STEP_NUM_TASKS" in os.environ:
        args.machines, args.total, rank, local_rank = (int(os.environ[f"SLURM_{name}"]) for name in (
            "STEP_NUM_NODES", "STEP_NUM_TASKS", "PROCID", "LOCALID"))
        args.leads, args.local_ranks = rank == 0, [local_rank]
        args.host, args.port = utils.slurm_host(), 15000 + int(os.environ["SLURM_JOB_ID"]) % 15000
    elif args.machines > 1 and (args.host == "localhost" or args.host.startswith("127.")):
        sys.exit(f"--nnodes={args.nnodes} needs --rdzv-backend=c10d --rdzv-endpoint=HOST:29400: by "
                 f"{args.host} each machine meets only itself")
    else:
        for name in (args.host, HERE):
            try:
                socket.gethostbyname(name)
            except OSError as error:
                sys.exit(f"{HERE}: {name} is no known host name here: {error}")
        args.leads = (args.node_rank == 0 if args.rdzv_backend == "static" else
                      rendezvous._matches_machine_hostname(args.host))  # torchrun's own rule
    return args


if __name__ == "__main__":
    utils.end_at_ctrl_c()
    args = parse_args()
    server = args.leads and socket.create_server(("", args.port), backlog=1024)
    spawn, ended, children = multiprocessing.get_context("spawn"), select.poll(), []
    for local_rank in args.local_ranks:
        line = meet(args)
        ended.register(line, select.POLLRDHUP)  # when who leads closes it
        os.environ["LOCAL_RANK"] = str(local_rank)
        children.append(spawn.Process(target=follow, args=(args, local_rank, line), daemon=True))
        children[-1].start()
    if args.leads:
        lead(args, server)
    while any(child.is_alive() for child in children) and not ended.poll(500):
        pass
    for child in children:
        child.join(5)
        child.kill()  # it may be stopped
        child.join()
        nccl_log(child.pid).unlink(missing_ok=True)
    sys.exit(int(any(child.exitcode for child in children)))
