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
def recorded(text=AFTER):
    return *record_twice(BEFORE), record(text, 2, "train_ddp.py")


@pytest.fixture
def three():
    """Original, nudged and converted, of a right conversion."""
    return copy.deepcopy(recorded())


def scaled(numbers, factor):
    return array("d", [factor * number for number in numbers])


def all_steps(run, k):
    return [rank.steps[k - 1] for rank in run.ranks]


def test_a_right_conversion_is_the_same_in_all_its_parts(three):
    status, said = verdict(*three)
    assert status == 0 and re.match(
        r"the same training: 12 steps with 2 processes; compared: training, 2 lines, 1 save weights within \de-0[78] of their "
        r"norm; rounding alone moves them by \de-07 printed: 2 of 2 lines the same saved: 1 file the same: model.pt$", said)


# Training: what is changed in the converted run's records, and what is said.

def another_rate(_, __, converted):
    for step in all_steps(converted, 5):
        step.options[0]["lr"] = 0.1


def a_rate_by_rank(_, __, converted):
    converted.ranks[1].steps[6].options[0]["lr"] = 0.025


def other_gradients_by_rank(_, __, converted):
    step = converted.ranks[1].steps[0]
    step.gradients = scaled(step.gradients, 1.1)


def a_model_in_no_ddp(_, __, converted):
    other_gradients_by_rank(_, __, converted)
    for rank in converted.ranks:
        rank.notes[rank.notes.index(rank.steps[0]) - 1].without = ["0.weight"]


def other_weights_by_rank(_, __, converted):
    step = converted.ranks[1].steps[6]
    step.before = scaled(step.before, 1.1)


def other_weights_at_the_start(_, __, converted):
    for step in all_steps(converted, 1):
        step.before = scaled(step.before, 1.1)


def other_weights_later(_, __, converted):
    for step in all_steps(converted, 7):
        step.before = scaled(step.before, 1.1)


def parted(converted, k, factor=1.5):
    for step in all_steps(converted, k):
        step.after, step.gradients = scaled(step.after, 1.01), scaled(step.gradients, factor)


def half_the_gradients(_, __, converted):
    parted(converted, 1, 0.5)
    for step in all_steps(converted, 1):
        step.losses = [step.losses[0] / 2]


def no_gradients(_, __, converted):
    parted(converted, 1, 0)


def another_loss(_, __, converted):
    for step in all_steps(converted, 2):
        step.after = scaled(step.after, 1.01)
        step.losses = [7.0]


def clipped_early(_, __, converted):
    for rank, step in enumerate(all_steps(converted, 2)):
        step.after, step.norms = scaled(step.after, 1.01), [1.5 + rank]


def samples_in_the_order_before(original, _, converted):
    parted(converted, 7)
    for rank, step in zip(converted.ranks, all_steps(converted, 7)):
        step.fed = copy.deepcopy(rank.steps[0].fed)
        step.passes[-1].again = True


def a_shuffle_of_its_own(_, __, converted):
    converted.ranks[1].steps[0].passes[-1].asked = (1, 0)


def the_same_noise(original, nudged, converted):
    for step in all_steps(converted, 1):
        step.after = scaled(step.after, 1.01)
        step.gradients = array("d", [number * (1 + place % 2) for place, number in enumerate(step.gradients)])
        step.losses = [7.0]
    for run in (original, nudged, converted):
        for step in (step for rank in run.ranks for step in rank.steps):
            step.draws, step.states["numpy"] = ["numpy"], len(run.ranks)


def own_noise(original, nudged, converted):
    the_same_noise(original, nudged, converted)
    for rank, step in enumerate(all_steps(converted, 1)):
        step.states["numpy"] = rank


def a_step_more(_, __, converted):
    for rank in converted.ranks:
        rank.notes.append(copy.deepcopy(rank.steps[-1]))


def scores(original, nudged, ranks):
    for run, values in ((original[0], [1.0]), (original[1], [1.0]), (nudged, ranks)):
        for rank, value in zip(run.ranks, values):
            rank.notes.append(Score(value, 6))


def a_score_by_rank(original, nudged, converted):
    scores((original, nudged), converted, [1.0, 2.0])


def another_score(original, nudged, converted):
    scores((original, nudged), converted, [2.0, 2.0])


FAULTS = {
    another_rate: "step 5: different optimizer options: lr 0.1 instead of 0.05. See \"Decisions",
    a_rate_by_rank: "step 7: ranks 0 and 1 have different optimizer options: lr 0.025 instead of 0.05. See \"Decisions",
    other_gradients_by_rank: "step 1: ranks 0 and 1 have different gradients: .*Training goes through DDP",
    a_model_in_no_ddp: "step 1: ranks 0 and 1 have different gradients: .*0.weight in no DDP.*Training goes through DDP",
    other_weights_by_rank: "step 7: ranks 0 and 1 have different weights: .*Load first, then DDP",
    other_weights_at_the_start: "step 1: it begins with different weights.*Load first",
    other_weights_later: "step 7: the weights differ before the step, although they agreed after the previous step",
    half_the_gradients: "step 1: all gradients are 0.5 times those of train.py = 1/2, the number of processes: the sum of the",
    no_gradients: "step 1: there are no gradients: does the optimizer hold",
    another_loss: "step 2: the same samples, .*the optimizer's step does not|step 2: .*loss of 7, 7 in the ranks",
    clipped_early: "step 2: gradients are clipped before they are averaged, at norms of 1.5, 2.5",
    samples_in_the_order_before: "step 7: the samples come in the order of an epoch before: no set_epoch. See \"Two routes",
    a_shuffle_of_its_own: r"step 1: ranks 0 and 1 shuffle differently, by DistributedSampler's seed and epoch \(0, 0\) and \(1",
    the_same_noise: "step 1: both draw random numbers in each step, by numpy, and all ranks the same.*Random numbers",
    a_step_more: "step 13: train.py takes 12 steps, the ranks take 13, 13.*Two routes",
    a_score_by_rank: "step 6: ReduceLROnPlateau is given a different figure on each rank: 1, 2.*Decisions",
    another_score: "step 6: ReduceLROnPlateau is given 2 instead of 1.*Decisions"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_training_is_named_with_its_step_and_its_cause(fault, three):
    fault(*three)
    status, said = verdict(*three)
    assert status == 1 and said.startswith("NOT THE SAME TRAINING") and re.search(FAULTS[fault], said)


def test_random_numbers_that_each_rank_draws_for_itself_keep_the_check_from_seeing_more(three):
    own_noise(*three)
    status, said = verdict(*three)
    assert status == 2 and "by numpy, each rank its own, as it should" in said


def whole_batches(converted, original, losses):
    for rank in converted.ranks:
        for ours, one, loss in zip(rank.steps, original.ranks[0].steps, losses):
            ours.fed, ours.losses = copy.deepcopy(one.fed), [loss(one.losses[0])]


def test_a_whole_batch_on_every_rank_is_the_same_training_but_not_shared_out(three):
    original, _, converted = three
    whole_batches(converted, original, [lambda loss: loss] * 12)
    status, said = verdict(*three)
    assert status == 1 and said.startswith("the same training, but not shared out: 12 steps with 2 processes")
    assert "each rank computes all of it. See \"Two routes\"" in said


def test_one_graph_whose_nodes_are_shared_out_is_the_same_training(three):
    original, _, converted = three
    whole_batches(converted, original, [lambda loss: loss / 2] * 12)
    status, said = verdict(*three)
    assert status == 0 and "every rank runs the whole forward pass, and its loss is that of its part" in said


def test_lengths_of_an_epoch_come_before_what_follows_them_and_drop_last_is_named(three):
    for run in three:  # an epoch of 6 steps in the original, of 5 in the converted
        shift = run is three[2]
        for rank in run.ranks:
            for k, step in enumerate(rank.steps):
                step.passes[-1].steps = k % (5 if shift else 6) + 1
                step.passes[-1].drop_last = "DataLoader" * shift
            rank.steps[5].options[0]["lr"] = 0.05 if shift else 0.1
    said = verdict(*three)[1]
    assert "step 6: an epoch had 6 steps and has 5: DataLoader(drop_last=True) leaves out the last batch" in said
    for rank in three[2].ranks:  # and where weights part too
        rank.steps[5].after, rank.steps[5].losses = scaled(rank.steps[5].after, 2), [7.0]
    assert "step 6: an epoch had 6 steps and has 5: DataLoader(drop_last=True)" in verdict(*three)[1]


def test_a_group_without_a_rate_is_compared_by_its_other_options(three):
    for run in three:
        for rank in run.ranks:
            for step in rank.steps:
                del step.options[0]["lr"]
    assert verdict(*three)[0] == 0


def test_where_rounding_has_grown_large_the_verdict_says_from_which_step_on(three):
    for step in three[1].ranks[0].steps[3:]:
        step.after = scaled(step.after, 1.1)
    status, said = verdict(*three)
    assert status == 0 and "from step 4 on rounding alone moves the weights by 1% " in said and "--float64 sees farther" in said


# How the converted script ends.

ENDS = {"it hangs: rank 0, after 7 steps, waits at train_ddp.py:17. See \"Hangs": dict(
            waits=["rank 0, after 7 steps, waits at train_ddp.py:17"]),
        "it aborts when it ends. See \"The end of a run": dict(stderr="terminate called without an active exception", status=1),
        "it fails after 12, 12 steps of the ranks: it at train_ddp.py:9: ValueError: my own. See \"Errors": dict(
            stderr='  File "/home/me/train_ddp.py", line 9, in <module>\nValueError: my own', status=1),
        "Connection reset by peer: the rank that it waits for has ended. See \"Hangs": dict(
            stderr="RuntimeError: Connection reset by peer", status=1),
        "it leaves processes behind. See \"The end of a run": dict(left=[4711])}


@pytest.mark.parametrize("says", ENDS)
def test_a_run_that_does_not_end_well_is_a_fault(says, three):
    vars(three[2]).update(ENDS[says])
    status, said = verdict(*three)
    assert status == 1 and said.startswith("NOT THE SAME TRAINING") and says in said


CANNOT = {"train.py would write /data/log.txt: under the check it may write": (0, Remark(About.WRITE, "/data/log.txt")),
          "train_ddp.py would write /data/log.txt": (2, Remark(About.WRITE, "/data/log.txt")),
          "the check cannot follow FSDP's first version": (2, Remark(About.UNSUPPORTED, "FSDP's first version"))}


@pytest.mark.parametrize("says", CANNOT)
def test_what_cannot_be_judged_is_said(says, three):
    run, remark = CANNOT[says]
    three[run].processes[0].notes.append(remark)
    status, said = verdict(*three)
    assert status == 2 and said.startswith(f"cannot be judged: {says}")


def test_a_run_that_takes_no_step_names_what_it_resumes_from(three):
    three[0].processes = [Process(0, 1, [Remark(About.LOADED, "checkpoints/run.pt")])]
    assert "takes no optimizer step; it reads checkpoints/run.pt: if it resumes from that, leave it out with --without " \
           "'checkpoints/run.pt'" in verdict(*three)[1]


def test_a_second_run_that_goes_otherwise_is_no_measure(three):
    three[1].ranks[0].notes.remove(three[1].ranks[0].steps[-1])
    status, said = verdict(*three)
    assert status == 2 and "takes more or fewer steps in the second run, with weights moved by one rounding and with" in said


# What was printed, logged and saved.

def stdout(*texts):
    def change(three):
        for run, text in zip(three, texts):
            run.stdout = text
    return change


def logs(*figures):
    def change(three):
        for run, values in zip(three, figures):
            run.ranks[0].notes += [Logged("TensorBoard", *value) if isinstance(value, tuple) else Logged(
                "TensorBoard", "loss", value) for value in values]
    return change


def saves(*files):
    """Of each run: its files, each a path and a weight."""
    def change(three):
        for run, them in zip(three, files):
            for rank in run.ranks:
                rank.notes = [note for note in rank.notes if not isinstance(note, Saved)]
            run.ranks[0].notes += [Saved(path, {"weight": ([1], array("d", [weight]))}, values)
                                   for path, weight, values in them]
    return change


def saved_by_all(three):
    three[2].ranks[1].notes.append(three[2].ranks[0].of(Saved)[0])


WRONG = {
    "printed 4 times instead of 2: loss 0.5. See \"Printed by all ranks": stdout(*["loss 0.5\n" * 2] * 2, "loss 0.5\n" * 4),
    "printed differently: train.py: loss 0.50 train_ddp.py: loss 0.60 . See \"Printed figures": stdout(
        "loss 0.50", "loss 0.50", "loss 0.60"),
    "printed differently: train.py: [96/240] loss 0.50": stdout("[96/240] loss 0.50", "[96/240] loss 0.50", "[48/240] loss 0.50"),
    "train_ddp.py prints none of the 2 lines with figures that train.py prints": stdout(*["loss 0.5\n" * 2] * 2, "done"),
    "TensorBoard: loss is logged 2 times instead of 1. See \"Printed by all ranks": logs([0.5], [0.5], [0.5, 0.5]),
    "TensorBoard: loss is 0.6 instead of 0.5. See \"Printed figures": logs([0.5], [0.5], [0.6]),
    "model.pt is saved by more than one rank. See \"Saving": saved_by_all,
    "0 files are saved instead of 1, without a.pt. See \"Saving": saves(*[[("a.pt", 1, {})]] * 2, []),
    "a.pt is saved 2 times instead of 1. See \"Decisions": saves(*[[("a.pt", 1, {})]] * 2, [("a.pt", 1, {})] * 2),
    "ckpt-17.pt: a different weight is saved": saves(*[[(f"ckpt-{time}.pt", weight, {})]
                                                       for time, weight in ((13, 1), (99, 1), (17, 999))]),
    "a.pt: a different loss is saved: 2 instead of 1": saves(
        *[[("a.pt", 1, {"loss": 1.0, "at": at})] for at in (5.0, 9e9)], [("a.pt", 1, {"loss": 2.0, "at": 6.0})]),
    "a.pt: a different hits is saved: 48 instead of 96": saves(*[[("a.pt", 1, {"hits": hits})] for hits in (96, 96, 48)])}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_printed_logged_or_saved_otherwise_is_named_beside_the_same_training(says, three):
    WRONG[says](three)
    status, said = verdict(*three)
    assert status == 1 and said.startswith("the same training: ") and says in said


SAME = {
    "saved: 1 file the same: a.pt a.pt: epochs is saved by train_ddp.py alone": saves(
        *[[("a.pt", 1, {})]] * 2, [("a.pt", 1, {"epochs": 3})]),
    "saved: 1 file the same: a.pt a.pt: args.workers is 2 instead of 0": saves(
        *[[("a.pt", 1, {"args.workers": workers})] for workers in (0, 0, 2)]),
    "a.pt was not compared: another run of train.py saves it 0 times instead of 1": saves(
        [("a.pt", 1, {})], [], [("a.pt", 9, {})]),
    "printed: 2 of 4 lines the same not printed by train_ddp.py in these words: on one device (and 1 more line)": stdout(
        *["on one device\nloss 0.5\n" * 2] * 2, "loss 0.5\n" * 2),
    "printed: no line by either": stdout("", "", ""),
    "logged: not compared, because another run of train.py logs others: TensorBoard: seconds": logs(
        [("seconds", 1.0)], [("seconds", 200.0)], [("seconds", 2.0)])}


@pytest.mark.parametrize("says", SAME)
def test_what_was_not_compared_is_said(says, three):
    SAME[says](three)
    status, said = verdict(*three)
    assert status == 0 and says in said


def test_each_cure_of_the_chapter_is_one_that_a_verdict_names():
    cures = re.findall(r"^### (.*)$", (TOOL.parents[1] / "docs/your_own_script.md").read_text(), re.MULTILINE)
    code = "".join(file.read_text() for file in (TOOL / "check_conversion").glob("*.py"))
    assert len(cures) > 10 and all(f'"{cure}"' in code for cure in cures)
