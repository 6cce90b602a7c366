"""In which steps each script would have computed in less precision."""
from check_conversion.verdict import Fault


def compare_precision(original, converted):
    """The first step in which autocast or a GradScaler was on in one of them and off in the other."""
    ranks = converted.ranks
    for k, (one, *shares) in enumerate(zip(original.ranks[0].steps, *(rank.steps for rank in ranks)), 1):
        for what in sorted(one.precision.union(*(share.precision for share in shares))):
            others = [rank for rank, share in zip(ranks, shares)
                      if (what in share.precision) != (what in one.precision)]
            if others:
                where = converted.name
                if len(others) < len(ranks):
                    where += f" on rank {others[0].rank}"
                first, then = ("on", "off") if what in one.precision else ("off", "on")
                return Fault(f"{what} is {first} in {original.name} and {then} in {where}",
                             "What your script has", k)
    return None
