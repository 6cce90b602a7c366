"""What each process does: it says what it is, and does what the one that leads asks for."""
import contextlib
import hashlib
import os
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from cluster_check import lines
from cluster_check.lines import hear, say

import utils

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = 2**24  # bytes of an all-reduce


def follow(args, local_rank, line):
    """One process: it does what it is asked to, until it is told with which status all end."""
    utils.end_at_ctrl_c()  # also where it waits in a collective
    listener, pool = socket.create_server(("", 0), backlog=1024), ThreadPoolExecutor(1)
    say(line, describe(args, line, listener.getsockname()[1]))
    while order := hear(line, args.wait + 20):
        what, rank, *given = order
        if what == "end":
            os._exit(*given)
        function = {"connecting": connect, "all-reduces": all_reduces}[what]
        try:  # in a thread, for a collective may wait for ever
            say(line, [pool.submit(function, args, local_rank, rank, *given).result(args.wait), None])
        except Exception as error:
            say(line, [None, " ".join(str(error).split())[:300] or f"no end within {args.wait} s"])
    if local_rank == args.local_ranks[0]:
        print(f"{lines.HERE}: nothing is heard of the machine of the rendezvous, {args.host}:{args.port}. Is it "
              "there, and does a firewall let this machine connect to it?", file=sys.stderr, flush=True)
    os._exit(1)


def describe(args, line, port):
    """What the machine that leads has to know; the first four of what must be alike are shown."""
    speeds = [0]
    for rate in Path("/sys/class/infiniband").glob("*/ports/*/rate"):
        speeds.append(float(rate.read_text().split()[0]))  # 200 Gb/sec (4X HDR)
    for card in Path("/sys/class/net").iterdir():
        if not (card / "bridge").exists() and not (card / "master").exists():  # of containers
            with contextlib.suppress(OSError):  # in many clouds none says it
                speeds.append(int((card / "speed").read_text()) / 1000)
    alike = {"device": "cpu" if args.device == "cpu" else f"{torch.accelerator.device_count()} x {args.device}",
             "torch": torch.__version__, "Python": sys.version.split()[0],
             args.backend: str(torch.cuda.nccl.version() if args.backend == "nccl" else "in torch")}
    for script in (*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py"), ROOT / "tools/check_cluster.py",
                   *ROOT.glob("tools/cluster_check/*.py")):
        alike[str(script.relative_to(ROOT))] = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    alike |= {name: value for name, value in os.environ.items() if name.startswith(
        ("NCCL_", "GLOO_", "OMP_NUM_THREADS")) and "IFNAME" not in name}  # cards may differ
    by_name = args.backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ
    address = line.getsockname()[0]  # of the card that is connected to the one who leads
    return {"machine": lines.HERE, "leads": args.leads, "speed": max(speeds), "alike": alike, "port": port,
            "card": address, "address": socket.gethostbyname(lines.HERE) if by_name else address}


def connect(args, local_rank, rank, places):
    """The time on this machine's clock, and what stands in the way to each machine."""
    def obstacle(place):
        address, port, card = place
        cure = f"; to try there: GLOO_SOCKET_IFNAME, the card of {card}" * (card != address)
        if address.startswith("127."):
            return f"that leads back to whoever asks; look at /etc/hosts there{cure}"
        try:
            socket.create_connection((address, port), 3).close()
        except OSError as error:
            return f"{error}: a firewall drops it, or that card is in another network{cure}"
    return time.time(), list(ThreadPoolExecutor(64).map(obstacle, places))


def nccl_log(pid):
    return Path(tempfile.gettempdir(), f"check_cluster.{pid}")


def all_reduces(args, local_rank, rank, port, groups, attempt):
    """For each group that has this rank: is the sum right, seconds for much and for a single number."""
    device, log = torch.device("cpu"), nccl_log(os.getpid())
    if args.device != "cpu":
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(log))  # says which network it took
    store, figures = dist.TCPStore(args.host, port), {}
    for name, ranks in {"all": [*range(args.total)], **groups}.items():
        if rank in ranks:  # the other groups are at work meanwhile, however many machines there are
            # Not by new_group: with local synchronization its members must have made equally many groups before.
            dist.init_process_group(args.backend, store=dist.PrefixStore(f"{attempt}, {name}", store),
                                    rank=ranks.index(rank), world_size=len(ranks),
                                    device_id=device if args.backend != "gloo" else None)
            if name in groups:  # all together need only to find each other
                figures[name] = measure(rank, ranks, device)
            dist.barrier()  # who is yet to connect would find the group gone
            dist.destroy_process_group()
    return figures, [way for way in ("IB", "Socket") if log.exists() and f"via NET/{way}" in log.read_text()]


def measure(rank, ranks, device):
    pattern = torch.arange(SIZE // 4, device=device).remainder_(1000).float()
    tensor = pattern + rank  # whole numbers below 2^24: the same in any order of summing
    dist.all_reduce(tensor)  # connections are made at the first use
    found = [torch.equal(tensor, pattern * len(ranks) + sum(ranks))]
    for given, repeats in ((tensor.zero_(), 5), (torch.zeros(1, device=device), 20)):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            dist.all_reduce(given)
            given[0].item()  # waits for the device
            times.append(time.perf_counter() - start)
        found.append(sorted(times)[repeats // 2])
    return found
