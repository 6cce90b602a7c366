"""What the machine that leads does: it asks all processes, part by part, and prints what it finds."""
import contextlib
import time

import torch.distributed as dist
from follow import SIZE
from messages import receive, send


def lead(args, server):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of all process groups
    processes = assemble(args, server)
    faults = find_faults(args, processes, store.port)
    blind = [each["machine"] for each in one_of_each_machine(processes) if each["alike"]["device"] == "cpu"]
    if faults:
        print(f"5. First to fix: {faults[0]}", flush=True)
    elif args.device_was_found and blind:
        print(f"5. Fine, but training would use the CPU: torch sees no GPU on {', '.join(blind)}", flush=True)
    else:
        print("5. Fine.", flush=True)
    for process in processes:
        send(process["connection"], {"end": int(bool(faults))})


def assemble(args, server):
    """All processes that come in time, those of the machine that leads first, in their order there, which gives the ranks."""
    connections, processes = [], []
    end = time.monotonic() + args.wait
    with contextlib.suppress(TimeoutError):
        while len(connections) < args.processes:
            server.settimeout(max(0.1, end - time.monotonic()))
            connections.append(server.accept()[0])
    end = time.monotonic() + args.wait
    for connection in connections:
        if description := receive(connection, end - time.monotonic()):
            processes.append({**description, "connection": connection})
    processes.sort(key=lambda process: (not process["leads"], process["machine"], process["local_rank"]))
    for rank, process in enumerate(processes):
        card = process["connection"].getpeername()[0]
        if process["leads"]:  # it may have come by its loopback: the others came to its card
            card = processes[-1]["connection"].getsockname()[0]
        processes[rank] = {"address": card, **process, "card": card, "rank": rank}
    return processes


def find_faults(args, processes, port):
    """Part by part, up to one that keeps the next from being tried."""
    first = one_of_each_machine(processes)
    faults = who_is_here(args, processes, first)
    if faults:
        return faults
    print("2. What differs")
    places = [[each["address"], each["port"], each["card"]] for each in first]
    answers, unanswered = ask(args, processes, "connecting", {"places": places})
    if unanswered:
        return unanswered
    faults = what_differs(processes, first, answers)
    obstacles = who_reaches_whom(first, answers)
    if obstacles:
        return faults + obstacles
    return faults + how_fast(args, processes, first, port)


def one_of_each_machine(processes):
    first = {}
    for process in processes:
        first.setdefault(process["machine"], process)
    return [*first.values()]


def names(processes):
    """These processes in words: ranks 0, 1 on node1; rank 4 on node2."""
    ranks = {}
    for process in processes:
        ranks.setdefault(process["machine"], []).append(str(process["rank"]))
    return "; ".join(f"{'ranks' if len(those) > 1 else 'rank'} {', '.join(those)} on {machine}"
                     for machine, those in ranks.items())


def count(things, one, several):
    return f"{len(things)} {one if len(things) == 1 else several}"


def end_part(faults, good):
    for fault in faults:
        print(f"   NOT GOOD: {fault}", flush=True)
    if not faults:
        print(f"   good: {good}", flush=True)
    return faults


def ask(args, processes, what, order):
    """What each process answers, by rank, and what is wrong with those that do not."""
    for process in processes:
        send(process["connection"], {**order, "rank": process["rank"]})
    end = time.monotonic() + args.wait + 5
    answers, silent, faults = {}, [], []
    for process in processes:
        reply = receive(process["connection"], end - time.monotonic())
        if not reply:
            silent.append(process)
        elif "error" in reply:
            faults.append(f"{names([process])} failed in {what}: {reply['error']}")
        else:
            answers[process["rank"]] = reply["answer"]
    if silent:  # first, because the others may have failed for this
        faults.insert(0, f"no answer from {names(silent)} during {what}: stopped, killed or cut off?")
    if faults:
        end_part(faults, "")
    return answers, faults


def who_is_here(args, processes, first):
    print("1. Who is here")
    for each in first:
        those = names(process for process in processes if process["machine"] == each["machine"])
        facts = ", ".join(f"{name}: {value}" for name, value in [*each["alike"].items()][:4])
        speed = f", network: {each['speed']:g} Gbit/s" if each["speed"] else ""  # if the card states one
        print(f"   {those}, {each['address']}, {facts}{speed}")
    faults = []
    if len(processes) < args.processes:
        faults.append(f"{args.machines - len(first)} of {args.machines} machines, {args.processes - len(processes)} of "
                      f"{args.processes} processes, did not connect within {args.wait} s; connected: "
                      f"{', '.join(each['machine'] for each in first)}. Was the same command started there, and does a firewall "
                      f"let it reach {args.host}:{args.port}?")
    for each in first:
        if each["address"] is None:
            faults.append(f"{each['machine']} cannot resolve its own name to an IPv4 address, as gloo must: add it to /etc/hosts "
                          f"there, or try GLOO_SOCKET_IFNAME with the interface of {each['card']}")
    return end_part(faults, f"{count(processes, 'process', 'processes')} on {count(first, 'machine', 'machines')}")


def what_differs(processes, first, answers):
    faults = []
    for name in sorted({name for process in processes for name in process["alike"]}):
        by_value = {}
        for process in processes:
            by_value.setdefault(process["alike"].get(name, "missing"), []).append(process)
        if len(by_value) > 1:
            values = " | ".join(f"{value} in {names(those)}" for value, those in by_value.items())
            faults.append(f"{name} differs: {values}")
    for each in first:
        ahead = answers[each["rank"]]["clock"] - answers[0]["clock"]
        if abs(ahead) > 5:  # torchrun's heartbeats bear 15
            faults.append(f"the clock of {each['machine']} is {ahead:+.1f} s from that of {first[0]['machine']}")
    return end_part(faults, "no difference that matters")


def who_reaches_whom(first, answers):
    print("3. Who reaches whom")
    faults = []
    for one in first:
        for other, obstacle in zip(first, answers[one["rank"]]["obstacles"]):
            if obstacle and one is not other:
                faults.append(f"{one['machine']} cannot reach {other['machine']} at {other['address']}: {obstacle}")
    return end_part(faults, "each machine reaches all others")


def groups_to_measure(processes, first):
    """All processes of a machine, and the first ones of two neighbours; the last of an odd number pairs with the first."""
    groups = {}
    for each in first:
        those = [process for process in processes if process["machine"] == each["machine"]]
        if len(those) > 1:
            groups[f"within {each['machine']}"] = those
    for number in range(0, len(first), 2):
        one, other = first[number], first[(number + 1) % len(first)]
        if one is not other:
            groups[f"{one['machine']} - {other['machine']}"] = [one, other]
    return groups


def how_fast(args, processes, first, port):
    print("4. How fast", flush=True)
    groups = groups_to_measure(processes, first)
    ranks = {name: [process["rank"] for process in group] for name, group in groups.items()}
    for attempt in range(3):  # what looks slow is measured again before it is said
        answers, unanswered = ask(args, processes, "all-reduces", {"port": port, "groups": ranks, "attempt": attempt})
        if unanswered:
            return unanswered
        figures, remarks, faults = [], [], []
        for name, group in groups.items():
            right, seconds, latencies = zip(*(answers[rank]["figures"][name] for rank in ranks[name]))
            speed = SIZE * 8e-9 * 2 * (len(group) - 1) / len(group) / max(seconds)
            figures.append(f"{name}: latency {max(latencies) * 1e3:.2f} ms, bus bandwidth {speed:.3g} Gbit/s")
            wrong = [process for process, good in zip(group, right) if not good]
            if wrong:
                faults.append(f"the all-reduce {name} gives a wrong sum in {names(wrong)}")
            stated = min(process["speed"] or 1 for process in group)
            if " - " in name and speed < stated / 4:
                remarks.append(f"remark: {name}: {speed:.3g} of {stated:g} Gbit/s, which the network cards state "
                               "(1 is assumed if they state nothing)")
        if faults or not remarks:
            break
    ways = {f"NCCL's network between machines: {way}" for answer in answers.values() for way in answer["ways"]}
    for line in [*figures, *remarks, *sorted(ways)]:
        print(f"   {line}")
    return end_part(faults, "every sum is right" if groups else "one process alone: there is no sum to check")
