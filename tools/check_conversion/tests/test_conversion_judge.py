"""The verdict is a function of three runs: here they are recorded once, and changed by hand. Each row of README's lists of what
is compared and what is not has its own."""
import copy
import functools
import re
from array import array
from dataclasses import replace

import pytest
import torch
from check_conversion.command import compare
from check_conversion.new_files import NewFile, with_arrays
from check_conversion.observed.contents import contents
from check_conversion.protocol import About, Bar, BatchNorm, Logged, Remark, Saved, Score
from check_conversion.running import Process
from runs import RICH, TOOL, in_words, record


@functools.cache
def recorded():
    before, after = RICH
    return record(before), record(before, nudged=True), record(after, 2, "train_ddp.py")


# Changes of the three runs: the original, the nudged and the converted one.

def at(k, ranks=(0, 1), run=2, **new):
    """Attributes of step k: what becomes of them."""
    def change(three):
        for rank in ranks:
            step = three[run].ranks[rank].steps[k - 1]
            for name, become in new.items():
                setattr(step, name, become(getattr(step, name)))
    return change


def times(factor):
    return lambda numbers: array("d", [factor * number for number in numbers])


def rate(value):
    return lambda options: [{**options[0], "lr": value}]


def steps_of(three):
    return [step for run in three for rank in run.ranks for step in rank.steps]


def another_buffer(ranks):
    def change(three):
        for rank in three[2].ranks:
            rank.steps[2].gradients[0] *= 2  # by which training goes otherwise
            rank.steps[2].after = times(1.01)(rank.steps[2].after)
        for rank in ranks:
            for numbers in vars(three[2].ranks[rank].steps[1].untrained["memory.keys"]).values():
                numbers[0] += 1
    return change


def end(run=2, **how):
    return lambda three: vars(three[run]).update(how)


def add(*notes):
    """To the notes of a run's rank, by run and rank."""
    return lambda three: [three[run].ranks[rank].notes.append(note) for run, rank, note in notes]


def score(*values):
    return add(*((*place, Score(value, 6)) for place, value in zip(RANKS, values)))


def stdout(original, converted, nudged=None):
    def change(three):
        for run, text in zip(three, (original, nudged or original, converted)):
            run.stdout = text
    return change


def new_file(content):
    if isinstance(content, str):
        return NewFile("text", content)
    return with_arrays({"a": torch.tensor(content)}) if content else NewFile("unread", why="broken")


def files(original, converted, nudged=None, ranks=(0,)):
    """All that each run leaves, by names: dictionaries and tensors by torch.save, lists as arrays, text; None is not read."""
    def change(three):
        for run, left in zip(three, (original, nudged or original, converted)):
            saves = {name: one for name, one in left.items() if isinstance(one, dict | torch.Tensor)}
            run.new_files = {name: new_file(one) for name, one in left.items() if name not in saves}
            for process in run.ranks:
                process.notes = [note for note in process.notes if not isinstance(note, Saved)]
            for rank in ranks if run is three[2] else [0]:
                run.ranks[rank].notes += [contents(name, one) for name, one in saves.items()]
    return change


def saved(value, name="a.pt", **more):
    return {name: {"weight": torch.tensor([float(value)]), **more}}


ERROR = """[rank1]:   File "/home/me/train_ddp.py", line 9, in <module>
[rank1]:   File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 5, in linear
[rank1]: ValueError: my own
RuntimeError: what came later"""
LOADED = [Remark(About.LOADED, name) for name in ("words.pt", "run.pt")]
NAN = float("nan")
RANKS = (0, 0), (1, 0), (2, 0), (2, 1)  # of the three runs
NOT, SAME, UNKNOWN = "^NOT THE SAME TRAINING ", "^the same training: ", "^cannot be judged: "
CSV = "epoch,loss\n1,0.50000000\n2,0.25000000\n"
ROWS = {  # of README's lists: what becomes of the runs, and status and words of the verdict
    "weights": {
        "all the same": ([], 0, SAME + r"12 steps with 2 processes, SyncBatchNorm; compared: training, 2 lines, 2 progress "
                         r"bars, 1 save, 1 csv; not autocast weights within \de-0[78] of their norm; rounding alone moves them "
                         r"by \de-07 .* printed: 2 of 2 lines the same .*saved: 1 file the same: model.pt"),
        "others at first": ([at(1, before=times(1.1))], 1, NOT + "step 1: it begins with different weights.*Load first"),
        "others than after the step before": ([at(7, before=times(1.1))], 1, NOT + "step 7: the weights differ before the"),
        "a rank's own in the end": ([at(12, [1], after=times(1.1))], 1, NOT + (
            "step 12: ranks 0 and 1 have different weights after the step: ")),
        "NaN in the converted script alone": ([at(7, after=times(NAN))], 1, NOT + "step 7: "),
        "another step of the optimizer": ([at(2, after=times(1.01))], 1, NOT + (
            "step 2: the same samples, and the gradients agree, but the optimizer's step"))},
    "gradients, losses, samples, random numbers, learning rates and other options": {
        "no gradients": ([at(1, after=times(1.01), gradients=times(0))], 1, NOT + "step 1: there are no gradients: does the opt"),
        "another order on each rank": ([at(1, [1], passes=lambda passes: [replace(passes[-1], asked=(1, 0))])], 1, NOT + (
            r"step 1: ranks 0 and 1 shuffle differently, because DistributedSampler's seed and epoch are \(0, 0\) and \(1, 0\)")),
        "a rank's own rate": ([at(7, [1], options=rate(0.02))], 1, NOT + (
            "step 7: ranks 0 and 1 have different optimizer options: lr 0.02 instead")),
        "an optimizer that takes no step": ([at(2, optimizer=lambda _: 1)], 1, NOT + (
            "step 2: this step is taken by optimizer 1 in train.py, and by optimizer 2 and 2 in")),
        "other ones in each run of the original": ([at(1, [0], run=0, draws=lambda _: ["numpy"]),
                                                    at(1, [0], run=1, states=lambda states: {**states, "numpy": 0})], 2, (
            UNKNOWN + r"train.py draws different random numbers in each run \(step 1: by numpy\): begin it")),
        "another beginning in each run of the original": ([at(1, [0], run=1, before=times(1.1))], 2, UNKNOWN + (
            r"train.py draws different random numbers in each run \(it begins with different weights\)"))},
    "buffers, and modules that no optimizer holds": {
        "another one": ([another_buffer(ranks=(0, 1))], 1, "memory.keys differs from that of train.py in step 2"),
        "a rank's own": ([another_buffer(ranks=[1])], 1, "memory.keys differs between ranks 0 and 1 in step 2: DDP averages")},
    "`autocast`, `GradScaler`, dropout": {
        "off on a rank": ([at(1, [1], on=lambda on: on - {"GradScaler"})], 1, (
            NOT + "step 1: GradScaler is on in train.py and off in train_ddp.py on rank 1.")),
        "on": ([at(1, on=lambda on: {*on, "dropout of 0.1"})], 1, (
            NOT + "step 1: dropout of 0.1 is off in train.py and on in train_ddp.py."))},
    "`SyncBatchNorm`": {"its statistics": ([], 0, SAME + "12 steps .*, SyncBatchNorm; .* 1 csv; not autocast weights")},
    "what `ReduceLROnPlateau` is given": {
        "another figure": ([score(1, 1, 2, 2)], 1, NOT + "step 6: ReduceLROnPlateau is given 2 instead of 1.*Decisions"),
        "one on a rank alone": ([score(1, 1, 1)], 1, NOT + "step 6: ReduceLROnPlateau is given 1 figures in train.py, and 1, 0")},
    "lines on stdout, and those that the script itself writes to stderr, as `logging` does": {
        "of all ranks": ([stdout("loss 0.5\n" * 2, "loss 0.5\n" * 4)], 1, SAME + ".*printed 4 times instead of 2: loss 0.5. See"),
        "no figures": ([stdout("loss 0.5", "done")], 1, "printed by train_ddp.py: none of the 1 line with figures of train.py"),
        "another last digit, and no figure": ([stdout("acc 91.4%\nbest: 0.9", "acc 91.3%\nbest: None")], 1, (
            "train_ddp.py: acc 91.3% .*train_ddp.py: best: None")),
        "more words": ([stdout("loss 0.5\nval loss 0.6", "rank 0: loss 0.5 (2 ranks)\nval loss 0.6")], 0, "2 of 2 lines")},
    "progress bars of `tqdm`": {"another state": ([lambda three: vars(three[2].ranks[0].of(Bar)[0]).update(state="5/6")], 1, (
        "shown in a progress bar differently: train.py: 6/6 train_ddp.py: 5/6"))},
    "figures for TensorBoard, tensorboardX and W&B": {
        "of all ranks": ([add(*((run, rank, Logged("TensorBoard", "loss", 0.5)) for run, rank in RANKS))], 1, (
            "TensorBoard: loss is logged 2 times instead of 1. See \"Printed by")),
        "another step": ([add(*((run, 0, Logged("TensorBoard", "loss", 0.5, max(1, run))) for run in range(3)))], 1, (
            "TensorBoard: loss is logged for step 2 instead of 1")),
        "a name that varies": ([add(*((run, 0, Logged("TensorBoard", f"at {run}", run)) for run in range(3)))], 0, (
            "train.py logs different values in each run: .*at 0"))},
    "files of `torch.save`": {
        "of all ranks": ([files(saved(1), saved(1), ranks=(0, 1))], 1, "a.pt is saved by ranks 0 and 1. See \"Saving"),
        "a tensor that varies": ([files(*map(saved, (1, 9, 2)))], 0, (
            "^(?!.*same: a.pt).*not compared, because train.py saves it differently in each run: a.pt: weight")),
        "what large numbers or NaN would hide, and ids": ([files(
            {"a.pt": torch.tensor([1e6, 0.02]), "b.pt": torch.tensor([NAN, 0.02]), "c.pt": torch.tensor([10**8, 1])},
            {"a.pt": torch.tensor([1e6, 0.20]), "b.pt": torch.tensor([NAN, 0.20]), "c.pt": torch.tensor([10**8, 2])})], 1, (
                "a.pt: a different tensor is saved.*b.pt: a different tensor is saved.*c.pt: a different tensor is saved")),
        "names that begin with module., a string and a switch": ([files(
            {"a.pt": {"my_module.bias": torch.ones(1)}, "b.pt": {"best": "resnet"}, "c.pt": {"converged": True}},
            {"a.pt": {"module.my_module.bias": torch.ones(1)}, "b.pt": {"best": "vgg"}, "c.pt": {"converged": False}})], 1, (
                "a.pt: the saved names begin with `module.`.*b.pt: not saved by .*best: resnet.*c.pt: a different converged")),
        "gone in the end": ([lambda three: three[2].new_files.pop("model.pt")], 1, "model.pt is gone or broken when train_ddp"),
        "a figure and a count beside a time": ([files(
            saved(1, at=1., loss=1., hits=96), saved(1, at=2., loss=3., hits=48), saved(1, at=9., loss=1., hits=96))], 1, (
                "a.pt: a different loss, hits is saved: 3 instead of 1, 48 instead of 96"))},
    "other new files": {
        "arrays": ([files({"a.npy": [1., 2.], "b.npy": [1., 2.], "c.npy": [1., 2.]},
                          {"a.npy": [1., 2.0000001], "b.npy": [1., 3.], "c.npy": [1.]})], 1, (
            r"^(?!.*a.npy).*b.npy: a different a is saved.*c.npy: a has the shape \[1\] instead of \[2\]")),
        "text": ([files({"a.csv": CSV, "b.csv": CSV}, {"a.csv": CSV.replace("0.50", "0.51")})], 1, (
            "a.csv: written differently: train.py: 1, 0.5.*not written by train_ddp.py: b.csv")),
        "another name, other words, and another kind": ([files(
            {"best_0.75.md": "a", "a.json": '{"hits": 5}', "b.csv": CSV},
            {"best_0.48.md": "a", "a.json": '{"all": 9}', "b.txt": CSV})], 1, (
                "a.json: not written by train_ddp.py in these.*named differently.*best_0.48.*not written by train_ddp.py: b")),
        "one of two ranks": ([add(*((2, rank, Remark(About.WRITTEN, "log.csv")) for rank in (0, 1)))], 1, (
            "log.csv is written by ranks 0 and 1"))},
    "how the run ends": {
        "a hang": ([end(waits=["rank 0 waits at train_ddp.py:17"])], 1, NOT + "it hangs: rank 0 waits at train_ddp.py:17"),
        "two trainings": ([lambda three: three[2].processes.append(three[2].processes[0])], 2, UNKNOWN + (
            "several processes of train_ddp.py train as the same rank")),
        "an abort": ([end(stderr="terminate called without an active", status=1)], 1, NOT + "it aborts when it ends. See \"The"),
        "an error after a fault": ([at(5, options=rate(0.1)), end(stderr=ERROR, status=1)], 1, NOT + (
            "step 5: different optimizer options: lr 0.1 instead of 0.05.* it fails after the ranks took 12, 12 steps: "
            "rank1 at train_ddp.py:9: ValueError: my own. See")),
        "an error in the original": ([end(run=0, stderr=ERROR, status=1)], 2, UNKNOWN + (
            r"train.py fails under the check \(rank1 at train_ddp.py:9: ValueError: my own\): does")),
        "a rank that does not train": ([end(started={0, 1, 2})], 1, NOT + (
            "rank 2 did not train: 3 processes were started, 2 trained. See \"Training goes through DDP")),
        "a process left behind": ([end(outlived=[4711])], 1, NOT + "it leaves processes behind. See \"The end of a run"),
        "a file refused": ([add((2, 1, Remark(About.WRITE, "/a")))], 2, UNKNOWN + "train_ddp.py tried to write /a, outside"),
        "an original that resumes": ([end(run=0, processes=[Process(0, 1, LOADED)])], 2, UNKNOWN + (
            "train.py takes no optimizer step; it reads words.pt, run.pt: .* 'run.pt'"))},
    "plain BatchNorm of several ranks (its statistics are frozen), dropout (set to 0), autocast (turned off)": {
        "in the first line": ([lambda three: [step.batchnorm.add(BatchNorm.FROZEN) for step in steps_of(three)],
                               lambda three: [step.on.add("dropout of 0.5") for step in steps_of(three)]], 0, SAME + (
            "12 steps with 2 processes; .* 1 csv; not BatchNorm, dropout, autocast weights within"))},
    "what differs in each run of the original (times, addresses)": {
        "a clock, short times and an address": ([stdout(
            "The time is: 00: 00: 01\nTot: 249ms\nTot: 251ms\n<State at 0x7f12ab> 0.5",
            "The time is: 00: 00: 02\nTot: 1s12ms\nTot: 980ms\n<State at 0x55e0f1> 0.5",
            "The time is: 00: 03: 44\nTot: 1m12s\nTot: 71s\n<State at 0x7f99cd> 0.5")], 0, (
                r"printed: 4 of 4 .* except for what differs in each run, such as a time: The time is.* \(and 3 more lines\)")),
        "a figure beside a time, beta, and a count": ([stdout(
            "12:30:01 loss 0.5\nbeta 0.50\n[96/240]", "12:30:07 loss 0.9\nbeta 0.60\n[48/240]",
            "00:31:01 loss 0.5\nbeta 0.50\n[96/240]")], 1, (
                r"train_ddp.py: 12:30:07 loss 0.9 .*train_ddp.py: beta 0.60 .*train_ddp.py: \[48/240\]")),
        "a line": ([stdout("loss 0.5\nspike 3", "loss 0.5", "loss 0.5")], 0, (
            "printed: 1 of 2 lines the same not compared, because train.py has different lines in each run: spike 3")),
        "an array, the only one of its file": ([files(*({"a.npy": [value]} for value in (1., 9., 9.)))], 0, (
            "^(?!.*npy;)(?!.*file the same: a.npy).*train.py saves it differently in each run: a.npy: a"))},
    "images, pickles, files of other kinds": {
        "a pickle": ([files({"a.pkl": None}, {"a.pkl": None})], 0, r"not read: a.pkl \(broken\)"),
        "an object": ([files(saved(1, args=TOOL), saved(1, args=TOOL))], 0, r"a.pt: not compared: args \(PosixPath\)")},
    "parameters whose gradient is nothing but rounding": {
        "a bias before BatchNorm": ([], 0, "not compared, because their gradients are nothing but rounding: 0.bias")},
    "all steps once rounding alone has become large, or weights are no longer finite": {"rounding": ([lambda three: [
        vars(step).update(after=times(1.1)(step.after)) for step in three[1].ranks[0].steps[3:]]], 2, UNKNOWN + (
            "the same up to step 3 of 12; from there on rounding alone moves the")),
        "NaN": ([lambda three: [vars(step).update(after=times(NAN)(step.after)) for step in steps_of(three)]], 2, UNKNOWN + (
            "step 1: the weights of both scripts are no longer finite"))},
    "what packages write to stderr": {"other lines": ([end(stderr="loss 0.7")], 0, "^(?!.*0.7)" + SAME[1:])}}


def test_each_row_of_readmes_lists_is_held():
    lists = (TOOL / "README.md").read_text().split("## What is compared")[1].split("## Options")[0]
    rows = re.findall(r"^\| (.*?) \|", lists, re.MULTILINE)
    assert [row for row in rows if row not in ("compared", "not compared", "---")] == [*ROWS]


@pytest.mark.parametrize("changes, status, says", [one for row in ROWS.values() for one in row.values()], ids=[
    f"{row}: {name}" for row, them in ROWS.items() for name in them])
def test_the_verdict_follows_from_what_was_noted(changes, status, says):
    three = copy.deepcopy(recorded())
    for change in changes:
        change(three)
    found, said = in_words(lambda: compare(lambda nudged=False, **_: three[nudged], lambda **_: three[2]))
    assert found == status and re.search(says, said)


def test_each_cure_of_the_chapter_is_one_that_a_verdict_names():
    chapter = TOOL.parents[1] / "docs/your_own_script.md"
    cures = re.findall(r"^### (.*)$", chapter.read_text(), re.MULTILINE)
    code = "".join(file.read_text() for file in (TOOL / "check_conversion").glob("*.py"))
    assert len(cures) > 10 and all(f'"{cure}"' in code for cure in cures)
