"""Do both train the same? Step by step, until one of them goes otherwise.

Rounding is measured: a run of the original whose weights were moved by one rounding at each step
drifts as far as a right conversion does.
"""
import collections
import itertools
import math
from dataclasses import dataclass, field, replace

from check_conversion import samples
from check_conversion.buffers import compare_untrained
from check_conversion.causes import Evidence, of_lengths, other_samples, why
from check_conversion.distances import LARGE, TIMES, apart_in, distance, factor_between, norm, of_tensors
from check_conversion.protocol import About, Began, Score
from check_conversion.samples import Losses, Relation
from check_conversion.verdict import CannotSay, Fault

LEAST = 1e-8  # of what training moves the weights: no fault that anybody makes is smaller
ALIKE = 1e-10, 1e-6  # of what all ranks have alike, in float64 and in float32: they have the same bits
SCHEDULED = "lr ", "momentum ", "betas "  # options that may follow the number of steps
NOISE = 1e-9  # of the largest gradient: one that is 0 in theory, a bias before a norm


@dataclass
class Rounding:
    """How far the weights of each optimizer may part so far."""
    eps: float  # of the weights' type
    drift: dict = field(default_factory=dict)
    start: dict = field(default_factory=dict)
    moved: dict = field(default_factory=dict)  # by training
    since: dict = field(default_factory=dict)  # the step from which on rounding hides its faults
    seen: dict = field(default_factory=dict)  # whether in some step a fault of any size would show

    def measure(self, k, one, nudged):
        which = one.optimizer
        self.start.setdefault(which, one.before)
        for a, b in ((one.before, nudged.before), (one.after, nudged.after)):
            least = self.eps * norm(a)  # one rounding
            self.drift[which] = max(self.drift.get(which, 0), distance(a, b), least)
        moved = distance(one.after, self.start[which])
        if math.isfinite(moved):  # weights that are NaN have not been moved by any measure
            self.moved[which] = moved
        if self.drift[which] <= LARGE * moved or not moved:  # what was not trained hides nothing
            self.since.pop(which, None)
        else:
            self.since.setdefault(which, k)
        self.seen[which] = self.seen.get(which, False) or TIMES * self.drift[which] < moved

    @property
    def blurred(self):
        """The first step in which an optimizer's faults are hidden, as they are to the end."""
        return min(self.since.values(), default=0)

    @property
    def blind(self):
        """Whether there is an optimizer, of those that train, of which no fault would have shown."""
        return not any(self.seen.values()) or any(
            self.moved.get(which) and not seen for which, seen in self.seen.items())

    def differs(self, one, other, which):
        return not distance(one, other) <= max(TIMES * self.drift[which], LEAST * self.moved.get(which, 0))


def noise_in(steps, nudged):
    """Of each optimizer the tensors whose gradient is noise in most steps: an optimizer that divides
    by its size makes weights of it."""
    total, found = collections.Counter(), collections.Counter()
    for one, other in zip(steps, nudged):
        total[one.optimizer] += 1
        pairs = [*zip(of_tensors(one.gradients), of_tensors(other.gradients))]
        largest = max((norm(a) for a, _ in pairs), default=0)
        calm = distance(one.gradients, other.gradients) < 1e-3 * norm(one.gradients)
        for place, (a, b) in enumerate(pairs):
            if 0 < norm(a) < NOISE * largest or (calm and distance(a, b) > 0.5 * norm(a)):
                found[one.optimizer, place] += 1
    return {which: [place for (whose, place), count in found.items()
                    if whose == which and 2 * count > total[which]] for which in total}


def taking(places, step):
    """The step, with these of its tensors, in this order."""
    def some(numbers):
        tensors = of_tensors(numbers)
        return [number for place in places if place < len(tensors) for number in tensors[place]]
    return replace(step, before=some(step.before), after=some(step.after), gradients=some(step.gradients))


def places_of(names, ours):
    """Where the parameters of these names are in an optimizer of the other script, which may hold them in
    another order."""
    if sorted(names) != sorted(ours) or len({*names}) < len(names):
        return [*range(len(ours))]
    return [ours.index(name) for name in names]


def unseeded(original, nudged):
    """What shows that the original draws other numbers each time."""
    one, other = original.ranks[0].steps, nudged.ranks[0].steps
    eps = original.ranks[0].of(Began)[0].eps
    if not distance(one[0].before, other[0].before) <= 100 * eps * norm(one[0].before):
        return "it begins with different weights"
    for k, (a, b) in enumerate(zip(one, other), 1):
        if distance(a.before, b.before) > 100 * eps * norm(a.before):
            return None  # by rounding, which what is fed and drawn may follow
        if drawn := [name for name in a.draws if a.states[name] != b.states.get(name)]:
            return f"step {k}: by {' and '.join(drawn)}"
        if k > 2:
            continue  # a state that is fed again follows the weights
        if len(samples.same_twice(a, b)) < len(samples.names_in(a)):
            return f"step {k}: other samples, or other values of them"
    return None


# What all ranks must have alike.

def other_options(one, other, nudged=None):
    """What two optimizers have been told otherwise: lr 0.1 instead of 0.05; not what rounding moves."""
    def same(a, b):
        return a == b or (isinstance(a, float) and isinstance(b, float)
                          and (math.isclose(a, b, rel_tol=1e-6) or (a != a and b != b)))
    if len(one.options) != len(other.options):
        return [f"{len(other.options)} groups of parameters instead of {len(one.options)}"]
    again = nudged.options if nudged else one.options
    return sorted({f"{name} {new.get(name)} instead of {old[name]}"
                   for old, new, known in zip(one.options, other.options, again) for name in old
                   if not same(old[name], new.get(name)) and same(old[name], known.get(name))})


def between_ranks(ranks, shares):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    for other, step in zip(ranks[1:], shares[1:]):
        who, one = f"ranks 0 and {other.rank}", shares[0]
        began = other.of(Began)[step.optimizer]
        if options := other_options(one, step):
            return Fault(f"{who} have different optimizer options: {', '.join(options)}", "Decisions")
        if fault := apart_in_shuffles(who, one, step):
            return fault
        for what, heading in (("before", "Load first, then DDP"),
                              ("gradients", "Training goes through DDP"),
                              ("after", "Load first, then DDP")):  # no later step may show it
            a, b = getattr(one, what), getattr(step, what)
            if distance(a, b) > ALIKE[began.eps > 1e-10] * norm(a):
                where = apart_in(began.names, a, b)
                without = [name for name in began.without if name in where]
                heading = "Training goes through DDP" if without else heading
                named = {"before": "weights", "after": "weights after the step"}.get(what, what)
                text = f"{who} have different {named}: {where}"
                alone = f" ({', '.join(without[:3])} not wrapped in DDP)" * bool(without)
                return Fault(text + alone, heading)
    return None


def apart_in_shuffles(who, one, step):
    for a, b in zip(one.passes, step.passes):
        if a.shuffles and a.asked != b.asked:
            return Fault(f"{who} shuffle differently, because DistributedSampler's seed and epoch are "
                         f"{a.asked} and {b.asked}", "Random numbers")
        if a.shuffles and a.sampler == b.sampler and a.length == b.length and a.drawn != b.drawn:
            return Fault(f"{who} shuffle differently, each with its own random numbers",
                         "Random numbers")
    return None


def compare_scores(original, nudged, converted):
    """Each decision of ReduceLROnPlateau rests on one figure, the same in all ranks."""
    scores = [run.ranks[0].of(Score) for run in (original, nudged)]
    scores += [rank.of(Score) for rank in converted.ranks]
    for a, b, *ours in zip(*scores):
        values = [one.value for one in ours]
        if any(distance(values[:1], [value]) > 1e-6 * norm(values) for value in values):
            given = ", ".join(f"{value:.6g}" for value in values)
            return Fault(f"ReduceLROnPlateau is given a different value on each rank: {given}",
                         "Decisions", ours[0].steps)
        moved = min(distance([a.value], [b.value]), norm([a.value]))
        if distance([a.value], values[:1]) > TIMES * moved + LARGE * norm([a.value]) + 1e-12:
            return Fault(f"ReduceLROnPlateau is given {values[0]:.6g} instead of {a.value:.6g}",
                         "Decisions", ours[0].steps)
    before, _, *counts = map(len, scores)
    if {*counts} != {before}:
        last = max(scores, key=len)[min(map(len, scores))]
        return Fault(f"ReduceLROnPlateau is given {before} figures in {original.name}, and "
                     f"{', '.join(map(str, counts))} on the ranks", "Decisions", last.steps)
    return None


def compare_switches(original, converted):
    """The first step in which autocast, a GradScaler or dropout was on in one of them and off in the other."""
    ranks = converted.ranks
    for k, (one, *shares) in enumerate(zip(original.ranks[0].steps, *(rank.steps for rank in ranks)), 1):
        for what in sorted(one.on.union(*(share.on for share in shares))):
            others = [rank for rank, share in zip(ranks, shares)
                      if (what in share.on) != (what in one.on)]
            if others:
                where = converted.name
                if len(others) < len(ranks):
                    where += f" on rank {others[0].rank}"
                first, then = ("on", "off") if what in one.on else ("off", "on")
                return Fault(f"{what} is {first} in {original.name} and {then} in {where}",
                             "What your script has", k)
    return None


# Step by step.

@dataclass
class Training:
    """How far both agree, and the first fault."""
    fault: Fault = None
    steps: int = 0
    whole: list = field(default_factory=list)  # Losses of each step of which all take the whole batch
    unseen: int = 0  # steps in which the model was fed nothing
    weights: float = 0.0  # how far they parted, and how far rounding parts them, of their norm
    rounding: float = 0.0
    blurred: int = 0  # the step from which on rounding alone is large
    noise: list = field(default_factory=list)  # parameters that were not compared

    @property
    def not_shared_out(self):
        return self.steps == len(self.whole) and {*self.whole} == {Losses.EACH}


def first_pass(steps):
    """How many steps come of it."""
    lengths = [one.passes[-1].steps for one in steps if one.passes]
    ends = [a for a, b in itertools.pairwise(lengths) if b <= a]
    return ends[0] if ends else max(lengths, default=0)


def drawn_in_each_step(steps):
    """Generators that move from step to step, and not once for a whole pass."""
    later = steps[1:] or steps  # before the first step the model was made
    of_each = [[step for step in later if step.optimizer == which] for which in {step.optimizer for step in later}]
    return {name for name in {*steps[0].states} for own in of_each
            if 2 * sum(name in step.draws for step in own) > len(own)}


def drawn_in_workers(*runs):
    return [*dict.fromkeys(name for run in runs for name in run.remarks(About.DREW))]


def alike_before(k, ranks):
    """Generators whose states were the same in all ranks in the step before."""
    before = [rank.steps[k - 2].states for rank in ranks] if k > 1 else []
    return {name for name in (before[0] if before else ())
            if len({states.get(name) for states in before}) == 1}


def compare_steps(original, nudged, converted):
    """Step by step, until one of them goes otherwise."""
    agree, rounding = Training(), Rounding(original.ranks[0].of(Began)[0].eps)
    ranks, steps = converted.ranks, original.ranks[0].steps
    known = dict(lengths=(first_pass(steps), first_pass(ranks[0].steps)),
                 each_step=drawn_in_each_step(steps), in_workers=drawn_in_workers(original, converted),
                 places={name: at for step in steps for name, at in step.drawn_at.items()})
    noise, earlier = noise_in(steps, nudged.ranks[0].steps), None
    parameters = {which: what_to_compare(original, converted, which, noise[which])
                  for which in noise if which < len(ranks[0].of(Began))}
    for k, (one, nudged_step, *shares) in enumerate(
            zip(steps, nudged.ranks[0].steps, *(rank.steps for rank in ranks)), 1):
        if {share.optimizer for share in shares} != {one.optimizer}:
            agree.fault = Fault(f"this step is taken by optimizer {one.optimizer + 1} in {original.name}, and by optimizer "
                                f"{' and '.join(str(share.optimizer + 1) for share in shares)} in the ranks, in the order "
                                "of their first steps", "Decisions", k)
            return agree
        agree.fault = between_ranks(ranks, shares)
        names, kept, theirs = parameters[one.optimizer]
        one, nudged_step = (taking(kept, step) for step in (one, nudged_step))
        shares = [taking(theirs, share) for share in shares]
        rounding.measure(k, one, nudged_step)
        e = evidence(k, one, nudged_step, shares, original, nudged, converted, known, names, rounding,
                     bool({*agree.whole} & {Losses.MEAN, Losses.SUM, Losses.MEAN_OF_SAMPLES}))
        agree.fault = agree.fault or compare_step(e, nudged_step, rounding, earlier)
        earlier = earlier or (e if gradients_differ(e, nudged_step) else None)
        if agree.fault:
            agree.fault.step = agree.fault.step or k
            return agree
        if e.samples.relation == Relation.WHOLE and len(ranks) > 1:
            agree.whole.append(e.losses)
        agree.unseen += not one.fed
        if not finite(one.after):
            agree.fault = Fault("the weights of both scripts are no longer finite, so nothing more can be compared",
                                "Check it", k, unknown=True)
            return agree
        agree.steps, size = k, norm(one.after) or 1
        agree.weights = max(agree.weights, distance(one.after, shares[0].after) / size)
        agree.rounding = max(agree.rounding, rounding.drift[one.optimizer] / size)
    agree.blurred = rounding.blurred
    agree.noise = [began.names[place] for began in original.ranks[0].of(Began)
                   for place in noise.get(began.optimizer, [])]
    counts = [len(rank.steps) for rank in ranks]
    if {*counts} != {len(steps)}:
        heading = "Two routes" if len({*counts}) == 1 else "Decisions"
        agree.fault = Fault(f"{original.name} takes {len(steps)} steps, the ranks take "
                            f"{', '.join(map(str, counts))}", heading, step=agree.steps + 1)
    elif not any(rounding.moved.values()):
        raise CannotSay(f"training moves no weight in {original.name}")
    elif rounding.blind:
        raise CannotSay(f"in {original.name} rounding alone moves the weights as far as training "
                        "does: take a larger learning rate in both")
    return agree


def what_to_compare(original, converted, which, noise):
    """The parameters of an optimizer, but for those whose gradients are noise: their names, and their
    places in both scripts."""
    names, ours = (run.ranks[0].of(Began)[which].names for run in (original, converted))
    kept = [place for place in range(len(names)) if place not in noise]
    places = places_of(names, ours)
    theirs = places if len(places) != len(names) else [places[place] for place in kept]
    return [names[place] for place in kept], kept, theirs


def lacking(original, converted, which):
    """Names of parameters that an optimizer holds in the original alone."""
    names, ours = (run.ranks[0].of(Began)[which].names for run in (original, converted))
    without = [name for name in names if name not in ours]
    return f": it lacks {', '.join(without[:5])}" if without else ""


def finite(numbers):
    return all(map(math.isfinite, numbers))


def evidence(k, one, nudged_step, shares, original, nudged, converted, known, names, rounding, whole_before):
    steps = original.ranks[0].steps
    found = samples.compare(one, nudged_step, shares, steps, original.name)
    return Evidence(original.name, k, one, shares, found, samples.losses(one, shares, found),
                    names=names, lacking=lambda: lacking(original, converted, one.optimizer),
                    alike_before=alike_before(k, converted.ranks),
                    blurred=one.optimizer in rounding.since, whole_before=whole_before,
                    untrained=lambda: compare_untrained(
                        k, steps, nudged.ranks[0].steps, [rank.steps for rank in converted.ranks],
                        original.name), **known)


def gradients_differ(e, nudged_step):
    """By more than rounding, in all ranks alike."""
    one, share = e.one, e.shares[0]
    apart = distance(one.gradients, share.gradients)
    return apart > max(LARGE * norm(one.gradients), TIMES * distance(one.gradients, nudged_step.gradients))


def compare_step(e, nudged_step, rounding, earlier=None):
    """earlier: the evidence of a step whose gradients differed, but moved no weight yet."""
    one, share, which = e.one, e.shares[0], e.one.optimizer
    if len(share.before) != len(one.before):
        return Fault(f"the optimizer holds other parameters than in {e.name}{e.lacking()}", "Load first, then DDP")
    different = rounding.differs(one.before, share.before, which)
    if different and one.before == rounding.start[which]:
        return Fault("it begins with different weights", "Load first, then DDP")
    if different and which not in rounding.since:
        return Fault("the weights differ before the step, although they agreed after the previous "
                     "step", "Load first, then DDP")
    if options := other_options(one, share, nudged_step):
        follow = all(option.startswith(SCHEDULED) for option in options) and (other_samples(e) or of_lengths(e))
        return follow or Fault(f"different optimizer options: {', '.join(options)}", "Decisions")
    differ = gradients_differ(e, nudged_step)
    if not rounding.differs(one.after, share.after, which):
        return why(e) if differ and factor_between(one.gradients, share.gradients) else None
    if earlier and not differ and (fault := why(earlier)):
        fault.step = earlier.step
        return fault
    return why(e)


def compare_training(original, nudged, converted):
    agree = compare_steps(original, nudged, converted)
    for other in (compare_scores(original, nudged, converted), compare_switches(original, converted)):
        if other and (not agree.fault or other.step < agree.fault.step):
            agree.fault = other
    return agree
