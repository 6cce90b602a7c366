"""Why does my cluster not train? Started on each machine, with the options that torchrun takes:
python tools/check_cluster.py --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d \
--rdzv-endpoint=HOST:29400
It is torchrun then, but one that does not wait ten minutes, and without a word, for a machine that
does not come. By Slurm alone: srun --kill-on-bad-exit=1 python tools/check_cluster.py
"""
import argparse
import contextlib
import fcntl
import hashlib
import ipaddress
import itertools
import json
import logging
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import median

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's own alarms would bury what is found
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils

CLOCKS = 5  # seconds apart: a third of what torchrun's heartbeats, 3 of 5 s, bear by default
LATENCY = 0.005  # seconds: machines in one building need a tenth of it
LEAST = 60e6  # bytes a second: half of what the slowest cable in use, 1 Gbit/s, carries
MB = 2**20
found = {"processes": [], "unreached": [], "all-reduce": {}, "products": {}, "faults": []}


def parse_args():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"] if not accelerator or accelerator.type == "mps" else [accelerator.type, "cpu"]
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--wait", type=utils.count, default=60, help="seconds for all processes to come (60)")
    add("--largest", type=utils.count, default=256, help="MB of the largest all-reduce (256); "
        "a process takes three times as much memory")
    add("--json", type=Path, metavar="FILE", help="all that was found, written where rank 0 is")
    add("--device", choices=devices, default=devices[0])
    add("--backend", help="the device's own by default")
    add("--machines", type=int, default=0, help="that should come, where torchrun --nnodes=MIN:MAX "
        "starts with fewer")
    args, options = parser.parse_known_args()
    if options and "LOCAL_RANK" in os.environ and not args.machines:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    args.backend = args.backend or dist.get_default_backend_for_device(args.device)
    return args, options


def launch(args, options):
    """Be torchrun, except that the processes start without the machines that do not come."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # rank 0 says it
    launcher = get_args_parser().parse_args([*options, __file__])
    machines = int(launcher.nnodes.rpartition(":")[2])
    launcher.training_script_args = [*sys.argv[1:], f"--machines={machines}"]
    launcher.max_restarts = 0  # what was found is said once
    launcher.shutdown_timeout = 5  # seconds, instead of 30, for a process that was stopped
    last_call = max(1, args.wait - 5)  # the processes then take some seconds to start
    launcher.rdzv_conf = f"last_call_timeout={last_call},read_timeout={args.wait // 2}"  # tries twice
    if launcher.rdzv_backend == "static":  # which knows no last call: the same address, by c10d
        launcher.rdzv_backend, launcher.standalone = "c10d", machines == 1
        address = f"{launcher.master_addr}:{launcher.master_port or 29500}"
        launcher.rdzv_endpoint = launcher.rdzv_endpoint or address
        launcher.rdzv_conf += f",is_host={launcher.node_rank == 0}"
        launcher.node_rank = 0  # c10d would warn of another
    launcher.nnodes = f"1:{machines}"
    try:
        run(launcher)
    except ChildFailedError:  # it has said why
        sys.exit(1)
    except RendezvousError as error:
        sys.exit(f"{socket.gethostname()}: waited {args.wait} s for the machine of the rendezvous, "
                 f"{launcher.rdzv_endpoint}: {error.__cause__ or error} Is it started, is this the "
                 "name that `hostname` prints there, does a firewall drop what comes from here?")


class Meeting:
    """Where the processes come together after each step, and rank 0 sees who does not."""

    # A process beside each one ends it when a step takes too long: one that was stopped, or waits
    # for a rank 0 that was, cannot do that itself.
    GUARD = """import os, select, sys
while told := os.read(0, 99):
    if not select.select([0], [], [], float(told.split()[-1]))[0]:
        sys.stderr.write(sys.argv[1])
        os.kill(os.getppid(), 9)
        break"""

    def __init__(self, args, rank, local_rank, world_size):
        self.args, self.rank, self.ranks = args, rank, range(world_size)
        self.patience = args.wait  # seconds that a step may take
        self.thread = ThreadPoolExecutor(1)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        last_words = (f"{socket.gethostname()}: nothing is heard of rank 0 at {host}:{port}. Is it "
                      "there, and does a firewall let this machine connect to it?\n")
        self.guard = subprocess.Popen(
            [sys.executable, "-ISc", self.GUARD, last_words if local_rank == 0 else ""],
            stdin=subprocess.PIPE, bufsize=0, start_new_session=True)  # SIGTERM is not for it
        self.grace = 7 + 2 * (local_rank > 0)  # one of each machine says it before all end
        self.begin_step(args.wait)
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.store = dist.PrefixStore("check", dist.TCPStore(
            host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(hours=1)))

    def begin_step(self, seconds):
        self.guard.stdin.write(b"%d\n" % (seconds + self.grace))

    def collect(self, step, mine, seconds):
        """Rank 0 gets what each process has, None where nothing came; the others wait for it."""
        self.step = step
        self.store.set(f"{step}/{self.rank}", json.dumps(mine))
        if self.rank != 0:
            told = self.store.get(step).decode()
            if told != "go on":
                os._exit(int(told))
            return []
        keys = [f"{step}/{rank}" for rank in self.ranks]
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(keys, timedelta(seconds=seconds))
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def all_do(self, step, rows, function, *arguments):
        """Rank 0 gets what the function returned in each process, if it did in all."""
        if self.rank == 0:  # nothing stands in the way: the others wait for this after each step
            self.store.set(self.step, "go on")
        self.begin_step(self.patience)
        end = time.monotonic() + self.patience + 3
        try:  # in a thread, for a collective may wait for ever
            mine = [self.thread.submit(function, *arguments).result(self.patience), None]
        except TimeoutError:
            mine = [None, f"no end within {self.patience} s"]
        except Exception as error:
            mine = [None, " ".join(str(error).split())[:300]]
        given = self.collect(step, mine, end - time.monotonic())  # none in the other ranks
        failed = [f"{names([row])} failed in {step}: {one[1]}"
                  for row, one in zip(rows, given) if one and one[1]]
        if silent := [row for row, one in zip(rows, given) if one is None]:
            failed = [f"{names(silent)} said nothing for {self.patience} s in {step}: stopped, "
                      "killed or cut off?"]
        if failed:
            self.verdict(failed, "")
            self.finish()
        return [one[0] for one in given]

    def verdict(self, faults, good):
        """The end of a part: what is wrong there, or that nothing is."""
        found["faults"] += faults
        lines = [f"   NOT GOOD: {fault}" for fault in faults] or [f"   good: {good}"]
        print(*lines, sep="\n", flush=True)

    def finish(self):
        """Rank 0's last words, and the end of all processes."""
        status = int(bool(found["faults"]))
        print(f"5. First to mend: {found['faults'][0]}" if status else "5. Fine.", flush=True)
        if self.args.json:
            record = {"command": sys.argv, "fine": not status, **found}
            self.args.json.write_text(json.dumps(record, indent=1) + "\n")
        self.store.set(self.step, str(status))
        time.sleep(1)  # the store may end with this process: the others read it first
        os._exit(status)


def names(rows):
    """These processes in words: ranks 0, 1 on node1; rank 4 on node2."""
    machines = {row["machine"]: [] for row in rows}
    for row in rows:
        machines[row["machine"]].append(str(row["rank"]))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} on {machine}"
                     for machine, ranks in machines.items())


def network_cards():
    """The IPv4 address of each network interface that has one."""
    cards = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # 0x8915: SIOCGIFADDR
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                cards[name] = socket.inet_ntoa(answer[20:24])
    return cards


def address_given_out(backend, cards):
    """What the backend tells the others to connect to."""
    chosen = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    if backend == "gloo" and not chosen:  # that of the machine's own name
        with contextlib.suppress(OSError):
            return socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    chosen = chosen or "^lo,docker,virbr"  # NCCL's own choice; ^ says which not
    beginnings = tuple(chosen.lstrip("^=").split(","))
    fits = [address for name, address in cards.items()
            if name.startswith(beginnings) != chosen.startswith("^")]
    return fits[0] if fits else "127.0.0.1"


def describe(args, device, rank, port):
    """What the others have to know of this process; the first nine are shown."""
    cards, name, unit, devices = network_cards(), platform.machine(), None, 0
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        name, unit = properties.name, str(getattr(properties, "uuid", device))
        devices = torch.accelerator.device_count()
    version = torch.cuda.nccl.version() if args.backend == "nccl" else ["in torch"]
    scripts = {str(script.relative_to(ROOT)): hashlib.sha256(script.read_bytes()).hexdigest()[:8]
               for script in (*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py"), Path(__file__))}
    variables = {name: value for name, value in os.environ.items() if name.startswith(
        ("NCCL_", "GLOO_", "OMP_NUM_THREADS")) and "IFNAME" not in name}  # cards may differ
    return {"rank": rank, "machine": socket.gethostname(),
            "address": address_given_out(args.backend, cards), "device": str(device), "name": name,
            "torch": torch.__version__, "Python": platform.python_version(),
            "backend": f"{args.backend} {'.'.join(map(str, version))}",
            "threads": torch.get_num_threads(),
            "node": int(os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))),
            "port": port, "cards": cards, "unit": unit, "devices": devices, "variables": variables,
            "scripts": scripts}


def who_is_here(args, meeting, row):
    """Part 1: all rows in all processes, or an end with the names of those that did not come."""
    late = args.machines - int(os.environ.get("GROUP_WORLD_SIZE", args.machines))
    given = meeting.collect("the start", row, 4 if late > 0 else args.wait)  # launch() has waited
    if row["rank"] != 0:
        return json.loads(meeting.store.get("rows"))
    rows = found["processes"] = [row for row in given if row]
    print("1. Who is here")
    table = [[*map(str, line)][:9] for line in (row.keys(), *(row.values() for row in rows))]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("   " + "  ".join(map(str.ljust, line, widths)).rstrip())
    missing = [str(rank) for rank, row in enumerate(given) if not row]
    machines = len({row["machine"] for row in rows})
    who = [f"{late} of {args.machines} machines"] if late > 0 else []
    if missing:
        who.append(f"{len(missing)} of {len(given)} processes (ranks {', '.join(missing)})")
    meeting.verdict([f"{some} did not come within {args.wait} s; here: {names(rows)}. Is the same "
                     "line started there, and does a firewall let it come to "
                     f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}?" for some in who],
                    f"{len(rows)} processes, {machines} machine{'s' * (machines > 1)}")
    if who:
        meeting.finish()
    meeting.store.set("rows", json.dumps(rows))
    return rows


def differences(rows):
    """Part 2: what the processes do not agree on."""
    facts = [{**{name: row[name] for name in ("torch", "Python", "backend", "devices")},
              **row["variables"], **row["scripts"]} for row in rows]
    faults = []
    for name in sorted(set().union(*facts)):
        values = {}
        for row, fact in zip(rows, facts):
            values.setdefault(fact.get(name, "missing"), []).append(row)
        if len(values) > 1:
            faults.append(f"{name} differs: " + " | ".join(
                f"{value} in {names(group)}" for value, group in values.items()))
    units = {}
    for row in rows:
        units.setdefault((row["node"], row["unit"]), []).append(row)
    return faults + [f"{names(group)} share one device, {group[0]['device']}"
                     for (_, unit), group in units.items() if unit and len(group) > 1]


def connect(leader):
    """What stands in the way to a machine where it says that it is."""
    if ipaddress.ip_address(leader["address"].partition("%")[0]).is_loopback:
        return "that leads back to whoever asks; look at /etc/hosts there"
    try:
        socket.create_connection((leader["address"], leader["port"]), 3).close()
    except TimeoutError:
        return "no answer: a firewall drops it, or that card is in another network"
    except OSError as error:
        return f"{error}: a firewall, or that card is in another network"


def reach(leaders, is_leader):
    """The time on this machine's clock, and what came of trying to connect to each machine."""
    clock = time.time()
    with ThreadPoolExecutor(16) as pool:
        return [clock, list(pool.map(connect, leaders)) if is_leader else []]


def who_reaches_whom(meeting, rows, leaders, reached):
    """Parts 2 and 3, of what all machines tried at the same time."""
    now, first = reached[0][0], leaders[0]["machine"]
    clocks = [f"the clock of {leader['machine']} is {abs(ahead):.1f} s "
              f"{'ahead of' if ahead > 0 else 'behind'} that of {first}: torchrun's heartbeats "
              "bear 15 s in all" for leader in leaders
              if abs(ahead := reached[leader["rank"]][0] - now) > CLOCKS]
    print("2. What differs")
    meeting.verdict(differences(rows) + clocks, "nothing that must not")
    print("3. Who reaches whom")
    faults = []
    for source, (j, target) in itertools.product(leaders, enumerate(leaders)):
        one, other, wrong = source["machine"], target["machine"], reached[source["rank"]][1][j]
        if source is target or not wrong:
            continue
        found["unreached"].append({"from": one, "to": other, "why": wrong})
        variable = f"{target['backend'].split()[0].upper()}_SOCKET_IFNAME"
        cures = [f"{variable}={name} ({address})" for name, address in target["cards"].items()
                 if address != target["address"] and name != "lo"]
        faults.append(f"{one} cannot reach {other} at {target['address']}: {wrong}" +
                      f"; to try on {other}: {' or '.join(cures)}" * bool(cures))
    meeting.verdict(faults, "each machine reaches each other one" if leaders[1:] else "one machine")
    if faults:
        meeting.finish()  # no process group can be made


def work(device):
    """Matrix products in a tenth of a second: of 15 the best, another may use the core by chance."""
    matrix, rates = torch.ones(256, 256, device=device), []
    for _ in range(15):
        end, products = time.perf_counter() + 0.1, 0
        while time.perf_counter() < end:
            (matrix @ matrix)[0, 0].item()  # waits for the device
            products += 1
        rates.append(products)
    return max(rates)


def seconds(tensor, group, repeats, choose):
    """What one of several all-reduces takes in the slowest process."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        tensor[0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    slowest = torch.tensor([choose(times)], device=tensor.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def all_reduces(groups, rank, largest, device):
    """Latency and bus bandwidth by size of each group that has this rank; are the sums right?"""
    measured = {}
    for name, ranks in groups.items():
        group = dist.new_group(ranks)  # made by all, also by those that are not in it
        if rank not in ranks or len(ranks) == 1:
            continue
        tiny = torch.zeros(1, device=device)
        seconds(tiny, group, 5, min)  # connections are made at the first use
        measured[name] = figures = {"latency, s": seconds(tiny, group, 20, median),
                                    "right": True, "bytes/s": {}}
        for size in [size for size in (1, 4, 16, 64, 256, 1024) if size <= largest]:
            pattern = torch.arange(size * MB // 4, device=device).remainder_(1000).float()
            tensor = pattern + rank  # whole numbers below 2^24: the same in any order of summing
            dist.all_reduce(tensor, group=group)
            figures["right"] &= torch.equal(tensor, pattern * len(ranks) + sum(ranks))
            took = seconds(tensor.zero_(), group, 3, min)
            figures["bytes/s"][size] = size * MB / took * 2 * (len(ranks) - 1) / len(ranks)
            if took > 0.3:  # four times as much tells nothing new
                break
    return measured


def measure(args, meeting, rows, leaders, device):
    """Part 4 in all processes: within each machine, between two neighbours."""
    rates = meeting.all_do("computing", rows, work, device)
    meeting.all_do("making the process group", rows, lambda: dist.init_process_group(
        args.backend, store=dist.PrefixStore("group", meeting.store), rank=meeting.rank,
        world_size=len(rows), device_id=device if args.backend != "gloo" else None))
    groups = {f"within {leader['machine']}": [row["rank"] for row in rows if row["node"] ==
                                              leader["node"]] for leader in leaders}
    ring = [*itertools.pairwise(leaders)] + [(leaders[0], leaders[-1])] * (len(leaders) > 2)
    pairs = [(f"{one['machine']} - {other['machine']}", [one["rank"], other["rank"]])
             for one, other in ring]
    measured = []
    for where, some in (("within the machines", groups), ("between machines", dict(pairs[::2])),
                        ("between machines again", dict(pairs[1::2]))):  # each cable for itself
        measured += zip(rows, meeting.all_do(f"all-reduces {where}", rows, all_reduces, some,
                                             meeting.rank, args.largest, device))
    return rates, measured


def how_fast(meeting, rows, rates, measured):
    """Part 4 of what all processes measured. What is slow trains all the same: a remark."""
    print("4. How fast")
    lines, faults, remarks = found["all-reduce"], [], []
    for row, figures in measured:
        lines.update(figures)
        faults += [f"the sum of an all-reduce {name} is wrong in {names([row])}"
                   for name, line in figures.items() if not line["right"]]
    for name, line in lines.items():
        line["best"] = max(line["bytes/s"].values())
        print(f"   {name}: latency {line['latency, s'] * 1e3:.2f} ms; bus bandwidth in MB/s: " +
              ", ".join(f"{value / 1e6:.1f} ({size} MB)" for size, value in line["bytes/s"].items())
              + f"; at best {line['best'] * 8e-9:.3g} Gbit/s")
        if " - " in name and line["latency, s"] > LATENCY:
            remarks.append(f"{name}: {line['latency, s'] * 1e3:.1f} ms latency, which each step of "
                           "training waits for")
        if " - " in name and line["best"] < LEAST:
            remarks.append(f"{name}: {line['best'] * 8e-6:,.0f} Mbit/s, less than half of what the "
                           "slowest cable carries, 1 Gbit/s: is it the right network card?")
    found["products"] = {names([row]): rate for row, rate in zip(rows, rates)}
    within = {name: line["best"] for name, line in lines.items() if " - " not in name}
    between = {name: line["best"] for name, line in lines.items() if " - " in name}
    for figures in (within, between, found["products"]):
        for name, value in figures.items():
            rest = [other for key, other in figures.items() if key != name]
            if rest and value < median(rest) / 2:
                what = "computes" if name.startswith("rank") else "sends"
                remarks.append(f"{name} {what} slower than the rest by half: {value:,.0f} a "
                               f"second, the others {median(rest):,.0f}")
    found["remarks"] = remarks
    print(*(f"   remark: {remark}\n" for remark in remarks), sep="", end="")
    meeting.verdict(faults, "every sum is right")


def check(args, rank, local_rank, world_size):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it where it waits in C++ too
    meeting = Meeting(args, rank, local_rank, world_size)
    if rank == 0 and args.json:
        args.json.touch()  # say now that it cannot be written
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    listener = socket.create_server(("", 0), backlog=1024)  # that connects is enough
    port = listener.getsockname()[1] if local_rank == 0 else None
    rows = who_is_here(args, meeting, describe(args, device, rank, port))
    leaders = [row for row in rows if row["port"]]
    reached = meeting.all_do("connecting", rows, reach, leaders, local_rank == 0)
    if rank == 0:
        who_reaches_whom(meeting, rows, leaders, reached)
    rates, measured = measure(args, meeting, rows, leaders, device)
    if rank == 0:
        how_fast(meeting, rows, rates, measured)
        meeting.finish()


if __name__ == "__main__":
    args, options = parse_args()
    if "LOCAL_RANK" not in os.environ and (options or "SLURM_STEP_NUM_TASKS" not in os.environ):
        sys.exit(launch(args, options))
    if "LOCAL_RANK" not in os.environ:
        os.environ.update(RANK=os.environ["SLURM_PROCID"], LOCAL_RANK=os.environ["SLURM_LOCALID"],
                          WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"])
        os.environ.setdefault("MASTER_ADDR", utils.slurm_host())
        os.environ.setdefault("MASTER_PORT", str(15000 + int(os.environ["SLURM_JOB_ID"]) % 15000))
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        sys.exit(1)  # --max-restarts: it has been said already
    check(args, *(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
