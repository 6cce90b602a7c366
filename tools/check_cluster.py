"""Finds out why training fails on several machines. Start it on each, in place of torchrun, with torchrun's options:
python tools/check_cluster.py --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400
MASTER_ADDR=HOST MASTER_PORT=29500 srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python tools/check_cluster.py
The machine that hosts the rendezvous prints what is found. Status: 0 all is fine, 1 something is wrong, 2 wrong options.
"""
import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's own alarms would bury what is found
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a collective that waits too long raises an error
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.run import config_from_args, get_args_parser

HERE = socket.gethostname()
MIB = 16  # of an all-reduce
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also ends a process inside a collective


def parse_args():
    """Where all meet, whether that is here, and how many processes there are, here and in all."""
    found = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    parser.add_argument("--wait", type=int, default=60, help="seconds to wait for the others (default: %(default)s)")
    parser.add_argument("--device", default=found.type if found and found.type != "mps" else "cpu", help="default: %(default)s")
    args, options = parser.parse_known_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("start it by python in place of torchrun, with torchrun's options")
    if not options and "SLURM_STEP_NUM_TASKS" in os.environ:  # each task counts as a machine of one process
        options = ["--nnodes", os.environ["SLURM_STEP_NUM_TASKS"], "--node-rank", os.environ["SLURM_PROCID"],
                   "--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ["MASTER_PORT"]]
    config, _, _ = config_from_args(get_args_parser().parse_args([*options, __file__]))
    args.processes, args.count = config.nproc_per_node, config.max_nodes * config.nproc_per_node
    args.node_rank = config.rdzv_configs.get("rank")  # None with c10d, where the machine hosts that has the address
    args.host, _, port = (config.rdzv_endpoint or "localhost").partition(":")
    args.port = int(port) if port.isdigit() else 29400
    if config.max_nodes > 1 and args.host in ("localhost", "127.0.0.1"):
        parser.error(f"through {args.host}, each machine finds only itself. Let one host the rendezvous, say this one, and write "
                     f"on all: python {' '.join(sys.argv)} --rdzv-backend=c10d --rdzv-endpoint={HERE}:29400")
    return args


def meet(args, index):
    """The store through which all talk, this process's rank and address. A machine that cannot reach it says what it sees."""
    end, address = time.monotonic() + args.wait, "unknown"
    while True:
        try:
            address = socket.gethostbyname(args.host)
            hosts = index == 0 and (address == socket.gethostbyname(HERE) if args.node_rank is None else args.node_rank == 0)
            own = args.host if hosts else socket.create_connection((address, args.port), 3).getsockname()[0]
            store = dist.TCPStore(address, args.port, None, hosts, timedelta(seconds=args.wait), wait_for_workers=False)
            return store, 0 if hosts else store.add("others", 1), own
        except (OSError, dist.DistError) as error:
            if time.monotonic() > end:
                sys.exit(1 if index else f"""{HERE}: port {args.port} of {args.host}, which is {address} here: {error}
  Refused: start check_cluster there, or correct the address; if it is this machine's, write its host name instead.
  Timed out, or no route: a firewall stops packets, the machine is off, or the address is wrong.
  In use: end what uses it, or take another port. Unknown: correct it, or add {args.host} and {HERE} to DNS or /etc/hosts.""")
        time.sleep(0.2)


def sign_in(args, store, rank):
    """The ranks on each machine once all have come, and what differs between machines."""
    facts = [f"torch {torch.__version__}", f"Python {sys.version.split()[0]}", args.device]
    if args.device == "cuda":
        facts += [torch.cuda.get_device_name(), f"NCCL {torch.cuda.nccl.version()}"]
    facts += [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("NCCL_") and "IFNAME" not in name]
    store.set(f"rank {rank}", "\n".join([HERE, *facts]))
    keys = [f"rank {number}" for number in range(args.count)]
    with contextlib.suppress(dist.DistStoreError):  # raised when the time is up
        store.wait(keys, timedelta(seconds=args.wait))
    came = [store.get(key).decode().split("\n") for key in keys if store.check([key])]
    known = {machine: facts for machine, *facts in came}
    machines = {machine: [number for number, (other, *_) in enumerate(came) if other == machine] for machine in known}
    print("\n".join(f"{machine}: ranks {ranks}, {', '.join(known[machine])}" for machine, ranks in machines.items()), flush=True)
    if len(came) < args.count:
        raise TimeoutError(f"{len(came)} of {args.count} processes came in {args.wait} s: start the same command on each; "
                           f"one that cannot reach {args.host}:{args.port} says what it sees")
    shared = set.intersection(*map(set, known.values()))
    return machines, [f"only on {machine}: {fact}" for machine in known for fact in known[machine] if fact not in shared]


def reach(args, store, rank, machines, address):
    """What machines cannot connect to: the first process of each listens, and tries all of them."""
    if rank == machines[HERE][0]:
        server = socket.create_server(("", 0), backlog=2 * len(machines))
        store.set(f"place of {HERE}", f"{server.getsockname()[1]} {address} {socket.getfqdn(HERE)}")
        store.set(f"seen from {HERE}", "\n".join(unreachable(args, store, machines)))
    return [fault for machine in machines for fault in store.get(f"seen from {machine}").decode().splitlines()]


def unreachable(args, store, machines):
    """Addresses, which gloo and NCCL use, and rank 0's name, which torchrun uses."""
    for machine in machines:
        port, *places = store.get(f"place of {machine}").decode().split()
        named = args.node_rank is None and machine == min(machines)  # with c10d, rank 0 is there
        for place in places[:1 + named]:
            try:
                socket.create_connection((place, int(port)), 3).close()
            except OSError as error:
                yield f"{HERE} cannot connect to {machine} at {place}, on a random port: {error}"


def measure(args, store, rank, gpu, machines):
    """Print how fast all-reduces are, within a machine and between them; return whose clock is wrong."""
    groups = {**{f"within {machine}": ranks for machine, ranks in machines.items()},
              "between machines": [ranks[0] for ranks in machines.values()], "all": [*range(args.count)]}
    times, reports, wait = {}, [None] * args.count, timedelta(seconds=args.wait)
    dist.init_process_group(None if gpu else "gloo", store=store, rank=rank, world_size=args.count, timeout=wait, device_id=gpu)
    for name, ranks in groups.items():
        group = dist.new_group(ranks, timeout=wait)
        if rank in ranks:
            times[name] = all_reduce(group, rank, ranks, gpu)
    dist.all_gather_object(reports, [time.time(), times])
    for name, ranks in groups.items():
        if len(ranks) > 1:
            seconds = max(reports[number][1][name] for number in ranks)
            speed = MIB * 2**23 * 2 * (len(ranks) - 1) / len(ranks) / seconds / 1e9  # as nccl-tests's bus bandwidth
            print(f"{name}: an all-reduce of {MIB} MiB in {seconds * 1e3:.1f} ms, {speed:.3g} Gbit/s")
    ahead = {machine: reports[ranks[0]][0] - reports[0][0] for machine, ranks in machines.items()}
    return [f"the clock of {machine} is {seconds:+.1f} s off" for machine, seconds in ahead.items() if abs(seconds) > 2]


def all_reduce(group, rank, ranks, gpu):
    """The seconds that the fastest takes."""
    times = []
    for _ in range(4):  # the first one connects
        tensor = torch.full([MIB << 18], rank, dtype=torch.float32, device=gpu)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        tensor[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    assert torch.all(tensor == sum(ranks)), f"the sum over ranks {ranks} is wrong"
    return min(times)


def work(index, args):
    """What each process does; rank 0 prints."""
    store, rank, address = meet(args, index)
    sys.stdout, gpu, faults = sys.stdout if rank == 0 else None, None, []
    try:
        if args.device != "cpu":
            gpu = torch.device(args.device, (index + int(os.getenv("SLURM_LOCALID", 0))) % torch.accelerator.device_count())
            torch.accelerator.set_device_index(gpu)  # this process's default GPU, instead of GPU 0
        machines, faults = sign_in(args, store, rank)
        faults += reach(args, store, rank, machines, address) or measure(args, store, rank, gpu, machines)
    except Exception as error:  # of several ranks' errors the first is kept, which may have caused the others
        faults.append(store.compare_set("error", "", f"rank {rank} on {HERE}: {' '.join(str(error).split())[:300]}").decode())
    print("\n".join(f"WRONG: {fault}" for fault in faults) or "Fine.", flush=True)
    os._exit(int(bool(faults)))  # torch may wait for what has failed


if __name__ == "__main__":
    args = parse_args()
    processes = mp.spawn(work, [args], args.processes, join=False).processes
    end = time.monotonic() + 6 * args.wait + 60
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        process.kill()
    if any(process.exitcode != 0 for process in processes):
        with contextlib.suppress(OSError):  # until rank 0 has ended: srun may kill it when a task has failed
            socket.create_connection((args.host, args.port), args.wait).recv(1)
        sys.exit(f"{HERE}: something is wrong: see above, or what {args.host} prints, and docs/troubleshooting.md")
