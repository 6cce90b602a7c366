"""What each process does: it says what it is, and does what the machine that leads asks for."""
import contextlib
import hashlib
import os
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from messages import HERE, receive, send

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2**24  # bytes of an all-reduce


def follow(args, local_rank, told):
    """Do what is asked for, until it is told with which status all end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    speaks = local_rank == args.local_ranks[0]  # for all of this machine
    leader = meet(args, speaks)
    listener = socket.create_server(("", 0), backlog=1024)  # other machines try to reach it
    send(leader, describe(args, listener.getsockname()[1]))
    pool = ThreadPoolExecutor(1)  # a collective may wait for ever
    while order := receive(leader, 3 * args.wait):  # the other machines may be slow to come, and then to answer
        if "end" in order:
            told.set()
            os._exit(order["end"])
        if "places" in order:
            work = pool.submit(reach, order["places"])
        else:
            work = pool.submit(all_reduces, args, local_rank, **order)
        try:
            send(leader, {"answer": work.result(args.wait)})
        except Exception as error:
            send(leader, {"error": " ".join(str(error).split())[:300] or f"not finished within {args.wait} s"})
    if speaks:
        print(f"{HERE}: lost contact with {args.host}:{args.port}, the rendezvous machine: has its process been "
              "stopped, killed or cut off?", file=sys.stderr, flush=True)
    else:
        told.wait(2 * args.wait)  # for the one that speaks, which may still be at what it was asked for
    told.set()
    os._exit(1)


def meet(args, speaks):
    """A connection to the machine that leads."""
    end = time.monotonic() + args.wait
    while True:
        try:
            return socket.create_connection((args.host, args.port), 3)
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(speaks and f"{HERE}: waited {args.wait} s for the rendezvous machine, {args.host}:{args.port}: "
                         f"{error}. Is check_cluster running there, is this its `hostname`, does a firewall drop packets?")
        time.sleep(0.2)


def describe(args, port):
    """What the machine that leads has to know; the first four of what must be alike are shown."""
    speeds = [0]
    for rate in Path("/sys/class/infiniband").glob("*/ports/*/rate"):
        speeds.append(float(rate.read_text().split()[0]))  # 200 Gb/sec (4X HDR)
    for device in Path("/sys/class/net").iterdir():
        if not (device / "bridge").exists() and not (device / "master").exists():  # of containers
            with contextlib.suppress(OSError):  # in many clouds none says it
                speeds.append(int((device / "speed").read_text()) / 1000)
    alike = {"device": "cpu" if args.device == "cpu" else f"{torch.accelerator.device_count()} x {args.device}",
             "torch": torch.__version__, "Python": sys.version.split()[0],
             args.backend: str(torch.cuda.nccl.version() if args.backend == "nccl" else "in torch")}
    for script in (*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py"), *ROOT.glob("tools/check_cluster/*.py")):
        alike[str(script.relative_to(ROOT))] = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    for name, value in os.environ.items():
        if name.startswith(("NCCL_", "GLOO_", "OMP_NUM_THREADS")) and "IFNAME" not in name:  # cards may differ
            alike[name] = value
    description = {"machine": HERE, "leads": args.leads, "local_rank": int(os.environ["LOCAL_RANK"]), "speed": max(speeds),
                   "alike": alike, "port": port}
    if args.backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:  # gloo looks up this machine's name
        try:
            description["address"] = socket.gethostbyname(HERE)
        except OSError:
            description["address"] = None
    return description


def reach(places):
    """The time on this machine's clock, and what stands in the way to each machine, if anything."""
    def obstacle(place):
        address, port, card = place
        cure = "" if card == address else f"; on that machine, try GLOO_SOCKET_IFNAME with the interface of {card}"
        if address.startswith("127."):
            return f"that address is loopback; check /etc/hosts there{cure}"
        try:
            socket.create_connection((address, port), 3).close()
        except OSError as error:
            return f"{error}: a firewall drops packets, or that interface is in another network{cure}"
    return {"clock": time.time(), "obstacles": list(ThreadPoolExecutor(64).map(obstacle, places))}


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
    for name, ranks in {"all": [*range(args.processes)], **groups}.items():
        if rank in ranks:  # the other groups are at work meanwhile, however many machines there are
            # Not by new_group: with local synchronization its members must have made equally many groups before.
            dist.init_process_group(args.backend, store=dist.PrefixStore(f"{attempt}, {name}", store),
                                    rank=ranks.index(rank), world_size=len(ranks),
                                    device_id=device if args.backend != "gloo" else None)
            if name in groups:  # all together need only to find each other
                figures[name] = measure(rank, ranks, device)
            dist.barrier()  # who is yet to connect would find the group gone
            dist.destroy_process_group()
    ways = [way for way in ("IB", "Socket") if log.exists() and f"via NET/{way}" in log.read_text()]
    return {"figures": figures, "ways": ways}


def measure(rank, ranks, device):
    pattern = torch.arange(SIZE // 4, device=device).remainder_(1000).float()
    tensor = pattern + rank  # whole numbers below 2^24: the same in any order of summing
    dist.all_reduce(tensor)  # connections are made at the first use
    right = torch.equal(tensor, pattern * len(ranks) + sum(ranks))
    return right, seconds(tensor.zero_(), 5), seconds(torch.zeros(1, device=device), 20)


def seconds(tensor, repeats):
    """What an all-reduce takes, as the median of several."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
