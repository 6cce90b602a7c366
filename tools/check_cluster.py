"""Why does my cluster not train? Started on each machine, with the options that torchrun takes:
python tools/check_cluster.py --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400
or by Slurm: srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python tools/check_cluster.py
The machine of the rendezvous leads: it asks all processes, and prints what it finds.
"""
import contextlib
import hashlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's own alarms would bury what is found
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import utils as rendezvous
from torch.distributed.run import config_from_args, get_args_parser

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils  # which lets Ctrl-C end a child also where it waits in C++

HERE = socket.gethostname()
SIZE = 2**24  # bytes of an all-reduce
faults = []


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


def say(line, what):
    with contextlib.suppress(OSError):  # who is gone does not answer either
        line.sendall(json.dumps(what).encode() + b"\n")


def hear(line, seconds):
    line.settimeout(max(0.1, seconds))
    with contextlib.suppress(OSError, ValueError), line.makefile() as file:  # None where nothing comes
        return json.loads(file.readline())


def meet(args):
    """A line to the machine that leads."""
    end = time.monotonic() + args.wait
    while True:
        try:
            return socket.create_connection((args.host, args.port), 3)
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(f"{HERE}: waited {args.wait} s for the machine of the rendezvous, {args.host}:{args.port}: "
                         f"{error}. Is it started, is this its `hostname`, does a firewall drop what comes from here?")
        time.sleep(0.2)


def follow(args, local_rank, line):
    """One process: it does what it is asked to, until it is told with which status all end."""
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
        print(f"{HERE}: nothing is heard of the machine of the rendezvous, {args.host}:{args.port}. Is it "
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
    for script in (*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py"), Path(__file__)):
        alike[str(script.relative_to(ROOT))] = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    alike |= {name: value for name, value in os.environ.items() if name.startswith(
        ("NCCL_", "GLOO_", "OMP_NUM_THREADS")) and "IFNAME" not in name}  # cards may differ
    by_name = args.backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ
    address = line.getsockname()[0]  # of the card that is connected to the one who leads
    return {"machine": HERE, "leads": args.leads, "speed": max(speeds), "alike": alike, "port": port,
            "card": address, "address": socket.gethostbyname(HERE) if by_name else address}


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


def all_reduces(args, local_rank, rank, port, groups):
    """For each group that has this rank: is the sum right, seconds for much and for a single number."""
    device, log = torch.device("cpu"), nccl_log(os.getpid())
    if args.device != "cpu":
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    if not dist.is_initialized():
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(log))  # says which network it took
        dist.init_process_group(args.backend, store=dist.TCPStore(args.host, port), rank=rank,
                                world_size=args.total, device_id=device if args.backend != "gloo" else None)
    figures, pattern = {}, torch.arange(SIZE // 4, device=device).remainder_(1000).float()
    for name, ranks in groups.items():
        if rank in ranks:  # the other groups are at work meanwhile, however many machines there are
            group = dist.new_group(ranks, use_local_synchronization=True)
            tensor = pattern + rank  # whole numbers below 2^24: the same in any order of summing
            dist.all_reduce(tensor, group=group)  # connections are made at the first use
            figures[name] = [torch.equal(tensor, pattern * len(ranks) + sum(ranks))]
            for given, repeats in ((tensor.zero_(), 5), (torch.zeros(1, device=device), 20)):
                times = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    dist.all_reduce(given, group=group)
                    given[0].item()  # waits for the device
                    times.append(time.perf_counter() - start)
                figures[name].append(sorted(times)[repeats // 2])
    return figures, [way for way in ("IB", "Socket") if log.exists() and f"via NET/{way}" in log.read_text()]


def names(rows):
    """These processes in words: ranks 0, 1 on node1; rank 4 on node2."""
    machines = {}
    for row in rows:
        machines.setdefault(row["machine"], []).append(str(row["rank"]))
    return "; ".join(f"rank{'s'[:len(ranks) - 1]} {', '.join(ranks)} on {node}" for node, ranks in machines.items())


def verdict(wrong, good="", last=False):
    """The end of a part: what is wrong there, or that nothing is."""
    print(*[f"   NOT GOOD: {fault}" for fault in wrong] or [f"   good: {good}"], sep="\n", flush=True)
    faults.extend(wrong)
    if wrong and last:
        raise SystemExit  # lead() says the last words


def ask(args, rows, what, *given):
    """What all processes answer, if all do."""
    for row in rows:
        say(row["line"], [what, row["rank"], *given])
    end = time.monotonic() + args.wait + 5
    answers = [hear(row["line"], end - time.monotonic()) for row in rows]
    silent = [row for row, answer in zip(rows, answers) if not answer]  # why others may fail too
    wrong = [f"{names(silent)} said nothing for {args.wait} s in {what}: stopped, killed or cut off?"] * bool(silent)
    wrong += [f"{names([row])} failed in {what}: {one[1]}" for row, one in zip(rows, answers) if one and one[1]]
    if wrong:
        verdict(wrong, last=True)
    return [answer for answer, _ in answers]


def how_fast(args, machines, first, rows, port):
    """All-reduces within each machine, and of one process of each with one of its neighbour."""
    groups = {f"within {machine}": those for machine, those in machines.items() if len(those) > 1}
    for one, other in zip(first[::2], first[1::2] + first[:len(first) % 2 and len(first) > 1]):
        groups[f"{one['machine']} - {other['machine']}"] = [one, other]
    ranks = {name: [row["rank"] for row in group] for name, group in groups.items()}
    for _ in range(3):  # what looks slow is measured again before it is said
        answers, lines, remarks, wrong = ask(args, rows, "all-reduces", port, ranks), [], [], []
        for name, group in groups.items():
            right, seconds, latencies = zip(*(answers[row["rank"]][0][name] for row in group))
            speed = SIZE * 8e-9 * 2 * (len(group) - 1) / len(group) / max(seconds)
            lines.append(f"{name}: latency {max(latencies) * 1e3:.2f} ms, bus bandwidth {speed:.3g} Gbit/s")
            wrong += [f"the sum of an all-reduce {name} is wrong in {names([row])}"
                      for row, good in zip(group, right) if not good]
            stated = min(row["speed"] or 1 for row in group)
            if " - " in name and speed < stated / 4:
                remarks.append(f"remark: {name}: {speed:.3g} of {stated:g} Gbit/s, which the network cards state (or 1)")
        if wrong or not remarks:
            break
    ways = {f"NCCL's way between machines: {way}" for _, seen in answers for way in seen}
    print(*(f"   {line}\n" for line in [*lines, *remarks, *ways]), sep="", end="")
    verdict(wrong, "every sum is right")


def lead(args, server):
    """Part by part, up to one that keeps the next from being tried."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    end, lines = time.monotonic() + args.wait, []
    with contextlib.suppress(TimeoutError):
        while len(lines) < args.total:
            server.settimeout(max(0.1, end - time.monotonic()))
            lines.append(server.accept()[0])
    rows = [{**row, "line": line} for line in lines if (row := hear(line, args.wait))]  # torch is imported
    rows.sort(key=lambda row: (not row["leads"], row["machine"]))
    machines = {row["machine"]: [] for row in rows}
    for rank, row in enumerate(rows):
        row["rank"] = rank
        machines[row["machine"]].append(row)
    first = [those[0] for those in machines.values()]
    print("1. Who is here")
    for row in first:
        facts = ", ".join(f"{name}: {value}" for name, value in [*row["alike"].items()][:4])
        print(f"   {names(machines[row['machine']])}, {row['address']}, {facts}, network: {row['speed']:g} Gbit/s")
    with contextlib.suppress(SystemExit):
        verdict([f"{args.machines - len(first)} of {args.machines} machines, {args.total - len(rows)} of {args.total} "
                 f"processes, did not come within {args.wait} s; here: {', '.join(machines)}. Is the same line started "
                 f"there, and does a firewall let it come to {args.host}:{args.port}?"] * (len(rows) < args.total),
                f"{len(rows)} processes, {len(first)} machines", last=True)
        places = [[row["address"], row["port"], row["card"]] for row in first]
        answers, wrong = ask(args, rows, "connecting", places), []
        print("2. What differs")
        for name in sorted(set().union(*(row["alike"] for row in rows))):
            values = {}
            for row in rows:
                values.setdefault(row["alike"].get(name, "missing"), []).append(row)
            those = " | ".join(f"{value} in {names(group)}" for value, group in values.items())
            wrong += [f"{name} differs: {those}"] * (len(values) > 1)
        for row in first:
            if abs(ahead := answers[row["rank"]][0] - answers[0][0]) > 5:  # torchrun's heartbeats bear 15
                wrong.append(f"the clock of {row['machine']} is {ahead:+.1f} s from that of {HERE}")
        verdict(wrong, "nothing that must not")
        print("3. Who reaches whom")
        verdict([f"{one['machine']} cannot reach {other['machine']} at {other['address']}: {obstacle}"
                 for one in first for other, obstacle in zip(first, answers[one["rank"]][1])
                 if obstacle and one is not other], "each machine reaches each other one", last=True)
        print("4. How fast", flush=True)
        how_fast(args, machines, first, rows, store.port)
    blind = [row["machine"] for row in first if args.found and row["alike"]["device"] == "cpu"]
    fine = f"5. Fine, but DEVICE: CPU on {', '.join(blind)}, where torch sees no GPU" if blind else "5. Fine."
    print(f"5. First to fix: {faults[0]}" if faults else fine, flush=True)
    for row in rows:
        say(row["line"], ["end", None, int(bool(faults))])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
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
