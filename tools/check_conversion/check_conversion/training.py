"""Do both train the same? Step by step, until one of them goes otherwise."""
import collections
import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from check_conversion.causes import Evidence, first_cause, other_scores, scores_between_ranks
from check_conversion.measure import KINDS, LARGE, TIMES, Measured
from check_conversion.records import Step
from check_conversion.samples import Losses, Relation, names_apart
from check_conversion.sketch import distance, few, norm, of_tensors
from check_conversion.verdict import DECISIONS, TWO_ROUTES, CannotSay, Fault

NOISE = 1e-9  # of the largest gradient: one that is 0 in theory, a bias before a norm


class Weights(Measured):
    """Those of one optimizer: how far they may part so far."""

    def __init__(self, start, eps):
        super().__init__(KINDS["weights"].floor)
        self.start, self.eps = start, eps
        self.hidden_since = 0  # the step from which on rounding alone is large
        self.shown = False  # in some step a fault of any size would have shown

    def follow(self, k, one, nudged):
        for kind in ("before", "after"):
            a, b = one.last(kind), nudged.last(kind)
            self.parted = max(self.parted, distance(a, b), self.eps * norm(a))  # one rounding at least
        moved = distance(one.last("after"), self.start)
        if math.isfinite(moved):  # weights that are NaN have not been moved by any measure
            self.largest = moved
        if self.parted <= LARGE * moved or not moved:  # what was not trained hides nothing
            self.hidden_since = 0
        else:
            self.hidden_since = self.hidden_since or k
        self.shown |= TIMES * self.parted < moved


class Buffers:
    """What no optimizer holds, of all steps: a cause where it differs, and rounding has not parted it as far."""

    def __init__(self, pair):
        self.pair, self.measured = pair, {}

    def compare(self, k):
        """What differs in step k or in the one before; not what did long before, without training going otherwise."""
        rows = [*zip(self.pair.steps, self.pair.nudged, *(rank.steps for rank in self.pair.ranks))][:k]
        for number, (one, nudged, *shares) in enumerate(rows, 1):
            said = self.between_ranks(number, shares) or self.from_original(number, one, nudged, shares[0])
            if said:
                return said if number >= k - 1 else ""
        return ""

    def between_ranks(self, number, shares):
        one = shares[0].named("buffer")
        for rank, share in enumerate(shares[1:], 1):
            other = share.named("buffer")
            if names := [name for name in one if name in other and self.differs(f"{name} on ranks", one[name], one[name], other[name])]:
                return (f"{short(names)} differs between ranks 0 and {rank} in step {number}: DDP averages only gradients, "
                        "so each rank must compute it from the whole batch")
        return ""

    def from_original(self, number, one, nudged, share):
        one, nudged, ours = (step.named("buffer") for step in (one, nudged, share))
        without = {without_variable(name): buffer for name, buffer in ours.items()}
        names = [name for name, buffer in one.items() if name in nudged
                 and (other := ours.get(name) or without.get(without_variable(name)))
                 and self.differs(name, buffer, nudged[name], other)]
        return f"{short(names)} differs from that of {self.pair.name} in step {number}" if names else ""

    def differs(self, name, one, nudged, other):
        """Its numbers, its rows in any order, and its columns in any order: keys in a queue may lie in another."""
        differ = []
        for form in ("sketch", "rows", "columns"):
            if getattr(one, form):
                measured = self.measured.setdefault((name, form), Measured(KINDS["buffer"].floor))
                measured.learn(getattr(one, form), getattr(nudged, form))
                differ.append(measured.differs(getattr(one, form), getattr(other, form)))
        return all(differ)


def short(names):
    """Two steps of each way: model.encoder_k, not each of its weights."""
    return few(".".join(name.split(".")[:2]) for name in names)


def without_variable(name):
    return name.partition(".")[2] or name


# Parameters whose gradient is nothing but rounding are not compared.

class Kept(NamedTuple):
    """The parameters of an optimizer that are compared: their names, and their places in both scripts."""
    names: list
    places: list
    theirs: list

    def of(self, step, places):
        """The step with these of its tensors, in this order."""
        taken = Step(step)
        for kind in ("before", "after", "gradients"):
            tensors = of_tensors(step.last(kind))
            taken.put(kind, [number for place in places if place < len(tensors) for number in tensors[place]])
        return taken


def keep(optimizer, original, ours, noise):
    names, theirs = original.parameters(optimizer).names, ours.parameters(optimizer).names
    kept = [place for place in range(len(names)) if place not in noise]
    if len(names) != len(theirs):
        return Kept([names[place] for place in kept], kept, [*range(len(theirs))])
    by_name = sorted(names) == sorted(theirs) and len({*names}) == len(names)  # perhaps in another order
    return Kept([names[place] for place in kept], kept, [theirs.index(names[place]) if by_name else place for place in kept])


def noise_in(steps, nudged):
    """Of each optimizer the tensors whose gradient is noise in most steps: an optimizer that divides
    by its size makes weights of it."""
    total, found = collections.Counter(), collections.Counter()
    for one, other in zip(steps, nudged):
        which, gradients, others = one.last("optimizer"), one.last("gradients"), other.last("gradients")
        total[which] += 1
        pairs = [*zip(of_tensors(gradients), of_tensors(others))]
        largest = max((norm(a) for a, _ in pairs), default=0)
        calm = distance(gradients, others) < 1e-3 * norm(gradients)
        for place, (a, b) in enumerate(pairs):
            if 0 < norm(a) < NOISE * largest or (calm and distance(a, b) > 0.5 * norm(a)):
                found[which, place] += 1
    return {which: [place for (whose, place), count in found.items()
                    if whose == which and 2 * count > total[which]] for which in total}


# What is known of both runs as a whole.

class Pair:
    """Two runs side by side: one process of the first, and all that train in the second."""

    def __init__(self, names, original, nudged, ranks, in_workers=()):
        """nudged: the original's second run; None where nothing is nudged. in_workers: generators that moved there."""
        self.name, self.converted = names
        self.original, self.ranks, self.in_workers = original, ranks, in_workers
        self.steps, self.nudged, self.nudged_tail = original.steps, (nudged or original).steps, (nudged or original).tail
        self.lengths = epoch_length(original), epoch_length(ranks[0])
        self.drawn_in_each_step = drawn_in_each_step(self.steps)
        self.on_gpus = {name.partition(" ")[0] for process in (original, *ranks) for step in process.steps
                        for name, only_there in step.get("switch", ()) if only_there}
        noise = noise_in(self.steps, self.nudged) if nudged else {}
        self.kept = {which: keep(which, original, ranks[0], noise.get(which, ()))
                     for which in {step.last("optimizer") for step in self.steps} if ranks[0].parameters(which)}
        self.noise = [original.parameters(which).names[place] for which in sorted(noise) for place in noise[which]]
        self.weights = {}
        self.gradients = collections.defaultdict(lambda: Measured(KINDS["gradients"].floor))
        self.scores = Measured(KINDS["score"].floor)
        self.buffers = Buffers(self)
        self.whole_before = False  # in a step that agreed, each rank took the whole batch, and its own part's loss

    def evidence(self, k):
        """Of step k, with what rounding has parted so far."""
        one, nudged, *shares = (steps[k - 1] for steps in (self.steps, self.nudged, *(rank.steps for rank in self.ranks)))
        which = one.last("optimizer")
        if {share.last("optimizer") for share in shares} == {which} and which in self.kept:
            kept = self.kept[which]
            one, nudged = (kept.of(step, kept.places) for step in (one, nudged))
            shares = [kept.of(share, kept.theirs) for share in shares]
        if which not in self.weights:
            self.weights[which] = Weights(one.last("before"), self.original.parameters(which).eps)
        self.weights[which].follow(k, one, nudged)
        self.gradients[which].parted = max(self.gradients[which].parted,
                                           distance(one.last("gradients"), nudged.last("gradients")))
        for a, b in zip(one.all("score"), nudged.all("score")):
            self.scores.learn([a], [b])
        return Evidence(self, k, one, nudged, shares)


def epoch_length(process):
    """Steps of the first epoch."""
    passes = [record for record in process.of("shuffle") if record.value.shuffles]
    for first, second in itertools.pairwise(passes):
        if second.value.number > first.value.number and first.value.length == second.value.length:
            return second.step - first.step
    return len(process.steps)


def drawn_in_each_step(steps):
    """Generators that move from step to step, and not once for a whole pass."""
    later = steps[1:] or steps  # before the first step the model was made
    of_each = [[step for step in later if step.last("optimizer") == which]
               for which in {step.last("optimizer") for step in later}]
    return {name for name in steps[0].named("drew") for own in of_each
            if 2 * sum(step.named("drew").get(name, (0, False))[1] for step in own) > len(own)}


def unseeded(original, nudged):
    """What shows that the original draws other numbers each time."""
    eps = original.parameters(0).eps
    for k, (a, b) in enumerate(zip(original.steps, nudged.steps), 1):
        parted = distance(a.last("before"), b.last("before")) > 100 * eps * norm(a.last("before"))
        if parted:
            return "it begins with different weights" if k == 1 else ""  # rounding, which the rest may follow
        states = b.named("drew")
        if drawn := [name for name, (state, moved) in a.named("drew").items() if moved and states.get(name, (0,))[0] != state]:
            return f"step {k}: by {' and '.join(drawn)}"
        if k <= 2 and names_apart(a, b):  # later a state that is fed again follows the weights
            return f"step {k}: other samples, or other values of them"
    return ""


# Step by step.

@dataclass
class Training:
    """How far both agree, and the first fault."""
    fault: Fault = None
    stopped: str = ""  # why no more can be compared
    steps: int = 0
    whole: list = field(default_factory=list)  # Losses of each step of which all take the whole batch
    unseen: int = 0  # steps in which the model was fed nothing
    weights: float = 0.0  # how far they parted, and how far rounding parts them, of their norm
    rounding: float = 0.0
    hidden: int = 0  # the step from which on rounding alone is large
    noise: list = field(default_factory=list)  # parameters that were not compared

    @property
    def not_shared_out(self):
        return self.steps == len(self.whole) and {*self.whole} == {Losses.EACH}


def compare(pair, whole=True):
    """All steps that both have, until one of them goes otherwise; whole: both runs came to their ends."""
    agree, earlier = Training(noise=pair.noise), None
    common = min(len(steps) for steps in (pair.steps, pair.nudged, *(rank.steps for rank in pair.ranks)))
    for k in range(1, common + 1):
        e = pair.evidence(k)
        cause, sentence = first_cause(e)
        if cause and earlier and not e.gradients_differ and not cause.always:
            k, (cause, sentence) = earlier  # gradients that differed before, and moved no weight yet
        if cause and cause.stops:
            agree.stopped = f"step {k}: {sentence}"
            return agree
        if cause:
            agree.fault = Fault(sentence, cause.heading, k)
            return agree
        if not all(map(math.isfinite, e.one.last("after"))):
            agree.stopped = f"step {k}: the weights of both scripts are no longer finite, so nothing more can be compared"
            return agree
        if e.gradients_differ and not earlier:
            earlier = k, cause_of(e)
        follow(agree, pair, e)
    agree.hidden = min((one.hidden_since for one in pair.weights.values() if one.hidden_since), default=0)
    if whole:
        agree.fault = last_scores(pair)
        check_ends(agree, pair)
    return agree


def last_scores(pair):
    """What ReduceLROnPlateau was given after the last step."""
    e = Evidence(pair, len(pair.steps), pair.original.tail, pair.nudged_tail, [rank.tail for rank in pair.ranks])
    sentence = scores_between_ranks(e) or other_scores(e)
    return Fault(sentence, DECISIONS, e.step) if sentence else None


def cause_of(e):
    """Of a step whose gradients differ, but move no weight: what explains them."""
    e.parted = True
    return first_cause(e)


def follow(agree, pair, e):
    """A step that agrees."""
    if e.samples.relation == Relation.WHOLE and e.count > 1:
        agree.whole.append(e.losses)
        pair.whole_before |= e.losses in (Losses.MEAN, Losses.SUM, Losses.MEAN_OF_SAMPLES)
    agree.unseen += not e.one.get("fed")
    agree.steps, size = e.step, norm(e.one.last("after")) or 1
    agree.weights = max(agree.weights, distance(e.one.last("after"), e.shares[0].last("after")) / size)
    agree.rounding = max(agree.rounding, e.weights.parted / size)


def check_ends(agree, pair):
    """Whether both took all their steps, and anything could have been seen in them."""
    counts = [len(rank.steps) for rank in pair.ranks]
    if {*counts} != {len(pair.steps)}:
        heading = TWO_ROUTES if len({*counts}) == 1 else DECISIONS
        agree.fault = Fault(f"{pair.name} takes {len(pair.steps)} steps, the ranks take {', '.join(map(str, counts))}",
                            heading, agree.steps + 1)
    elif not any(one.largest for one in pair.weights.values()):
        raise CannotSay(f"training moves no weight in {pair.name}")
    elif any(one.largest and not one.shown for one in pair.weights.values()):
        raise CannotSay(f"in {pair.name} rounding alone moves the weights as far as training does: take a larger learning "
                        "rate in both")
