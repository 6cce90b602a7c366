"""Why a step went otherwise: each cause rests on something that was noted."""
import math

from conversion_check.draws import drawn_numbers, own_numbers, same_numbers
from conversion_check.evidence import Fault, apart_in, distance, norm

SHARED_OUT = ("", "no sampler", "RandomSampler", "SequentialSampler", "SubsetRandomSampler",
              "_InfiniteConstantSampler")  # by DistributedSampler, or a dataset's own lines


def why(e):
    """What explains another step: the first of these that was seen."""
    seen = (not_trained(e) or same_numbers(e) or other_samples(e) or other_factor(e)
            or own_numbers(e) or unequal(e))
    return seen if seen or e.blurred else what_is_known(e)


def not_trained(e):
    if not any(e.shares[0].gradients) and any(e.one.gradients):
        return Fault("there are no gradients: does the optimizer hold the parameters of the model "
                     "that is trained, or was it made earlier?", "Training goes through DDP")
    return None


def other_samples(e):
    original, ours, *_ = e.passes
    relation, total, n = e.samples.relation, sum(e.samples.ranks), e.count
    if relation == "same":
        return None
    if relation == "whole" and n > 1:
        return Fault(f"each rank takes the whole batch: {e.samples.sizes}", "Two routes")
    if relation == "alike":
        return Fault("the ranks are fed the same samples, so that each rank goes through all "
                     f"samples: {e.samples.sizes}", "Two routes")
    if relation != "unknown" and n > 1 and total == n * e.samples.original:
        return Fault(f"each rank takes a whole batch: {e.samples.sizes}", "Two routes")
    if n > 1 and relation != "unknown" and total < 0.6 * e.samples.original:
        return Fault(f"the batch is divided twice: {e.samples.sizes}", "Two routes")
    if relation in ("others", "values", "overlap") and original.sampler not in SHARED_OUT and (
            original.sampler != ours.sampler):
        return Fault(f"the samples are drawn by {original.sampler} in {e.name}, by "
                     f"{ours.sampler or 'no sampler'} now", "Two routes")
    if ours.again:
        return Fault("the samples come in the order of an epoch before: no set_epoch", "Two routes")
    if original.sampler and ours.sampler and original.shuffles != ours.shuffles and (
            relation == "others"):
        shuffling = original.sampler if original.shuffles else ours.sampler
        return Fault(f"one of the two shuffles, by {shuffling}, one does not", "Two routes")
    if relation in ("repeated", "left out", "overlap"):
        said = "repeated, and others left out" if relation == "overlap" else relation
        return Fault(f"samples are {said}: {e.samples.sizes}", "Two routes")
    if relation == "others":
        if e.lengths[0] != e.lengths[1]:
            return Fault(f"an epoch had {e.lengths[0]} steps and has {e.lengths[1]}", "Two routes")
        if e.drawing and not e.samples.whole_numbers:
            return drawn_numbers(e)  # which may turn a sample into another one's like
        return Fault(f"other samples than {e.name} has in this step: {e.samples.sizes}",
                     "Two routes")
    return None


def other_factor(e):
    """Only where the factor explains the difference."""
    if e.factor is None:
        return None
    is_factor = f"all gradients are {e.factor:.4g} times those of {e.name}"
    if math.isclose(e.factor * e.count, 1, rel_tol=0.01) and e.count > 1:
        reason = ("the sum of the ranks' losses is the loss before: DDP takes the mean over ranks, "
                  "so multiply by world_size" if e.losses == "sum" else
                  "DDP takes the mean over ranks (is the loss a sum over the batch, or are "
                  "gradients clipped to another norm?)")
        return Fault(f"{is_factor} = 1/{e.count}, the number of processes: {reason}",
                     "Sums and unequal parts")
    if math.isclose(e.factor, e.count, rel_tol=0.01) and e.count > 1:
        return Fault(f"{is_factor}, the number of processes", "Sums and unequal parts")
    return Fault(f"{is_factor}, with {e.count} process{'es' * (e.count > 1)}",
                 "Sums and unequal parts")


def unequal(e):
    """Parts that count as equals and are not."""
    if len({*e.samples.ranks}) > 1 and e.losses == "mean of samples":
        return Fault(f"a mean over parts that are not equal: {e.samples.sizes}",
                     "Sums and unequal parts")
    if len({tuple(share.norms) for share in e.shares}) > 1:
        norms = ", ".join(f"{share.norms[-1]:.3g}" for share in e.shares if share.norms)
        return Fault(f"gradients are clipped before they are averaged, at norms of {norms}",
                     "No common factor")
    return None


def of_the_optimizer(e):
    """Whether the weights part by far more of their step than the gradients of their norm."""
    one, other = e.one, e.shares[0]
    step = distance(one.before, one.after) or 1
    gradients = distance(one.gradients, other.gradients) / (norm(one.gradients) or 1)
    return distance(one.after, other.after) / step > 1000 * max(gradients, 1e-6)


def what_is_known(e):
    """No cause, but where to look for it."""
    where = apart_in(e.names, e.one.gradients, e.shares[0].gradients)
    known = "the same samples" if e.samples.relation == "same" else e.samples.sizes
    if of_the_optimizer(e):
        return Fault(f"{known}, and the gradients agree, but the optimizer's step "
                     "does not: was its state loaded, as in the original?",
                     "Load first, then DDP")
    size = distance(e.one.gradients, e.shares[0].gradients) / (norm(e.one.gradients) or 1)
    said = f"gradients {size:.2g} of their norm apart, most in {where}"
    if e.losses in ("mean", "each"):
        return Fault(f"{known} and the same loss, {said}", "No common factor")
    if e.losses == "sum":
        return Fault(f"{known}, and the ranks' losses sum up to the loss before; {said}",
                     "Sums and unequal parts")
    if e.losses == "other":
        parts = ", ".join(f"{sum(share.losses):.6g}" for share in e.shares)
        return Fault(f"{known}, and a loss of {parts} in the ranks, {sum(e.one.losses):.6g} in "
                     f"{e.name}: neither their mean nor their sum is that. Do parts count "
                     f"differently (padding, ignore_index), or is something computed over the "
                     f"batch? {said}", "No common factor")
    return Fault(f"{known}; {said}", "No common factor")
