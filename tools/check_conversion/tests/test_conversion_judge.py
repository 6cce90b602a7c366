"""The verdict is a function of three runs: here they are recorded once, and changed by hand."""
import copy
import functools
import re
from array import array

import pytest
from check_conversion.protocol import About, Logged, Remark, Saved, Score
from check_conversion.running import Process
from runs import AFTER, BEFORE, TOOL, record, record_twice, verdict


@functools.cache
def recorded():
    return *record_twice(BEFORE), record(AFTER, 2, "train_ddp.py")


@pytest.fixture
def three():
    """Original, nudged and converted, of a right conversion."""
    return copy.deepcopy(recorded())


def at(k, ranks=(0, 1), **new):
    """Attributes of step k in the converted run: what becomes of them."""
    def change(three):
        for rank in ranks:
            step = three[2].ranks[rank].steps[k - 1]
            for name, become in new.items():
                setattr(step, name, become(getattr(step, name)))
    return change


def times(factor):
    return lambda numbers: array("d", [factor * number for number in numbers])


def uneven(numbers):
    return array("d", [number * (1 + place % 2) for place, number in enumerate(numbers)])


def rate(value):
    return lambda options: [{**options[0], "lr": value}]


def add(*notes):
    """To the notes of each run's ranks, by run and rank."""
    def change(three):
        for run, rank, note in notes:
            three[run].ranks[rank].notes.append(note)
    return change


def noise(own):
    """Drawn in each step by numpy, in the original and in the ranks, who lose the original's loss by it."""
    def change(three):
        for run in three:
            for rank, process in enumerate(run.ranks):
                for step in process.steps:
                    step.draws, step.states["numpy"] = ["numpy"], len(run.ranks) + rank * own
        at(1, after=times(1.01), gradients=uneven, losses=lambda _: [7.0])(three)
    return change


def whole_batches(share):
    """On every rank, whose loss is a share of the original's."""
    def change(three):
        for rank in three[2].ranks:
            for ours, one in zip(rank.steps, three[0].ranks[0].steps):
                ours.fed, ours.losses = copy.deepcopy(one.fed), [share * one.losses[0]]
    return change


def shorter_epochs(three):
    """5 steps instead of 6; rates follow them, and so do weights."""
    for run, length, dropping in zip(three, (6, 6, 5), ("", "", "DataLoader")):
        for rank in run.ranks:
            for k, step in enumerate(rank.steps):
                step.passes[-1].steps, step.passes[-1].drop_last = k % length + 1, dropping
    at(6, options=rate(0.1), after=times(2), losses=lambda _: [7.0])(three)


def no_rates(three):
    for step in [step for run in three for rank in run.ranks for step in rank.steps]:
        del step.options[0]["lr"]


def noisy_gradients(three):
    for k, run in enumerate(three):
        for step in [step for rank in run.ranks for step in rank.steps]:
            step.gradients[:32], step.after[:32] = array("d", [1e-12 * (k + 1)] * 32), array("d", [k] * 32)


def rounding_grows(three):
    for step in three[1].ranks[0].steps[3:]:
        step.after = times(1.1)(step.after)


def one_step_less(three):
    three[1].ranks[0].notes.remove(three[1].ranks[0].steps[-1])


def resumes(three):
    three[0].processes = [Process(0, 1, [Remark(About.LOADED, name) for name in ("words.pt", "run.pt")])]


def end(**how):
    return lambda three: vars(three[2]).update(how)


def stdout(*texts):
    def change(three):
        for run, text in zip(three, texts):
            run.stdout = text
    return change


def logs(*figures, name="loss"):
    return add(*((run, 0, Logged("TensorBoard", name, one)) for run, them in enumerate(figures) for one in them))


def saves(*files):
    """Of each run its files: path, weight, plain values."""
    def change(three):
        for run, them in zip(three, files):
            for rank in run.ranks:
                rank.notes = [note for note in rank.notes if not isinstance(note, Saved)]
            run.ranks[0].notes += [Saved(path, {"weight": ([1], array("d", [weight]))}, values) for path, weight, values in them]
    return change


def saved_by_all(three):
    three[2].ranks[1].notes.append(three[2].ranks[0].of(Saved)[0])


NOT = "NOT THE SAME TRAINING "
VERDICTS = [  # status, what is said, and by what change
    (0, r"the same training: 12 steps with 2 processes; compared: training, 2 lines, 1 save weights within \de-0[78] of their "
        r"norm; rounding alone moves them by \de-07 printed: 2 of 2 lines the same saved: 1 file the same: model.pt$", add()),
    (1, NOT + "step 5: different optimizer options: lr 0.1 instead of 0.05. See \"Decisions", at(5, options=rate(0.1))),
    (1, NOT + "step 7: ranks 0 and 1 have different optimizer options: lr 0.02 instead of 0.05", at(7, [1], options=rate(0.02))),
    (1, NOT + "step 1: ranks 0 and 1 have different gradients: .*Training goes through DDP", at(1, [1], gradients=times(1.1))),
    (1, NOT + "step 7: ranks 0 and 1 have different weights: .*Load first, then DDP", at(7, [1], before=times(1.1))),
    (1, NOT + "step 1: it begins with different weights.*Load first", at(1, before=times(1.1))),
    (1, NOT + "step 7: the weights differ before the step, although they agreed after the", at(7, before=times(1.1))),
    (1, NOT + "step 1: all gradients are 0.5 times .*the sum of the ranks' losses is the original's", at(
        1, after=times(1.01), gradients=times(0.5), losses=lambda losses: [losses[0] / 2])),
    (1, NOT + "step 1: there are no gradients: does the optimizer hold", at(1, after=times(1.01), gradients=times(0))),
    (1, NOT + "step 2: the same samples, and the gradients agree, but the optimizer's step does not", at(2, after=times(1.01))),
    (1, NOT + "step 2: the same samples, and a loss of 7, 7 in the ranks.*Errors that vary", at(
        2, after=times(1.01), gradients=uneven, losses=lambda _: [7.0])),
    (1, NOT + r"step 1: ranks 0 and 1 shuffle differently, by DistributedSampler's seed and epoch \(0, 0\) and \(1, 0\)", at(
        1, [1], passes=lambda passes: [setattr(passes[-1], "asked", (1, 0)), passes][1])),
    (1, NOT + "step 1: both draw random numbers in each step, by numpy, and all ranks draw the same", noise(own=0)),
    (2, "cannot be judged: step 1: both draw random numbers in each step, by numpy, and each rank draws its own", noise(own=1)),
    (1, NOT + "step 6: ReduceLROnPlateau is given 2 instead of 1.*Decisions", add(
        (0, 0, Score(1, 6)), (1, 0, Score(1, 6)), (2, 0, Score(2, 6)), (2, 1, Score(2, 6)))),
    (1, NOT + "step 6: an epoch had 6 steps in train.py and now has 5: DataLoader.drop_last=True.", shorter_epochs),
    (1, "the same training, but not shared out: 12 steps .*each rank computes all of it. See \"Two routes", whole_batches(1)),
    (0, "the same training: .* every rank runs the forward pass on the whole batch", whole_batches(1 / 2)),
    (0, "the same training: ", no_rates),
    (0, "the same .* not compared, because their gradients are nothing but rounding: 0.weight printed", noisy_gradients),
    (2, "cannot be judged: the same up to step 3 of 12; from there on rounding alone moves the weights", rounding_grows),
    (2, "cannot be judged: train.py takes more or fewer steps in the second run, with weights moved by one", one_step_less),
    (2, "cannot be judged: train.py takes no optimizer step; it reads words.pt, run.pt: .* --without 'run.pt'", resumes),
    (2, "cannot be judged: train.py would write /data/log.txt", add((0, 0, Remark(About.WRITE, "/data/log.txt")))),
    (2, "cannot be judged: train_ddp.py would write /data/log.txt", add((2, 1, Remark(About.WRITE, "/data/log.txt")))),
    # How the converted script ends.
    (1, NOT + "it hangs: rank 0 waits at train_ddp.py:17. See \"Hangs", end(waits=["rank 0 waits at train_ddp.py:17"])),
    (1, NOT + "it aborts when it ends. See \"The end of a run", end(stderr="terminate called without an active", status=1)),
    (1, NOT + "it fails after 12, 12 steps of the ranks: it at train_ddp.py:9: ValueError: my own. See \"Errors", end(
        stderr='  File "/home/me/train_ddp.py", line 9, in <module>\nValueError: my own', status=1)),
    (1, NOT + ".*Connection reset by peer: the rank that it waits for has ended. See \"Hangs", end(
        stderr="RuntimeError: Connection reset by peer", status=1)),
    (1, NOT + "it leaves processes behind. See \"The end of a run", end(left=[4711])),
    # What it prints, logs and saves.
    (1, "the same training: .*printed 4 times instead of 2: loss 0.5. See \"Printed by all ranks", stdout(
        *["loss 0.5\n" * 2] * 2, "loss 0.5\n" * 4)),
    (1, r"the same training: .*printed differently: train.py: \[96/240\] train_ddp.py: \[48/240\]", stdout(
        "[96/240]", "[96/240]", "[48/240]")),
    (1, "the same .*train_ddp.py prints none of the 2 lines with figures", stdout(*["loss 0.5\n" * 2] * 2, "done")),
    (0, "printed: 2 of 4 lines the same not printed by train_ddp.py in these words: on one device .and 1 more line.", stdout(
        *["on one device\nloss 0.5\n" * 2] * 2, "loss 0.5\n" * 2)),
    (0, "printed: no line", stdout("", "", "")),
    (1, "TensorBoard: loss is logged 2 times instead of 1. See \"Printed by all ranks", logs([0.5], [0.5], [0.5, 0.5])),
    (1, "TensorBoard: loss is 0.6 instead of 0.5. See \"Printed figures", logs([0.5], [0.5], [0.6])),
    (0, "logged: not compared, because another run of train.py logs others: TensorBoard: loss", logs([1], [200], [2])),
    (1, "model.pt is saved by more than one rank. See \"Saving", saved_by_all),
    (1, "0 files are saved instead of 1, without a.pt. See \"Saving", saves(*[[("a.pt", 1, {})]] * 2, [])),
    (1, "a.pt is saved 2 times instead of 1. See \"Decisions", saves(*[[("a.pt", 1, {})]] * 2, [("a.pt", 1, {})] * 2)),
    (1, "at-17.pt: a different weight is saved", saves([("at-13.pt", 1, {})], [("at-99.pt", 1, {})], [("at-17.pt", 999, {})])),
    (1, "a.pt: a different loss is saved: 2 instead of 1", saves(
        *[[("a.pt", 1, {"loss": 1.0, "at": at})] for at in (5.0, 9e9)], [("a.pt", 1, {"loss": 2.0, "at": 6.0})])),
    (1, "a.pt: a different hits is saved: 48 instead of 96", saves(*[[("a.pt", 1, {"hits": hits})] for hits in (96, 96, 48)])),
    (0, "1 file the same: a.pt a.pt: epochs is saved by train_ddp.py alone", saves(
        *[[("a.pt", 1, {})]] * 2, [("a.pt", 1, {"epochs": 3})])),
    (0, "1 file the same: a.pt a.pt: args.workers is 2 instead of 0", saves(
        *[[("a.pt", 1, {"args.workers": workers})] for workers in (0, 0, 2)])),
    (0, "a.pt was not compared: another run of train.py saves it 0 times", saves([("a.pt", 1, {})], [], [("a.pt", 9, {})]))]


@pytest.mark.parametrize("status, says, change", VERDICTS, ids=[f"{status} {says[-60:]}" for status, says, _ in VERDICTS])
def test_the_verdict_follows_from_what_was_noted(status, says, change, three):
    change(three)
    found, said = verdict(*three)
    assert found == status and (re.match if says.startswith((NOT, "cannot", "the same")) else re.search)(says, said)


def test_each_cure_of_the_chapter_is_one_that_a_verdict_names():
    chapter = TOOL.parents[1] / "docs/your_own_script.md"
    cures = re.findall(r"^### (.*)$", chapter.read_text(), re.MULTILINE)
    code = "".join(file.read_text() for file in (TOOL / "check_conversion").glob("*.py"))
    assert len(cures) > 10 and all(f'"{cure}"' in code for cure in cures)
