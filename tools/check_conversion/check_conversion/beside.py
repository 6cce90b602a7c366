"""Does what training has beside its parameters part, a queue or a momentum encoder?"""
from check_conversion.distances import distance, norm
from check_conversion.verdict import Fault

TIMES = 5  # as far as rounding parts it, it may part
LEAST = 1e-6  # of its norm


def short(names):
    """Two steps of each way: model.encoder_k, not each of its weights."""
    found = dict.fromkeys(".".join(name.split(".")[:2]) for name in names)
    return ", ".join([*found][:3]) + f" and {len(found) - 3} more" * (len(found) > 3)


def between_ranks(shares):
    """What rank 0 and another have otherwise, and which that is."""
    for rank, share in enumerate(shares[1:], 1):
        names = [name for name, one in shares[0].beside.items()
                 if name in share.beside and parts(one, one, share.beside[name])]
        if names:
            return names, rank
    return [], 0


def without_variable(name):
    return name.partition(".")[2] or name


def parts(one, nudged, other):
    """In whichever order its rows or columns lie."""
    return all(distance(getattr(one, form), getattr(other, form)) > max(
        TIMES * distance(getattr(one, form), getattr(nudged, form)), LEAST * norm(getattr(one, form)))
        for form in ("sketch", "rows", "columns") if getattr(one, form))


def from_original(one, nudged, share):
    ours = {without_variable(name): tensor for name, tensor in share.beside.items()}
    return [name for name, tensor in one.beside.items() if name in nudged.beside
            and (other := share.beside.get(name) or ours.get(without_variable(name)))
            and parts(tensor, nudged.beside[name], other)]


def compare_beside(k, steps, nudged, ranks, name):
    """What has parted in step k or in the one before, of all ranks' steps; not what had long before,
    without training going otherwise for it."""
    rows = [*zip(steps, nudged, *ranks)][:k]
    for which, (one, moved, *shares) in enumerate(rows, 1):
        names, rank = between_ranks(shares)
        said = (f"differs between ranks 0 and {rank} in step {which}: DDP averages gradients alone, "
                "so each rank must compute it from the whole batch")
        if not names:
            names = from_original(one, moved, shares[0])
            said = f"differs from that of {name} in step {which}"
        if names:
            return Fault(f"{short(names)} {said}", "What your script has", k) if which >= k - 1 else None
    return None
