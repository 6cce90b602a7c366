"""Why a step differs. In a step things happen in one order: what the ranks were told, which samples they were fed, what
was drawn, which loss, which gradients, which weights. The first of these that is not as it should be is the cause, and
what comes behind it follows from it: told(), fed(), gradients() and weights() say the causes in this order. Each rests
on something that was recorded, and is a section of the chapter, or None where nothing more can be compared, and a
sentence."""
import math
from functools import cached_property

from check_conversion import samples
from check_conversion.records import FLOORS
from check_conversion.samples import Losses, Relation
from check_conversion.sketch import LARGE, TIMES, apart_in, distance, factor_between, norm, of_tensors
from check_conversion.verdict import few

LOAD_FIRST, ROUTES, SUMS, VARY = "Load first, then DDP", "Two routes", "Sums and unequal parts", "Errors that vary"
SCRIPT, NUMBERS, THROUGH_DDP = "What your script has", "Random numbers", "Training goes through DDP"
SCHEDULED = "lr ", "momentum ", "betas "  # options that may follow the number of steps
A_SHUFFLE, NO_SHUFFLE = "a shuffle", "nothing that shuffles"


class Evidence:
    """A step of the original, of its second run, and of all ranks, side by side."""

    def __init__(self, pair, step, one, nudged, shares):
        """pair: training.Pair, what is known of both runs as a whole; step counts from 1."""
        self.pair, self.step, self.one, self.nudged, self.shares = pair, step, one, nudged, shares
        self.name, self.count, self.optimizer = pair.name, len(shares), one.last("optimizer")
        self.names, self.weights = pair.names.get(self.optimizer), pair.weights.get(self.optimizer)

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
        one, ours = self.both("gradients")
        alike = distance(one, ours) <= max(LARGE * norm(one), TIMES * self.pair.gradients[self.optimizer])
        return self.weights.differs(*self.both("new_weights")) or bool(other_options(self)) or (
            not alike and self.factor is not None)

    @property
    def rounding_decides(self):
        apart = distance(*self.both("gradients"))
        return self.weights.hidden_since or apart <= TIMES * self.pair.gradients[self.optimizer]

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
        so_far = self.pair.losses
        allowed = max(so_far.allowed, 10 * self.same_bits * so_far.largest)
        return samples.losses(self.one, self.shares, self.samples, allowed)

    @property
    def same_bits(self):
        """How far what is the same on all ranks may part, as a share of it."""
        return 1e-10 if self.pair.ranks[0].parameters(self.optimizer).eps < 1e-10 else 1e-6

    # Random numbers.

    def states(self, generator):
        return [share.named("drew").get(generator, (0, False))[0] for share in self.shares]

    def moved(self, generator):
        """The ranks in which it has moved since the step before."""
        return [rank for rank, share in enumerate(self.shares) if share.named("drew").get(generator, (0, False))[1]]

    @cached_property
    def draws(self):
        """Generators that the original has drawn from, with their states."""
        return {name: state for name, (state, moved) in self.one.named("drew").items() if moved}

    @cached_property
    def drawing(self):
        """Generators that move in both in each step, and draw other numbers than in the original."""
        return [name for name, state in self.draws.items() if 0 in self.moved(name)
                and name in self.pair.drawn_in_each_step and {*self.states(name)} != {state}]

    @cached_property
    def drawn_values(self):
        """Arguments of the model with other values than the original's."""
        return " and ".join(name for name, relation in self.samples.relations.items()
                            if relation in (Relation.ALIKE, Relation.VALUES))

    @cached_property
    def unexplained(self):
        """Whether neither samples nor losses say why: random numbers may. Noise turns a sample into another one's like,
        perhaps."""
        if self.relation == Relation.OTHERS:
            return not self.samples.whole_numbers
        return self.factor is None and self.relation in (Relation.SAME, Relation.VALUES, Relation.UNKNOWN) and (
            self.losses in (Losses.OTHER, Losses.UNKNOWN) or bool(self.drawn_values))

    # Words.

    @property
    def epochs(self):
        before, now = self.pair.lengths
        return f"an epoch had {before} steps in {self.name} and now has {now}"

    @property
    def known(self):
        return self.samples.known if self.relation == Relation.SAME else self.samples.sizes

    @property
    def apart(self):
        """Of the gradients, as a share of their norm."""
        one, ours = self.both("gradients")
        return distance(one, ours) / (norm(one) or 1)

    @property
    def what_differs(self):
        where = apart_in(self.names, *self.both("gradients"))
        return f"gradients differ by {self.apart:.2g} of their norm, most in {where}"


def causes(e):
    """All that are seen in a step, the first of them first."""
    yield from told(e)
    if e.parted:
        yield from fed(e)
        yield from gradients(e)
        yield from weights(e)
    if not all(map(math.isfinite, e.one.last("new_weights"))):
        yield None, "the weights of both scripts are no longer finite: nothing more can be compared"


# What the ranks were told, and where they begin: also where it moves no weight otherwise.

def told(e):
    theirs = [share.last("optimizer") for share in e.shares]
    if {*theirs} != {e.optimizer}:
        yield "Decisions", (f"{e.name} takes this step with optimizer {e.optimizer + 1}, the ranks with optimizer "
                            f"{' and '.join(str(one + 1) for one in dict.fromkeys(theirs))}, in the order of their "
                            "first steps: all must take the same steps in the same order")
    if len({len(one) for one in e.both("old_weights")}) > 1:
        names, ours = (process.parameters(e.optimizer).names for process in (e.pair.original, e.pair.ranks[0]))
        lacking = few(name for name in names if name not in ours) or "none, but has more"
        yield LOAD_FIRST, f"the optimizer holds other parameters than in {e.name}; it lacks {lacking}"
    for rank, share in enumerate(e.shares):
        if apart := options_apart(e.shares[0], share, e.shares[0]):
            yield "Decisions", (f"ranks 0 and {rank} have different optimizer options: {', '.join(apart)}; all must "
                                "decide by the same figure")
    yield from shuffles_of_ranks(e)
    for kind, heading, what in (
            ("old_weights", LOAD_FIRST, "weights: {}; load or change them on all ranks alike"),
            ("gradients", THROUGH_DDP, "gradients: {}; call the DDP model itself in each step"),
            ("new_weights", LOAD_FIRST, "weights after the step: {}")):
        if apart := ranks_apart(e, kind):
            yield heading, f"ranks 0 and {apart[0]} have different {what.format(apart[1])}"
    yield from clipped_apart(e)
    one, ours = e.both("old_weights")
    if not e.weights.hidden_since and e.weights.differs(one, ours):
        seeds = [record and record.value for record in e.latest("seed")]
        first = ("both scripts are seeded alike, but before the model is made one of them draws more random numbers"
                 if seeds[0] == seeds[1] else "seed both scripts alike")
        yield LOAD_FIRST, (
            f"it begins with different weights, most in {apart_in(e.names, one, ours)}: {first}"
            if one == e.weights.start else
            "the weights differ before the step, although they agreed after the previous step")
    for cause in other_scores(e):
        yield from other_length(e)  # from which it follows
        yield cause
    yield from other_switches(e)
    options = options_apart(e.one, e.shares[0], e.nudged)
    if not all(option.startswith(SCHEDULED) for option in options):
        yield "Decisions", f"different optimizer options: {other_options(e)}"


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


def shuffles_of_ranks(e):
    one, *others = [rank.latest("shuffle", e.step) for rank in e.pair.ranks]
    for rank, other in enumerate(others, 1):
        if one and other and one.value.shuffles and other.value.shuffles and one.value != other.value:
            how = (f"DistributedSampler's seed and epoch are {one.value.asked} and {other.value.asked}"
                   if one.value.asked and other.value.asked else "each with its own random numbers")
            yield NUMBERS, (f"ranks 0 and {rank} shuffle differently, {how}: give all ranks a DistributedSampler with "
                            "the same seed and epoch")


def ranks_apart(e, kind):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    parameters, one = e.pair.ranks[0].parameters(e.optimizer), e.shares[0].last(kind)
    for rank, share in enumerate(e.shares[1:], 1):
        if distance(one, share.last(kind)) > e.same_bits * norm(one):
            where = apart_in(e.names, one, share.last(kind))
            without = [name for name in parameters.without if name in where]
            return rank, where + f" ({few(without)} not wrapped in DDP)" * bool(without)
    return None


def clipped_apart(e):
    one, *theirs = (step.all("norm") for step in (e.one, *e.shares))
    counts = {*map(len, theirs)}
    if counts == {len(one)} or (len(counts) == 1 and e.parted):
        for norms in zip(*theirs):
            if max(norms) - min(norms) > e.same_bits * max(norms):
                yield VARY, (f"gradients are clipped before they are averaged, at norms of "
                             f"{', '.join(f'{one:.3g}' for one in norms)}: clip after the last backward")


def other_scores(e):
    """Of ReduceLROnPlateau."""
    said, one, *shares = "ReduceLROnPlateau is", *(step.all("score") for step in (e.one, *e.shares))
    for given in zip(*shares):
        if any(distance(given[:1], [value]) > FLOORS["score"] * norm(given) for value in given):
            yield "Decisions", (f"{said} given a different value on each rank: "
                                f"{', '.join(f'{value:.6g}' for value in given)}: it needs the figure of all ranks")
    if len({*map(len, (one, *shares))}) > 1:
        counts = ", ".join(str(len(share)) for share in shares)
        yield "Decisions", f"{said} stepped {len(one)} times in {e.name}, and {counts} times on the ranks"
    for a, c in zip(one, shares[0]):
        if e.pair.scores.differs([a], [c]):
            yield "Decisions", f"{said} given {c:.6g} instead of {a:.6g}"


def other_switches(e):
    """What is on only where there is a GPU is not compared."""
    on, *theirs = ({name for name in step.named("switch") if name.partition(" ")[0] not in e.pair.on_gpus}
                   for step in (e.one, *e.shares))
    for what in sorted(on.union(*theirs), key=lambda what: (what != "model.eval()", what)):  # it turns dropout off too
        others = [rank for rank, ours in enumerate(theirs) if (what in ours) != (what in on)]
        if others:
            where = e.pair.converted + f" on rank {others[0]}" * (len(others) < e.count)
            first, then = ("on", "off") if what in on else ("off", "on")
            yield SCRIPT, f"{what} is {first} in {e.name} and {then} in {where}"


# Which samples, and random numbers that are seen in them.

def fed(e):
    relation, seen, ours = e.relation, e.samples, e.latest("shuffle")[1]
    otherwise = relation not in (Relation.UNKNOWN, Relation.SAME, Relation.WHOLE)
    full_size = otherwise and e.count > 1 and sum(seen.ranks) == e.count * seen.original
    if not any(e.shares[0].last("gradients")) and any(e.one.last("gradients")):
        yield THROUGH_DDP, ("there are no gradients: the optimizer must hold the parameters of the model that is "
                            "trained, so make it after that model")
    yield from other_length(e)
    if (e.drawn_values or e.unexplained) and any(len({*e.states(name)}) == 1 < e.count for name in e.drawing):
        yield NUMBERS, (
            f"both draw random numbers in each step, by {' and '.join(e.drawing)}, and all ranks draw the same ones, "
            "perhaps for noise, augmentation or picking the samples of a batch: draw them for the whole batch on each "
            "rank, then take the rank's part")
    if relation == Relation.SAME and seen.mispaired:
        yield ROUTES, f"{seen.mispaired[0]} is paired with other samples of {seen.mispaired[1]} than in {e.name}"
    of_parts = {*e.pair.whole} & samples.PARTS  # a rank has taken the whole batch before, and the loss of its own part
    if relation == Relation.ALIKE or (relation == Relation.WHOLE and not of_parts):
        yield ROUTES, f"{relation.value}: {seen.sizes}"
    if full_size and len({*seen.calls}) == 1 < seen.calls[0]:
        yield "Loops of steps", (
            f"each rank takes {seen.calls[0]} batches of full size in a step, as {e.name} does alone: divide the "
            f"number of batches in a step by the number of processes ({e.count})")
    if full_size:
        yield ROUTES, f"each rank takes a full-size batch of its own, instead of batch_size // world_size: {seen.sizes}"
    if otherwise and sum(seen.ranks) < 0.6 * seen.original:
        yield ROUTES, f"the batch is divided twice: {seen.sizes}"
    if relation not in (Relation.SAME, Relation.WHOLE) and ours and ours.value.again:
        yield ROUTES, ("the samples come in the order of an earlier epoch, because set_epoch was not called: call "
                       "sampler.set_epoch(epoch)")
    if relation in (Relation.OTHERS, Relation.VALUES):
        yield from other_order(e)
    if relation in (Relation.MORE, Relation.LEFT_OUT):
        yield ROUTES, f"{relation.value}: {seen.sizes}"
    if relation == Relation.OTHERS:
        for name in e.draws if e.step > 1 or any(e.latest("shuffle")) else ():  # others made the model and the data
            if name not in e.pair.drawn_in_each_step and len({*e.states(name)}) > 1:
                yield NUMBERS, (f"the ranks draw different random numbers once per pass over the data, by {name}, and "
                                f"are fed other samples than {e.name}: {seen.sizes}")
    yield from other_numbers(e)
    if relation == Relation.OTHERS:
        yield ROUTES, f"different samples from those of {e.name} in this step, in {seen.argument}: {seen.sizes}"
    if options := other_options(e):
        also = f"; {e.epochs}" * (len({*e.pair.lengths}) > 1)  # by which a schedule may go
        yield "Decisions", f"different optimizer options: {options}{also}"


def other_length(e):
    (before, now), said = e.pair.lengths, e.epochs
    sampler = e.latest("shuffle")[1]
    if before and 1 < e.count == now / before and not (sampler and sampler.value.asked):
        yield ROUTES, f"{said}: each rank goes through all samples, so give its loader a DistributedSampler"
    if before != now and e.step == min(before, now) + 1 > 1:
        dropping = [f"{loader.value}(drop_last=True) in {name}" for loader, name in zip(
            e.latest("loader"), (e.name, e.pair.converted)) if loader and loader.value]
        if dropping or abs(before - now) == 1:
            said += ": both must leave out what is incomplete, or neither"
        yield ROUTES, said + f"; there is {' and '.join(dropping)}" * bool(dropping)


def other_order(e):
    """By a sampler that the other does not have."""
    loaders, shuffles = e.latest("loader"), e.latest("shuffle")
    if all(loaders):
        before, now = map(order_of, loaders, shuffles)
        by_itself = before not in (A_SHUFFLE, NO_SHUFFLE)
        if None not in (before, now) and before != now and (by_itself or e.relation == Relation.OTHERS):
            yield ROUTES, f"the samples are ordered by {before} in {e.name}, and by {now} in {e.pair.converted}"


def order_of(loader, shuffle):
    """What decides it, or None where that cannot be told."""
    if shuffle and shuffle.value.sampler == loader.name:
        return A_SHUFFLE if shuffle.value.shuffles else NO_SHUFFLE
    return {"SequentialSampler": NO_SHUFFLE, "_InfiniteConstantSampler": None}.get(loader.name, loader.name)


def other_numbers(e):
    """Where they are seen in the samples or in the loss: noise and augmentation."""
    for name in e.draws if e.unexplained or e.relation == Relation.OTHERS else ():
        drew = e.moved(name)
        if 0 < len(drew) < e.count:
            other = next(rank for rank in range(e.count) if rank not in drew)
            yield NUMBERS, (f"rank {drew[0]} draws random numbers for this step, by {name}, and rank {other} does "
                            "not: all ranks must draw equally many")
    if e.unexplained and e.drawing:
        by = f"by {' and '.join(e.drawing)}"
        before = [rank.steps[e.step - 2].named("drew") for rank in e.pair.ranks] if e.step > 1 else [{}]
        if any(name in before[0] and len({states.get(name, (0,))[0] for states in before}) == 1 for name in e.drawing):
            yield NUMBERS, (f"the ranks drew the same random numbers up to this step, {by}, but no longer do: one of "
                            "them has drawn more")
        yield None, (f"both draw random numbers in each step, {by}, and each rank draws its own, which is right for "
                     "noise and augmentation. Nothing more can be compared until these are turned off in both "
                     "scripts, or drawn for the whole batch")


# Which gradients.

def gradients(e):
    step, buffers = e.pair.first_buffers
    drawn = e.drawing or (e.pair.in_workers and e.drawn_values)  # then buffers follow from it
    if step >= e.step - 1 and buffers and not drawn and not e.rounding_decides:  # what differed long before is no cause
        yield SCRIPT, buffers
    yield from other_clipping(e)
    if e.factor is not None:
        yield by_a_factor(e)
    if e.unexplained and e.drawn_values:
        said = f"{e.drawn_values} has values that {e.name} never feeds it, and"
        if e.pair.in_workers:
            yield None, (f"{said} loader workers draw random numbers, by {e.pair.in_workers}: for augmentation or "
                         "noise. Until it is turned off in both, nothing more can be compared")
        yield NUMBERS, (f"{said} the global generators of torch, NumPy and Python draw nothing for them in each step: "
                        "does each rank have its own data, or its own generator, or is it prepared differently?")
    if len({*e.samples.ranks}) > 1 and e.losses == Losses.MEAN_OF_SAMPLES:
        yield SUMS, (f"the loss is a mean, but the ranks' parts are not equal: {e.samples.sizes}; divide each rank's "
                     "sum by the count of the whole batch")


def other_clipping(e):
    one, ours = e.both("norm")
    if (one is None) != (ours is None):
        clips, other = (e.name, e.pair.converted) if ours is None else (e.pair.converted, e.name)
        yield SCRIPT, f"gradients are clipped in {clips}, and not in {other}"
    if one and ours == 0:
        yield SCRIPT, "gradients are clipped before backward, when there are none yet: clip after it"
    if e.factor is not None and math.isclose(e.factor_unclipped or 0, 1, rel_tol=1e-6):
        yield SCRIPT, (f"gradients are clipped to another norm: they are {e.factor:.4g} times those of {e.name}, and "
                       "were the same before")


def by_a_factor(e):
    factor = e.factor_unclipped or e.factor
    said = "before they are clipped, " * bool(e.factor_unclipped) + (
        f"all gradients are {factor:.4g} times those of {e.name}")
    part = f", which is 1 / the number of processes ({e.count})"
    if e.count > 1 and math.isclose(factor, e.count, rel_tol=0.01):
        return SUMS, f"{said}, the number of processes: do not multiply a mean by world_size"
    if e.count == 1 or not math.isclose(factor, 1 / e.count, rel_tol=0.01):
        return SUMS, f"{said}, with {e.count} processes"
    if e.losses == Losses.EACH:
        return "Losses over pairs", (f"{said}{part}: each rank computes the whole loss, but its gradient reaches only "
                                     "the rank's own part; gather with gradients")
    if e.losses == Losses.SUM:
        return SUMS, (f"{said}{part}: the sum of the ranks' losses is the original's loss: DDP takes the mean over "
                      "ranks, so multiply by world_size")
    return SUMS, (f"{said}{part}: DDP takes the mean over ranks (is the loss a sum over the batch, or are gradients "
                  "clipped to another norm?)")


# Which weights; then what is known where no cause was seen.

def weights(e):
    if of_the_optimizer(e):
        yield LOAD_FIRST, (f"{e.known}, and the gradients agree, but the optimizer's step does not: was its state "
                           f"loaded, as in {e.name}?")
    one, nudged = e.one.last("gradients"), e.nudged.last("gradients")
    if e.rounding_decides:
        pairs = zip(e.names, of_tensors(one), of_tensors(nudged))
        where = few(name for name, a, b in pairs if distance(a, b) > LARGE * norm(a)) or "all of them"
        yield None, (f"from here on rounding alone moves the gradients of {e.name} as far, most in {where}, so smaller "
                     "faults cannot be seen; all steps before are the same")
    alike = e.losses in (Losses.MEAN, Losses.EACH)
    if alike and len(e.one.all("loss")) > 1:
        yield "Check it", (f"{e.known} and the same loss, {e.what_differs}. If {e.name} averages the mean losses of "
                           "batches that count unequally many targets, change it, before you run the check, to divide "
                           "the sum of a step by its count")
    if e.losses == Losses.SUM:
        yield SUMS, f"{e.known}, and the ranks' losses add up to the original's loss; {e.what_differs}"
    if e.losses == Losses.OTHER:
        each = ", ".join(f"{sum(share.all('loss')):.6g}" for share in e.shares)
        yield VARY, (f"{e.known}, but the ranks' losses are {each}, and neither their mean nor their sum is that of "
                     f"{e.name}. Do parts count differently (padding, ignore_index, class weights), is something "
                     "computed over the batch (mining, a contrastive loss), or are labels paired with other "
                     f"samples? {e.what_differs}")
    yield VARY, f"{e.known}{' and the same loss' * alike}; {e.what_differs}"


def of_the_optimizer(e):
    """The weights part by far more of their step than the gradients of their norm."""
    step = distance(*map(e.one.last, ("old_weights", "new_weights"))) or 1
    return distance(*e.both("new_weights")) / step > 1000 * max(e.apart, 1e-6)
