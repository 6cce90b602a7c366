"""The verdict is a function of three runs: here they are recorded once, and changed by hand. Each row of README's lists of what
is compared and what is not has its own."""
import copy
import functools
import re
from array import array

import pytest
import runs
import torch
from check_conversion.new_files import NewFile
from check_conversion.protocol import About, Bar, BatchNorm, Fed, Logged, Remark, Saved, Score
from check_conversion.running import Process
from runs import LESS, LOSS, MODEL, TOOL, WHOLE, changed, record, record_twice, verdict

START = """
import tqdm
scaler, memory = torch.amp.GradScaler("cpu"), nn.Module()
memory.register_buffer("keys", torch.zeros(24, 4))
torch.manual_seed(0)"""
EACH = """
    model.eval()
    held_out = nn.functional.mse_loss({model}(data.tensors[0]), data.tensors[1]).item()
    model.train()
    if {rank} == 0:
        open("log.csv", "a").write(f"{{epoch}},{{held_out:.6f}}\\n")
"""
BOTH = [LESS, (MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))"),
        ("\ntorch.manual_seed(0)", START), ("loss.backward()", "scaler.scale(loss).backward()"),
        ("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()"),
        (f"        loss = {LOSS}", f"        with torch.autocast('cpu', torch.bfloat16):\n            loss = {LOSS}")]
SAVE = "torch.save([{}.state_dict(), memory.state_dict()]"
BEFORE = changed(runs.BEFORE, *BOTH, ("in loader:\n", "in tqdm.tqdm(loader):\n        memory.keys[:len(x)] = x\n"),
                 ("torch.save(model.state_dict()", EACH.format(model="model", rank="0") + SAVE.format("model")))
PART = """in tqdm.tqdm(loader, disable=rank != 0):
        memory.keys[:len(x)] = x[[1, 0, *range(2, len(x))]]
        whole, x, y = len(x), x[rank::world_size], y[rank::world_size]
"""
PLAIN = changed(runs.AFTER, *BOTH, WHOLE, ("in loader:\n", PART), ("loss.item() * len(x)", "loss.item() * whole / world_size"),
                (LOSS, "nn.functional.mse_loss(model(x), y, reduction='sum') * world_size / whole"),
                ("torch.save(model.module.state_dict()", SAVE.format("model.module")),
                ("if rank == 0:\n    torch", EACH.format(model="model.module", rank="rank") + "if rank == 0:\n    torch"))


def synchronised(group=None):
    return changed(PLAIN, ("DDP(nn.Sequential", f"DDP(nn.SyncBatchNorm.convert_sync_batchnorm(process_group={group}, "
                           "module=nn.Sequential"), ("nn.Linear(8, 1))", "nn.Linear(8, 1)))"))


@functools.cache
def recorded():
    return *record_twice(BEFORE), record(synchronised(), 2, "train_ddp.py")


@pytest.fixture
def three():
    """Original, nudged and converted, of a right conversion."""
    return copy.deepcopy(recorded())


# Changes of the three runs.

def nothing(three):
    pass


def in_turn(*changes):
    def change(three):
        for one in changes:
            one(three)
    return change


def at(k, ranks=(0, 1), **new):
    """Attributes of step k in the converted run: what becomes of them."""
    def change(three):
        for rank in ranks:
            step = three[2].ranks[rank].steps[k - 1]
            for name, become in new.items():
                setattr(step, name, become(getattr(step, name)))
    return change


def of_each_step(change_step):
    """Called with the run's number, the rank and the step."""
    def change(three):
        for run, found in enumerate(three):
            for rank, process in enumerate(found.ranks):
                for step in process.steps:
                    change_step(run, rank, step)
    return change


def times(factor):
    return lambda numbers: array("d", [factor * number for number in numbers])


def uneven(numbers):
    return array("d", [number * (1 + place % 2) for place, number in enumerate(numbers)])


def otherwise(k):
    """Training goes otherwise in step k, and no factor explains it."""
    return at(k, after=times(1.01), gradients=uneven, losses=lambda _: [7.0])


def rate(value):
    return lambda options: [{**options[0], "lr": value}]


def draws(number, k=1):
    """numpy's numbers are drawn in each step, or in step k alone; number says which, by run and rank."""
    def change_step(run, rank, step):
        step.draws, step.states["numpy"] = ["numpy"], number(run, rank)
    return in_turn(of_each_step(change_step), otherwise(k))


def fed(rows, name="Sequential 0", whole_numbers=False):
    """All that the model is fed, by run and rank, or a second argument of it."""
    def change_step(run, rank, step):
        numbers = [*map(float, rows(run, rank))]
        step.fed = [one for one in step.fed if one.name != name] + [Fed(name, [len(numbers)], whole_numbers, rows=numbers)]
    return of_each_step(change_step)


def whole(run, rank):
    return range(24)


def part(run, rank):
    return range(24) if run < 2 else range(12 * rank, 12 * rank + 12)


def own_numbers_once_a_pass(three):
    fed(lambda run, rank: range(100, 124) if run == 2 and rank else part(run, rank), whole_numbers=True)(three)
    at(1, draws=lambda _: ["numpy"], states=lambda states: {**states, "numpy": id(states)})(three)
    for run in three[:2]:
        step = run.ranks[0].steps[0]
        step.draws, step.states["numpy"] = ["numpy"], 0
    otherwise(1)(three)


def share_of_loss(factor):
    return lambda three: [setattr(step, "losses", [factor * one.losses[0]]) for rank in three[2].ranks
                          for step, one in zip(rank.steps, three[0].ranks[0].steps)]


def shorter_epochs(three):
    """5 steps instead of 6; rates follow them, and so do weights."""
    for run, length, dropping in zip(three, (6, 6, 5), ("", "", "DataLoader")):
        for rank in run.ranks:
            for k, step in enumerate(rank.steps):
                step.passes[-1].steps, step.passes[-1].drop_last = k % length + 1, dropping
    in_turn(at(6, options=rate(0.1)), otherwise(6))(three)


def rounding_grows(three):
    for step in three[1].ranks[0].steps[3:]:
        step.after = times(1.1)(step.after)


def one_step_less(three):
    three[1].ranks[0].notes.remove(three[1].ranks[0].steps[-1])


def another_queue(*ranks):
    def change(three):
        for rank in ranks:
            one = three[2].ranks[rank].steps[1].untrained["memory.keys"]
            for numbers in one.sketch, one.rows, one.columns:
                numbers[0] += 1
        otherwise(3)(three)
    return change


def resumes(three):
    three[0].processes = [Process(0, 1, [Remark(About.LOADED, name) for name in ("words.pt", "run.pt")])]


def end(**how):
    return lambda three: vars(three[2]).update(how)


def add(*notes):
    """To the notes of a run's rank, by run and rank."""
    return lambda three: [three[run].ranks[rank].notes.append(note) for run, rank, note in notes]


def score(*values):
    return add(*((run, rank, Score(value, 6)) for (run, rank), value in zip(((0, 0), (1, 0), (2, 0), (2, 1)), values)))


def stdout(original, converted, nudged=None):
    def change(three):
        for run, text in zip(three, (original, original if nudged is None else nudged, converted)):
            run.stdout = text
    return change


def bar(state, more=0):
    def change(three):
        bars = three[2].ranks[0].of(Bar)
        bars[0].state = state
        three[2].ranks[1].notes += bars[:more]
    return change


def logs(*figures, names=("loss",) * 3):
    return add(*((run, 0, Logged("TensorBoard", names[run], one)) for run, them in enumerate(figures) for one in them))


def saves(original, converted, nudged=None, ranks=(0,)):
    """Of each run its files: path, weight, plain values."""
    def change(three):
        for run, them in zip(three, (original, original if nudged is None else nudged, converted)):
            run.new_files.pop("model.pt", None)
            for rank in run.ranks:
                rank.notes = [note for note in rank.notes if not isinstance(note, Saved)]
            for rank in ranks if run is three[2] else [0]:
                run.ranks[rank].notes += [Saved(path, {"weight": ([1], array("d", [weight]))}, {
                    name: one for name, one in values.items() if not isinstance(one, str)}, {
                    name: one for name, one in values.items() if isinstance(one, str)}) for path, weight, values in them]
    return change


def unknown(three):
    for run in three:
        run.ranks[0].of(Saved)[0].unknown["args"] = "Namespace"


def copied(*weights):
    """A copy of a checkpoint, which torch.save has not written under this name, in each run."""
    def change(three):
        for run, weight in zip(three, weights):
            if weight is not None:
                run.new_files["best.pt"] = NewFile("saved", saved=Saved("", {"weight": ([1], array("d", [weight]))}, {}))
    return change


def saved(original, converted, nudged=None):
    """A plain value in a file."""
    return saves(*(None if one is None else [("a.pt", 1, one)] for one in (original, converted, nudged)))


def new_file(name, original, converted, nudged=None):
    def change(three):
        for run, one in zip(three, (original, converted if nudged == "as converted" else original, converted)):
            run.new_files = {} if one is None else {name: NewFile("text", one) if isinstance(one, str) else NewFile(
                "arrays", arrays={"a": torch.tensor(one)})}
    return change


def unread(name):
    return lambda three: [run.new_files.update({name: NewFile("unread", why="neither text nor arrays")}) for run in three]


def nan_from(k, *ranks):
    """NaN in the weights after step k and from then on in all that a step has, in ranks of the three runs."""
    def change_step(run, rank, step):
        if (run, rank) in ranks:
            seen[run, rank] = seen.get((run, rank), 0) + 1
            for name in ("before", "gradients", "after"):
                if seen[run, rank] > k or (name == "after" and seen[run, rank] == k):
                    setattr(step, name, times(NAN)(getattr(step, name)))
    seen = {}
    return of_each_step(change_step)


NAN = float("nan")
EVERYWHERE = (0, 0), (1, 0), (2, 0), (2, 1)
NOT, SAME, UNKNOWN = "^NOT THE SAME TRAINING ", "^the same training: ", "^cannot be judged: "
CSV = "epoch,loss\n1,0.50000000\n2,0.25000000\n"
ROWS = {  # of README's lists: what becomes of the runs, and status and words of the verdict
    "weights": {
        "all the same": (nothing, 0, SAME + r"12 steps with 2 processes, SyncBatchNorm; compared: training, 2 lines, 2 progress "
                         r"bars, 1 save, 1 csv; not autocast weights within \de-0[78] of their norm; rounding alone moves them "
                         r"by \de-07 .* printed: 2 of 2 lines the same .*saved: 1 file the same: model.pt"),
        "other ones at first": (at(1, before=times(1.1)), 1, NOT + "step 1: it begins with different weights.*Load first"),
        "other ones than after the step before": (at(7, before=times(1.1)), 1, NOT + "step 7: the weights differ before the"),
        "a rank has its own": (at(7, [1], before=times(1.1)), 1, NOT + "step 7: ranks 0 and 1 have different weights: "),
        "a rank has its own after the last step": (
            at(12, [1], after=times(1.1)), 1, NOT + "step 12: ranks 0 and 1 have different weights after the step: "),
        "NaN in all": (nan_from(7, *EVERYWHERE), 0, SAME + "12 steps"),
        "NaN in the converted script alone": (nan_from(7, *EVERYWHERE[2:]), 1, NOT + "step 7: "),
        "NaN in the original alone": (nan_from(7, *EVERYWHERE[:2]), 1, NOT + "step 7: "),
        "NaN in one rank alone": (nan_from(12, (2, 1)), 1, NOT + "step 12: ranks 0 and 1 have different weights after"),
        "NaN in one run of the original alone": (nan_from(7, (1, 0)), 2, UNKNOWN + "the same up to step 6 of 12"),
        "another step of the optimizer": (
            at(2, after=times(1.01)), 1, NOT + "step 2: the same samples, and the gradients agree, but the optimizer's step")},
    "gradients, losses, samples, random numbers, learning rates and other options": {
        "a rank has NaN": (at(1, [1], gradients=times(NAN)), 1, NOT + "step 1: ranks 0 and 1 have different gradients"),
        "a rank has its own gradients": (at(1, [1], gradients=times(1.1)), 1, NOT + "step 1: ranks 0 and 1 have different grad"),
        "gradients of a sum of losses": (in_turn(at(1, after=times(1.01), gradients=times(0.5)), share_of_loss(0.5)), 1, NOT + (
            "step 1: all gradients are 0.5 times .*the sum of the ranks' losses is the original's")),
        "no gradients": (at(1, after=times(1.01), gradients=times(0)), 1, NOT + "step 1: there are no gradients: does the opt"),
        "losses that no mean explains": (
            otherwise(2), 1, NOT + "step 2: the same samples, but the ranks' losses are 7, 7, and it is .*or are labels.*Errors that vary"),
        "another order on each rank": (at(1, [1], passes=lambda passes: [setattr(passes[-1], "asked", (1, 0)), passes][1]), 1, (
            NOT + r"step 1: ranks 0 and 1 shuffle differently, because DistributedSampler's seed and epoch are \(\) and \(1, 0\)")),
        "the whole batch, and every loss is the whole": (in_turn(fed(whole), share_of_loss(1)), 1, (
            "^the same training, but not split between ranks: 12 steps .*each rank computes all of it. See \"Two routes")),
        "the whole batch, and every loss is a part": (
            in_turn(fed(whole), share_of_loss(1 / 2)), 0, SAME + ".* every rank runs the forward pass on the whole batch"),
        "the whole batch, and a rate that follows it": (
            in_turn(fed(whole), at(2, options=rate(0.1))), 1, NOT + "step 2: each rank takes the whole batch"),
        "a second argument with other samples": (in_turn(fed(lambda run, rank: range(100, 112) if run == 2 and rank else part(
            run, rank), "Sequential 1", True), otherwise(1)), 1, NOT + "step 1: different samples .* in Sequential 1"),
        "values of each rank, drawn by nothing": (in_turn(fed(lambda run, rank: range(100, 112) if run == 2 and rank else part(
            run, rank)), otherwise(1)), 1, NOT + "step 1: Sequential 0 has values that train.py never .*no random numbers are"),
        "a shorter epoch, before rates that follow it": (
            shorter_epochs, 1, NOT + "step 6: an epoch had 6 steps in train.py and now has 5: DataLoader.drop_last=True."),
        "the same numbers on all ranks": (
            draws(lambda run, rank: run == 2), 1, NOT + "step 1: both draw random numbers in each step, by numpy, and all ranks"),
        "each rank's own numbers": (draws(lambda run, rank: (run == 2) + rank), 2, UNKNOWN + (
            "step 1: both draw random numbers in each step, by numpy, and each rank draws its own")),
        "the original's numbers, which are no cause": (draws(lambda run, rank: 1), 1, NOT + "step 1: the same samples"),
        "each rank's own numbers once a pass": (
            own_numbers_once_a_pass, 1, NOT + "step 1: the ranks draw different random numbers once per pass over the data, by numpy"),
        "another rate": (at(5, options=rate(0.1)), 1, NOT + "step 5: different optimizer options: lr 0.1 instead of 0.05"),
        "another rate on one rank": (
            at(7, [1], options=rate(0.02)), 1, NOT + "step 7: ranks 0 and 1 have different optimizer options: lr 0.02 instead"),
        "no rate at all": (of_each_step(lambda run, rank, step: step.options[0].pop("lr")), 0, SAME)},
    "buffers, and modules that no optimizer holds": {
        "a rank has its own": (
            another_queue(1), 1, "memory.keys differs between ranks 0 and 1 in step 2: DDP averages only gradients"),
        "another one than the original": (another_queue(0, 1), 1, "memory.keys differs from that of train.py in step 2"),
        "the same rows in another order": (nothing, 0, "the same rows or columns in another order: keys")},
    "`autocast`, `GradScaler`": {
        "off in a step": (at(4, precision=lambda on: on - {"autocast in bfloat16"}), 1, (
            NOT + "step 4: autocast in bfloat16 is on in train.py and off in train_ddp.py.")),
        "off on a rank": (at(1, [1], precision=lambda on: on - {"GradScaler"}), 1, (
            NOT + "step 1: GradScaler is on in train.py and off in train_ddp.py on rank 1."))},
    "`SyncBatchNorm`": {"its statistics": (nothing, 0, SAME + "12 steps .*, SyncBatchNorm; .* 1 csv; not autocast")},
    "what `ReduceLROnPlateau` is given": {
        "another figure": (score(1, 1, 2, 2), 1, NOT + "step 6: ReduceLROnPlateau is given 2 instead of 1.*Decisions"),
        "NaN": (score(1, 1, NAN, NAN), 1, NOT + "step 6: ReduceLROnPlateau is given nan instead of 1"),
        "NaN on a rank": (score(1, 1, 1, NAN), 1, NOT + "step 6: ReduceLROnPlateau is given a different value on each"),
        "NaN in all": (score(NAN, NAN, NAN, NAN), 0, SAME),
        "one on a rank alone": (score(1, 1, 1), 1, NOT + "step 6: ReduceLROnPlateau is given 1 figures in train.py, and 1, 0 on"),
        "another one on a rank": (score(1, 1, 1, 2), 1, NOT + "step 6: ReduceLROnPlateau is given a different value on each")},
    "lines on stdout, and those that the script itself writes to stderr, as `logging` does": {
        "of all ranks": (stdout("loss 0.5\n" * 2, "loss 0.5\n" * 4), 1, SAME + ".*printed 4 times instead of 2: loss 0.5. See"),
        "none with figures": (
            stdout("loss 0.5\n" * 2, "done"), 1, "printed by train_ddp.py: none of the 2 lines with figures of train.py"),
        "fewer words": (stdout("on one device\nloss 0.5\n" * 2, "loss 0.5\n" * 2), 0, (
            "printed: 2 of 4 lines the same not printed by train_ddp.py in these words: on one device .and 1 more line.")),
        "more words": (stdout("loss 0.5", "rank 0: loss 0.9"), 1, "printed differently: train.py: loss 0.5 train_ddp.py: rank 0"),
        "none": (stdout("", ""), 0, "printed: no line"),
        "three of all that differ": (stdout("".join(f"step {k} loss 0.{k}\n" for k in range(1, 7)), "".join(
            f"step {k} loss 0.9{k}\n" for k in range(1, 7))), 1, "(train_ddp.py: step . loss 0.9.*){3}and 3 more lines")},
    "progress bars of `tqdm`": {
        "another state": (bar("5/6"), 1, "shown in a progress bar differently: train.py: 6/6 train_ddp.py: 5/6"),
        "one of each rank": (bar("6/6", 1), 1, "shown in a progress bar 3 times instead of 2: 6/6")},
    "figures for TensorBoard, tensorboardX and W&B": {
        "another figure": (logs([0.5], [0.5], [0.6]), 1, "TensorBoard: loss is 0.6 instead of 0.5. See \"Printed figures"),
        "NaN": (logs([0.5], [0.5], [NAN]), 1, "TensorBoard: loss is nan instead of 0.5"),
        "NaN in both": (logs([NAN], [NAN], [NAN]), 0, "TensorBoard: 1 figures the same"),
        "some that vary": (logs([1, 1, 1], [1, 1, 9], [1, 1, 5]), 0, (
            r"TensorBoard: 2 figures the same not compared, because train.py logs different values in each run: TensorBoard: loss "
            r"\(1 of 3\)")),
        "of all ranks": (logs([0.5], [0.5], [0.5] * 2), 1, "TensorBoard: loss is logged 2 times instead of 1. See \"Printed by"),
        "what varies": (logs([1], [200], [2]), 0, "not compared, because train.py logs different values in each run: TensorBoard: loss"),
        "a name that varies": (logs([1], [1], [2], names=("at 3", "at 9", "at 5")), 0, "train.py logs different values in each run: .*at 3")},
    "files of `torch.save`": {
        "of all ranks": (saves(*[[("a.pt", 1, {})]] * 2, ranks=(0, 1)), 1, "a.pt is saved by more than one rank. See \"Saving"),
        "none": (saves([("a.pt", 1, {})], []), 1, "0 files are saved instead of 1; missing: a.pt. See \"Saving"),
        "twice": (saves([("a.pt", 1, {})], [("a.pt", 1, {})] * 2), 1, "a.pt is saved 2 times instead of 1. See \"Decisions"),
        "another tensor, under a name that varies": (
            saves([("at-13.pt", 1, {})], [("at-17.pt", 999, {})], [("at-99.pt", 1, {})]), 1, "at-17.pt: a different weight is"),
        "a file that another run of the original does not have": (
            saves([("a.pt", 1, {})], [("a.pt", 9, {})], []), 0, "a.pt was not compared: another run of train.py saves it 0"),
        "a tensor that varies": (saves([("a.pt", 1, {})], [("a.pt", 9, {})], [("a.pt", 2, {})]), 0, (
            "^(?!.*same: a.pt).*not compared, because train.py saves it differently in each run: a.pt: weight")),
        "NaN in a tensor": (saves([("a.pt", 1, {})], [("a.pt", NAN, {})]), 1, "a.pt: a different weight is saved"),
        "NaN in both": (saves([("a.pt", NAN, {"loss": NAN})], [("a.pt", NAN, {"loss": NAN})]), 0, "1 file the same: a.pt"),
        "NaN in a number": (saved({"loss": 1.}, {"loss": NAN}), 1, "a.pt: a different loss is saved: nan instead of 1"),
        "a number that varies": (saved({"at": 1.}, {"at": 9.}, {"at": 5.}), 0, "in each run: a.pt: at"),
        "an object": (unknown, 0, "model.pt: not compared: args .Namespace."),
        "another figure beside a time": (saved(*({"loss": loss, "at": at} for loss, at in ((1., 5.), (2., 6.), (1., 9e9)))), 1, (
            "a.pt: a different loss is saved: 2 instead of 1")),
        "another count": (saved({"hits": 96}, {"hits": 48}), 1, "a.pt: a different hits is saved: 48 instead of 96"),
        "another figure in a string": (
            saved({"best": "loss 0.5"}, {"best": "loss 0.9"}), 1, "a.pt: saved differently: train.py: best: loss 0.5 train_ddp"),
        "no string": (saved({"best": "loss 0.5"}, {}), 1, "a.pt: best is not saved"),
        "a value more": (saved({}, {"epochs": 3}), 0, "1 file the same: a.pt .*a.pt: epochs is saved by train_ddp.py alone"),
        "another setting": (saved({"args.workers": 0, "args.log": "a 1"}, {"args.workers": 2, "args.log": "a 2"}), 0, (
            "1 file the same: a.pt .*a.pt: args.workers is 2 instead of 0 a.pt: args.log is a 2 instead of a 1"))},
    "other new files": {
        "rounding": (new_file("a.npy", [1., 2.], [1., 2.0000001]), 0, "written: 1 file the same: a.npy"),
        "another figure": (new_file("a.csv", CSV, CSV.replace("0.50", "0.51")), 1, "a.csv: written differently: train.py: 1,0.5"),
        "a line twice": (new_file("a.csv", CSV, CSV + "2,0.25000000\n"), 1, "a.csv: written 3 times instead of 2"),
        "another shape": (new_file("a.npy", [1., 2.], [1.]), 1, r"a.npy: a has the shape \[1\] instead of \[2\]"),
        "another number": (new_file("a.npy", [1., 2.], [1., 3.]), 1, "a.npy: a different a is saved"),
        "no number": (new_file("a.npy", [1., 2.], [1., float("nan")]), 1, "a.npy: a different a is saved"),
        "none": (new_file("a.csv", CSV, None), 1, "train_ddp.py does not write a.csv"),
        "a copy of a checkpoint": (copied(1, 1, 1), 0, "1 save, 1 csv, 1 pt; .*written: 2 files the same: .*best.pt"),
        "a checkpoint that one of the two renames": (in_turn(saves([("tmp", 1, {})], [("best.pt", 1, {})]), copied(1, 1, 1)), 0, (
            "^(?!.*ddp.py alone)(?!.*not write).*written: 2 files the same: .*best.pt")),
        "a checkpoint that the other one renames": (in_turn(saves([("best.pt", 1, {})], [("tmp", 1, {})]), copied(1, 1, 1)), 0, (
            "^(?!.*ddp.py alone)(?!.*not write).*written: 2 files the same: .*best.pt")),
        "another copy of a checkpoint": (copied(1, 1, 2), 1, "best.pt: a different weight is saved"),
        "no copy of a checkpoint": (copied(1, 1, None), 1, "train_ddp.py does not write best.pt"),
        "one more": (new_file("a.csv", None, CSV), 0, "written by train_ddp.py alone: a.csv"),
        "one of two ranks": (add((2, 0, Remark(About.WRITTEN, "log.csv")), (2, 1, Remark(About.WRITTEN, "log.csv"))), 1, (
            "log.csv is written by ranks 0 and 1"))},
    "how the run ends": {
        "a hang": (end(waits=["rank 0 waits at train_ddp.py:17"]), 1, NOT + "it hangs: rank 0 waits at train_ddp.py:17"),
        "an abort": (end(stderr="terminate called without an active", status=1), 1, NOT + "it aborts when it ends. See \"The"),
        "an error after a fault": (in_turn(at(5, options=rate(0.1)), end(stderr=(
            '  File "/home/me/train_ddp.py", line 9, in <module>\nValueError: my own'), status=1)), 1, NOT + (
            "step 5: different.* it fails after the ranks took 12, 12 steps: it at train_ddp.py:9: ValueError: my own. See")),
        "an error of which another rank hears": (end(stderr="RuntimeError: Connection reset by peer", status=1), 1, NOT + (
            ".*Connection reset by peer .the rank that it waits for has ended.. See \"Hangs")),
        "a rank that does not train": (end(started={0, 1, 2}), 1, NOT + (
            "rank 2 did not train: 3 processes were started, 2 trained. See \"Training goes through DDP")),
        "a process left behind": (end(outlived=[4711]), 1, NOT + "it leaves processes behind. See \"The end of a run"),
        "a file refused to the original": (
            add((0, 0, Remark(About.WRITE, "/tmp/a"))), 2, UNKNOWN + "train.py tried to write /tmp/a, outside this folder. Under"),
        "a file refused to the converted script": (
            add((2, 1, Remark(About.WRITE, "/tmp/a"))), 2, UNKNOWN + "train_ddp.py tried to write /tmp/a, outside this folder"),
        "an original that resumes": (
            resumes, 2, UNKNOWN + "train.py takes no optimizer step; it reads words.pt, run.pt: .* 'run.pt'"),
        "another end of the original": (one_step_less, 2, UNKNOWN + "train.py takes more or fewer steps in the second run")},
    "plain BatchNorm of several ranks (its statistics are frozen), dropout (set to 0), autocast (turned off)": {
        "in the first line": (of_each_step(lambda run, rank, step: (
            step.batchnorm.add(BatchNorm.FROZEN), step.stood_still.add("dropout"))), 0, SAME + (
            "12 steps with 2 processes; .* 1 csv; not BatchNorm, dropout, autocast weights within"))},
    "what differs in each run of the original (times, addresses)": {name: (
        stdout(original, converted, nudged), 0,
        f"compared except for what differs in each run, such as a time: {re.escape(original.splitlines()[0])}") for name, (
            original, nudged, converted) in {
                "a clock": ("The time elapse of 000 is: 00: 00: 01", "The time elapse of 000 is: 00: 03: 44",
                            "The time elapse of 000 is: 00: 00: 02"),
                "a speed": ("Tokens / Sec: 1219.2", "Tokens / Sec: 3.1", "Tokens / Sec: 800.7"),
                "a short time": ("Tot: 249ms\nTot: 251ms", "Tot: 1m12s\nTot: 71s", "Tot: 1s12ms\nTot: 980ms"),
                "an address": ("<State at 0x7f12ab> 0.5", "<State at 0x7f99cd> 0.5", "<State at 0x55e0f1> 0.5")}.items()} | {
        name: (stdout(original, converted, original.replace("12:30", "00:31")), 1,
               f"printed differently: train.py: {re.escape(original)} train_ddp.py: {re.escape(converted)}") for name, (
            original, converted) in {
                "a figure beside a time": ("12:30:01 loss 0.5", "12:30:07 loss 0.9"), "beta, no time": ("beta 0.50", "beta 0.60"),
                "theta, no time": ("theta: 1.25", "theta: 1.5"), "a duration, no time": ("3.5 s of speech", "3.9 s of speech"),
                "a count": ("[96/240]", "[48/240]"), "a loss that is none": ("loss 0.5", "loss nan")}.items()} | {
        "a line": (stdout("loss 0.5\nspike 3", "loss 0.5", "loss 0.5"), 0, (
            "printed: 1 of 2 lines the same not compared, because train.py has different lines in each run: spike 3")),
        "an array, the only one of its file": (new_file("a.npy", [1.], [9.], "as converted"), 0, (
            "^(?!.*npy;)(?!.*file the same: a.npy).*train.py writes it differently in each run: a.npy: a"))},
    "images, pickles, files of other kinds": {
        "an image": (add((0, 0, Remark(About.IMAGE, "a.png"))), 0, "images were not compared: a.png"),
        "a pickle": (unread("a.pkl"), 0, r"not read: a.pkl \(neither text nor arrays\)")},
    "parameters whose gradient is nothing but rounding": {
        "a bias before BatchNorm": (nothing, 0, "not compared, because their gradients are nothing but rounding: 0.bias")},
    "all steps once rounding alone has become large": {
        "before the end": (rounding_grows, 2, UNKNOWN + "the same up to step 3 of 12; from there on rounding alone moves the"),
        "though a figure differs then": (in_turn(rounding_grows, stdout("loss 0.5", "loss 0.9")), 2, UNKNOWN + "the same up")},
    "what packages write to stderr": {"other lines": (end(stderr="loss 0.7"), 0, "^(?!.*0.7)" + SAME[1:])}}


def test_each_row_of_readmes_lists_is_held():
    lists = (TOOL / "README.md").read_text().split("## What is compared")[1].split("## Options")[0]
    rows = re.findall(r"^\| (.*?) \|", lists, re.MULTILINE)
    assert [row for row in rows if row not in ("compared", "not compared", "---")] == [*ROWS]


@pytest.mark.parametrize("change, status, says", [one for row in ROWS.values() for one in row.values()], ids=[
    f"{row}: {name}" for row, them in ROWS.items() for name in them])
def test_the_verdict_follows_from_what_was_noted(change, status, says, three):
    change(three)
    found, said = verdict(*three)
    assert found == status and re.search(says, said)


@pytest.mark.parametrize("status, says, after", [
    (0, r"BatchNorm compared as SyncBatchNorm .the conversion at train_ddp.py:\d+ was not called.; .* csv; not autocast weights", changed(PLAIN, (
        "optimizer =", "if torch.cuda.is_available():\n    nn.SyncBatchNorm.convert_sync_batchnorm(model)\noptimizer ="))),
    (1, "", synchronised("[dist.new_group([r]) for r in range(2)][rank]"))], ids=["on GPUs alone", "in groups of one rank"])
def test_batchnorm_is_synchronised_as_it_would_be_on_gpus_over_unequal_parts(status, says, after):
    original, nudged, _ = recorded()
    found, said = verdict(original, nudged, record(after, 2, "train_ddp.py"))
    assert found == status and re.search(says, said)


def test_each_cure_of_the_chapter_is_one_that_a_verdict_names():
    chapter = TOOL.parents[1] / "docs/your_own_script.md"
    cures = re.findall(r"^### (.*)$", chapter.read_text(), re.MULTILINE)
    code = "".join(file.read_text() for file in (TOOL / "check_conversion").glob("*.py"))
    assert len(cures) > 10 and all(f'"{cure}"' in code for cure in cures)
