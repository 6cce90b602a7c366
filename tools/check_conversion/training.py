"""Whether a run trains as the original's first run did, and if not, from which step on, and why."""
import torch

torch.set_default_dtype(torch.float64)  # of what the processes have noted
NOISE = 5  # times what rounding alone does in the original's second run
MOST = 0.02  # of all gradients; where rounding does more, it decides


class Verdict(Exception):
    """Status and text."""


class Unknown(Exception):
    """Why one step cannot be judged."""


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
    unions = [[sample for part in parts for sample in part[dimension]] for dimension in (0, 1)]
    return any(rows and alike(rows, union) for rows, union in zip(mine, unions)) or all(alike(mine[0], part[0]) for part in parts)


class Training:
    """Of steps: those of the original, from its step `offset` on; those of each rank of another run."""

    def __init__(self, base, ranks, offset=0):
        self.base, self.ranks, self.offset = base, ranks, offset
        self.noise, self.turned = {}, 0.0  # by rounding: each tensor, and all gradients as a part of their norm

    def shares(self, one, step, kind):
        """How far each tensor is away, of what it may be: parts of its own norm, of all gradients."""
        norms = torch.tensor(one[kind])[:, 0]
        limits = {"before": 1e-6 * norms, "after": 1e-6 * norms + 1e-4 * torch.tensor(one["update"]),
                  "gradients": 1e-4 * norms + 5e-6 * norms.norm()}[kind]
        return torch.tensor(step[kind])[:, 1] / (limits + 1e-30)

    def measure(self, second):
        """The most that rounding moved each tensor, in the original's second run."""
        if len(second) != len(self.base):
            raise Verdict(2, f"the original takes {len(self.base)} steps, and {len(second)} where the clocks run faster")
        for number, step in enumerate(second, 1):
            if number == 1 and self.shares(step, step, "before").max() > 1e5:
                raise Verdict(2, "the original begins with other weights in each run: seed it" + see("Check it"))
            norms, distances, _ = torch.tensor(step["gradients"]).T
            if not norms.norm() < float("inf"):
                raise Verdict(2, f"gradients of the original are not finite at step {number}")
            if distances.norm() > MOST * norms.norm():
                raise Verdict(2, f"at step {number} rounding decides what the original learns{see('Check it')}")
            self.turned = max(self.turned, float(distances.norm() / (norms.norm() + 1e-30)))
            for kind in ("before", "gradients", "after"):
                key, moved = (kind, *step["names"]), self.shares(step, step, kind)
                self.noise[key] = torch.maximum(self.noise.get(key, moved), moved)

    def fault(self):
        """The first that is sure. If there is none but a step that cannot be judged, there is no verdict."""
        lengths, unknown = {len(steps) for steps in self.ranks} - {len(self.base)}, []
        counts = f"{' and '.join(map(str, lengths))} steps instead of {len(self.base)}; " * bool(lengths)
        for number, (one, *steps) in enumerate(zip(self.base, *self.ranks)):
            place = f"step {self.offset + number + 1}: "
            try:
                if fault := self.step_fault(number, one, steps):
                    return counts + place + fault
            except Unknown as reason:
                unknown.append(f"{place}{reason}")
        if unknown and not counts:
            raise Verdict(2, unknown[0])
        return counts.removesuffix("; ")

    def step_fault(self, number, one, steps):
        if any(step["shuffles"] != steps[0]["shuffles"] for step in steps):
            return "the ranks shuffle the samples by different seeds" + see("Random numbers")
        if not all(step["known"] and len(step["names"]) == len(one["names"]) for step in steps):
            return "the optimizer has other parameters"
        if names := self.wrong(one, steps, "before"):
            return (f"weights were changed{names}" + see("Load first, then DDP") if number or self.offset else
                    f"other initial weights{names}: does one script draw more numbers before?" + see("What your script has"))
        names = self.wrong(one, steps, "gradients")
        if names or not all(near(one["norms"], step["norms"]) for step in steps):
            return self.sample_fault(number, one, steps) or self.gradient_fault(one, steps, names)
        options = [self.other_option(one, step) for step in steps]
        for rank, option in enumerate(options):
            if option:
                section = "Load first, then DDP" if self.offset else "What your script has" if all(options) else "Decisions"
                advice = ": is the state of optimizer and schedule loaded?" * bool(self.offset)
                return f"{option} on rank {rank}{advice}{see(section)}"
        names = self.wrong(one, steps, "after")
        return names and f"the gradients agree, the optimizer's step does not{names}"

    def wrong(self, one, steps, kind):
        """Names of tensors that differ by more than rounding on a rank."""
        limit = max(1, NOISE * self.noise.get((kind, *one["names"]), torch.zeros(1)).max())
        for rank, step in enumerate(steps):
            fine = self.shares(one, step, kind) <= limit
            if names := [name for name, right in zip(one["names"], fine) if not right]:
                return f": {', '.join(map(str, names[:3]))}{', …' * (len(names) > 3)} on rank {rank}"
        return ""

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
        if self.offset:
            return "other samples than in the unbroken run: is their order seeded in each epoch?" + see("Random numbers")
        for dimension in (0, 1):
            union = [sample for part in parts[others[0]] for sample in part[dimension]]
            if self.fed(others[0], dimension, union):
                size = len(one["samples"][others[0]][dimension])
                if len(union) == len(steps) * size and not number:
                    return "each rank takes a full-size batch, not batch_size // world_size" + see("Two routes")
                counts = f": {len(union)} instead of {size}" * (len(union) != size)
                return f"other samples, or some repeated{counts}" + see("Two routes")
        return "samples or values that the original never feeds its model" + self.random(one, steps, one["workers"])

    def fed(self, place, dimension, samples):
        """Whether the original has them too, in any of its steps."""
        known = {f"{sample:.5g}" for step in self.base for sample in step["samples"].get(place, ((), ()))[dimension]}
        return sum(f"{sample:.5g}" in known for sample in samples) > 0.9 * len(samples)

    def random(self, one, steps, workers=False):
        """Random numbers of each rank's own are no fault, but hide one."""
        if workers or (one["drawn"] and all(step["drawn"] for step in steps) and len({step["drawn"] for step in steps}) > 1):
            raise Unknown("the original draws random numbers here, and each rank its own: turn augmentation and noise off in both"
                          + see("Check it"))
        return "; do the ranks draw alike what must differ?" + see("Random numbers") if one["drawn"] else ""

    def split(self):
        """Whether the ranks do not each compute what the original does."""
        return len(self.ranks) == 1 or not all(
            one["samples"] and near(one["losses"], step["losses"]) and all(
                len(rows[0]) > 1 and alike(rows[0], step["samples"].get(place, [[]])[0])
                for place, rows in one["samples"].items())
            for steps in self.ranks for one, step in zip(self.base, steps))

    def gradient_fault(self, one, steps, names):
        """Of what the gradients of one step can have, the first that fits."""
        if self.offset:
            return f"gradients differ, samples do not{names}: is dropout seeded in each epoch?{see('Random numbers')}"
        base, first, *others = (torch.tensor(step["gradients"]) for step in (one, *steps))
        norm = base[:, 0].norm()
        scale = torch.tensor([1, norm, norm ** 2])
        if not all(torch.allclose(other / scale, first / scale, rtol=1e-2, atol=1e-4) for other in others):
            return "the ranks have different gradients, not averaged in this step: does it go around DDP?" + see(
                "Training goes through DDP")
        if len(steps[0]["norms"]) != len(one["norms"]) or not all(near(steps[0]["norms"], step["norms"]) for step in steps):
            norms = " and ".join(str([float(f"{norm:.3g}") for norm in step["norms"]]) for step in steps)
            return f"clipped before they are averaged, at norms of {norms}{see('Errors that vary')}"
        if not near(one["clips"], steps[0]["clips"]):
            return f"gradients are clipped to {steps[0]['clips']} instead of {one['clips']}" + see("What your script has")
        hint = self.random(one, steps)
        for name, value in one["buffers"].items():
            if not all(near([value], [step["buffers"].get(name, value)]) for step in steps):
                return (f"gradients differ, and the buffer {name}: DDP averages only gradients, so it must be computed from "
                        "the whole batch" + see("Losses over pairs"))
        if times := self.factor(one, steps, base, first):
            hint = ": unscale_ before clipping" * (not 0.01 < times < 100 and "GradScaler" in one["switches"])
            return (f"all gradients are {times:.4g} times the original's, with {len(steps)} processes"
                    f"{hint or ': a sum must be multiplied by world_size, a mean must not' + see('Sums and unequal parts')}")
        losses = ", ".join(f"{sum(step['losses']):.5g}" for step in (one, *steps))
        return (f"gradients differ, samples do not{names}; losses of the original and the ranks: {losses}; do parts count "
                f"unequally (padding, class weights), or does the loss compare samples?{see('Errors that vary')}{hint}")

    def factor(self, one, steps, base, first):
        """If all gradients are the original's times a number, that number."""
        (size, distance, product), norm = first.T, base[:, 0].norm()
        square = (distance.square() + 2 * product - size.square()).sum()  # of their own norm
        parallel = (square * norm ** 2 / product.sum() ** 2 - 1).abs() < max(1e-5, (NOISE * self.turned) ** 2)
        mine, its = (one["norms"][0], steps[0]["norms"][0]) if one["norms"] else (norm.item() ** 2, product.sum().item())
        times = its / (mine or 1)  # of all gradients, before they are clipped
        return times if parallel and not near([times], [1], 0.1) else None

    def other_option(self, one, step):
        for mine, others in [(one["switches"], step["switches"]), *zip(one["options"], step["options"])]:
            for name in mine | others:
                was, now = mine.get(name, False), others.get(name, False)
                rounded = isinstance(was, float) and near([was], [now], 1e-4)
                if was != now and None not in (was, now) and not rounded:
                    return f"{name} {now} instead of {was}"
        return ""
