"""Does anything that no optimizer holds differ: a queue, a momentum encoder, running statistics?"""
from check_conversion.distances import TIMES, distance, norm
from check_conversion.verdict import Fault

LEAST = 1e-6  # of its norm


def short(names):
    """Two steps of each way: model.encoder_k, not each of its weights."""
    found = dict.fromkeys(".".join(name.split(".")[:2]) for name in names)
    return ", ".join([*found][:3]) + f" and {len(found) - 3} more" * (len(found) > 3)


def between_ranks(shares):
    """What rank 0 and another have otherwise, and which that is."""
    for rank, share in enumerate(shares[1:], 1):
        names = [name for name, one in shares[0].untrained.items()
                 if name in share.untrained and differs(one, one, share.untrained[name])]
        if names:
            return names, rank
    return [], 0


def without_variable(name):
    return name.partition(".")[2] or name


def forms_that_differ(one, nudged, other):
    """Whether its numbers differ, its rows in any order, and its columns in any order."""
    forms = [[getattr(tensor, form) for tensor in (one, nudged, other)]
             for form in ("sketch", "rows", "columns") if getattr(one, form)]
    return [distance(a, c) > max(TIMES * distance(a, b), LEAST * norm(a)) for a, b, c in forms]


def differs(one, nudged, other):
    return all(forms_that_differ(one, nudged, other))


def from_original(one, nudged, share):
    ours = {without_variable(name): tensor for name, tensor in share.untrained.items()}
    return [name for name, tensor in one.untrained.items() if name in nudged.untrained
            and (other := share.untrained.get(name) or ours.get(without_variable(name)))
            and differs(tensor, nudged.untrained[name], other)]


def reordered(original, nudged, converted):
    """Names of what holds the same rows or columns in another order at the end, as a queue may."""
    one, of_nudged, other = ({without_variable(name): tensor for name, tensor in run.ranks[0].steps[-1].untrained.items()}
                         for run in (original, nudged, converted))
    found = {name: forms_that_differ(tensor, of_nudged[name], other[name]) for name, tensor in one.items()
             if name in of_nudged and name in other}
    return {name for name, forms in found.items() if forms[0] and not all(forms)}


def compare_untrained(k, steps, nudged, ranks, name):
    """What differs in step k or in the one before, of all ranks' steps; not what did long before,
    without training going otherwise for it."""
    rows = [*zip(steps, nudged, *ranks)][:k]
    for which, (one, nudged_step, *shares) in enumerate(rows, 1):
        names, rank = between_ranks(shares)
        said = (f"differs between ranks 0 and {rank} in step {which}: DDP averages only gradients, "
                "so each rank must compute it from the whole batch")
        if not names:
            names = from_original(one, nudged_step, shares[0])
            said = f"differs from that of {name} in step {which}"
        if names:
            return Fault(f"{short(names)} {said}", "What your script has", k) if which >= k - 1 else None
    return None
