"""Random numbers as a cause: noise and augmentation."""
from conversion_check.evidence import Fault


def drawn_values(e):
    """Arguments of the model with other values than the original's."""
    return [name for name, relation in e.samples.relations.items()
            if relation in ("alike", "overlap", "values")]


def loss_is_explained(e):
    return e.losses in ("mean", "sum", "each", "mean of samples") and not drawn_values(e)


def drawn_numbers(e):
    """What is drawn for its own samples must differ between ranks; then no more can be compared."""
    if alike := [name for name in e.drawing if e.alike(name)]:
        return Fault(f"both draw random numbers in each step, by {' and '.join(alike)}, and all "
                     "ranks the same: noise, augmentation or the samples of a batch",
                     "Random numbers")
    if parted := [name for name in e.drawing if name in e.alike_before]:
        return Fault(f"the ranks drew the same random numbers until here, by "
                     f"{' and '.join(parted)}, and do so no longer: one of them has drawn more, "
                     "rank 0 alone perhaps", "Random numbers")
    if e.drawing:
        return Fault(f"both draw random numbers in each step, by {' and '.join(e.drawing)}, each "
                     "rank its own, as it should for noise and augmentation. Nothing more can be "
                     "seen until these are 0 in both scripts, or drawn for the whole batch",
                     "Random numbers", unknown=True)
    return None


def same_numbers(e):
    """Where the ranks' numbers are seen in the samples, or in the loss."""
    if any(map(e.alike, e.drawing)) and (drawn_values(e) or (
            e.samples.relation == "same" and not loss_is_explained(e) and not e.factor)):
        return drawn_numbers(e)
    return None


def own_numbers(e):
    """Where they are seen there, and are each rank's own."""
    if loss_is_explained(e) or e.samples.relation not in ("same", "values", "unknown"):
        return None
    if e.drawing:
        return drawn_numbers(e)
    if drawn_values(e) and not any(noted.workers for noted in e.passes):
        return Fault(f"the model is fed values that {e.name} never feeds it: does each rank "
                     "have its own data, or is it prepared differently?", "Random numbers")
    if drawn_values(e):
        return Fault(f"the model is fed values that {e.name} never feeds it, augmentation or noise "
                     "perhaps, drawn in loader workers. "
                     "Nothing more can be seen until it is left out of both", "Random numbers",
                     unknown=True)
    return None
