"""Whether a run trains, prints and saves what the original's first run did, and if not, from where on, and why."""
import argparse
import calendar
import contextlib
import functools
import re
from collections import defaultdict

import numpy
import torch

tensor = functools.partial(torch.tensor, dtype=torch.float64)  # of what the processes have noted
NOISE = 5  # times what rounding alone does in the original's second run
MOST = 0.02  # of all gradients; where rounding does more, it decides
FEW, LITTLE = 0.25, 2e-3  # of the steps; of all gradients: so much may differ where rounding flips a ReLU
SLIGHT, TIME = 1e-5, 1e-3  # of a figure: no difference; one that, between two originals, shows a time
CLOCK = 0.9  # shows a time, where the only other run is one whose clock runs a thousand times faster
NUMBER = re.compile(r"(?<![A-Za-z_\d.])[-+]?(?:\d{1,3}(?:,\d{3})+(?= ?[A-Za-z/])|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)")
WHEN = re.compile(r"\d+:\d\d:\d\d(?:[.,]\d+)?|\d\d\d\d-\d\d-\d\d|(?<![A-Za-z])(?:{})(?![A-Za-z])".format("|".join(
    [*calendar.day_abbr, *calendar.day_name, *calendar.month_abbr[1:], *calendar.month_name[1:]])))
PICKLED = [argparse.Namespace, numpy.ndarray, numpy.dtype, numpy.array(0).__reduce__()[0], numpy.float64(0).__reduce__()[0],
           *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__)]  # what checkpoints have besides tensors


class Verdict(Exception):
    """Status and text."""


def near(some, others, relative=1e-3, scale=0.0):
    return len(some) == len(others) and numpy.allclose(some, others, relative, relative * scale)


def alike(samples, others):
    """Whether they are the same, in any order."""
    return near(sorted(samples), sorted(others), 1e-4, max(map(abs, samples), default=0.0))


def without_shared(lists):
    """Without the samples that are in all of them, such as rows of a mask."""
    shared = set.intersection(*({f"{sample:.5g}" for sample in samples} for samples in lists))
    return [[sample for sample in samples if f"{sample:.5g}" not in shared] for samples in lists]


def same_samples(mine, parts):
    """Whether the ranks' parts together are the original's samples, in dimension 0 or 1; or each part is all of them."""
    for dimension in (0, 1):
        rows, *others = without_shared([samples[dimension] for samples in (mine, *parts)])
        if rows and alike(rows, [sample for part in others for sample in part]):
            return True
    return all(alike(mine[0], part[0]) for part in parts)


def excess(one, step, kind):
    """How far each of a step's tensors is from the original's, in multiples of what it may be."""
    norms = tensor(one[kind])[:, 0]
    limits = 1e-4 * norms + 5e-6 * norms.norm() if kind == "gradients" else 1e-6 * norms + 1e-3 * tensor(one["update"])
    return tensor(step[kind])[:, 1] / (limits + 1e-30)


def change(step):
    """How far all of a step's gradients are from the original's."""
    norms, distances, _ = tensor(step["gradients"]).T
    return distances.norm() / norms.norm().clamp(1e-30)


def on_rank(step):
    """The first that is wrong: if it is rank 0, so are all, as a rule."""
    return f" on rank {step['rank']}" if step["rank"] else ""


class Training:
    """Of steps: those of the original, from its step `offset` on; those of each rank of another run."""

    def __init__(self, base, ranks, offset=0):
        self.base, self.ranks, self.offset, self.noise = base, ranks, offset, defaultdict(list)

    def measure(self, second):
        """The most that rounding moves a tensor in each step of the original's second run."""
        if len(second) != len(self.base):
            raise Verdict(2, f"the original takes {len(self.base)} steps, and {len(second)} where the clocks run faster")
        for number, step in enumerate(second, 1):
            if not change(step) <= MOST:  # or it is not finite
                cause = "rounding, no seed, NaN or the order of a set"
                raise Verdict(2, f'{cause} decides step {number} of the original (see "Check it")')
            for kind in ("before", "gradients", "after"):
                self.noise[kind].append(float(excess(step, step, kind).max()))

    def fault(self):
        """The first, of the number of steps and of a step."""
        lengths = {len(steps) for steps in self.ranks if len(steps) != len(self.base)}
        if lengths and self.offset:  # each step is another one, so all differ
            return (f"{min(lengths)} steps instead of {len(self.base)}: does the command resume from the newest checkpoint, at "
                    'the next step, and load what decides when it ends? (see "Decisions")')
        found = []
        if self.same_on_all_ranks():
            found += ['not split: all ranks have the same samples; is DistributedSampler, or [part], missing? (see "Two routes")']
        found += [f"{length} steps instead of {len(self.base)}" for length in lengths]
        wrong = self.wrong_gradients()
        for number, (one, *steps) in enumerate(zip(self.base, *self.ranks)):
            if fault := self.step_fault(number, one, steps, wrong.get(number, "")):
                return "; ".join([*found, f"step {self.offset + number + 1}: {fault}"])
        return "; ".join(found)

    def wrong_gradients(self):
        """Their names by step, without a few steps that differ a little: there rounding flips a ReLU or another maximum."""
        found = {}
        for number, (one, *steps) in enumerate(zip(self.base, *self.ranks)):
            if all(step["known"] for step in steps) and (names := self.wrong(number, one, steps, "gradients")):
                found[number] = names, all(change(step) <= LITTLE for step in steps)  # not, if one is not finite
        few = not self.offset and len(found) <= FEW * len(self.base)
        advice = '; in few steps: does rounding decide them? (see "Check it")' if few else ""
        return {number: names + advice for number, (names, little) in found.items() if not (few and little)}

    def step_fault(self, number, one, steps, gradients):
        first, *others = (step["shuffles"] for step in steps)  # by kind of sampler and size; rank 0 alone may show pictures
        if any(first[kind] != other[kind] for other in others for kind in first.keys() & other.keys()):
            return ('the ranks shuffle the samples by different seeds or epochs: is DistributedSampler missing '
                    '(see "Two routes"), or on route B a generator of the loader\'s own? (see "Random numbers")')
        if not all(step["known"] for step in steps):
            if number and any(len(run) != len(self.base) for run in self.ranks):
                return 'other parameters: does an earlier model train for another number of steps? (see "Decisions")'
            if any(len(step["names"]) != len(one["names"]) for step in steps):
                return "the optimizer has other parameters"
            raise Verdict(2, f"step {number + 1}: the optimizer has its parameters in another order, or of other shapes")
        if names := self.wrong(number, one, steps, "before"):
            if number or self.offset:
                return f'weights were changed, not loaded, or not seeded again{names} (see "Load first, then DDP")'
            return f'other initial weights{names}: does one script draw more numbers before? (see "What your script has")'
        if option := self.other_option(number, one, steps):
            return option
        if gradients or not all(near(one["norms"], step["norms"], scale=max(one["norms"], default=0)) for step in steps):
            return (self.not_averaged(one, steps) or self.size_fault(one, steps) or
                    self.sample_fault(number, one, steps) or self.gradient_fault(one, steps, gradients))
        names = self.wrong(number, one, steps, "after")
        advice = ('is its state loaded? (see "Load first, then DDP")' if self.offset else
                  'is it another one, or do parts count unequally in its closure? (see "Sums and unequal parts")')
        return names and f"the gradients agree, the optimizer's step does not{names}; {advice}"

    def wrong(self, number, one, steps, kind):
        """Names of tensors that differ by more than rounding on a rank."""
        noise = max(self.noise[kind][:number + 2], default=0)  # until the next step: weights are moved after the first one
        for step in steps:
            fine = excess(one, step, kind) <= max(1, NOISE * noise)
            if names := [name for name, right in zip(one["names"], fine) if not right]:
                return f": {', '.join(names[:3])}{', …' if names[3:] else ''}{on_rank(step)}"
        return ""

    def other_option(self, number, one, steps):
        """Of a parameter, such as its learning rate; or what is on, such as dropout."""
        for step in steps:
            if self.offset:
                advice = ': are the optimizer and the schedule loaded? (see "Load first, then DDP")'
            elif number or step["rank"]:  # it began alike, or rank 0 is right
                advice = (': has its schedule another length, does it follow a metric or a count of one rank, '
                          'or is a model in evaluation mode there? (see "Decisions")')
            else:
                advice = ' (see "What your script has")'
            for mine, others in [(one["switches"], step["switches"]), *zip(one["options"], step["options"])]:
                for name in mine | others:
                    was, now = mine.get(name, False), others.get(name, False)
                    rounded = isinstance(was, float) and near([was], [now], 1e-4)
                    if was != now and None not in (was, now) and not rounded:
                        return f"{name} {now} instead of {was}{on_rank(step)}{advice}"
        return ""

    def not_averaged(self, one, steps):
        """DDP's gradients are the same on all ranks, whatever they come from."""
        norm = tensor(one["gradients"])[:, 0].norm() + 1e-30
        first, *others = (tensor(step["gradients"]) / tensor([1, norm, norm ** 2]) for step in steps)
        if all(torch.allclose(other, first, rtol=1e-4, atol=1e-6) for other in others):
            return ""
        return ('the ranks have different gradients, not averaged: does it go around DDP, call backward twice, end in '
                'no_sync, or unfreeze layers? (see "Training goes through DDP")')

    def size_fault(self, one, steps):
        """Of gradients that are clipped, or that only a factor makes different, whatever the samples are."""
        if self.offset:
            return ""
        if len(steps[0]["norms"]) != len(one["norms"]) or not all(near(steps[0]["norms"], step["norms"]) for step in steps):
            return 'gradients are clipped before they are averaged (see "Sums and unequal parts")'
        norm, first = tensor(one["gradients"])[:, 0].norm(), tensor(steps[0]["gradients"])
        factor = first[:, 2].sum() / norm ** 2
        parallel = near([first[:, 1].norm()], [(factor - 1).abs() * norm], 1e-3, norm)
        times = steps[0]["norms"][0] / (one["norms"][0] or 1) if one["norms"] else float(factor)  # before they are clipped
        if not parallel or near([times], [1], 0.1):
            return ""
        return (f"all gradients are {times:.4g} times the original's: is a sum multiplied by world_size, but no mean, and is "
                'a count that of the whole batch? (see "Sums and unequal parts"); does it divide by the number of parts that '
                'it accumulates, and call unscale_ before it clips?')

    def sample_fault(self, number, one, steps):
        parts = [step["samples"] for step in steps]
        if same_samples(one["samples"], parts) or not any(part[0] for part in parts):  # or all went around DDP
            return ""
        if any(step["again"] for step in steps):
            return ('the sampler has the order of an earlier epoch again: is set_epoch missing, or given a number twice? '
                    '(see "Two routes")')
        if self.offset:
            return ('other samples than in the unbroken run: are order and noise seeded in each epoch (see "Random numbers"), '
                    'and are batches skipped that it trained on? (see "Loops of steps")')
        for dimension in (0, 1):
            found = [f"{sample:.5g}" for part in parts for sample in part[dimension]]
            fed = {f"{sample:.5g}" for step in self.base for sample in step["samples"][dimension]}
            if sum(sample in fed for sample in found) > 0.9 * len(found):  # the original has them too, in some step
                size = len(one["samples"][dimension])
                if len(found) == len(steps) * size and not number:
                    return 'each rank takes a full-size batch, not batch_size // world_size (see "Two routes")'
                if len(found) == size:
                    return "other samples, or some repeated" + (self.random_hint(one, steps) or (
                        ': do all ranks shuffle alike, as the original, in each epoch? (see "Random numbers"); '
                        'does a pool hold the samples of one rank? (see "Losses over pairs")'))
                return (f'other samples, or some repeated: {len(found)} instead of {size}: does the number of processes divide '
                        'the batch size, and that of all samples? Is dimension 0 the batch? (see "Two routes"); '
                        'on route B, do all ranks shuffle alike? (see "Random numbers")')
        hint = self.random_hint(one, steps, one["workers"])
        return "samples or values that the original never feeds its model" + (
            hint or '; is mixup drawn for a part instead of the whole batch, or do the ranks draw other batches? '
            '(see "Random numbers"); if they are padded, does the model read padding (see "Two routes"), or do parts count '
            'unequally? (see "Sums and unequal parts")')

    def random_hint(self, one, steps, workers=False):
        """No verdict, if ranks draw numbers of their own: they are no fault, but hide one."""
        generators = zip(one["drawn"], *(step["drawn"] for step in steps))  # what each has on each rank, if it has drawn
        if workers or any(all(states) and len({*states[1:]}) > 1 for states in generators):
            raise Verdict(2, 'each rank draws its own random numbers: turn off, in both, whatever is random in training '
                          '(see "Check it"); on route B, do all ranks draw alike? (see "Random numbers")')
        return '; do the ranks draw alike what must differ? (see "Random numbers")' if any(one["drawn"]) else ""

    def same_on_all_ranks(self):
        first, *others = self.ranks
        pairs = [(one["samples"][0], step["samples"][0]) for steps in others for one, step in zip(first, steps)
                 if len(one["samples"][0]) > 1]  # one sample, or none, as in a second optimizer's step, says nothing
        changes = any(one != pairs[0][0] for one, _ in pairs)  # otherwise it may be a graph, of which a step takes nodes
        return changes and all(alike(one, other) for one, other in pairs)

    def gradient_fault(self, one, steps, names):
        """Other gradients from the same samples, by more than a factor."""
        if self.offset:
            return (f'gradients differ, samples do not{names}: is dropout seeded in each epoch, or in each step after '
                    'the batch is taken (see "Random numbers"), and is a second model, or a tensor that the loss uses, loaded?')
        hint = self.random_hint(one, steps)
        return (f"gradients differ, samples do not{names}{hint}; do parts count unequally (padding, class weights), or must "
                'the loss or a buffer be computed from all samples? (see "Sums and unequal parts"); does it compare them? '
                '(see "Losses over pairs"); is a decision, such as teacher forcing, not drawn alike? (see "Random numbers"); '
                'does the model read padding? (see "Two routes"); is zero_grad missing, or is a second model, as a target or an '
                'average, not updated alike on all ranks?')


def gap(one, other):
    """Relative; one unit of the last digit is nothing, unless the figure is coarse: it is not rounded otherwise by chance."""
    a, b, (mantissa, _, exponent) = float(one), float(other), one.lower().partition("e")
    size, distance = max(abs(a), abs(b)), abs(a - b)
    decimals = len(mantissa.partition(".")[2])  # none in "5000.", at the end of a sentence
    unit = 1.01 * 10.0 ** (int(exponent or 0) - decimals) if decimals else 0
    if one == other or a == b or distance <= unit < 1e-3 * size:
        return 0.0
    return distance / size if distance < float("inf") else 1.0


def by_words(lines):
    """Numbers and text of each line, by what it has besides its numbers, which may be padded, and when it was written."""
    found = defaultdict(list)
    for line in [line.strip() for line in lines if re.search(r"\w", line)]:  # without brackets and rules
        timeless = WHEN.sub("", line)
        words = "".join(NUMBER.sub("#", timeless).split())
        found[words].append(([number.replace(",", "") for number in NUMBER.findall(timeless)], line[:120]))
    return found


def same_names(first, *others):
    """Gives files of the other runs the first one's names, if a date or a time is all that they differ by."""
    def words(name):
        return re.sub(r"\d+", "#", WHEN.sub("", name))
    for pattern in {words(name) for name in first.keys() - others[0].keys()}:
        names, *theirs = ([name for name in found if words(name) == pattern] for found in (first, *others))
        for found, its in zip(others, theirs):
            if len(its) == len(names):
                found |= {name: found.pop(one) for name, one in zip(names, its)}


def compare_lines(runs, resumed=False, printed=False):
    """Those of the same words: what differs, what cannot be compared, and how many there are."""
    first, second, other = map(by_words, runs)
    checkpoint = ":norm#" in "".join(first)
    if resumed and (checkpoint or all(len(second[words]) == len(lines) for words, lines in first.items())):
        second = first  # it is written anew at each save: the killed run's is that of another step
    found, left_out, count = [], [], 0
    for words, lines in first.items():
        timed = not resumed and len(second[words]) != len(lines)  # it has a time among its words
        reworded = printed and not resumed and not other[words] and any(other.values())
        if timed or reworded:
            left_out.append(repr(lines[0][1]))
        else:
            count += len(lines)
            moved = moved_numbers(lines, second[words])
            if resumed and printed and not second[words]:  # the killed run has not come so far
                moved = [move if move > CLOCK else 0 for move in moved_numbers(lines[::-1], other[words][::-1])]
            left_out += [f"number {place} of {lines[0][1]!r}" for place, move in enumerate(moved, 1) if move > TIME]
            found += differences(lines, moved, other[words], resumed)
    if found and any(re.match(r".*module\..*:norm#", words) and words not in first for words in other):
        found = ['its names begin with module.: save those of model.module (see "Saving")']
    return found, left_out, count


def moved_numbers(lines, again):
    """For each number of such lines: how far rounding moves it in the original's second run, or the clock."""
    gaps = [[*map(gap, one, its)] for (one, _), (its, _) in zip(lines, again)]
    return [*map(max, zip(*gaps))] or [0.0] * len(lines[0][0])


def fits(numbers, others, moved):
    """Whether they differ by no more than rounding. What the clock moves is not compared."""
    return all(move > TIME or gap(one, other) <= max(SLIGHT, NOISE * move) for one, other, move in zip(numbers, others, moved))


def differences(lines, moved, others, resumed):
    """Of lines of the same words, in their order; of a resumed run, anywhere."""
    if not others or (len(others) != len(lines) and not resumed):
        advice = "it is missing" if not others else (
            'is it printed, or written, by all ranks? (see "Printed by all ranks")' if len(others) > len(lines) else
            'does it depend on a figure of one rank? (see "Printed figures")')
        yield f"{len(others)} times instead of {len(lines)}: {lines[0][1]}; {advice}"
        return
    for place, (numbers, line) in enumerate(lines):
        candidates = others if resumed else [others[place]]
        if not any(fits(numbers, its, moved) for its, _ in candidates):
            nearest = min(candidates, key=lambda its: sum(one != other for one, other in zip(numbers, its[0])))
            yield f"{nearest[1]!r} instead of {line!r}"


def read_lines(path):
    """Of a text; of a checkpoint, one for each value: a tensor's norm, and its direction. None if it cannot be read."""
    with contextlib.suppress(Exception), torch.serialization.safe_globals(PICKLED):  # nothing else in it is executed
        return [*value_lines(numpy.load(path) if path.suffix in (".npy", ".npz") else torch.load(
            path, weights_only=True, map_location="cpu", mmap=False))]
    with contextlib.suppress(UnicodeDecodeError):
        return path.read_text().splitlines()


def value_lines(value, name=""):
    if isinstance(value, (list, tuple)) or hasattr(value, "keys"):
        keys = value.keys() if hasattr(value, "keys") else range(len(value))
        for key in [key for key in keys if key not in ("args", "config", "hparams") and "rng" not in str(key)]:  # may differ
            yield from value_lines(value[key], f"{name}.{key}".strip("."))
    elif isinstance(value, (torch.Tensor, numpy.ndarray)) and value.ndim:
        flat = torch.as_tensor(value).double().flatten().nan_to_num()
        direction = flat @ torch.arange(1, len(flat) + 1).double().sin() / (flat.norm() + 1e-30)
        yield f"{name}: norm {flat.norm():.9g} direction {direction:.5f} of {[*value.shape]}"
    elif isinstance(value, (int, float, numpy.number, torch.Tensor, numpy.ndarray)):
        yield f"{name}: {float(value):.12g}"
