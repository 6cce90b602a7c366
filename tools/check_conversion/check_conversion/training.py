"""Do both train the same? Step by step, until one of them goes otherwise."""
import collections
import math

from check_conversion import causes
from check_conversion.causes import Evidence
from check_conversion.records import Step
from check_conversion.samples import Losses, Relation, same_twice
from check_conversion.sketch import LARGE, Measured, distance, norm, of_tensors
from check_conversion.verdict import CannotSay, Fault, few

NOISE = 1e-9  # of the largest gradient: one that is 0 in theory, a bias before a norm


class Weights(Measured):
    """Those of one optimizer: how far they may part so far."""

    def __init__(self, start, eps):
        super().__init__("weights")
        self.start, self.eps = start, eps
        self.hidden_since = 0  # the step from which on rounding alone is large

    def follow(self, k, one, nudged):
        for kind in ("old_weights", "new_weights"):
            a, b = one.last(kind), nudged.last(kind)
            self.parted = max(self.parted, distance(a, b), self.eps * norm(a))  # one rounding at least
        moved = distance(one.last("new_weights"), self.start)
        if math.isfinite(moved):  # weights that are NaN have not been moved by any measure
            self.largest = moved
        hidden = self.parted > LARGE * moved > 0  # what was not trained hides nothing
        self.hidden_since = (self.hidden_since or k) if hidden else 0


# Parameters whose gradient is nothing but rounding are not compared.

def compared(step, places):
    """The step with those of its optimizer's tensors that are compared, in this order."""
    taken = Step(step)
    for kind in ("old_weights", "new_weights", "gradients"):
        tensors = of_tensors(step.last(kind))
        taken.put(kind, [number for place in places if place < len(tensors) for number in tensors[place]])
    return taken


def places(names, theirs, noise):
    """Where the parameters that are compared stand in the original's optimizer, and in the ranks'."""
    kept = [place for place in range(len(names)) if place not in noise]
    if len(names) != len(theirs):
        return kept, [*range(len(theirs))]
    by_name = sorted(names) == sorted(theirs) and len({*names}) == len(names)  # perhaps in another order
    return kept, [theirs.index(names[place]) for place in kept] if by_name else kept


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


# Two runs side by side.

class Pair:
    """One process of the first, and all that train in the second; and how far they agree."""

    def __init__(self, scripts, original, nudged, ranks, in_workers=()):
        """nudged: the original's second run; None where nothing is nudged. in_workers: generators that moved there."""
        self.name, self.converted = scripts
        self.original, self.nudged, self.ranks = original, nudged or original, ranks
        self.steps, self.in_workers = original.steps, " and ".join(in_workers)
        # What is known of both as a whole.
        self.lengths = epoch_length(original), epoch_length(ranks[0])
        self.drawn_in_each_step = drawn_in_each_step(self.steps)
        self.on_gpus = {name.partition(" ")[0] for process in (original, *ranks) for step in process.steps
                        for name, only_there in step.get("switch", ()) if only_there}
        noise = noise_in(self.steps, nudged.steps) if nudged else {}
        self.noise = [original.parameters(which).names[place] for which in sorted(noise) for place in noise[which]]
        self.places, self.names = {}, {}  # of each optimizer
        for which in {step.last("optimizer") for step in self.steps}:
            if ours := ranks[0].parameters(which):
                names = original.parameters(which).names
                self.places[which] = places(names, ours.names, noise.get(which, ()))
                self.names[which] = [names[place] for place in self.places[which][0]]
        # How far rounding has parted what is in the steps so far.
        self.weights = {}  # of each optimizer
        self.gradients = collections.Counter()
        self.buffers = collections.defaultdict(lambda: Measured("buffer"))
        self.scores, self.losses = Measured("score"), Measured("loss")
        self.first_buffers = 0, ""  # the first step in which some differ by more, and which
        # The steps that agree.
        self.agreed = 0
        self.whole = []  # Losses of each in which all take the whole batch
        self.unseen = 0  # those in which the model was fed nothing
        self.apart, self.rounding = 0.0, 0.0  # how far the weights part, and how far rounding parts them, of their norm

    def follow(self, k):
        """The evidence of step k, once what rounding parts in it has been learnt."""
        one, nudged, *shares = (process.steps[k - 1] for process in (self.original, self.nudged, *self.ranks))
        which = one.last("optimizer")
        if {share.last("optimizer") for share in shares} == {which} and which in self.places:
            mine, theirs = self.places[which]
            one, nudged = (compared(step, mine) for step in (one, nudged))
            shares = [compared(share, theirs) for share in shares]
        if which not in self.weights:
            self.weights[which] = Weights(one.last("old_weights"), self.original.parameters(which).eps)
        self.weights[which].follow(k, one, nudged)
        self.gradients[which] = max(self.gradients[which], distance(one.last("gradients"), nudged.last("gradients")))
        for a, b in zip(one.all("score"), nudged.all("score")):
            self.scores.learn([a], [b])
        self.losses.learn(*([sum(step.all("loss"))] for step in (one, nudged)))
        if not self.first_buffers[0]:
            self.first_buffers = self.compare_buffers(k, one, nudged, shares)
        return Evidence(self, k, one, nudged, shares)

    def agree(self, e):
        if e.relation == Relation.WHOLE:
            self.whole.append(e.losses)
        self.unseen += not e.one.get("fed")
        self.agreed, size = e.step, norm(e.one.last("new_weights")) or 1
        self.apart = max(self.apart, distance(*e.both("new_weights")) / size)
        self.rounding = max(self.rounding, e.weights.parted / size)

    @property
    def not_shared_out(self):
        return self.agreed == len(self.whole) and {*self.whole} == {Losses.EACH}

    @property
    def hidden_since(self):
        return min((one.hidden_since for one in self.weights.values() if one.hidden_since), default=0)

    def compare_buffers(self, k, one, nudged, shares):
        """Those that no optimizer holds: the step, and which differ, further than rounding has parted them."""
        one, nudged, *shares = (step.named("buffer") for step in (one, nudged, *shares))
        for rank, share in enumerate(shares[1:], 1):
            if names := self.other_buffers(shares[0], shares[0], share):
                return k, (f"{names} between ranks 0 and {rank} in step {k}: DDP averages only gradients, so "
                           "each rank must compute it from the whole batch")
        names = self.other_buffers(one, nudged, shares[0])
        return (k, f"{names} from that of {self.name} in step {k}") if names else (0, "")

    def other_buffers(self, one, nudged, other):
        """What differs, in words, of each way two steps: model.encoder_k, not each of its weights."""
        without = {name.partition(".")[2] or name: buffer for name, buffer in other.items()}  # the variable's name
        found = {}
        for name in one.keys() & nudged.keys():
            if theirs := other.get(name) or without.get(name.partition(".")[2] or name):
                self.buffers[name].learn(one[name], nudged[name])
                if self.buffers[name].differs(one[name], theirs):
                    found[name] = distance(one[name], theirs) / (norm(one[name]) or 1)
        if not found:
            return ""
        where = few(sorted(".".join(name.split(".")[:2]) for name in found))
        kept = "BatchNorm's running mean or variance in " * all(".running_" in name for name in found)
        return f"{kept}{where} differs by up to {max(found.values()):.2g} of its norm"


def epoch_length(process):
    """Steps of the first epoch, from shuffle to shuffle, or from loader to loader; 0 where there is neither."""
    shuffles = [(record.step, record.value.length) for record in process.of("shuffle") if record.value.shuffles]
    passes = shuffles or [(record.step, record.name) for record in process.of("loader")]
    if not passes:
        return 0
    (begin, what), *rest = passes
    return next((step - begin for step, other in rest if other == what and step > begin), len(process.steps) - begin)


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
        if distance(a.last("old_weights"), b.last("old_weights")) > 100 * eps * norm(a.last("old_weights")):
            return "it begins with different weights" if k == 1 else ""  # rounding, which the rest may follow
        states = {name: state for name, (state, _) in b.named("drew").items()}
        if drawn := [name for name, (state, moved) in a.named("drew").items() if moved and states.get(name) != state]:
            return f"step {k}: by {' and '.join(drawn)}"
        if k <= 2 and len(same_twice(a, b)) < len(a.named("fed")):  # later what is fed again follows the weights
            return f"step {k}: other samples, or other values of them"
    return ""


# Step by step.

def first_fault(pair, to_the_end):
    """In all steps that both have; to_the_end: both runs came to it."""
    for k in range(1, min(len(process.steps) for process in (pair.original, pair.nudged, *pair.ranks)) + 1):
        e = pair.follow(k)
        if cause := next(causes.causes(e), None):
            return Fault(*cause, k)
        pair.agree(e)
    return at_the_end(pair) if to_the_end else None


def at_the_end(pair):
    """Whether both took all their steps, whether these moved any weight, and the last scores."""
    counts = [len(rank.steps) for rank in pair.ranks]
    if {*counts} != {len(pair.steps)}:
        return Fault("Two routes" if len({*counts}) == 1 else "Decisions",
                     f"{pair.name} takes {len(pair.steps)} steps, the ranks take {', '.join(map(str, counts))}",
                     pair.agreed + 1)
    if not any(one.largest for one in pair.weights.values()):
        raise CannotSay(f"training moves no weight in {pair.name}")
    e = Evidence(pair, pair.agreed, pair.original.tail, pair.nudged.tail, [rank.tail for rank in pair.ranks])
    cause = next(causes.other_scores(e), None)
    return cause and Fault(*cause, pair.agreed)
