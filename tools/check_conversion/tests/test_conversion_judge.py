"""The verdict is a function of three runs: here they are recorded once, and changed by hand. Each row of README's lists of what
is compared and what is not has its own."""
import copy
import functools
import re
from array import array

import pytest
import torch
from check_conversion.command import compare
from check_conversion.new_files import NewFile, with_arrays
from check_conversion.observed.contents import contents
from check_conversion.protocol import About, Bar, BatchNorm, Logged, Remark, Saved, Score, Untrained
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


def end(run=2, **how):
    return lambda three: vars(three[run]).update(how)


def noted(*records):
    """One by the original, by the nudged one, and by each rank of the converted one, or None."""
    def change(three):
        processes = [process for run in three for process in run.ranks]
        for process, note in zip(processes, records):
            if note:
                process.notes.append(note)
    return change


def stdout(original, converted, nudged=None):
    def change(three):
        for run, text in zip(three, (original, nudged or original, converted)):
            run.stdout = text
    return change


def files(original, converted, nudged=None):
    """What each run leaves too, by names: dictionaries and tensors by torch.save, lists as arrays, text; None is not read."""
    def change(three):
        for run, left in zip(three, (original, nudged or original, converted)):
            for name, content in left.items():
                if isinstance(content, dict | torch.Tensor):
                    run.ranks[0].notes.append(contents(name, content))
                elif isinstance(content, list):
                    run.new_files[name] = with_arrays({"a": torch.tensor(content)})
                else:
                    run.new_files[name] = NewFile("text", content) if content else NewFile("unread", why="broken")
    return change


def saved(value, **more):
    return {"a.pt": {"weight": torch.tensor([float(value)]), **more}}


ERROR = """[rank1]:   File "/home/me/train_ddp.py", line 9, in <module>
[rank1]:   File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 5, in linear
[rank1]: ValueError: my own
RuntimeError: what came later"""
WRITTEN = Remark(About.WRITTEN, "log.csv")
OTHER_KEYS = {"memory.keys": Untrained(array("d", [9.]))}
OTHERWISE = at(3, gradients=times(1.5), after=times(1.01))  # by the keys of the step before
NAN = float("nan")
NOT, SAME, UNKNOWN = "^NOT THE SAME TRAINING ", "^the same training: ", "^cannot be judged: "
CSV = "epoch,loss\n1,0.50000000\n2,0.25000000\n"
ROWS = {  # of README's lists: what becomes of the runs, and status and words of the verdict
    "weights": {
        "all the same": ([], 0, SAME + r"12 steps with 2 processes, SyncBatchNorm; compared: training, 2 lines, 2 progress "
                         r"bars, 1 save, 1 csv; not autocast weights within \de-0[78] of their norm; rounding alone moves them "
                         r"by \de-07 .* printed: 2 of 2 lines the same .*saved: 1 file the same: model.pt"),
        "others at first": ([at(1, before=times(1.1))], 1, NOT + "step 1: it begins with different weights.*Load first"),
        "others than after the step before": ([at(7, before=times(1.1))], 1, NOT + "step 7: the weights differ before the"),
        "a rank's own in the end": ([at(12, [1], after=times(1.1))], 1, NOT + "step 12: ranks 0 and 1 have different weights"),
        "NaN in the converted script alone": ([at(7, after=times(NAN))], 1, NOT + "step 7: "),
        "another step of the optimizer": ([at(2, after=times(1.01))], 1, NOT + "step 2: .*gradients agree, but the optimizer's")},
    "gradients, losses, samples, random numbers, learning rates and other options": {
        "no gradients": ([at(1, after=times(1.01), gradients=times(0))], 1, NOT + "step 1: there are no gradients"),
        "a rank's own rate": ([at(7, [1], options=rate(0.02))], 1, NOT + "step 7: ranks 0 and 1 have different .*: lr 0.02"),
        "an optimizer that takes no step": ([at(2, optimizer=lambda _: 1)], 1, NOT + "step 2: this step is taken by optimizer 1"),
        "other numbers in each run of the original": ([at(1, [0], 0, draws=lambda _: ["torch"]),
                                                       at(1, [0], 1, states=lambda _: {"torch": 0})], 2, UNKNOWN + (
            r"train.py draws different random numbers in each run \(step 1: by torch\)"))},
    "buffers, and modules that no optimizer holds": {
        "others": ([at(2, untrained=lambda _: OTHER_KEYS), OTHERWISE], 1, "memory.keys differs from that of train.py in step 2"),
        "a rank's own": ([at(2, [1], untrained=lambda _: OTHER_KEYS), OTHERWISE], 1, "memory.keys differs between ranks")},
    "`autocast`, `GradScaler`, dropout": {
        "off on a rank": ([at(1, [1], on=lambda on: on - {"GradScaler"})], 1, "GradScaler is on in .* in train_ddp.py on rank 1"),
        "on": ([at(1, on=lambda on: {*on, "dropout of 0.1"})], 1, "dropout of 0.1 is off in train.py and on in train_ddp.py.")},
    "`SyncBatchNorm`": {"its statistics": ([], 0, SAME + "12 steps .*, SyncBatchNorm; .* 1 csv; not autocast weights")},
    "what `ReduceLROnPlateau` is given": {
        "another figure": ([noted(*(Score(value, 6) for value in (1, 1, 2, 2)))], 1, NOT + "step 6: .* given 2 instead of 1"),
        "one on a rank alone": ([noted(*[Score(1, 6)] * 3)], 1, NOT + "step 6: .* given 1 figures in train.py, and 1, 0")},
    "lines on stdout, and those that the script itself writes to stderr, as `logging` does": {
        "of all ranks": ([stdout("loss 0.5\n" * 2, "loss 0.5\n" * 4)], 1, SAME + ".*printed 4 times instead of 2: loss 0.5. See"),
        "no figures": ([stdout("loss 0.5", "done")], 1, "printed by train_ddp.py: none of the 1 line with figures of train.py"),
        "another digit, and no figure": ([stdout("acc 91.4%\nbest: 0.9", "acc 91.3%\nbest: None")], 1, "acc 91.3% .*best: None"),
        "more words": ([stdout("loss 0.5\nval loss 0.6", "rank 0: loss 0.5 (2 ranks)\nval loss 0.6")], 0, "2 of 2 lines")},
    "progress bars of `tqdm`": {"another state": ([lambda three: vars(three[2].ranks[0].of(Bar)[0]).update(state="5/6")], 1, (
        "shown in a progress bar differently: train.py: 6/6 train_ddp.py: 5/6"))},
    "figures for TensorBoard, tensorboardX and W&B": {
        "of all ranks": ([noted(*[Logged("wandb", "loss", 1)] * 4)], 1, "wandb: loss is logged 2 times instead of 1. See"),
        "another step": ([noted(*(Logged("wandb", "loss", 1, step) for step in (1, 1, 2)))], 1, "for step 2 instead of 1"),
        "a name that varies": ([noted(*(Logged("wandb", f"at {k}", 1) for k in range(3)))], 0, "in each run: wandb: at 0")},
    "files of `torch.save`": {
        "of all ranks": ([noted(None, None, None, Saved("model.pt", {}, {}))], 1, "model.pt is saved by ranks 0 and 1."),
        "a tensor that varies": ([files(*map(saved, (1, 9, 2)))], 0, "^(?!.*same: a.pt).*differently in each run: a.pt: weight"),
        "what large numbers or NaN would hide, and ids": ([files(
            {"a.pt": torch.tensor([1e6, NAN, 0.02]), "b.pt": torch.tensor([10**8, 1])},
            {"a.pt": torch.tensor([1e6, NAN, 0.20]), "b.pt": torch.tensor([10**8, 2])})], 1, (
                "a.pt: a different tensor is saved.*b.pt: a different tensor is saved")),
        "names that begin with module., a string and a switch": ([files(
            {"a.pt": {"my_module.bias": torch.ones(1)}, "b.pt": {"best": "resnet"}, "c.pt": {"converged": True}},
            {"a.pt": {"module.my_module.bias": torch.ones(1)}, "b.pt": {"best": "vgg"}, "c.pt": {"converged": False}})], 1, (
                "a.pt: the saved names begin with `module.`.*b.pt: not saved by .*best: resnet.*c.pt: a different converged")),
        "gone in the end": ([lambda three: three[2].new_files.pop("model.pt")], 1, "model.pt is gone or broken when train_ddp")},
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
        "one of two ranks": ([noted(None, None, WRITTEN, WRITTEN)], 1, "log.csv is written by ranks 0 and 1")},
    "how the run ends": {
        "a hang": ([end(waits=["rank 0 waits at train_ddp.py:17"])], 1, NOT + "it hangs: rank 0 waits at train_ddp.py:17"),
        "two trainings": ([lambda three: three[2].processes.append(three[2].processes[0])], 2, UNKNOWN + "several processes of"),
        "an error after a fault": ([at(5, options=rate(0.1)), end(stderr=ERROR, status=1)], 1, NOT + (
            "step 5: different optimizer options: lr 0.1 .* 12, 12 steps: rank1 at train_ddp.py:9: ValueError: my own. See")),
        "an error in the original": ([end(0, stderr=ERROR, status=1)], 2, UNKNOWN + r"train.py fails under the check \(rank1 at"),
        "a rank that does not train": ([end(started={0, 1, 2})], 1, NOT + "rank 2 did not train: 3 processes were started"),
        "a process left behind": ([end(outlived=[4711])], 1, NOT + "it leaves processes behind. See \"The end of a run"),
        "a file refused": ([noted(None, None, Remark(About.WRITE, "/a"))], 2, UNKNOWN + "train_ddp.py tried to write /a,"),
        "an original that resumes": ([end(0, processes=[Process(0, 1, [Remark(About.LOADED, "run.pt")])])], 2, UNKNOWN + (
            "train.py takes no optimizer step; it reads run.pt: .* 'run.pt'"))},
    "plain BatchNorm of several ranks (its statistics are frozen), dropout (set to 0), autocast (turned off)": {
        "in the first line": ([at(12, batchnorm=lambda _: {BatchNorm.FROZEN})], 0, SAME + ".*; not BatchNorm, autocast")},
    "what differs in each run of the original (times, addresses)": {
        "a figure beside a time, and a count": ([stdout(
            "12:30:01 loss 0.5\n[96/240]", "12:30:07 loss 0.9\n[48/240]", "00:31:01 loss 0.5\n[96/240]")], 1, (
                r"train_ddp.py: 12:30:07 loss 0.9 .*train_ddp.py: \[48/240\]")),
        "a line": ([stdout("loss 0.5\nspike 3", "loss 0.5", "loss 0.5")], 0, "1 of 2 lines the same not compared, .*: spike 3")},
    "images, pickles, files of other kinds": {
        "a pickle": ([files({"a.pkl": None}, {"a.pkl": None})], 0, r"not read: a.pkl \(broken\)"),
        "an object": ([files(saved(1, args=TOOL), saved(1, args=TOOL))], 0, r"a.pt: not compared: args \(PosixPath\)")},
    "parameters whose gradient is nothing but rounding": {
        "a bias before BatchNorm": ([], 0, "not compared, because their gradients are nothing but rounding: 0.bias")},
    "all steps once rounding alone has become large, or weights are no longer finite": {
        "rounding": ([at(k, [0], 1, after=times(1.1)) for k in range(4, 13)], 2, UNKNOWN + (
            "the same up to step 3 of 12; from there on rounding alone moves the")),
        "NaN": ([at(1, [0], 0, after=times(NAN)), at(1, after=times(NAN))], 2, UNKNOWN + "step 1: the weights of both scripts")},
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
