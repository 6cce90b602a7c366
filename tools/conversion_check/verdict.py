"""Says what was seen, and with which status the check ends."""
import os
import re

from conversion_check.causes import Fault
from conversion_check.printed import compare_lines, compare_logged
from conversion_check.saved import compare_saved
from conversion_check.training import compare_training, unseeded
from conversion_check.workspace import CannotSay

CHAPTER = "docs/your_own_script.md"
STOOD_STILL = {  # what to do about it
    "BatchNorm": ("BatchNorm kept its statistics, so it was not compared", "What your script has"),
    "dropout": ("dropout was 0, so it was not compared", "Random numbers"),
    "autocast": ("autocast was off, so it was not compared", "Check it")}


def own_error(stderr):
    """The first error that anybody had, after the last line of the user's own that led to it."""
    place = "?"
    for line in stderr.splitlines():
        who, line = re.match(r"(?:\[(rank\d+)\]: ?)?(.*)", line).groups()
        found = re.match(r' *File "(.*)", line (\d+)', line)
        if found and not re.search('/lib/python|/conversion_check/|"<', line):
            place = f"{os.path.basename(found[1])}:{found[2]}"
        elif re.match(r"[\w.]*(Error|Exception)(: \S|$)|.*can't open file", line):
            return f"{who or 'it'} at {place}: {line[:300]}"
    return ["it says nothing", *(line for line in stderr.splitlines() if line.strip("= "))][-1]


def check_original(first):
    """Whether the original can be the measure."""
    if first.waits:
        raise CannotSay(f"{first.name} itself takes no step: {' '.join(first.waits)}")
    check_writes(first)
    if first.status:
        raise CannotSay(f"{first.name} fails under the check ({own_error(first.stderr)}): does it "
                        "run alone?")
    if not first.ranks:
        raise CannotSay(f"{first.name} takes no optimizer step{resumed(first)}")


def resumed(run):
    """A run that finds its work done takes no step."""
    loaded = [name for name in dict.fromkeys(run.remarks("loaded")) if not name.startswith(("..", "("))]
    if not loaded:
        return ""
    return (f"; it reads {', '.join(loaded[:3])}: if it goes on from there, leave that out by "
            f"--without '{loaded[0]}'")


def check_writes(run):
    if refused := run.remarks("would write"):
        raise CannotSay(f"{run.name} would write {refused[0]}: under the check it may write into its "
                        "copy of this folder alone")


def check_again(first, again):
    """Whether it trains the same each time."""
    if again.ranks:
        reason = unseeded(first, again)
        if reason:
            raise CannotSay(f"{first.name} draws other numbers each time ({reason}): begin it with "
                            "torch.manual_seed(0), random.seed(0) and numpy.random.seed(0), and seed its "
                            "own generators; a set of strings has another order each time, too")
    if not again.ranks or len(again.ranks[0].steps) != len(first.ranks[0].steps):
        raise CannotSay(f"{first.name} takes other steps the second time, in which its weights are "
                        "moved by one rounding")


def how_it_ended(first, many):
    """A fault of the converted script's run as a whole."""
    counts = [len(rank.steps) for rank in many.ranks]
    if many.waits:
        return Fault("\n  ".join(["it hangs:", *many.waits]), "Hangs")
    if {*counts} == {len(first.ranks[0].steps)} and re.search(
            "terminate called without|SIGABRT", many.stderr):
        return Fault("it aborts when it ends", "The end of a run")
    if many.status:
        error = own_error(many.stderr)
        gone = re.search("Connection (reset|closed)", error)
        return Fault(f"it fails after {', '.join(map(str, counts)) or 0} steps of the ranks: {error}"
                     + ": the rank that it waits for has ended" * bool(gone), "Hangs" if gone else "Errors")
    if many.left:
        return Fault("it leaves processes behind", "The end of a run")
    if not many.ranks:
        raise CannotSay(f"{many.name} takes no optimizer step{resumed(many)}")
    return None


def say(fault):
    step = f"step {fault.step}: " if fault.step else ""
    print(f'{step}{fault.text}. See "{fault.heading}" in {CHAPTER}.')


def say_training(agree, many):
    count = len(many.ranks)
    print(f"the same training: {agree.steps} steps with {count} process{'es' * (count > 1)}, weights "
          f"within {agree.weights:.0e} of their norm; rounding alone parts them by {agree.rounding:.0e}")
    if agree.blurred:
        print(f"from step {agree.blurred} on rounding alone moves the weights by 1% of what training "
              "does: a smaller fault cannot be seen there; --float64 sees farther")


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
    if "dropout" in found and many.ranks and not ranks_draw_alike(many):
        STOOD_STILL["dropout"] = ("dropout was 0, so it was not compared; the ranks would draw "
                                  "other numbers, as they should", "Random numbers")
    for what in STOOD_STILL:
        if what in found:
            text, heading = STOOD_STILL[what]
            print(f'{text}. See "{heading}" in {CHAPTER}.')


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
        if fault and not fault.unknown and fault.step <= min(len(rank.steps) for rank in many.ranks):
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
