"""Why a step differs. In a step things happen in one order: what the ranks were told, what was drawn, which samples, which
loss, which gradients, which weights. The first row of CAUSES, at the end, that holds is the cause; the rows behind it
follow from it. Each rests on something that was noted."""
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from check_conversion import samples
from check_conversion.measure import KINDS, LARGE, SAME_BITS, TIMES
from check_conversion.records import Step
from check_conversion.samples import Losses, Relation
from check_conversion.sketch import apart_in, distance, factor_between, few, norm, of_tensors
from check_conversion.verdict import (
    CHECK_IT,
    DECISIONS,
    HAS,
    LOAD_FIRST,
    PAIRS,
    RANDOM_NUMBERS,
    STEPS,
    SUMS,
    THROUGH_DDP,
    TWO_ROUTES,
    VARY,
)

SHARED_OUT = (None, "RandomSampler", "SequentialSampler", "SubsetRandomSampler",
              "_InfiniteConstantSampler")  # by DistributedSampler, or a dataset's own lines
SCHEDULED = "lr ", "momentum ", "betas "  # options that may follow the number of steps


@dataclass
class Evidence:
    """A step of the original, of its second run, and of all ranks, side by side."""
    pair: object  # training.Pair: what is known of both runs as a whole
    step: int  # which, from 1
    one: Step  # the original's
    nudged: Step
    shares: list  # the ranks'

    @property
    def name(self):
        return self.pair.name

    @property
    def count(self):
        return len(self.shares)

    @property
    def optimizer(self):
        return self.one.last("optimizer")

    @property
    def weights(self):
        return self.pair.weights[self.optimizer]

    @cached_property
    def parted(self):
        """Whether a cause is to be looked for: the weights differ afterwards by more than rounding explains, or all
        gradients by a factor that the optimizer does not heed."""
        one, ours = self.one, self.shares[0]
        return self.weights.differs(one.last("after"), ours.last("after")) or bool(scheduled(self)) or (
            self.gradients_differ and self.factor is not None)

    @cached_property
    def gradients_differ(self):
        gradients = self.one.last("gradients")
        apart = distance(gradients, self.shares[0].last("gradients"))
        return not apart <= max(LARGE * norm(gradients), self.pair.gradients[self.optimizer].allowed)

    @cached_property
    def factor(self):
        return factor_between(self.one.last("gradients"), self.shares[0].last("gradients"))

    @cached_property
    def factor_unclipped(self):
        """Between their norms before they were clipped, if both scripts clip."""
        one, ours = self.one.last("norm"), self.shares[0].last("norm")
        return ours / one if one and ours is not None else None

    @cached_property
    def samples(self):
        return samples.compare(self.one, self.nudged, self.shares, self.pair.steps, self.name)

    @cached_property
    def losses(self):
        return samples.losses(self.one, self.shares, self.samples)

    @cached_property
    def names(self):
        """Of the parameters."""
        return self.pair.kept[self.optimizer].names

    def latest(self, kind):
        """The last record of this kind in the original and on rank 0, or None."""
        return [process.latest(kind, self.step) for process in (self.pair.original, self.pair.ranks[0])]

    # Random numbers.

    def states(self, generator):
        return [share.named("drew").get(generator, (0, False))[0] for share in self.shares]

    def moved(self, generator):
        """The ranks in which it has moved since the step before."""
        return [rank for rank, share in enumerate(self.shares) if share.named("drew").get(generator, (0, False))[1]]

    @property
    def draws(self):
        """Generators that the original has drawn from."""
        return [name for name, (_, moved) in self.one.named("drew").items() if moved]

    def as_before(self, generator):
        """Every rank has drawn what the original has, until the model was called at least: how much
        a loss draws then follows from what it is given. Such numbers are no cause."""
        until_then = {share.last("forward", {}).get(generator) for share in self.shares}
        return {*self.states(generator)} == {self.one.named("drew")[generator][0]} or (
            until_then == {self.one.last("forward", {}).get(generator, "none")})

    @cached_property
    def drawing(self):
        """Generators that move in both in each step, and draw other numbers than in the original."""
        return [name for name in self.draws if 0 in self.moved(name)
                and name in self.pair.drawn_in_each_step and not self.as_before(name)]

    def alike(self, generator):
        return len({*self.states(generator)}) == 1 < self.count

    @cached_property
    def alike_before(self):
        """Generators whose states were the same in all ranks in the step before."""
        before = [rank.steps[self.step - 2].named("drew") for rank in self.pair.ranks] if self.step > 1 else []
        return [name for name in (before[0] if before else ()) if len({states.get(name, (0,))[0] for states in before}) == 1]

    @cached_property
    def drawn_values(self):
        """Arguments of the model with other values than the original's."""
        return [name for name, relation in self.samples.relations.items()
                if relation in (Relation.ALIKE, Relation.OVERLAP, Relation.VALUES)]

    @property
    def loss_is_explained(self):
        return self.losses not in (Losses.OTHER, Losses.UNKNOWN) and not self.drawn_values


# What the ranks were told.

def other_options(one, other, nudged):
    """What two optimizers have been told otherwise: lr 0.1 instead of 0.05; not what rounding moves."""
    def same(a, b):
        return a == b or (isinstance(a, float) and isinstance(b, float) and (
            math.isclose(a, b, rel_tol=KINDS["options"].floor) or (a != a and b != b)))
    one, other, nudged = (step.last("options") for step in (one, other, nudged))
    if len(one) != len(other):
        return [f"{len(other)} groups of parameters instead of {len(one)}"]
    return sorted({f"{name} {new.get(name)} instead of {old[name]}" for old, new, known in zip(one, other, nudged)
                   for name in old if not same(old[name], new.get(name)) and same(old[name], known.get(name))})


def another_optimizer(e):
    theirs = [share.last("optimizer") for share in e.shares]
    if {*theirs} != {e.optimizer}:
        return (f"this step is taken by optimizer {e.optimizer + 1} in {e.name}, and by optimizer "
                f"{' and '.join(str(which + 1) for which in dict.fromkeys(theirs))} in the ranks, in the order of their "
                "first steps: all must take the same steps in the same order")
    return ""


def options_between_ranks(e):
    for rank, share in enumerate(e.shares[1:], 1):
        if options := other_options(e.shares[0], share, e.shares[0]):
            return f"ranks 0 and {rank} have different optimizer options: {', '.join(options)}"
    return ""


def shuffles_between_ranks(e):
    passes = [rank.latest("shuffle", e.step) for rank in e.pair.ranks]
    first = passes[0].value if all(passes) else None
    for rank, other in enumerate(passes[1:], 1):
        if first is None or not (first.shuffles and other.value.shuffles):
            continue
        if first.asked != other.value.asked:
            return (f"ranks 0 and {rank} shuffle differently, because DistributedSampler's seed and epoch are "
                    f"{first.asked} and {other.value.asked}")
        if replace(first, again=False, number=0) != replace(other.value, again=False, number=0):
            return (f"ranks 0 and {rank} shuffle differently, each with its own random numbers: use DistributedSampler, "
                    "or the same seed on all ranks")
    return ""


def scores_between_ranks(e):
    values = [share.all("score") for share in e.shares]
    for given in zip(*values):
        if any(distance(given[:1], [value]) > KINDS["options"].floor * norm(given) for value in given):
            shown = ", ".join(f"{value:.6g}" for value in given)
            return f"ReduceLROnPlateau is given a different value on each rank: {shown}; give it the sum over all ranks"
    if len({*map(len, values)}) > 1:
        return f"ReduceLROnPlateau is stepped {', '.join(map(str, map(len, values)))} times on the ranks since the last step"
    return ""


def other_scores(e):
    one, ours = e.one.all("score"), e.shares[0].all("score")
    for a, c in zip(one, ours):
        if e.pair.scores.differs([a], [c]):
            return f"ReduceLROnPlateau is given {c:.6g} instead of {a:.6g}"
    if len(one) != len(ours):
        return f"ReduceLROnPlateau is stepped {len(ours)} times since the last step, and {len(one)} times in {e.name}"
    return ""


def switches(e):
    """What is on only where there is a GPU is not compared."""
    def on(step):
        return {name for name in step.named("switch") if name.partition(" ")[0] not in e.pair.on_gpus}
    for what in sorted(on(e.one).union(*map(on, e.shares))):
        others = [rank for rank, share in enumerate(e.shares) if (what in on(share)) != (what in on(e.one))]
        if others:
            where = e.pair.converted + f" on rank {others[0]}" * (len(others) < e.count)
            first, then = ("on", "off") if what in on(e.one) else ("off", "on")
            return f"{what} is {first} in {e.name} and {then} in {where}"
    return ""


def shorter_epoch(e):
    """Where the shorter of two epochs has just ended."""
    return of_lengths(e) if e.step == min(e.pair.lengths) + 1 else ""


def of_lengths(e):
    before, now = e.pair.lengths
    if 0 in (before, now) or before == now:
        return ""
    said = f"an epoch had {before} steps in {e.name} and now has {now}"
    dropped_before, dropped = (loader.value if loader else "" for loader in e.latest("loader"))
    if now > before:
        return said + (f": {dropped_before} had drop_last=True in {e.name}; give it to the loader" if dropped_before
                       else f": leave out in {e.pair.converted} what {e.name} leaves out")
    if dropped == "DataLoader":
        return f"{said}: DataLoader(drop_last=True) leaves out the last batch, which is smaller; leave drop_last away"
    shuffle = e.latest("shuffle")[1]
    if dropped and shuffle and 0 < e.samples.original <= shuffle.value.length % e.count:
        return (f"{said}: {dropped}(drop_last=True) leaves out {shuffle.value.length % e.count} samples, all that the last "
                f"batch had; leave them out in {e.name} too")
    return f"{said}, because its loop leaves out the last step, which is incomplete: leave that out in {e.name} too"


def told_otherwise(e):
    options = other_options(e.one, e.shares[0], e.nudged)
    return said_of(options, e) if not all(option.startswith(SCHEDULED) for option in options) else ""


def scheduled(e):
    """Options that may only follow from another number of steps or from what a schedule was given."""
    return said_of(other_options(e.one, e.shares[0], e.nudged), e)


def said_of(options, e):
    if not options:
        return ""
    scores = [process.latest("score", e.step) for process in (e.pair.original, e.pair.ranks[0])]
    given = ""
    if any(option.startswith("lr ") for option in options) and all(scores) and scores[0].value != scores[1].value:
        given = f"; ReduceLROnPlateau was last given {scores[1].value:.6g} instead of {scores[0].value:.6g}"
    return f"different optimizer options: {', '.join(options)}{given}"


# Where it begins.

def other_parameters(e):
    names, ours = (process.parameters(e.optimizer).names for process in (e.pair.original, e.pair.ranks[0]))
    if len(e.shares[0].last("before")) == len(e.one.last("before")):
        return ""
    lacking = [name for name in names if name not in ours]
    return f"the optimizer holds other parameters than in {e.name}" + f": it lacks {few(lacking)}" * bool(lacking)


def weights_between_ranks(e):
    return between_ranks(e, "before", "weights")


def between_ranks(e, kind, said):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    parameters = e.pair.ranks[0].parameters(e.optimizer)
    one = e.shares[0].last(kind)
    for rank, share in enumerate(e.shares[1:], 1):
        if distance(one, share.last(kind)) > SAME_BITS[parameters.eps > 1e-10] * norm(one):
            return f"ranks 0 and {rank} have different {said}: {apart_in(e.names, one, share.last(kind))}"
    return ""


def other_weights(e):
    one, ours = e.one.last("before"), e.shares[0].last("before")
    if not e.weights.differs(one, ours) or e.weights.hidden_since:
        return ""
    if one == e.weights.start:
        return f"it begins with different weights, most in {apart_in(e.names, one, ours)}: seed both scripts alike"
    return "the weights differ before the step, although they agreed after the previous step"


# Which samples.

def mispaired(e):
    if e.samples.relation == Relation.SAME and e.samples.mispaired:
        name, key = e.samples.mispaired
        return f"{name} is paired with other samples of {key} than in {e.name}"
    return ""


def whole_batch(e):
    if e.samples.relation == Relation.WHOLE and e.count > 1 and not e.pair.whole_before:
        return f"each rank takes the whole batch: {e.samples.sizes}"
    return ""


def same_on_all_ranks(e):
    if e.samples.relation == Relation.ALIKE:
        return f"all ranks are fed the same samples, so each of them goes through all samples: {e.samples.sizes}"
    return ""


def is_known(e):
    return e.count > 1 and e.samples.relation not in (Relation.UNKNOWN, Relation.SAME, Relation.WHOLE)


def full_steps(e):
    calls = [samples.calls(step, e.samples.argument) for step in (e.one, *e.shares)]
    if is_known(e) and calls[0] > 1 and sum(e.samples.ranks) == e.count * e.samples.original and len({*calls}) == 1:
        return (f"each rank takes {calls[0]} batches in a step, as {e.name} does alone: divide the number of batches in a "
                f"step by the number of processes ({e.count}), and the size of a batch where that does not divide")
    return ""


def full_batches(e):
    if is_known(e) and sum(e.samples.ranks) == e.count * e.samples.original:
        return f"each rank takes a full-size batch of its own, instead of batch_size // world_size: {e.samples.sizes}"
    return ""


def divided_twice(e):
    if is_known(e) and sum(e.samples.ranks) < 0.6 * e.samples.original:
        return f"the batch is divided twice: {e.samples.sizes}"
    return ""


def other_sampler(e):
    original, ours = (loader.name if loader else None for loader in e.latest("loader"))
    if original != ours and original not in SHARED_OUT and e.samples.relation in (
            Relation.OTHERS, Relation.VALUES, Relation.OVERLAP):
        return f"the samples are drawn by {original} in {e.name}, by {ours or 'no sampler'} now"
    return ""


def epoch_again(e):
    ours = e.latest("shuffle")[1]
    if e.samples.relation not in (Relation.SAME, Relation.WHOLE) and ours and ours.value.again:
        return "the samples come in the order of an earlier epoch: set_epoch was not called"
    return ""


def one_shuffles(e):
    loaders, shuffles = e.latest("loader"), e.latest("shuffle")
    shuffling = [bool(one and one.value.shuffles) for one in shuffles]
    if e.samples.relation == Relation.OTHERS and all(loaders) and shuffling[0] != shuffling[1]:
        first, then = (e.name, e.pair.converted) if shuffling[0] else (e.pair.converted, e.name)
        return f"{first} shuffles, with {loaders[shuffling[1]].name}; {then} does not"
    return ""


def other_count(e):
    said = {Relation.REPEATED: "repeated", Relation.MORE: "added", Relation.LEFT_OUT: "left out",
            Relation.OVERLAP: "repeated, and others left out"}
    return f"samples are {said[e.samples.relation]}: {e.samples.sizes}" if e.samples.relation in said else ""


def own_order(e):
    """Numbers that are drawn once a pass order its samples: all ranks need the same."""
    if e.samples.relation != Relation.OTHERS or (e.step == 1 and not any(e.latest("shuffle"))):
        return ""  # what was drawn made the model and the data
    for name in e.draws:
        if name not in e.pair.drawn_in_each_step and len({*e.states(name)}) > 1:
            return (f"the ranks draw different random numbers once per pass over the data, by {name}, and "
                    f"are fed other samples than {e.name}: {e.samples.sizes}")
    return ""


def other_samples(e):
    if e.samples.relation != Relation.OTHERS:
        return ""
    drawn = f"; both draw random numbers in each step, by {' and '.join(e.drawing)}" * bool(e.drawing)
    return (f"different samples from those of {e.name} in this step, in {e.samples.argument}: {e.samples.sizes}{drawn}")


def other_length(e):
    return of_lengths(e) if e.samples.relation == Relation.OTHERS else ""


# Which random numbers, where they are seen in the samples or in the loss: noise and augmentation.

def is_unexplained(e):
    return not e.loss_is_explained and e.samples.relation in (Relation.SAME, Relation.VALUES, Relation.UNKNOWN)


def numbers_matter(e):
    """Noise may turn a sample into another one's like."""
    return (is_unexplained(e) and e.factor is None) or (
        e.samples.relation == Relation.OTHERS and not e.samples.whole_numbers)


def one_rank_draws(e):
    """Where a rank draws and another does not, they no longer agree on what both go by."""
    if not (e.samples.relation == Relation.OTHERS or is_unexplained(e)):
        return ""
    for name in e.draws:
        drew = e.moved(name)
        if 0 < len(drew) < e.count:
            other = next(rank for rank in range(e.count) if rank not in drew)
            return (f"rank {drew[0]} draws random numbers for this step, by {name}, and rank {other} does not: "
                    "all ranks must draw equally many")
    return ""


def same_numbers(e):
    """What is drawn for its own samples must differ between ranks."""
    alike = [name for name in e.drawing if e.alike(name)]
    if alike and (e.drawn_values or numbers_matter(e)):
        return (f"both draw random numbers in each step, by {' and '.join(alike)}, and all ranks draw the same ones, perhaps "
                "for noise, augmentation or picking the samples of a batch: draw them for the whole batch on each rank, then "
                "take the rank's part")
    return ""


def parted_numbers(e):
    parted = [name for name in e.drawing if name in e.alike_before]
    if parted and numbers_matter(e):
        return (f"the ranks drew the same random numbers up to this step, by {' and '.join(parted)}, but no longer do: one "
                "of them has drawn more")
    return ""


def own_numbers(e):
    """Which no rule can tell right from wrong."""
    if e.drawing and numbers_matter(e):
        where = f", seen in {' and '.join(e.drawn_values)}" * bool(e.drawn_values)
        return (f"both draw random numbers in each step, by {' and '.join(e.drawing)}, and each rank draws its own{where}, "
                "which is right for noise and augmentation. Nothing more can be compared until these are turned off in both "
                "scripts, or drawn for the whole batch")
    return ""


def numbers_in_workers(e):
    if e.drawn_values and is_unexplained(e) and e.pair.in_workers:
        return (f"{' and '.join(e.drawn_values)} has values that {e.name} never feeds it, and loader workers draw random "
                f"numbers, by {' and '.join(e.pair.in_workers)}: augmentation or noise. Nothing more can be compared until "
                "it is turned off in both")
    return ""


def other_values(e):
    if e.drawn_values and is_unexplained(e):
        return (f"{' and '.join(e.drawn_values)} has values that {e.name} never feeds it, and no random numbers are drawn "
                "for them in each step: does each rank have its own data, or is it prepared differently?")
    return ""


# What no optimizer holds.

def buffers(e):
    return "" if e.drawing else e.pair.buffers.compare(e.step)


# Which gradients.

def gradients_between_ranks(e):
    said = between_ranks(e, "gradients", "gradients")
    without = [name for name in e.pair.ranks[0].parameters(e.optimizer).without if name in said]
    return said + f" ({few(without)} not wrapped in DDP)" * bool(said and without)


def no_gradients(e):
    if not any(e.shares[0].last("gradients")) and any(e.one.last("gradients")):
        return ("there are no gradients: does the optimizer hold the parameters of the model "
                "that is trained, or was the optimizer made before that model?")
    return ""


def clipped_between_ranks(e):
    norms = [share.last("norm") for share in e.shares]
    if len({*norms}) > 1 and None not in norms:
        shown = ", ".join(f"{norm:.3g}" for norm in norms)
        return f"gradients are clipped before they are averaged, at norms of {shown}: clip after the last backward"
    return ""


def one_clips(e):
    one, ours = (step.last("norm") is not None for step in (e.one, e.shares[0]))
    if one == ours:
        return ""
    first, then = ("are", "no longer") if one else ("were not", "now")
    return f"gradients {first} clipped in {e.name}, and are {then}"


def clipped_while_scaled(e):
    one, ours = (step.last("scale", 1) for step in (e.one, e.shares[0]))
    if e.factor_unclipped and any(scale != 1 and math.isclose(e.factor_unclipped, power, rel_tol=0.01)
                                  for scale in (one, ours) for power in (scale, 1 / scale)):
        where = e.pair.converted if e.factor_unclipped > 1 else e.name
        return f"gradients are clipped while they are scaled in {where}: call scaler.unscale_(optimizer) before"
    return ""


def clipped_otherwise(e):
    if e.factor is not None and e.factor_unclipped and math.isclose(e.factor_unclipped, 1, rel_tol=1e-6):
        return (f"gradients are clipped to another norm: they are {e.factor:.4g} times those of {e.name}, and "
                "were the same before")
    return ""


def said_factor(e):
    """All gradients are so many times the original's, or nothing: only where that explains the difference."""
    if e.factor is None:
        return 0, ""
    factor = e.factor_unclipped or e.factor
    return factor, "before they are clipped, " * bool(e.factor_unclipped) + f"all gradients are {factor:.4g} times those of {e.name}"


def loss_gathered(e):
    factor, said = said_factor(e)
    if e.count > 1 and math.isclose(factor * e.count, 1, rel_tol=0.01) and e.losses == Losses.EACH:
        return (f"{said}, which is 1 / the number of processes ({e.count}): each rank computes the whole loss, but its "
                "gradient reaches only the rank's own part; gather with gradients")
    return ""


def factor_of_processes(e):
    factor, said = said_factor(e)
    if e.count > 1 and math.isclose(factor * e.count, 1, rel_tol=0.01):
        reason = ("the sum of the ranks' losses is the original's loss: DDP takes the mean over ranks, so multiply by "
                  "world_size" if e.losses == Losses.SUM else
                  "DDP takes the mean over ranks (is the loss a sum over the batch, or are gradients clipped to another norm?)")
        return f"{said}, which is 1 / the number of processes ({e.count}): {reason}"
    if e.count > 1 and math.isclose(factor, e.count, rel_tol=0.01):
        return f"{said}, the number of processes"
    return f"{said}, with {e.count} process{'es' * (e.count > 1)}" if said else ""


def unequal_parts(e):
    if len({*e.samples.ranks}) > 1 and e.losses == Losses.MEAN_OF_SAMPLES:
        return (f"the loss is a mean, but the ranks' parts are not equal: {e.samples.sizes}; divide each rank's sum by the "
                "count of the whole batch")
    return ""


# Which weights; what is known where no cause was seen.

def weights_afterwards(e):
    return between_ranks(e, "after", "weights after the step")


def differs_by(e):
    gradients = e.one.last("gradients")
    return distance(gradients, e.shares[0].last("gradients")) / (norm(gradients) or 1)


def optimizer_state(e):
    """The weights part by far more of their step than the gradients of their norm."""
    step = distance(e.one.last("before"), e.one.last("after")) or 1
    if distance(e.one.last("after"), e.shares[0].last("after")) / step > 1000 * max(differs_by(e), 1e-6):
        return (f"{known_samples(e)}, and the gradients agree, but the optimizer's step does not: was its state loaded, as "
                f"in {e.name}?")
    return ""


def rounding_decides(e):
    """The second run of the original parts by as much."""
    gradients = e.pair.gradients[e.optimizer]
    apart = distance(e.one.last("gradients"), e.shares[0].last("gradients"))
    if e.weights.hidden_since or apart <= TIMES * gradients.parted:
        parted = zip(e.names, of_tensors(e.one.last("gradients")), of_tensors(e.nudged.last("gradients")))
        where = few(name for name, a, b in parted if distance(a, b) > LARGE * norm(a))
        return (f"from here on rounding alone moves the gradients of {e.name} as far{f', most in {where}' * bool(where)}, so "
                f"smaller faults cannot be seen; the {e.step - 1} steps before are the same")
    return ""


def known_samples(e):
    return "the same samples" if e.samples.relation == Relation.SAME else e.samples.sizes


def what_differs(e):
    where = apart_in(e.names, e.one.last("gradients"), e.shares[0].last("gradients"))
    return f"gradients differ by {differs_by(e):.2g} of their norm, most in {where}"


def same_loss(e):
    if e.losses not in (Losses.MEAN, Losses.EACH):
        return ""
    parts = ("; are means of batches averaged that count unequally many targets? Divide the sum of a step by its count"
             * (len(e.one.all("loss")) > 1))
    return f"{known_samples(e)} and the same loss, {what_differs(e)}{parts}"


def summed_loss(e):
    if e.losses == Losses.SUM:
        return f"{known_samples(e)}, and the ranks' losses add up to the original's loss; {what_differs(e)}"
    return ""


def other_loss(e):
    if e.losses != Losses.OTHER:
        return ""
    parts = ", ".join(f"{sum(share.all('loss')):.6g}" for share in e.shares)
    return (f"{known_samples(e)}, but the ranks' losses are {parts}, and it is {sum(e.one.all('loss')):.6g} in {e.name}: "
            "neither their mean nor their sum equals it. Do parts count differently (padding, ignore_index, class weights), is "
            "something computed over the batch (mining, a contrastive loss), or are labels, which the model does not see, "
            f"paired with other samples? {what_differs(e)}")


def nothing_known(e):
    return f"{known_samples(e)}; {what_differs(e)}"


class Cause(NamedTuple):
    holds: object  # a function: the sentence, or nothing
    heading: str
    always: bool = False  # also of a step that moves the weights alike
    stops: bool = False  # no fault: nothing more can be compared


CAUSES = [
    # What the ranks were told, and where the step begins.
    Cause(another_optimizer, DECISIONS, always=True),
    Cause(other_parameters, LOAD_FIRST, always=True),
    Cause(options_between_ranks, DECISIONS, always=True),
    Cause(shuffles_between_ranks, RANDOM_NUMBERS, always=True),
    Cause(weights_between_ranks, LOAD_FIRST, always=True),
    Cause(gradients_between_ranks, THROUGH_DDP, always=True),
    Cause(other_weights, LOAD_FIRST, always=True),
    Cause(scores_between_ranks, DECISIONS, always=True),
    Cause(other_scores, DECISIONS, always=True),
    Cause(switches, HAS, always=True),
    Cause(told_otherwise, DECISIONS, always=True),
    # Samples, and random numbers that are seen in them.
    Cause(no_gradients, THROUGH_DDP),
    Cause(shorter_epoch, TWO_ROUTES),
    Cause(same_numbers, RANDOM_NUMBERS),
    Cause(mispaired, TWO_ROUTES),
    Cause(whole_batch, TWO_ROUTES),
    Cause(same_on_all_ranks, TWO_ROUTES),
    Cause(full_steps, STEPS),
    Cause(full_batches, TWO_ROUTES),
    Cause(divided_twice, TWO_ROUTES),
    Cause(other_sampler, TWO_ROUTES),
    Cause(epoch_again, TWO_ROUTES),
    Cause(one_shuffles, TWO_ROUTES),
    Cause(other_count, TWO_ROUTES),
    Cause(other_length, TWO_ROUTES),
    Cause(own_order, RANDOM_NUMBERS),
    Cause(one_rank_draws, RANDOM_NUMBERS),
    Cause(parted_numbers, RANDOM_NUMBERS),
    Cause(own_numbers, RANDOM_NUMBERS, stops=True),
    Cause(other_samples, TWO_ROUTES),
    Cause(scheduled, DECISIONS, always=True),
    # Gradients.
    Cause(buffers, HAS),
    Cause(one_clips, HAS),
    Cause(clipped_while_scaled, HAS),
    Cause(clipped_otherwise, HAS),
    Cause(loss_gathered, PAIRS),
    Cause(factor_of_processes, SUMS),
    Cause(numbers_in_workers, RANDOM_NUMBERS, stops=True),
    Cause(other_values, RANDOM_NUMBERS),
    Cause(unequal_parts, SUMS),
    Cause(clipped_between_ranks, VARY),
    # Weights; then what is known where no cause was seen.
    Cause(weights_afterwards, LOAD_FIRST, always=True),
    Cause(optimizer_state, LOAD_FIRST),
    Cause(rounding_decides, CHECK_IT, stops=True),
    Cause(same_loss, VARY),
    Cause(summed_loss, SUMS),
    Cause(other_loss, VARY),
    Cause(nothing_known, VARY),
]


def first_cause(e):
    """The first row that holds, and its sentence, or nothing."""
    for cause in CAUSES:
        if (cause.always or e.parted) and (sentence := cause.holds(e)):
            return cause, sentence
    return None, ""
