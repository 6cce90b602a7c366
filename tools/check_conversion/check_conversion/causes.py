"""Why a step differs: each cause rests on something that was noted."""
import math
from collections.abc import Callable
from dataclasses import dataclass

from check_conversion.distances import apart_in, distance, factor_between, norm
from check_conversion.protocol import Pass, Step
from check_conversion.samples import Losses, Relation, Samples
from check_conversion.verdict import Fault

SHARED_OUT = ("", "no sampler", "RandomSampler", "SequentialSampler", "SubsetRandomSampler",
              "_InfiniteConstantSampler")  # by DistributedSampler, or a dataset's own lines
SAID = {Relation.REPEATED: "repeated", Relation.MORE: "added", Relation.LEFT_OUT: "left out",
        Relation.OVERLAP: "repeated, and others left out"}


@dataclass
class Evidence:
    """What was noted of a step, in the original and in each rank, side by side."""
    name: str  # of the original's script
    step: int  # which
    one: Step  # the original's
    shares: list  # the ranks'
    samples: Samples
    losses: Losses
    lengths: tuple  # steps of the first pass over the samples, in both
    names: list  # of the parameters
    lacking: Callable  # which of them the converted script's optimizer does not hold
    each_step: set  # generators that move from step to step in the original, not once a pass
    places: dict  # of generators: the user's line that drew
    alike_before: set  # generators whose states were the same in all ranks in the step before
    in_workers: list  # generators that moved in loader workers, of both runs
    blurred: bool  # rounding alone is large: what was seen counts, how far they parted does not
    whole_before: bool  # in an earlier step, which agreed, each rank took the whole batch
    untrained: Callable  # what has parted that no optimizer holds

    @property
    def count(self):
        return len(self.shares)

    @property
    def factor(self):
        return factor_between(self.one.gradients, self.shares[0].gradients)

    @property
    def passes(self):
        """The last pass over the samples of each."""
        return [step.passes[-1] if step.passes else Pass("", False)
                for step in (self.one, *self.shares)]

    @property
    def factor_unclipped(self):
        """Between their norms before they were clipped, if both scripts clip."""
        one, ours = self.one.norms, self.shares[0].norms
        return ours[-1] / one[-1] if one and ours and one[-1] else None

    def states(self, generator):
        return [share.states.get(generator) for share in self.shares]

    def as_before(self, generator):
        """Every rank has drawn what the original has, until the model was called at least: how much
        a loss draws then follows from what it is given. Such numbers are no cause."""
        until_then = {share.after_model.get(generator) for share in self.shares}
        return {*self.states(generator)} == {self.one.states.get(generator)} or (
            generator in self.one.after_model and until_then == {self.one.after_model[generator]})

    @property
    def drawing(self):
        """Generators that move in both in each step, and other numbers than in the original."""
        return [name for name in self.one.draws if name in self.shares[0].draws
                and name in self.each_step and not self.as_before(name)]

    def alike(self, generator):
        return len({*self.states(generator)}) == 1 < self.count

    def by(self, generators):
        """by torch (at train.py:7) and numpy"""
        places = {name: f" (at {place})" for name, place in self.places.items()}
        return "by " + " and ".join(name + places.get(name, "") for name in generators)


def why(e):
    """What explains another step: the first of these that was seen."""
    seen = (not_trained(e) or other_length(e) or same_numbers(e)
            or other_samples(e) or (not e.drawing and e.untrained()) or other_clipping(e) or other_factor(e)
            or own_numbers(e) or unequal(e))
    return seen if seen or e.blurred else what_is_known(e)


def not_trained(e):
    if not any(e.shares[0].gradients) and any(e.one.gradients):
        return Fault("there are no gradients: does the optimizer hold the parameters of the model "
                     "that is trained, or was the optimizer made before that model?", "Training goes through DDP")
    return None


def other_length(e):
    """Where the shorter of two epochs has just ended."""
    return of_lengths(e) if e.step == min(e.lengths) + 1 else None


def of_lengths(e):
    if 0 in e.lengths or e.lengths[0] == e.lengths[1]:
        return None
    said = f"an epoch had {e.lengths[0]} steps in {e.name} and now has {e.lengths[1]}"
    before, now = (noted.drop_last for noted in e.passes[:2])
    if now and e.lengths[1] < e.lengths[0]:
        said += f": {now}(drop_last=True) leaves out the last batch, which is smaller"
    if before and e.lengths[1] > e.lengths[0]:
        said += f": {before} had drop_last=True in {e.name}"
    return Fault(said, "Two routes")


def other_samples(e):
    original, ours, *_ = e.passes
    relation, total, n = e.samples.relation, sum(e.samples.ranks), e.count
    if relation == Relation.SAME and e.samples.mispaired:
        name, key = e.samples.mispaired
        return Fault(f"{name} is paired with other samples of {key} than in {e.name}", "Two routes")
    if relation == Relation.SAME:
        return None
    if relation == Relation.WHOLE and e.whole_before:
        return None
    if relation == Relation.WHOLE and n > 1:
        return Fault(f"each rank takes the whole batch: {e.samples.sizes}", "Two routes")
    if relation == Relation.ALIKE:
        return Fault("all ranks are fed the same samples, so each of them goes through all "
                     f"samples: {e.samples.sizes}", "Two routes")
    if relation != Relation.UNKNOWN and n > 1 and total == n * e.samples.original:
        return Fault(f"each rank takes a full-size batch of its own: {e.samples.sizes}", "Two routes")
    if n > 1 and relation != Relation.UNKNOWN and total < 0.6 * e.samples.original:
        return Fault(f"the batch is divided twice: {e.samples.sizes}", "Two routes")
    if relation in (Relation.OTHERS, Relation.VALUES, Relation.OVERLAP) and original.sampler not in SHARED_OUT and (
            original.sampler != ours.sampler):
        return Fault(f"the samples are drawn by {original.sampler} in {e.name}, by "
                     f"{ours.sampler or 'no sampler'} now", "Two routes")
    if ours.again:
        return Fault("the samples come in the order of an earlier epoch: set_epoch was not called", "Two routes")
    if original.sampler and ours.sampler and original.shuffles != ours.shuffles and (
            relation == Relation.OTHERS):
        shuffling = original.sampler if original.shuffles else ours.sampler
        return Fault(f"one of the two scripts shuffles, with {shuffling}; the other does not", "Two routes")
    if relation in SAID:
        said = SAID[relation]
        return Fault(f"samples are {said}: {e.samples.sizes}", "Two routes")
    if relation == Relation.OTHERS:
        if fault := of_lengths(e):
            return fault
        if fault := own_order(e) or some_draw(e):
            return fault
        if e.drawing and not e.samples.whole_numbers:
            return drawn_numbers(e)  # which may turn a sample into another one's like
        drawn = f"; both draw random numbers in each step, {e.by(e.drawing)}" * bool(e.drawing)
        return Fault(f"different samples from those of {e.name} in this step, in {e.samples.argument}: "
                     f"{e.samples.sizes}{drawn}", "Two routes")
    return None


def other_clipping(e):
    one, ours = (bool(step.norms) for step in (e.one, e.shares[0]))
    if one != ours:
        first, then = ("are", "no longer") if one else ("were not", "now")
        return Fault(f"gradients {first} clipped in {e.name}, and are {then}", "What your script has")
    if one and e.factor is not None and math.isclose(e.factor_unclipped, 1, rel_tol=1e-6):
        return Fault(f"gradients are clipped to another norm: they are {e.factor:.4g} times those of {e.name}, and "
                     "were the same before", "What your script has")
    return None


def other_factor(e):
    """Only where the factor explains the difference."""
    if e.factor is None:
        return None
    factor = e.factor_unclipped or e.factor
    is_factor = f"all gradients are {factor:.4g} times those of {e.name}"
    is_factor = f"before they are clipped, {is_factor}" if e.factor_unclipped else is_factor
    if math.isclose(factor * e.count, 1, rel_tol=0.01) and e.count > 1:
        if e.losses == Losses.EACH:
            return Fault(f"{is_factor}, which is 1 / the number of processes ({e.count}): each rank computes the whole "
                         "loss, but its gradient reaches only the rank's own part; gather with gradients", "Losses over pairs")
        reason = ("the sum of the ranks' losses is the original's loss: DDP takes the mean over ranks, "
                  "so multiply by world_size" if e.losses == Losses.SUM else
                  "DDP takes the mean over ranks (is the loss a sum over the batch, or are "
                  "gradients clipped to another norm?)")
        return Fault(f"{is_factor}, which is 1 / the number of processes ({e.count}): {reason}",
                     "Sums and unequal parts")
    if math.isclose(factor, e.count, rel_tol=0.01) and e.count > 1:
        return Fault(f"{is_factor}, the number of processes", "Sums and unequal parts")
    return Fault(f"{is_factor}, with {e.count} process{'es' * (e.count > 1)}",
                 "Sums and unequal parts")


def unequal(e):
    """Parts that count as equals and are not."""
    if len({*e.samples.ranks}) > 1 and e.losses == Losses.MEAN_OF_SAMPLES:
        return Fault(f"the loss is a mean, but the ranks' parts are not equal: {e.samples.sizes}",
                     "Sums and unequal parts")
    if len({tuple(share.norms) for share in e.shares}) > 1:
        norms = ", ".join(f"{share.norms[-1]:.3g}" for share in e.shares if share.norms)
        return Fault(f"gradients are clipped before they are averaged, at norms of {norms}",
                     "Errors that vary")
    return None


# Random numbers as a cause: noise and augmentation.

def drawn_values(e):
    """Arguments of the model with other values than the original's."""
    return [name for name, relation in e.samples.relations.items()
            if relation in (Relation.ALIKE, Relation.OVERLAP, Relation.VALUES)]


def loss_is_explained(e):
    return e.losses not in (Losses.OTHER, Losses.UNKNOWN) and not drawn_values(e)


def drawn_numbers(e):
    """What is drawn for its own samples must differ between ranks; then no more can be compared."""
    if alike := [name for name in e.drawing if e.alike(name)]:
        return Fault(f"both draw random numbers in each step, {e.by(alike)}, and all "
                     "ranks draw the same ones, perhaps for noise, augmentation or picking the samples of a batch",
                     "Random numbers")
    if parted := [name for name in e.drawing if name in e.alike_before]:
        return Fault(f"the ranks drew the same random numbers up to this step, {e.by(parted)}, but "
                     "no longer do: one of them has drawn more", "Random numbers")
    if e.drawing:
        where = f", seen in {' and '.join(drawn_values(e))}" * bool(drawn_values(e))
        return Fault(f"both draw random numbers in each step, {e.by(e.drawing)}, and each rank "
                     f"draws its own{where}, which is right for noise and augmentation. Nothing more can be "
                     "compared until these are turned off in both scripts, or drawn for the whole batch",
                     "Random numbers", unknown=True)
    return None


def same_numbers(e):
    """Where the ranks' numbers are seen in the samples, or in the loss."""
    if any(map(e.alike, e.drawing)) and (drawn_values(e) or (
            e.samples.relation == Relation.SAME and not loss_is_explained(e) and not e.factor)):
        return drawn_numbers(e)
    return None


def some_draw(e):
    """Where a rank draws and another does not, they no longer agree on what both go by."""
    for name in e.one.draws:
        drew = [rank for rank, share in enumerate(e.shares) if name in share.draws]
        if 0 < len(drew) < e.count:
            others = [rank for rank in range(e.count) if rank not in drew]
            return Fault(f"rank {drew[0]} draws random numbers for this step, {e.by([name])}, and "
                         f"rank {others[0]} does not", "Random numbers")
    return None


def own_order(e):
    """Numbers that are drawn once a pass order its samples: all ranks need the same."""
    if e.step == 1 and not e.one.passes:
        return None  # what was drawn made the model and the data
    for name in e.one.draws:
        if name not in e.each_step and len({*e.states(name)}) > 1:
            return Fault(f"the ranks draw different random numbers once per pass over the data, {e.by([name])}, and "
                         f"are fed other samples than {e.name}: {e.samples.sizes}", "Random numbers")
    return None


def own_numbers(e):
    """Where they are seen there, and are each rank's own."""
    if loss_is_explained(e) or e.samples.relation not in (
            Relation.SAME, Relation.VALUES, Relation.UNKNOWN):
        return None
    if fault := some_draw(e):
        return fault
    if e.drawing:
        return drawn_numbers(e)
    values = " and ".join(drawn_values(e))
    if values and e.in_workers:
        return Fault(f"{values} has values that {e.name} never feeds it, and loader workers draw "
                     f"random numbers, {e.by(e.in_workers)}: augmentation or noise. Nothing more can "
                     "be compared until it is turned off in both", "Random numbers", unknown=True)
    if values:
        return Fault(f"{values} has values that {e.name} never feeds it, and no random numbers are "
                     "drawn for them in each step: does each rank have its own data, or is it "
                     "prepared differently?", "Random numbers")
    return None


# Where no cause was seen.

def of_the_optimizer(e):
    """Whether the weights part by far more of their step than the gradients of their norm."""
    one, other = e.one, e.shares[0]
    step = distance(one.before, one.after) or 1
    gradients = distance(one.gradients, other.gradients) / (norm(one.gradients) or 1)
    return distance(one.after, other.after) / step > 1000 * max(gradients, 1e-6)


def what_is_known(e):
    """No cause, but where to look for it."""
    where = apart_in(e.names, e.one.gradients, e.shares[0].gradients)
    known = "the same samples" if e.samples.relation == Relation.SAME else e.samples.sizes
    if of_the_optimizer(e):
        return Fault(f"{known}, and the gradients agree, but the optimizer's step "
                     "does not: was its state loaded, as in the original?",
                     "Load first, then DDP")
    size = distance(e.one.gradients, e.shares[0].gradients) / (norm(e.one.gradients) or 1)
    said = f"gradients differ by {size:.2g} of their norm, most in {where}"
    if e.losses in (Losses.MEAN, Losses.EACH):
        return Fault(f"{known} and the same loss, {said}", "Errors that vary")
    if e.losses == Losses.SUM:
        return Fault(f"{known}, and the ranks' losses add up to the original's loss; {said}",
                     "Sums and unequal parts")
    if e.losses == Losses.OTHER:
        parts = ", ".join(f"{sum(share.losses):.6g}" for share in e.shares)
        return Fault(f"{known}, but the ranks' losses are {parts}, and it is {sum(e.one.losses):.6g} in "
                     f"{e.name}: neither their mean nor their sum equals it. Do parts count "
                     f"differently (padding, ignore_index), is something computed over the batch (mining, a "
                     f"contrastive loss), or are labels, which the model does not see, paired with other samples? {said}",
                     "Errors that vary")
    return Fault(f"{known}; {said}", "Errors that vary")
