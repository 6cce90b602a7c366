"""The verdict is a function of three runs: here they are recorded once, and changed by hand. Each row of README's lists of what
is compared and what is not has its own."""
import copy
import functools
import re
from array import array

import pytest
import torch
from check_conversion.command import check_conversion
from check_conversion.files import File, with_values
from check_conversion.records import Process, Record
from runs import RICH, TOOL, in_words, record


@functools.cache
def recorded():
    before, after = RICH
    return record(before), record(before, nudged=True), record(after, 2, "train_ddp.py")


# Changes of the three runs: the original, the nudged and the converted one.

def at(k, ranks=(0, 1), run=2, **new):
    """Kinds of records of step k: what becomes of their last value."""
    def change(three):
        for rank in ranks:
            step = three[run].ranks[rank].steps[k - 1]
            for kind, become in new.items():
                step.put(kind, become(step.last(kind)))
    return change


def noted(kind, *records, step=0):
    """Name and value of what the original, the nudged one and each rank of the converted one noted in a step, or None."""
    def change(three):
        for process, one in zip((process for run in three for process in run.ranks), records):
            if one and step:
                process.steps[step - 1].setdefault(kind, []).append(one)
            elif one:
                process.of(kind).append(Record(process.rank, 6, kind, *one))
    return change


def end(run=2, **how):
    return lambda three: vars(three[run]).update(how)


def times(factor):
    return lambda numbers: array("d", [factor * number for number in numbers])


def turned(numbers):
    return array("d", reversed(numbers))


def rate(value):
    return lambda options: [{**options[0], "lr": value}]


def text(*texts, stream="stdout"):
    """Of the original, of the converted script, and of the nudged run, if that is another."""
    original, converted, nudged = (*texts, texts[0])[:3]
    return lambda three: [run.texts.update({stream: {0: text}}) for run, text in zip(three, (original, nudged, converted))]


def files(*left):
    """What they leave too, by names: text, None for what is not read, or what torch.save is given."""
    def change(three):
        for run, found in zip(three, (left[0], (*left, left[0])[2], left[1])):
            for name, content in found.items():
                run.files[name] = (File("text", content) if isinstance(content, str)
                                   else File("unread", why="broken") if content is None else with_values(content))
    return change


def moments(tiny):
    state = {0: {"momentum_buffer": torch.ones(2)}, 1: {"momentum_buffer": torch.full((2,), tiny)}}
    return {"a.pt": {"optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}}


ERROR = """[rank1]:   File "/home/me/train_ddp.py", line 9, in <module>
[rank1]:   File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 5, in linear
[rank1]: ValueError: my own
RuntimeError: what came later"""
KEYS = "memory.keys", array("d", [9.])
OTHERWISE = at(3, gradients=times(1.5), new_weights=times(1.01))  # by the keys of the step before
NAN = float("nan")
NOT, SAME, UNKNOWN = "^NOT THE SAME TRAINING ", "^the same training: 12 steps with 2 processes", "^cannot be judged: "
CSV = "epoch,loss\n1,0.50000000\n2,0.25000000\n"
ROWS = {  # of README's lists: what becomes of the runs, and status and words of the verdict
    "weights": [
        ([], 0, SAME + r", SyncBatchNorm; not compared: autocast weights within \de-1\d of their norm; rounding alone moves "
         r"them by \de-1\d printed: 2 of 2 lines the same shown in progress bars: 2 of 2 bars the same written: 2 of 2 files"),
        ([at(1, old_weights=times(1.1))], 1, NOT + "step 1: it begins with different weights.*Load first"),
        ([at(7, old_weights=times(1.1))], 1, NOT + "step 7: the weights differ before the"),
        ([at(12, [1], new_weights=times(1.1))], 1, NOT + "step 12: ranks 0 and 1 have different weights"),
        ([at(7, new_weights=times(NAN))], 1, NOT + "step 7: "),
        ([at(2, new_weights=times(1.01))], 1, NOT + "step 2: .*gradients agree, but the optimizer's")],
    "samples, losses, gradients, buffers, random numbers, learning rates and other options": [
        ([at(1, new_weights=times(1.01), gradients=times(0))], 1, NOT + "step 1: there are no gradients"),
        ([noted("norm", *(("", one) for one in (1., 1., 1., 2.)), step=1)], 1, "before they are averaged, at norms of 1, 2"),
        ([at(7, [1], options=rate(0.02))], 1, NOT + "step 7: ranks 0 and 1 have different .*: lr 0.02"),
        ([noted("drew", ("torch", (1, True)), ("torch", (2, True)), step=1)], 2, UNKNOWN + (
            r"train.py draws different random numbers in each run \(step 1: by torch\)")),
        ([noted("buffer", None, None, KEYS, KEYS, step=2), OTHERWISE], 1, (
            r"keys differs by up to \S+ of its norm from that of train.py in step 2")),
        ([noted("buffer", None, None, None, KEYS, step=2), OTHERWISE], 1, (
            r"keys differs by up to \S+ of its norm between ranks 0 and 1 in step 2"))],
    "`autocast`, `GradScaler`, dropout, `model.eval()`, `clip_grad_value_`": [
        ([noted("switch", None, None, None, ("dropout of 0.1", False), step=1)], 1, "0.1 is off in .* and on in .* on rank 1"),
        ([noted("switch", ("GradScaler.x", True), step=1)], 0, "only where there is a GPU: GradScaler")],
    "BatchNorm": [
        ([noted("batchnorm", None, None, ["plain"])], 2, UNKNOWN + ".*with --sync-batchnorm.*with --rank-batchnorm")],
    "what `ReduceLROnPlateau` is given": [
        ([noted("score", *[("", one) for one in (1, 1, 2, 2)], step=7)], 1, NOT + "step 7: .* given 2 instead of 1"),
        ([noted("score", *[("", 1)] * 3, step=7)], 1, NOT + "step 7: .* stepped 1 times in train.py, and 1, 0 times on"),
        ([at(7, options=rate(0.1)), noted("score", ["", 1], ["", 1], ["", 2])], 1, "lr 0.1 instead of 0.05, .* given 2 instead"),
        ([lambda three: three[2].ranks[0].tail.put("score", 1)], 1, NOT + "step 12: ReduceLROnPlateau")],
    "lines on stdout, and those that the script itself writes to stderr, as `logging` does": [
        ([text("loss 0.5\n" * 2, "loss 0.5\n" * 4)], 1, ".*printed 4 times instead of 2: loss 0.5. See"),
        ([text("loss 0.5", "done")], 1, "not printed by train_ddp.py in these words: loss 0.5. See"),
        ([text("acc 91.4%\nbest: 0.9", "acc 91.3%\nbest: None")], 1, "acc 91.3% .*best: None"),
        ([text("loss 0.5\nval loss 0.6", "rank 0: loss 0.5 (2 ranks)\nval loss 0.6")], 0, "2 of 2 lines"),
        ([end(stderr="loss 0.7")], 0, "^(?!.*0.7)" + SAME[1:])],  # by a package
    "progress bars of `tqdm`": [
        ([text("9/9", "8/9", stream="bars")], 1, "bars differently: train.py: 9/9 train_ddp.py: 8/9")],
    "figures for TensorBoard, tensorboardX and W&B": [
        ([text("loss 1.0", "loss 1.0\n" * 2, stream="logged")], 1, "logged 2 times instead of 1: loss 1.0"),
        ([text("loss 1.0 for step 1", "loss 1.0 for step 2", stream="logged")], 1, "loss 1.0 for step 2")],
    "files, as they lie there when the run has ended": [
        ([files({"a.npy": torch.tensor([1., 2.]), "b.npy": torch.tensor([1., 2.]), "c.npy": torch.tensor([1., 2.])},
                {"a.npy": torch.tensor([1., 2 + 1e-7]), "b.npy": torch.tensor([1., 3.]), "c.npy": torch.ones(1)})], 1, (
            r"b.npy: a different value .*c.npy: value has the shape \[1\] instead of \[2\].* same: log.csv, model.pt, a.npy")),
        ([files({"a.csv": CSV, "b.csv": CSV, "1.5.md": "a"}, {"a.csv": CSV.replace("0.50", "0.51"), "1.4.md": "a"})], 1, (
            "a.csv: written differently: train.py: 1,0.5.*not written by .*: b.csv.* named differently")),
        ([noted("wrote", None, None, ["log.csv"], ["log.csv"])], 1, "log.csv is written by ranks 0 and 1"),
        ([files({"a.pt": torch.tensor([1e6, NAN, 0.02]), "b.pt": torch.tensor([10**8, 1])},
                {"a.pt": torch.tensor([1e6, NAN, 0.20]), "b.pt": torch.tensor([10**8, 2])})], 1, (
                    "a.pt: a different value is saved.*b.pt: a different value is saved")),
        ([files(*map(moments, (1e-16, -1e-16, 3e-16)))], 0, "3 of 3 files the same"),
        ([files(*map(moments, (0.5, 0.6)))], 1, "a.pt: a different optimizer.state.1.momentum_buffer"),
        ([files({"a.pt": {"lr": 1, "device": "cpu"}}, {"a.pt": {"lr": 1}})], 0, "a.pt: not saved by train_ddp.py: device"),
        ([files({"a.pt": {"model": {"bias": torch.ones(1)}}, "b.pt": {"best": "resnet"}, "c.pt": {"converged": True}},
                {"a.pt": {"model": {"module.bias": torch.ones(1)}}, "b.pt": {"best": "vgg"}, "c.pt": {"converged": False}})], 1, (
                    "a.pt: the saved names begin with `module.`.*b.pt: written .*: best: vgg.*c.pt: .*converged: True")),
        ([lambda three: three[2].files.pop("model.pt")], 1, "not written by train_ddp.py: model.pt")],
    "how the run ends": [
        ([end(waits=["rank 0 waits at train_ddp.py:17"])], 1, NOT + "it hangs: rank 0 waits at train_ddp.py:17"),
        ([at(5, options=rate(0.1)), end(stderr=ERROR, status=1)], 1, NOT + (
            "step 5: different optimizer options: lr 0.1 .* 12, 12 steps: rank1 at train_ddp.py:9: ValueError: my own. See")),
        ([end(0, stderr=ERROR, status=1)], 2, UNKNOWN + r"train.py itself fails \(rank1 at train_ddp.py:9: ValueError"),
        ([end(stderr=ERROR.replace("my own", "expected dtype Float"), status=1)], 2, "with --float32"),
        *([([end(stderr="invalid device ordinal", status=1)], 2, "needs a GPU for each of its 2 processes, and there are")] * (
            torch.accelerator.device_count() < 2)),
        ([lambda three: three[2].processes.append(Process(1, [Record(2, 0, "group")]))], 1, NOT + (
            "rank 2 did not train: 3 processes were started")),
        ([end(outlived=[4711])], 1, NOT + "it leaves processes behind. See \"Hangs and errors"),
        ([noted("refused", None, None, ["/a"])], 2, UNKNOWN + "train_ddp.py tried to write /a,"),
        ([end(0, processes=[Process(1, [Record(0, 0, "read", "run.pt")])])], 2, UNKNOWN + (
            "train.py takes no optimizer step; it reads run.pt: .* 'run.pt'"))],
    "dropout (set to 0), autocast (turned off), with `--rank-batchnorm` BatchNorm (frozen)": [
        ([noted("batchnorm", None, None, ["frozen"])], 0, SAME + ".*; not compared: BatchNorm, autocast")],
    "what differs in each run of the original (times, addresses)": [
        ([text("12:30:01 loss 0.5\n[96/240]", "12:30:07 loss 0.9\n[48/240]", "00:31:01 loss 0.5\n[96/240]")], 1, (
            r"train_ddp.py: 12:30:07 loss 0.9 .*train_ddp.py: \[48/240\]")),
        ([text("loss 0.5\nspike 3", "loss 0.5", "loss 0.5")], 0, "1 of 2 lines the same .*each run of .*: spike 3"),
        ([files(*({"a.pt": {"weight": torch.tensor([one])}} for one in (1., 2., 9.)))], 0, "in each run of .*: a.pt: weight")],
    "images, files of other kinds, and files of more than half a gigabyte": [
        ([files({"a.png": None}, {"a.png": None})], 0, r"not read: a.png \(broken\)")],
    "parameters whose gradient is nothing but rounding": [([], 0, "because the gradient is nothing but rounding: 0.bias")],
    "all steps from which on rounding decides, or weights are no longer finite": [
        ([at(k, [0], 1, new_weights=times(1.1)) for k in range(4, 13)], 2, UNKNOWN + (
            "the same up to step 3 of 12; from there on")),
        ([at(3, [0], 1, gradients=turned), at(3, gradients=turned, new_weights=times(1.01)),
          noted("buffer", None, None, KEYS, KEYS, step=3)], 2, UNKNOWN + (  # then BatchNorm's statistics part too
            "step 3: from here on rounding alone moves the gradients of train.py as far, most in 0.weight")),
        ([at(1, [0], 0, new_weights=times(NAN)), at(1, new_weights=times(NAN))], 2, UNKNOWN + (
            "step 1: the weights of both scripts"))]}


def test_each_row_of_readmes_lists_is_held():
    lists = (TOOL / "README.md").read_text().split("## What is compared")[1].split("## Resuming")[0]
    rows = re.findall(r"^\| (.*?) \|", lists, re.MULTILINE)
    assert [row for row in rows if row not in ("compared", "not compared", "---")] == [*ROWS]


@pytest.mark.parametrize("changes, status, says", [pytest.param(*one, id=f"{row} {k}") for row, them in ROWS.items()
                                                   for k, one in enumerate(them)])
def test_the_verdict_follows_from_what_was_noted(changes, status, says):
    three = copy.deepcopy(recorded())
    for change in changes:
        change(three)
    found, said = in_words(lambda: check_conversion(lambda nudged=False, **_: three[nudged], lambda **_: three[2]))
    assert found == status and re.search(says, said)


def test_each_heading_that_a_verdict_cites_is_one_of_the_chapter():
    headings = re.findall(r"^##+ (.*)$", (TOOL.parents[1] / "docs/your_own_script.md").read_text(), re.MULTILINE)
    code = "".join((TOOL / f"check_conversion/{name}.py").read_text() for name in ("causes", "judge", "outputs", "training"))
    cited = re.findall(r'"([A-Z][a-z]+(?:,? [A-Za-z]+)*)"', code)
    assert "Errors that vary" in cited and {*cited} <= {*headings, "DataLoader"}
