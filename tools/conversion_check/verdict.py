"""Says what was seen, and with which status the check ends."""
from conversion_check.ending import check_writes, how_it_ended
from conversion_check.printed import compare_lines, compare_logged
from conversion_check.saved import compare_saved
from conversion_check.training import compare_training
from conversion_check.workspace import CannotSay

CHAPTER = "docs/your_own_script.md"
STOOD_STILL = {  # what to do about it
    "BatchNorm": ("BatchNorm kept its statistics, so it was not compared", "What your script has"),
    "dropout": ("dropout was 0, so it was not compared", "Random numbers"),
    "autocast": ("autocast was off, so it was not compared", "Check it")}


def say(fault):
    step = f"step {fault.step}: " if fault.step else ""
    end = "" if fault.text.endswith("?") else "."
    print(f'{step}{fault.text}{end} See "{fault.heading}" in {CHAPTER}.')


def say_training(agree, many):
    count = len(many.ranks)
    print(f"the same training: {agree.steps} steps with {count} process{'es' * (count > 1)}, "
          f"weights within {agree.weights:.0e} of their norm; rounding alone moves them by "
          f"{agree.rounding:.0e}")
    if agree.blurred:
        print(f"from step {agree.blurred} on rounding alone moves the weights by 1% of what "
              "training does: a smaller fault cannot be seen there, nor in what is printed and "
              "saved after it; --float64 sees farther")


def say_figures(first, again, many, agree):
    """Whether all that was printed and saved is the same."""
    drift = max(agree.rounding, agree.weights)
    parts = {"printed": compare_lines(first, again, many, drift),
             "logged": compare_logged(first, again, many, drift),
             "saved": compare_saved(first, again, many, drift)}
    for name, part in parts.items():
        if part.fault:
            say(part.fault)
        elif part.said:
            print(f"{name}: {part.said}")
        for remark in part.remarks:
            print(f"  {remark}")
    return all(not part.fault for part in parts.values())


def say_what_stood_still(first, many):
    found = set().union(*(step.stood_still for run in (first, many) for rank in run.ranks
                          for step in rank.steps[-1:]))
    for what, (text, heading) in STOOD_STILL.items():
        if what in found:
            apart = what == "dropout" and many.ranks and not ranks_draw_alike(many)
            more = "; the ranks would draw different numbers, as they should" if apart else ""
            print(f'{text}{more}. See "{heading}" in {CHAPTER}.')


def ranks_draw_alike(many):
    states = [rank.steps[-1].states["torch"] for rank in many.ranks]
    return len({*states}) < len(states)


def judge(first, again, many):
    """Print the verdict, and give the status."""
    check_writes(many)
    if unknown := many.remarks("cannot follow"):
        raise CannotSay(f"the check cannot follow {unknown[0]}")
    end = how_it_ended(first, many)
    agree = compare_training(first, again, many) if many.ranks else None
    fault = agree.fault if agree else None
    if end:
        print("NOT THE SAME TRAINING")
        shortest = min((len(rank.steps) for rank in many.ranks), default=0)
        if fault and not fault.unknown and fault.step <= shortest:
            say(fault)  # else it did not come to its end
        say(end)
        return 1
    if fault and fault.unknown:
        raise CannotSay(f"step {fault.step}: {fault.text}. See \"{fault.heading}\" in {CHAPTER}")
    if fault:
        print("NOT THE SAME TRAINING")
        say(fault)
        return 1
    say_training(agree, many)
    same = say_figures(first, again, many, agree)
    say_what_stood_still(first, many)
    return 0 if same else 1
