"""Why a step differs. In a step things happen in one order: what the ranks were told, what was drawn, which samples,
which loss, which gradients, which weights. The first row of CAUSES, at the end, that holds is the cause; the rows
behind it follow from it. Each rests on something that was recorded."""
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from check_conversion import samples
from check_conversion.records import FLOORS, Step
from check_conversion.samples import Losses, Relation
from check_conversion.sketch import LARGE, TIMES, apart_in, distance, factor_between, norm, of_tensors
from check_conversion.verdict import Heading, few

SHARED_OUT = (None, "RandomSampler", "SequentialSampler", "SubsetRandomSampler",
              "_InfiniteConstantSampler")  # by DistributedSampler, or a dataset's own lines
SCHEDULED = "lr ", "momentum ", "betas "  # options that may follow the number of steps
SAME_BITS = 1e-10, 1e-6  # of what DDP keeps alike on all ranks, in float64 and in float32


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
    def names(self):
        """Of the parameters."""
        return self.pair.names[self.optimizer]

    @property
    def weights(self):
        return self.pair.weights[self.optimizer]

    def both(self, kind):
        """The original's and rank 0's."""
        return self.one.last(kind), self.shares[0].last(kind)

    def latest(self, kind):
        """The last record of a kind so far, of the original and of rank 0, or None."""
        return [process.latest(kind, self.step) for process in (self.pair.original, self.pair.ranks[0])]

    @cached_property
    def parted(self):
        """Whether a cause is to be looked for: the weights differ afterwards by more than rounding explains, or
        options, or all gradients by a factor that the optimizer does not heed."""
        return self.weights.differs(*self.both("after")) or bool(other_options(self)) or (
            self.gradients_differ and self.factor is not None)

    @cached_property
    def gradients_differ(self):
        one, ours = self.both("gradients")
        return not distance(one, ours) <= max(LARGE * norm(one), self.pair.gradients[self.optimizer].allowed)

    @cached_property
    def factor(self):
        return factor_between(*self.both("gradients"))

    @cached_property
    def factor_unclipped(self):
        """Between their norms before they were clipped, if both scripts clip."""
        one, ours = self.both("norm")
        return ours / one if one and ours is not None else None

    @cached_property
    def samples(self):
        return samples.Samples(self.one, self.nudged, self.shares, self.pair.steps, self.name)

    @property
    def relation(self):
        return self.samples.relation

    @cached_property
    def losses(self):
        return samples.losses(self.one, self.shares, self.samples)

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

    @cached_property
    def drawn_values(self):
        """Arguments of the model with other values than the original's."""
        return " and ".join(name for name, relation in self.samples.relations.items()
                            if relation in (Relation.ALIKE, Relation.OVERLAP, Relation.VALUES))

    @property
    def unexplained(self):
        """Neither by other samples nor by the losses."""
        return self.relation in (Relation.SAME, Relation.VALUES, Relation.UNKNOWN) and (
            self.losses in (Losses.OTHER, Losses.UNKNOWN) or bool(self.drawn_values))

    @property
    def numbers_matter(self):
        """Noise may turn a sample into another one's like."""
        return (self.unexplained and self.factor is None) or (
            self.relation == Relation.OTHERS and not self.samples.whole_numbers)

    # Words.

    @property
    def by(self):
        return f"by {' and '.join(self.drawing)}"

    @property
    def known(self):
        return "the same samples" if self.relation == Relation.SAME else self.samples.sizes

    @property
    def apart(self):
        """Of the gradients, as a share of their norm."""
        one, ours = self.both("gradients")
        return distance(one, ours) / (norm(one) or 1)

    @property
    def what_differs(self):
        where = apart_in(self.names, *self.both("gradients"))
        return f"gradients differ by {self.apart:.2g} of their norm, most in {where}"

    @property
    def all_gradients(self):
        unclipped = "before they are clipped, " * bool(self.factor_unclipped)
        return f"{unclipped}all gradients are {self.factor_unclipped or self.factor:.4g} times those of {self.name}"

    @property
    def losses_of_ranks(self):
        return ", ".join(f"{sum(share.all('loss')):.6g}" for share in self.shares)


# What the ranks were told, and where they begin.

def options_apart(one, other, nudged):
    """What two optimizers have been told otherwise: lr 0.1 instead of 0.05; not what rounding moves."""
    def same(a, b):
        return a == b or (isinstance(a, float) and isinstance(b, float) and (
            math.isclose(a, b, rel_tol=FLOORS["options"]) or (a != a and b != b)))
    one, other, nudged = (step.last("options") for step in (one, other, nudged))
    if len(one) != len(other):
        return [f"{len(other)} groups of parameters instead of {len(one)}"]
    return sorted({f"{name} {new.get(name)} instead of {old[name]}" for old, new, known in zip(one, other, nudged)
                   for name in old if not same(old[name], new.get(name)) and same(old[name], known.get(name))})


def other_options(e):
    options = options_apart(e.one, e.shares[0], e.nudged)
    if any(option.startswith("lr ") for option in options) and all(scores := e.latest("score")):
        if scores[0].value != scores[1].value:
            options.append("which ReduceLROnPlateau took, last given "
                           f"{scores[1].value:.6g} instead of {scores[0].value:.6g}")
    return ", ".join(options)


def unscheduled_options(e):
    options = options_apart(e.one, e.shares[0], e.nudged)
    return not all(option.startswith(SCHEDULED) for option in options) and other_options(e)


def options_of_ranks(e):
    apart = [(rank, options_apart(e.shares[0], share, e.shares[0])) for rank, share in enumerate(e.shares)]
    return next(((rank, ", ".join(options)) for rank, options in apart if options), None)


def shuffles_of_ranks(e):
    first, *others = [rank.latest("shuffle", e.step) for rank in e.pair.ranks]
    for rank, other in enumerate(others, 1):
        if first and other and first.value.shuffles and other.value.shuffles:
            if first.value.asked != other.value.asked:
                return (f"0 and {rank} shuffle differently, because DistributedSampler's seed and epoch are "
                        f"{first.value.asked} and {other.value.asked}")
            if replace(first.value, again=False) != replace(other.value, again=False):
                return f"0 and {rank} shuffle differently, each with its own random numbers: use DistributedSampler"
    return ""


def ranks_apart(e, kind):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    parameters, one = e.pair.ranks[0].parameters(e.optimizer), e.shares[0].last(kind)
    for rank, share in enumerate(e.shares[1:], 1):
        if distance(one, share.last(kind)) > SAME_BITS[parameters.eps > 1e-10] * norm(one):
            where = apart_in(e.names, one, share.last(kind))
            without = [name for name in parameters.without if name in where]
            return rank, where + f" ({few(without)} not wrapped in DDP)" * bool(without)
    return None


def other_optimizer(e):
    theirs = [share.last("optimizer") for share in e.shares]
    return {*theirs} != {e.optimizer} and (e.optimizer + 1, " and ".join(str(one + 1) for one in dict.fromkeys(theirs)))


def other_parameters(e):
    names, ours = (process.parameters(e.optimizer).names for process in (e.pair.original, e.pair.ranks[0]))
    one, other = map(len, e.both("before"))
    return one != other and (few(name for name in names if name not in ours) or "none, but has more")


def other_weights(e):
    one, ours = e.both("before")
    if e.weights.hidden_since or not e.weights.differs(one, ours):
        return ""
    if one == e.weights.start:
        return f"it begins with different weights, most in {apart_in(e.names, one, ours)}: seed both scripts alike"
    return "the weights differ before the step, although they agreed after the previous step"


def scores_of_ranks(e):
    for given in zip(*(share.all("score") for share in e.shares)):
        if any(distance(given[:1], [value]) > FLOORS["options"] * norm(given) for value in given):
            return "is given a different value on each rank: " + ", ".join(f"{value:.6g}" for value in given)
    counts = [len(share.all("score")) for share in e.shares]
    return len({*counts}) > 1 and f"is stepped {', '.join(map(str, counts))} times on the ranks"


def other_scores(e):
    one, ours = e.one.all("score"), e.shares[0].all("score")
    apart = [f"is given {c:.6g} instead of {a:.6g}" for a, c in zip(one, ours) if e.pair.scores.differs([a], [c])]
    return apart[0] if apart else len(one) != len(ours) and f"is stepped {len(ours)} times instead of {len(one)}"


def other_switches(e):
    """What is on only where there is a GPU is not compared."""
    def on(step):
        return {name for name in step.named("switch") if name.partition(" ")[0] not in e.pair.on_gpus}
    seen = on(e.one).union(*map(on, e.shares))
    for what in sorted(seen, key=lambda what: (what != "model.eval()", what)):  # which turns dropout off too
        others = [rank for rank, share in enumerate(e.shares) if (what in on(share)) != (what in on(e.one))]
        if others:
            where = e.pair.converted + f" on rank {others[0]}" * (len(others) < e.count)
            first, then = ("on", "off") if what in on(e.one) else ("off", "on")
            return f"{what} is {first} in {e.name} and {then} in {where}"
    return ""


# Which samples.

def other_length(e):
    before, now = e.pair.lengths
    if 0 in (before, now) or before == now:
        return ""
    said = f"an epoch had {before} steps in {e.name} and now has {now}"
    dropped_before, dropped = (loader.value if loader else "" for loader in e.latest("loader"))
    if now > before:
        return said + f": {dropped_before} had drop_last=True in {e.name}" * bool(dropped_before)
    if dropped == "DataLoader":
        return f"{said}: DataLoader(drop_last=True) leaves out the last batch, which is smaller; leave drop_last away"
    shuffle = e.latest("shuffle")[1]
    if dropped and shuffle and 0 < e.samples.original <= shuffle.value.length % e.count:
        return (f"{said}: {dropped}(drop_last=True) leaves out {shuffle.value.length % e.count} samples, all that the "
                f"last batch had; leave them out in {e.name} too")
    if now < before - 1:
        return said
    return f"{said}, because its loop leaves out the last step, which is incomplete: leave that out in {e.name} too"


def is_full_size(e):
    return e.count > 1 and sum(e.samples.ranks) == e.count * e.samples.original and e.relation not in (
        Relation.UNKNOWN, Relation.SAME, Relation.WHOLE)


def batches_in_a_step(e):
    calls = e.samples.calls
    return is_full_size(e) and len({*calls}) == 1 and calls[0] > 1 and calls[0]


def other_sampler(e):
    original, ours = (loader.name if loader else None for loader in e.latest("loader"))
    return original != ours and original not in SHARED_OUT and (original, ours or "no sampler")


def one_shuffles(e):
    loaders, shuffling = e.latest("loader"), [bool(one and one.value.shuffles) for one in e.latest("shuffle")]
    names = (e.name, e.pair.converted)
    return all(loaders) and shuffling[0] != shuffling[1] and (
        names[shuffling[1]], loaders[shuffling[1]].name, names[shuffling[0]])


def own_order(e):
    """Numbers that are drawn once a pass order its samples: all ranks need the same. What was drawn before the first
    step made the model and the data."""
    return (e.step > 1 or any(e.latest("shuffle"))) and next(
        (name for name in e.draws if name not in e.pair.drawn_in_each_step and len({*e.states(name)}) > 1), None)


# Which random numbers, where they are seen in the samples or in the loss: noise and augmentation.

def one_rank_draws(e):
    for name in e.draws:
        drew = e.moved(name)
        if 0 < len(drew) < e.count:
            return drew[0], name, next(rank for rank in range(e.count) if rank not in drew)
    return None


def same_numbers(e):
    return (e.drawn_values or e.numbers_matter) and any(len({*e.states(name)}) == 1 < e.count for name in e.drawing)


def parted_numbers(e):
    before = [rank.steps[e.step - 2].named("drew") for rank in e.pair.ranks] if e.step > 1 else [{}]
    return e.numbers_matter and any(
        name in before[0] and len({states.get(name, (0,))[0] for states in before}) == 1 for name in e.drawing)


# Which gradients, and which weights.

def is_factor(e, factor):
    return e.factor is not None and e.count > 1 and math.isclose(e.factor_unclipped or e.factor, factor, rel_tol=0.01)


def clipped_otherwise(e):
    one, ours = e.both("norm")
    if one is not None and ours is None:
        return f"gradients are clipped in {e.name}, and are no longer: clip them as before"
    if one is None and ours is not None:
        return f"gradients were not clipped in {e.name}, and are now"
    if one and ours == 0:
        return "gradients are clipped before backward, when there are none yet: clip them after it"
    if e.factor is not None and math.isclose(e.factor_unclipped or 0, 1, rel_tol=1e-6):
        return (f"gradients are clipped to another norm: they are {e.factor:.4g} times those of {e.name}, and were "
                "the same before")
    return ""


def norms_of_ranks(e):
    norms = [share.last("norm") for share in e.shares]
    return len({*norms}) > 1 and None not in norms and ", ".join(f"{one:.3g}" for one in norms)


def of_the_optimizer(e):
    """The weights part by far more of their step than the gradients of their norm."""
    step = distance(*map(e.one.last, ("before", "after"))) or 1
    return distance(*e.both("after")) / step > 1000 * max(e.apart, 1e-6)


def by_rounding(e):
    """Where the second run of the original parts by as much."""
    one, nudged = e.one.last("gradients"), e.nudged.last("gradients")
    if not e.weights.hidden_since and distance(*e.both("gradients")) > TIMES * e.pair.gradients[e.optimizer].parted:
        return ""
    pairs = zip(e.names, of_tensors(one), of_tensors(nudged))
    return few(name for name, a, b in pairs if distance(a, b) > LARGE * norm(a)) or "all of them"


class Cause(NamedTuple):
    heading: Heading
    holds: object  # a function of the evidence: whether it holds, or what the sentence shows as `found`
    sentence: str
    always: bool = False  # also of a step that moves the weights alike
    stops: bool = False  # no fault: nothing more can be compared


H, R, L = Heading, Relation, Losses
CAUSES = [
    # What the ranks were told, and where the step begins.
    Cause(H.DECISIONS, other_optimizer, "{e.name} takes this step with optimizer {found[0]}, the ranks with optimizer "
          "{found[1]}, in the order of their first steps: all must take the same steps in the same order", always=True),
    Cause(H.LOAD_FIRST, other_parameters,
          "the optimizer holds other parameters than in {e.name}; it lacks {found}", always=True),
    Cause(H.DECISIONS, options_of_ranks, "ranks 0 and {found[0]} have different optimizer options: {found[1]}; all "
          "must decide by the same figure", always=True),
    Cause(H.NUMBERS, shuffles_of_ranks, "ranks {found}", always=True),
    Cause(H.LOAD_FIRST, lambda e: ranks_apart(e, "before"), "ranks 0 and {found[0]} have different weights: "
          "{found[1]}; load or change them on all ranks alike", always=True),
    Cause(H.THROUGH_DDP, lambda e: ranks_apart(e, "gradients"), "ranks 0 and {found[0]} have different gradients: "
          "{found[1]}; call the DDP model itself in each step", always=True),
    Cause(H.LOAD_FIRST, other_weights, "{found}", always=True),
    Cause(H.DECISIONS, scores_of_ranks, "ReduceLROnPlateau {found}: it needs the figure of all ranks", always=True),
    Cause(H.DECISIONS, other_scores, "ReduceLROnPlateau {found}", always=True),
    Cause(H.HAS, other_switches, "{found}", always=True),
    Cause(H.DECISIONS, unscheduled_options, "different optimizer options: {found}", always=True),
    # Samples, and random numbers that are seen in them.
    Cause(H.THROUGH_DDP, lambda e: not any(e.shares[0].last("gradients")) and any(e.one.last("gradients")),
          "there are no gradients: the optimizer must hold the parameters of the model that is trained, so make it "
          "after that model"),
    Cause(H.ROUTES, lambda e: e.step == min(e.pair.lengths) + 1 and other_length(e), "{found}"),
    Cause(H.NUMBERS, same_numbers, "both draw random numbers in each step, {e.by}, and all ranks draw the same ones, "
          "perhaps for noise, augmentation or picking the samples of a batch: draw them for the whole batch on each "
          "rank, then take the rank's part"),
    Cause(H.ROUTES, lambda e: e.relation == R.SAME and e.samples.mispaired,
          "{found[0]} is paired with other samples of {found[1]} than in {e.name}"),
    Cause(H.ROUTES, lambda e: e.relation == R.ALIKE or (
        e.relation == R.WHOLE and e.count > 1 and not e.pair.whole_before), "{e.relation.value}: {e.samples.sizes}"),
    Cause(H.STEPS, batches_in_a_step, "each rank takes {found} batches of full size in a step, as {e.name} does "
          "alone: divide the number of batches in a step by the number of processes ({e.count})"),
    Cause(H.ROUTES, is_full_size,
          "each rank takes a full-size batch of its own, instead of batch_size // world_size: {e.samples.sizes}"),
    Cause(H.ROUTES, lambda e: e.relation not in (R.UNKNOWN, R.SAME, R.WHOLE) and (
        sum(e.samples.ranks) < 0.6 * e.samples.original), "the batch is divided twice: {e.samples.sizes}"),
    Cause(H.ROUTES, lambda e: e.relation in (R.OTHERS, R.VALUES, R.OVERLAP) and other_sampler(e),
          "the samples are drawn by {found[0]} in {e.name}, by {found[1]} now"),
    Cause(H.ROUTES, lambda e: e.relation not in (R.SAME, R.WHOLE) and e.latest("shuffle")[1]
          and e.latest("shuffle")[1].value.again, "the samples come in the order of an earlier epoch, because "
          "set_epoch was not called: call sampler.set_epoch(epoch)"),
    Cause(H.ROUTES, lambda e: e.relation == R.OTHERS and one_shuffles(e),
          "{found[0]} shuffles, with {found[1]}; {found[2]} does not"),
    Cause(H.ROUTES, lambda e: e.relation in (R.REPEATED, R.MORE, R.LEFT_OUT, R.OVERLAP),
          "{e.relation.value}: {e.samples.sizes}"),
    Cause(H.ROUTES, lambda e: e.relation == R.OTHERS and other_length(e), "{found}"),
    Cause(H.NUMBERS, lambda e: e.relation == R.OTHERS and own_order(e), "the ranks draw different random numbers once "
          "per pass over the data, by {found}, and are fed other samples than {e.name}: {e.samples.sizes}"),
    Cause(H.NUMBERS, lambda e: (e.relation == R.OTHERS or e.unexplained) and one_rank_draws(e),
          "rank {found[0]} draws random numbers for this step, by {found[1]}, and rank {found[2]} does not: all ranks "
          "must draw equally many"),
    Cause(H.NUMBERS, parted_numbers, "the ranks drew the same random numbers up to this step, {e.by}, but no longer "
          "do: one of them has drawn more"),
    Cause(H.NUMBERS, lambda e: e.drawing and e.numbers_matter, "both draw random numbers in each step, {e.by}, and "
          "each rank draws its own, which is right for noise and augmentation. Nothing more can be compared until "
          "these are turned off in both scripts, or drawn for the whole batch", stops=True),
    Cause(H.ROUTES, lambda e: e.relation == R.OTHERS,
          "different samples from those of {e.name} in this step, in {e.samples.argument}: {e.samples.sizes}"),
    Cause(H.DECISIONS, other_options, "different optimizer options: {found}", always=True),
    # Gradients.
    Cause(H.HAS, lambda e: not e.drawing and e.pair.first_buffers[0] >= e.step - 1 and e.pair.first_buffers[1],
          "{found}"),  # not one that differed long before
    Cause(H.HAS, clipped_otherwise, "{found}"),
    Cause(H.PAIRS, lambda e: is_factor(e, 1 / e.count) and e.losses == L.EACH,
          "{e.all_gradients}, which is 1 / the number of processes ({e.count}): each rank computes the whole loss, "
          "but its gradient reaches only the rank's own part; gather with gradients"),
    Cause(H.SUMS, lambda e: is_factor(e, 1 / e.count) and e.losses == L.SUM,
          "{e.all_gradients}, which is 1 / the number of processes ({e.count}): the sum of the ranks' losses is the "
          "original's loss: DDP takes the mean over ranks, so multiply by world_size"),
    Cause(H.SUMS, lambda e: is_factor(e, 1 / e.count),
          "{e.all_gradients}, which is 1 / the number of processes ({e.count}): DDP takes the mean over ranks (is the "
          "loss a sum over the batch, or are gradients clipped to another norm?)"),
    Cause(H.SUMS, lambda e: is_factor(e, e.count),
          "{e.all_gradients}, the number of processes: do not multiply a mean by world_size"),
    Cause(H.SUMS, lambda e: e.factor is not None, "{e.all_gradients}, with {e.count} processes"),
    Cause(H.NUMBERS, lambda e: e.unexplained and e.pair.in_workers and e.drawn_values,
          "{found} has values that {e.name} never feeds it, and loader workers draw random numbers, by "
          "{e.pair.in_workers}: augmentation or noise. Nothing more can be compared until it is turned off in "
          "both", stops=True),
    Cause(H.NUMBERS, lambda e: e.unexplained and e.drawn_values,
          "{found} has values that {e.name} never feeds it, and no random numbers are drawn for them in each step: "
          "does each rank have its own data, or is it prepared differently?"),
    Cause(H.SUMS, lambda e: len({*e.samples.ranks}) > 1 and e.losses == L.MEAN_OF_SAMPLES,
          "the loss is a mean, but the ranks' parts are not equal: {e.samples.sizes}; divide each rank's sum by the "
          "count of the whole batch"),
    Cause(H.VARY, norms_of_ranks,
          "gradients are clipped before they are averaged, at norms of {found}: clip after the last backward"),
    # Weights; then what is known where no cause was seen.
    Cause(H.LOAD_FIRST, lambda e: ranks_apart(e, "after"),
          "ranks 0 and {found[0]} have different weights after the step: {found[1]}", always=True),
    Cause(H.LOAD_FIRST, of_the_optimizer, "{e.known}, and the gradients agree, but the optimizer's step does not: was "
          "its state loaded, as in {e.name}?"),
    Cause(H.CHECK_IT, by_rounding, "from here on rounding alone moves the gradients of {e.name} as far, most in "
          "{found}, so smaller faults cannot be seen; all steps before are the same", stops=True),
    Cause(H.VARY, lambda e: e.losses in (L.MEAN, L.EACH) and len(e.one.all("loss")) > 1,
          "{e.known} and the same loss, {e.what_differs}; are means of batches averaged that count unequally many "
          "targets? Divide the sum of a step by its count"),
    Cause(H.VARY, lambda e: e.losses in (L.MEAN, L.EACH), "{e.known} and the same loss, {e.what_differs}"),
    Cause(H.SUMS, lambda e: e.losses == L.SUM,
          "{e.known}, and the ranks' losses add up to the original's loss; {e.what_differs}"),
    Cause(H.VARY, lambda e: e.losses == L.OTHER,
          "{e.known}, but the ranks' losses are {e.losses_of_ranks}, and neither their mean nor their sum is that of "
          "{e.name}. Do parts count differently (padding, ignore_index, class weights), is something computed over "
          "the batch (mining, a contrastive loss), or are labels, which the model does not see, paired with other "
          "samples? {e.what_differs}"),
    Cause(H.VARY, lambda e: True, "{e.known}; {e.what_differs}"),
]


def first_cause(e, parted=None):
    """The first row that holds, and its sentence, or nothing."""
    for cause in CAUSES:
        if (cause.always or (e.parted if parted is None else parted)) and (found := cause.holds(e)):
            return cause, cause.sentence.format(e=e, found=found)
    return None, ""
