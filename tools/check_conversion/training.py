"""Whether a run trains as the original's first run did, and if not, from which step on, and why."""
import itertools

import torch

NOISE = 5  # times what rounding alone does in the original's second run
MOST = 0.02  # of all gradients; where rounding does more, it decides


class Verdict(Exception):
    """Status and text."""


class Unknown(Exception):
    """Why a step cannot be judged; another one, perhaps, can."""


def see(section):
    return f' (see "{section}")'


def near(some, others, relative=1e-3, scale=0.0):
    return len(some) == len(others) and all(
        a == b or abs(a - b) <= relative * max(abs(a), abs(b), scale) for a, b in zip(some, others))


def alike(samples, others):
    """Whether they are the same, in any order."""
    return near(sorted(samples), sorted(others), 1e-4, max(map(abs, samples), default=0.0))


def same_samples(mine, parts):
    """Whether the ranks' parts are the original's samples, in dimension 0 or 1; or each has what all have, such as a mask."""
    for dimension in (0, 1):
        if mine[dimension] and alike(mine[dimension], [one for part in parts for one in part[dimension]]):
            return True
    return all(alike(mine[0], part[0]) for part in parts)


class Training:
    """Of steps: those of the original, from its step `offset` on; those of each rank of another run."""

    def __init__(self, base, ranks, offset=0):
        self.base, self.ranks, self.offset = base, ranks, offset
        self.noise = {}  # by kind and tensors
        self.turned = 0.0  # by rounding: the gradients, as a part of their norm
        self.random = None  # the first step of which the original's second run had other samples

    def shares(self, one, step, kind):
        """How far each tensor is away, of what it may be: parts of its own norm, of all gradients."""
        norms = torch.tensor(one[kind])[:, 0]
        limits = {"before": 1e-6 * norms, "after": 1e-6 * norms + 1e-4 * torch.tensor(one["update"]),
                  "gradients": 1e-4 * norms + 5e-6 * norms.norm()}[kind]
        return torch.tensor(step[kind])[:, 1] / (limits + 1e-30)

    def measure(self, second):
        """The most that rounding moved each tensor, in the original's second run."""
        for number, step in enumerate(second):
            one = self.base[number]
            if not all(same_samples(one["samples"][place], [found]) for place, found in step["samples"].items()):
                self.random = number
                return
            norms, distances, _ = torch.tensor(step["gradients"]).T
            if not norms.norm() < float("inf"):
                raise Verdict(2, f"gradients of the original are not finite at step {number + 1}")
            if distances.norm() > MOST * norms.norm():
                raise Verdict(2, f"at step {number + 1} rounding decides what the original learns" + see("Check it"))
            self.turned = max(self.turned, float(distances.norm() / (norms.norm() + 1e-30)))
            for kind in ("before", "gradients", "after"):
                key, moved = (kind, *step["names"]), self.shares(step, step, kind)
                self.noise[key] = torch.maximum(self.noise.get(key, moved), moved)

    def fault(self):
        """The first one that is sure, with its step; else why there is no saying."""
        lengths = {len(steps) for steps in self.ranks} - {len(self.base)}
        counts = f"{' and '.join(map(str, lengths))} steps instead of {len(self.base)}; " if lengths else ""
        unknown = []
        for number, (one, *steps) in enumerate(zip(self.base, *self.ranks)):
            try:
                fault = self.step_fault(number, one, steps)
            except Unknown as reason:
                unknown.append(f"step {self.offset + number + 1}: {reason}")
                continue
            if fault:
                return f"{counts}step {self.offset + number + 1}: {fault}"
        if unknown and not counts:
            raise Verdict(2, unknown[0])
        return counts.removesuffix("; ")

    def step_fault(self, number, one, steps):
        if any(step["shuffles"] != steps[0]["shuffles"] for step in steps):
            return "the ranks shuffle the samples by different seeds: all must draw one order" + see("Random numbers")
        if not all(step["known"] and len(step["names"]) == len(one["names"]) for step in steps):
            return "the optimizer has other parameters"
        if names := self.wrong(one, steps, "before"):
            return self.weights_fault(number, names)
        names = self.wrong(one, steps, "gradients")
        if names or not all(near(one["norms"], step["norms"]) for step in steps):
            return self.sample_fault(number, one, steps) or self.gradient_fault(number, one, steps, names)
        for rank, step in enumerate(steps):
            if option := self.other_option(one, step):
                return self.option_fault(option, rank, one, steps)
        if names := self.wrong(one, steps, "after"):
            return f"the gradients agree, the optimizer's step does not{names}" + (
                ": is its state loaded?" if self.offset else "")
        return ""

    def wrong(self, one, steps, kind):
        """Names of tensors that differ by more than rounding on a rank."""
        limit = max(1, NOISE * self.noise.get((kind, *one["names"]), torch.zeros(1)).max())
        for rank, step in enumerate(steps):
            fine = self.shares(one, step, kind) <= limit
            if names := [name for name, right in zip(one["names"], fine) if not right]:
                return f": {', '.join(names[:3])}{', …' * (len(names) > 3)} on rank {rank}"
        return ""

    def weights_fault(self, number, names):
        if number:
            return f"weights were changed{names}: after DDP(model), all ranks must change them alike" + see("Load first, then DDP")
        if self.offset:
            return f"weights were changed{names}"
        return (f"other initial weights{names}: seed both scripts alike, and draw nothing more before the model is made"
                + see("What your script has"))

    def sample_fault(self, number, one, steps):
        places = [place for place in one["samples"] if all(place in step["samples"] for step in steps)]
        parts = {place: [step["samples"][place] for step in steps] for place in places}
        others = [place for place in places if not same_samples(one["samples"][place], parts[place])]
        if not others:
            return ""
        for before in range(number):
            earlier = self.base[before]["samples"]
            if all(place in earlier and same_samples(earlier[place], parts[place]) for place in places):
                return f"the samples are those of step {before + 1} again: is set_epoch missing?" + see("Two routes")
        mine, union = one["samples"][others[0]][0], [sample for part in parts[others[0]] for sample in part[0]]
        if not self.fed(others[0], union):
            hint = self.draws(number, one, steps)
            return f"values that the original never feeds its model{hint}"
        if len(union) == len(steps) * len(mine):
            return (f"each rank takes a full-size batch ({len(mine)} samples): give its loader batch_size // world_size"
                    + see("Two routes"))
        counts = f": {len(union)} instead of {len(mine)}" * (len(union) != len(mine))
        return f"other samples, or some repeated{counts}" + see("Two routes")

    def fed(self, place, samples):
        """Whether the original has them too, in any of its steps."""
        known = torch.tensor(sorted({sample for step in self.base for sample in step["samples"].get(place, [[]])[0]}))
        samples = torch.tensor(samples)
        after = torch.searchsorted(known, samples).clamp(1, len(known) - 1)
        near = torch.minimum((known[after - 1] - samples).abs(), (known[after.clamp(max=len(known) - 1)] - samples).abs())
        return bool((near <= 1e-6 * known.abs().max()).double().mean() > 0.9)

    def draws(self, number, one, steps):
        """What random numbers have to do with it: each rank's own cannot be compared with the original's."""
        if self.random is not None and number >= self.random:
            raise Unknown("the original's loader workers draw random numbers: turn augmentation off in both" + see("Check it"))
        names = [name for name in one["drawn"] if all(name in step["drawn"] for step in steps)]
        if any(step["drawn"][name] != steps[0]["drawn"][name] for step in steps for name in names):
            raise Unknown(f"both scripts draw random numbers, by {' and '.join(names)}, and each rank draws its own: "
                          "turn augmentation and noise off in both" + see("Check it"))
        return f"; do the ranks draw alike, by {' and '.join(names)}, what must differ?" + see("Random numbers") if names else ""

    def split(self):
        """Whether the ranks do not each compute what the original does."""
        return len(self.ranks) == 1 or not all(
            one["samples"] and all(len(mine[0]) > 1 and alike(mine[0], step["samples"].get(place, [[]])[0])
                                   for place, mine in one["samples"].items())
            and near(one["losses"], step["losses"])
            for steps in self.ranks for one, step in zip(self.base, steps))

    def gradient_fault(self, number, one, steps, names):
        """Of the causes that the gradients of one step can have, the first that fits."""
        hint = self.draws(number, one, steps)
        base, first, *others = (torch.tensor(step["gradients"]) for step in (one, *steps))
        scale = torch.tensor([1, base[:, 0].norm(), base[:, 0].norm() ** 2])
        clips = [len(step["norms"]) for step in (one, *steps)]
        if len({*clips}) > 1:
            return (f"clipped before they are averaged: {clips[1]} times instead of {clips[0]}; clip once, after the last backward"
                    + see("Errors that vary"))
        unlike = [name for name, *rows in zip(one["names"], first / scale, *(other / scale for other in others))
                  if not all(torch.allclose(row, rows[0], rtol=1e-2, atol=1e-4) for row in rows)]
        if unlike or not all(near(steps[0]["norms"], step["norms"]) for step in steps):
            return (f"the ranks have different gradients{': ' * bool(unlike)}{', '.join(unlike[:3])}: they are not averaged in "
                    "this step; call model(x), not model.module(x)" + see("Training goes through DDP"))
        for name, value in one["buffers"].items():
            if not all(near([value], [step["buffers"].get(name, value)], 1e-3) for step in steps):
                return (f"gradients differ, and the buffer {name}: DDP averages only gradients, so a buffer must be computed "
                        "from the whole batch" + see("Losses over pairs"))
        return self.factor(one, steps, base, first) or self.other_gradients(one, steps, names) + hint

    def factor(self, one, steps, base, first):
        """All gradients are the original's times a number."""
        (size, distance, product), norm, clipped = first.T, base[:, 0].norm(), bool(one["norms"])
        square = (distance.square() + 2 * product - size.square()).sum()  # of their own norm
        across = (square * norm ** 2 / product.sum() ** 2 - 1).abs()  # the angle's tangent, squared
        before = one["norms"][0] if clipped else norm.item() ** 2  # of all gradients, before they are clipped
        times = (steps[0]["norms"][0] if clipped else product.sum().item()) / (before or 1)
        if across > max(1e-5, (NOISE * self.turned) ** 2) or near([times], [1], 0.1):
            return ""
        advice = ""
        if near([times], [1 / len(steps)], 0.1):
            advice = "a sum must be multiplied by world_size, for DDP divides by it"
        elif near([times], [len(steps)], 0.1):
            advice = "a mean must not be multiplied by world_size"
        elif not 0.01 < times < 100 and "GradScaler" in one["switches"]:
            advice = "unscale_ before clipping"
        return (f"all gradients are {times:.4g} times the original's, with {len(steps)} processes: {advice}".removesuffix(": ")
                + see("Sums and unequal parts"))

    def other_gradients(self, one, steps, names):
        losses = ", ".join(f"{sum(step['losses']):.5g}" for step in (one, *steps))
        text = f"gradients differ, samples do not{names}; losses of the original and the ranks: {losses}"
        sizes = [[len(found[0]) for found in step["samples"].values()] for step in steps]
        if any(size != sizes[0] for size in sizes):
            return (f"{text}; the ranks' parts are not equal: divide each one's sum by the count of the whole batch"
                    + see("Sums and unequal parts"))
        return (f"{text}; do the parts count unequally (padding, class weights), or does the loss compare samples?"
                + see("Errors that vary"))

    def other_option(self, one, step):
        groups = itertools.zip_longest(one["options"], step["options"], fillvalue={})
        for mine, others in [(one["switches"], step["switches"]), *groups]:
            for name in mine | others:
                was, now = mine.get(name, False), others.get(name, False)
                rounded = isinstance(was, float) and near([was], [now], 1e-4)
                if was != now and None not in (was, now) and not rounded:
                    return f"{name} {now} instead of {was}"
        return ""

    def option_fault(self, option, rank, one, steps):
        text = f"{option} on rank {rank}"
        if option.startswith("ReduceLROnPlateau") or not all(self.other_option(one, step) for step in steps):
            return f"{text}: all ranks must decide alike, by a figure of all" + see("Decisions")
        if option.startswith("lr ") and not self.offset:
            return f"{text}: keep the original's rate and schedule, for all ranks together take its batch" + see("Loops of steps")
        return text
