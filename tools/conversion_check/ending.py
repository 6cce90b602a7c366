"""How a run ended, and whether the original's can be the measure."""
import os
import re

from conversion_check.evidence import Fault
from conversion_check.rounding import unseeded
from conversion_check.workspace import CannotSay


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
    if error := re.search(r"Error in sitecustomize.*\n(?:.*\n)?(.*)", first.stderr):
        raise CannotSay(f"the check cannot begin in that Python: {error[1]}")
    if first.status:
        raise CannotSay(f"{first.name} fails under the check ({own_error(first.stderr)}): does it "
                        "run alone?")
    if not first.ranks:
        raise CannotSay(f"{first.name} takes no optimizer step{resumed(first)}")


def resumed(run):
    """A run that finds its work done takes no step."""
    loaded = [name for name in dict.fromkeys(run.remarks("loaded"))
              if not name.startswith(("..", "("))]
    if not loaded:
        return ""
    return (f"; it reads {', '.join(loaded[:3])}: if it resumes from that, leave it out with "
            f"--without '{loaded[0]}'")


def check_writes(run):
    if refused := run.remarks("would write"):
        raise CannotSay(f"{run.name} would write {refused[0]}: under the check it may write into "
                        "its copy of this folder alone")


def check_again(first, again):
    """Whether it trains the same each time."""
    if again.ranks:
        reason = unseeded(first, again)
        if reason:
            raise CannotSay(f"{first.name} draws new numbers each time ({reason}): begin it with "
                            "torch.manual_seed(0), random.seed(0) and numpy.random.seed(0), and "
                            "seed its own generators; a set of strings has another order each "
                            "time, too")
    if again.status:
        raise CannotSay(f"{first.name} fails in its second run, with weights moved by one "
                        f"rounding: {own_error(again.stderr)}")
    if not again.ranks or len(again.ranks[0].steps) != len(first.ranks[0].steps):
        raise CannotSay(f"{first.name} takes more or fewer steps in the second run, with weights "
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
        steps = ", ".join(map(str, counts)) or 0
        ended = ": the rank that it waits for has ended" * bool(gone)
        return Fault(f"it fails after {steps} steps of the ranks: {error}{ended}",
                     "Hangs" if gone else "Errors")
    if many.left:
        return Fault("it leaves processes behind", "The end of a run")
    if not many.ranks:
        raise CannotSay(f"{many.name} takes no optimizer step{resumed(many)}")
    return None
