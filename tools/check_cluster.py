"""Why does my cluster not train? Started on each machine, with the options that torchrun takes:
python tools/check_cluster.py --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d \
--rdzv-endpoint=HOST:29400
It is torchrun then, but one that does not wait ten minutes, and without a word, for a machine that
does not come. By Slurm alone: srun --kill-on-bad-exit=1 python tools/check_cluster.py
"""
import argparse
import fcntl
import hashlib
import ipaddress
import itertools
import json
import logging
import os
import platform
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import median

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's own alarms would bury what is found
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402

CLOCKS = 5  # seconds apart: a third of what torchrun's heartbeats, 3 of 5 s, bear by default
ROUND_TRIP = 0.005  # seconds: machines in one building need a tenth of it
LEAST = 60e6  # bytes a second: half of what the slowest cable in use, 1 Gbit/s, carries
MB = 2**20
# A process beside each one: ends it when it is stopped or stuck, where it cannot do so itself. It
# is told again and again for how many seconds it may hear nothing.
SENTINEL = """import os, select, sys
while told := os.read(0, 99):
    if not select.select([0], [], [], float(told.split()[-1]))[0]:
        sys.stderr.write(sys.argv[1])
        os.kill(os.getppid(), 9)
        break"""

found = {"processes": [], "connections": [], "all-reduce": {}, "products/s": {}, "faults": []}
now = {"stage": "waiting for the others", "since": time.monotonic(), "status": "go on"}


def parse_args():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = ["cpu"] if not accelerator or accelerator.type == "mps" else [accelerator.type, "cpu"]
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--wait", type=utils.count, default=60, help="seconds for all processes to come (60)")
    add("--largest", type=utils.count, default=256, help="MB of the largest all-reduce (256)")
    add("--json", type=Path, metavar="FILE", help="all that was found, written where rank 0 is")
    add("--device", choices=devices, default=devices[0])
    add("--backend", help="the device's own by default")
    add("--machines", type=int, default=0, help="that should come, where torchrun --nnodes=MIN:MAX "
        "starts with fewer")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # from torch.distributed.launch
    args, options = parser.parse_known_args()
    if options and "LOCAL_RANK" in os.environ and not args.machines:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    args.backend = args.backend or dist.get_default_backend_for_device(args.device)
    args.patience = min(args.wait, 10)  # seconds for which a process that is there may be silent
    return args, options


def launch(args, options):
    """Be torchrun, except that the processes start without the machines that do not come."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import get_args_parser, run
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # rank 0 says it
    launcher = get_args_parser().parse_args([*options, __file__])
    machines = int(launcher.nnodes.rpartition(":")[2])
    launcher.training_script_args = [*sys.argv[1:], f"--machines={machines}"]
    launcher.max_restarts = 0  # what was found is said once
    launcher.shutdown_timeout = 5  # seconds, instead of 30, for a process that was stopped
    conf = [launcher.rdzv_conf] if launcher.rdzv_conf else []
    if launcher.rdzv_backend == "static":  # which knows no last call: the same address, by c10d
        launcher.rdzv_backend, launcher.standalone = "c10d", machines == 1
        launcher.rdzv_endpoint = (launcher.rdzv_endpoint or
                                  f"{launcher.master_addr}:{launcher.master_port or 29500}")
        conf.append(f"is_host={launcher.node_rank == 0}")
        launcher.node_rank = 0  # c10d would warn of another
    last_call = max(1, args.wait - 5)  # the processes then take some seconds to start
    conf += [f"last_call_timeout={last_call}", f"read_timeout={args.wait + 5}"]
    launcher.nnodes, launcher.rdzv_conf = f"1:{machines}", ",".join(conf)

    def look_for_the_rendezvous():
        try:
            socket.create_connection(parse_rendezvous_endpoint(launcher.rdzv_endpoint, 29400), 3)
        except OSError as error:
            print(f"{socket.gethostname()}: waited {args.wait} s for the machine of the "
                  f"rendezvous, {launcher.rdzv_endpoint}: {error}. Is it started, is this the name "
                  "that `hostname` prints there, does a firewall drop what comes from here?",
                  file=sys.stderr, flush=True)
            os._exit(1)
    timer = threading.Timer(args.wait, look_for_the_rendezvous)
    timer.daemon = True
    if machines > 1:
        timer.start()
    try:
        run(launcher)
    except ChildFailedError:  # it has said why
        sys.exit(1)
    except RendezvousError as error:
        sys.exit(f"{socket.gethostname()}: {error}")


def network_cards():
    """The IPv4 address of each network interface that has one."""
    cards = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:  # 0x8915: SIOCGIFADDR, for which Python has no function
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                cards[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                pass
    return cards


def address_given_out(backend, cards):
    """What the backend tells the others to connect to."""
    chosen = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    if backend == "gloo" and not chosen:  # that of the machine's own name
        try:
            return socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        except OSError:
            return "127.0.0.1"
    chosen = chosen or "^lo,docker,virbr"  # NCCL's own choice; ^ says which not
    names = tuple(chosen.lstrip("^=").split(","))
    fits = [address for name, address in cards.items()
            if name.startswith(names) != chosen.startswith("^")]
    return fits[0] if fits else "127.0.0.1"


def describe(args, device, rank, port):
    """What the others have to know of this process; the first nine are shown."""
    cards, name, unit, devices = network_cards(), platform.machine(), None, 0
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
        name, unit = properties.name, str(getattr(properties, "uuid", device))
        devices, room = torch.accelerator.device_count(), torch.accelerator.get_memory_info()[0]
    version = torch.cuda.nccl.version() if args.backend == "nccl" else ["in torch"]
    scripts = {str(script.relative_to(ROOT)): hashlib.sha256(script.read_bytes()).hexdigest()[:8]
               for script in (*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py"), Path(__file__))}
    variables = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS" or
                 name.startswith(("NCCL_", "GLOO_")) and "IFNAME" not in name}  # cards may differ
    return {"rank": rank, "machine": socket.gethostname(),
            "address": address_given_out(args.backend, cards), "device": str(device), "name": name,
            "torch": torch.__version__, "Python": platform.python_version(),
            "backend": f"{args.backend} {'.'.join(map(str, version))}",
            "threads": torch.get_num_threads(),
            "node": int(os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", 0))),
            "port": port, "cards": cards, "unit": unit, "devices": devices, "room": room,
            "variables": variables, "scripts": scripts}


def names(rows):
    """These processes in words: ranks 0, 1 on node1; rank 4 on node2."""
    machines = {row["machine"]: [] for row in rows}
    for row in rows:
        machines[row["machine"]].append(str(row["rank"]))
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} on {machine}"
                     for machine, ranks in machines.items())


def verdict(faults, good):
    """The end of a part: what is wrong there, or that nothing is."""
    found["faults"] += faults
    print(*([f"   NOT GOOD: {fault}" for fault in faults] or [f"   good: {good}"]), sep="\n",
          flush=True)


def finish(args, *faults):
    """Rank 0's last words; watch() then ends all processes with this status."""
    if now["status"] != "go on":
        return
    if faults:
        verdict(faults, "")
    first = f"First to mend: {found['faults'][0]}" if found["faults"] else "Fine."
    print(f"5. {first}", flush=True)
    if args.json:
        fine = {"command": sys.argv, "fine": not found["faults"]}
        args.json.write_text(json.dumps({**fine, **found}, indent=1) + "\n")
    now["status"] = "1" if found["faults"] else "0"


def stage(text):
    now.update(stage=text, since=time.monotonic())


def look(args, store, rows, beat):
    """Rank 0 ends it all when a process is silent, has failed, or all wait for each other."""
    keys = [f"beat/{beat}/{row['rank']}" for row in rows]
    try:
        store.wait(keys, timedelta(seconds=args.patience))
    except dist.DistStoreError:
        silent = [row for row, key in zip(rows, keys) if not store.check([key])]
        return finish(args, f"{names(silent)} said nothing for {args.patience} s "
                      f"({now['stage']}): stopped, killed or cut off?")
    stages = {names([row]): text.decode() for row, text in zip(rows, store.multi_get(keys))}
    if failed := [f"{name} {text}" for name, text in stages.items() if text.startswith("failed")]:
        finish(args, *failed)
    elif time.monotonic() > now["since"] + max(args.wait, 30):
        finish(args, "all wait for each other: " + ", ".join(
            f"{name}: {text}" for name, text in stages.items()))


def watch(args, store, rows, rank, sentinel):
    """Once a second all processes show rank 0 that they live, and hear from it how it goes on."""
    bears = args.patience + 5 if rank else 2 * args.patience + 5  # rank 0 waits for the others
    for beat in itertools.count():
        sentinel.stdin.write(b"%d\n" % bears)
        store.set(f"beat/{beat}/{rank}", now["stage"])
        if rank == 0:
            look(args, store, rows, beat)
            store.set(f"beat/{beat}", now["status"])
        status = store.get(f"beat/{beat}").decode()
        time.sleep(1)  # rank 0 may keep the store: the others read their status meanwhile
        if status != "go on":
            os._exit(int(status))


def gather(args, store, row, world_size):
    """Part 1: all rows in all processes, or an end with the names of those that did not come."""
    keys = [f"row/{rank}" for rank in range(world_size)]
    store.set(keys[row["rank"]], json.dumps(row))
    if row["rank"] != 0:
        return json.loads(store.get("rows"))
    late = args.machines - int(os.environ.get("GROUP_WORLD_SIZE", args.machines))
    try:  # if machines are missing launch() has waited already
        store.wait(keys, timedelta(seconds=args.wait if late <= 0 else 4))
    except dist.DistStoreError:
        pass
    missing = [key for key in keys if not store.check([key])]
    rows = [json.loads(store.get(key)) for key in keys if key not in missing]
    found["processes"] = rows
    print("1. Who is here")
    table = [[*map(str, line)][:9] for line in (row.keys(), *(row.values() for row in rows))]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("   " + "  ".join(map(str.ljust, line, widths)).rstrip())
    machines = sorted({row["machine"] for row in rows})
    faults = []
    if late > 0:
        faults.append(f"{late} of {args.machines} machines did not come within {args.wait} s; "
                      f"here: {', '.join(machines)}. Is the same line started there, and does a "
                      "firewall let it come here?")
    if missing:
        ranks = ", ".join(key.removeprefix("row/") for key in missing)
        faults.append(f"{len(missing)} of {world_size} processes did not come within {args.wait} "
                      f"s: rank{'s' * (len(missing) > 1)} {ranks}; here: {names(rows)}. Are they "
                      "stuck, or does a firewall keep them from "
                      f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}?")
    verdict(faults, f"{world_size} processes, {len(machines)} machine{'s' * (len(machines) > 1)}")
    store.set("rows", json.dumps(rows if not faults else []))
    return rows if not faults else []


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


def listen(rank):
    """A port on which this machine says who it is and what its clock shows."""
    listener = socket.create_server(("", 0), backlog=1024)

    def answer():
        while True:
            with listener.accept()[0] as connection:
                connection.sendall(f"{rank} {time.time()}".encode())
    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname()[1]


def connect(leader):
    """Try to reach a machine where it says that it is: one round trip, and its clock."""
    if ipaddress.ip_address(leader["address"].partition("%")[0]).is_loopback:
        return {"error": "that leads back to whoever asks; look at /etc/hosts there"}
    tries = []
    try:
        for _ in range(5):
            start, begin = time.time(), time.perf_counter()
            with socket.create_connection((leader["address"], leader["port"]), 3) as connection:
                tries.append(time.perf_counter() - begin)
                rank, clock = connection.recv(99).split()
                if int(rank) != leader["rank"]:
                    return {"error": "another machine answers there"}
        return {"round trip, s": min(tries), "clock, s": float(clock) - (start + time.time()) / 2}
    except TimeoutError:
        return {"error": "no answer: a firewall drops it, or that card is in another network"}
    except (OSError, ValueError) as error:
        return {"error": f"{error}: a firewall, or that card is in another network"}


def connections(leaders, tried):
    """Parts 2 and 3 of what all machines tried: clocks, faults each with its cure, round trips."""
    clocks, faults, trips = [], [], []
    for source, target in itertools.permutations(leaders, 2):
        result = tried[source["node"]][leaders.index(target)]
        one, other = source["machine"], target["machine"]
        found["connections"].append({"from": one, "to": other, **result})
        if "error" in result:
            variable = f"{target['backend'].split()[0].upper()}_SOCKET_IFNAME"
            cures = [f"{variable}={name} ({address})" for name, address in target["cards"].items()
                     if address != target["address"] and name != "lo"]
            faults.append(f"{one} cannot reach {other} at {target['address']}: {result['error']}" +
                          f"; to try on {other}: {' or '.join(cures)}" * bool(cures))
            continue
        if abs(result["clock, s"]) > CLOCKS and leaders[0] is target:
            clocks.append(f"the clock of {one} is {abs(result['clock, s']):.1f} s "
                          f"{'behind' if result['clock, s'] > 0 else 'ahead of'} that of {other}: "
                          "torchrun's heartbeats bear 15 s in all")
        trips.append((result["round trip, s"], f"{one} reaches {other} at {target['address']}, "
                      f"round trip {result['round trip, s'] * 1e3:.2f} ms"))
    return clocks, faults, sorted(trips)


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


def all_reduces(name, ranks, rank, group, largest, device):
    """Latency, bus bandwidth by size, and whether the sums are right."""
    stage(f"in an all-reduce {name}")
    tiny = torch.zeros(1, device=device)
    seconds(tiny, group, 5, min)  # connections are made at the first use
    figures = {"latency, s": seconds(tiny, group, 20, median), "right": True, "bytes/s": {}}
    for size in [size for size in (1, 4, 16, 64, 256, 1024) if size <= largest]:
        stage(f"in an all-reduce of {size} MB {name}")
        pattern = torch.arange(size * MB // 4, device=device).remainder_(1000).float()
        tensor = pattern + rank  # whole numbers below 2^24: the same in any order of summing
        dist.all_reduce(tensor, group=group)
        figures["right"] &= torch.equal(tensor, pattern * len(ranks) + sum(ranks))
        took = seconds(tensor.zero_(), group, 5, min)
        figures["bytes/s"][size] = size * MB / took * 2 * (len(ranks) - 1) / len(ranks)
        if took > 0.5:  # four times as much would take four times as long, and tell nothing new
            break
    return figures


def work(device):
    """Matrix products a second in this process, while all are at it; the best of 15 times,
    so that one that shares its core with others by chance is not taken for a slow one."""
    stage("computing")
    matrix, rates = torch.ones(256, 256, device=device), []
    for _ in range(15):
        dist.all_reduce(torch.zeros(1, device=device))
        end, products = time.perf_counter() + 0.1, 0
        while time.perf_counter() < end:
            (matrix @ matrix)[0, 0].item()  # waits for the device
            products += 1
        rates.append(products / 0.1)
    return max(rates)


def measure(args, store, rows, leaders, rank, device):
    """Part 4 in each process: within each machine, between two neighbours, among all machines."""
    stage("making the process group")
    dist.init_process_group(args.backend, store=dist.PrefixStore("group", store), rank=rank,
                            world_size=len(rows), timeout=timedelta(seconds=max(args.wait, 30)),
                            device_id=device if args.backend != "gloo" else None)
    figures = {"products/s": work(device)}
    groups = {f"within {leader['machine']}": [row["rank"] for row in rows if row["node"] ==
                                              leader["node"]] for leader in leaders}
    pairs = [*zip(leaders, leaders[1:])] + [(leaders[0], leaders[-1])] * (len(leaders) > 2)
    for one, other in pairs[::2] + pairs[1::2]:  # half of them at a time
        groups[f"{one['machine']} - {other['machine']}"] = [one["rank"], other["rank"]]
    if len(leaders) > 2:
        groups["among all machines"] = [leader["rank"] for leader in leaders]
    largest = min(args.largest, *(row["room"] // (8 * MB) // (1 if row["unit"] else len(rows))
                                  for row in rows))
    for name, ranks in groups.items():
        group = dist.new_group(ranks)  # made by all, also by those that are not in it
        if rank in ranks and len(ranks) > 1:
            figures[name] = all_reduces(name, ranks, rank, group, largest, device)
    return figures


def speed(rows, measured):
    """Part 4's table and faults, from what all processes measured."""
    lines, faults = found["all-reduce"], []
    for row, figures in zip(rows, measured):
        found["products/s"][names([row])] = figures.pop("products/s")
        for name, line in figures.items():
            lines.setdefault(name, line)
            if not line["right"]:
                faults.append(f"the sum of an all-reduce {name} is wrong in {names([row])}")
    for name, line in sorted(lines.items(), key=lambda item: " - " in item[0]):
        line["best"] = max(line["bytes/s"].values(), default=0)
        print(f"   {name}: latency {line['latency, s'] * 1e3:.2f} ms; bus bandwidth in MB/s: " +
              ", ".join(f"{value / 1e6:.1f} ({size} MB)" for size, value in line["bytes/s"].items())
              + f"; at best {line['best'] * 8e-9:.3g} Gbit/s")
    within = {name: line["best"] for name, line in lines.items() if name.startswith("within")}
    between = {name: line["best"] for name, line in lines.items() if " - " in name}
    for name, best in between.items():
        if 0 < best < LEAST:
            faults.append(f"{name}: {best * 8e-6:,.0f} Mbit/s, less than half of what the slowest "
                          "cable carries, 1 Gbit/s: is it the right network card?")
    for figures in (within, between, found["products/s"]):
        for name, value in figures.items():
            rest = [other for key, other in figures.items() if key != name]
            if rest and value < median(rest) / 2:
                what = "computes" if name.startswith("rank") else "sends"
                faults.append(f"{name} {what} slower than the rest by half: {value:,.0f} a second, "
                              f"the others {median(rest):,.0f}")
    return faults


def check(args, rank, local_rank, world_size):
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    message = (f"{socket.gethostname()}: nothing is heard of rank 0 at {master[0]}:{master[1]}. Is "
               "it there, and does a firewall let this machine connect to it?\n")
    sentinel = subprocess.Popen([sys.executable, "-ISc", SENTINEL, message * (local_rank == 0)],
                                stdin=subprocess.PIPE, bufsize=0,
                                start_new_session=True)  # a launcher's SIGTERM is not for it
    last = 2 * (local_rank > 0)  # one of each machine says it before all end
    sentinel.stdin.write(b"%d\n" % (args.wait + last))
    if rank == 0 and args.json:
        args.json.touch()  # say now that it cannot be written
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.PrefixStore("check", dist.TCPStore(
        *master, is_master=serves, wait_for_workers=False, timeout=timedelta(hours=1)))
    sentinel.stdin.write(b"%d\n" % (args.wait + 5 + last))
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    port = listen(rank) if local_rank == 0 else None
    rows = gather(args, store, describe(args, device, rank, port), world_size)
    if not rows:
        if rank == 0:
            finish(args)
            time.sleep(1)  # until the others have read it: the store may end with this process
        os._exit(1)
    leaders, me = [row for row in rows if row["port"]], rows[rank]
    threading.Thread(target=watch, args=(args, store.clone(), rows, rank, sentinel),
                     daemon=True).start()
    try:
        stage("connecting")
        if local_rank == 0:
            with ThreadPoolExecutor(16) as pool:
                store.set(f"reach/{me['node']}", json.dumps([*pool.map(connect, leaders)]))
        if rank == 0:
            tried = {leader["node"]: json.loads(store.get(f"reach/{leader['node']}"))
                     for leader in leaders}
            clocks, faults, trips = connections(leaders, tried)
            print("2. What differs")
            verdict(differences(rows) + clocks, "nothing that must not")
            print("3. Who reaches whom", *(f"   {text}" for _, text in trips[-8:]), sep="\n")
            far = [f"{text}: much, and each step of training waits for it"
                   for trip, text in trips if trip > ROUND_TRIP]
            verdict(faults + far, "each machine reaches each other one" if trips else "one machine")
            if faults:
                finish(args)  # no process group can be made
            else:
                store.set("go on", "")
        store.get("go on")
        if rank == 0:
            print("4. How fast", flush=True)
        figures = measure(args, store, rows, leaders, rank, device)
        store.set(f"figures/{rank}", json.dumps(figures))
        stage("waiting for the figures")
        if rank == 0:
            measured = [json.loads(store.get(f"figures/{row['rank']}")) for row in rows]
            verdict(speed(rows, measured), "no one is slower than the rest by half")
            finish(args)
    except Exception as error:
        stage(f"failed {now['stage']}: {' '.join(str(error).split())[:300]}")
    threading.Event().wait()  # watch() ends all processes, once rank 0 has said what it has to


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
