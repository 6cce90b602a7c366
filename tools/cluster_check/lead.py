"""What the machine that leads does: it asks all processes, part by part, and prints what it finds."""
import contextlib
import time

import torch.distributed as dist
from cluster_check.follow import SIZE
from cluster_check.lines import hear, say

faults = []


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
    print("4. How fast", flush=True)
    groups = {f"within {machine}": those for machine, those in machines.items() if len(those) > 1}
    for one, other in zip(first[::2], first[1::2] + first[:len(first) % 2 and len(first) > 1]):
        groups[f"{one['machine']} - {other['machine']}"] = [one, other]
    ranks = {name: [row["rank"] for row in group] for name, group in groups.items()}
    for attempt in range(3):  # what looks slow is measured again before it is said
        answers, lines, remarks, wrong = ask(args, rows, "all-reduces", port, ranks, attempt), [], [], []
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


def assemble(args, server):
    """All processes that come in time, those of the machine that leads first: their order gives the ranks."""
    end, lines = time.monotonic() + args.wait, []
    with contextlib.suppress(TimeoutError):
        while len(lines) < args.total:
            server.settimeout(max(0.1, end - time.monotonic()))
            lines.append(server.accept()[0])
    rows = [{**row, "line": line} for line in lines if (row := hear(line, args.wait))]  # torch is imported
    rows.sort(key=lambda row: (not row["leads"], row["machine"]))
    return [{**row, "rank": rank} for rank, row in enumerate(rows)]


def who_is_here(args, rows, machines, first):
    print("1. Who is here")
    for row in first:
        facts = ", ".join(f"{name}: {value}" for name, value in [*row["alike"].items()][:4])
        print(f"   {names(machines[row['machine']])}, {row['address']}, {facts}, network: {row['speed']:g} Gbit/s")
    verdict([f"{args.machines - len(first)} of {args.machines} machines, {args.total - len(rows)} of {args.total} "
             f"processes, did not come within {args.wait} s; here: {', '.join(machines)}. Is the same line started "
             f"there, and does a firewall let it come to {args.host}:{args.port}?"] * (len(rows) < args.total),
            f"{len(rows)} processes, {len(first)} machines", last=True)


def what_differs(rows, first, clocks):
    print("2. What differs")
    wrong = []
    for name in sorted(set().union(*(row["alike"] for row in rows))):
        values = {}
        for row in rows:
            values.setdefault(row["alike"].get(name, "missing"), []).append(row)
        those = " | ".join(f"{value} in {names(group)}" for value, group in values.items())
        wrong += [f"{name} differs: {those}"] * (len(values) > 1)
    for row in first:
        if abs(ahead := clocks[row["rank"]] - clocks[0]) > 5:  # torchrun's heartbeats bear 15
            wrong.append(f"the clock of {row['machine']} is {ahead:+.1f} s from that of {first[0]['machine']}")
    verdict(wrong, "nothing that must not")


def who_reaches_whom(first, obstacles):
    print("3. Who reaches whom")
    verdict([f"{one['machine']} cannot reach {other['machine']} at {other['address']}: {obstacle}"
             for one in first for other, obstacle in zip(first, obstacles[one["rank"]])
             if obstacle and one is not other], "each machine reaches each other one", last=True)


def lead(args, server):
    """Part by part, up to one that keeps the next from being tried."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    rows, machines = assemble(args, server), {}
    for row in rows:
        machines.setdefault(row["machine"], []).append(row)
    first = [those[0] for those in machines.values()]
    with contextlib.suppress(SystemExit):
        who_is_here(args, rows, machines, first)
        places = [[row["address"], row["port"], row["card"]] for row in first]
        clocks, obstacles = zip(*ask(args, rows, "connecting", places))
        what_differs(rows, first, clocks)
        who_reaches_whom(first, obstacles)
        how_fast(args, machines, first, rows, store.port)
    blind = [row["machine"] for row in first if args.found and row["alike"]["device"] == "cpu"]
    fine = f"5. Fine, but DEVICE: CPU on {', '.join(blind)}, where torch sees no GPU" if blind else "5. Fine."
    print(f"5. First to fix: {faults[0]}" if faults else fine, flush=True)
    for row in rows:
        say(row["line"], ["end", None, int(bool(faults))])
