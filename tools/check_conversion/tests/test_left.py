"""What a run leaves in its copy of the folder is read without running any of it."""
import json
import pickle
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from check_conversion import left
from check_conversion.left import Left, compare_left
from check_conversion.protocol import About, Remark
from check_conversion.running import Process, Run

safetensors = pytest.importorskip("safetensors.torch")


def found(known=()):
    return left.read(Path("."), known)


def test_text_is_text_whatever_its_ending(folder):
    Path("out/deep").mkdir(parents=True)
    for name in ("log.csv", "history.jsonl", "out/config.yaml", "out/deep/notes"):
        Path(name).write_text("epoch,loss\n1,0.5\n")
    assert {name: (one.kind, one.text) for name, one in found().items()} == dict.fromkeys(
        ("history.jsonl", "log.csv", "out/config.yaml", "out/deep/notes"), ("text", "epoch,loss\n1,0.5\n"))


def test_what_is_known_and_what_links_lead_to_are_left_out(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "data.csv").write_text("1")
    Path("linked").symlink_to(elsewhere)
    Path("data.csv").symlink_to(elsewhere / "data.csv")
    Path("old.txt").write_text("1")
    Path("new.txt").write_text("1")
    assert [*found({"old.txt"})] == ["new.txt"]


def test_arrays_of_numpy(folder):
    numpy.save("one.npy", numpy.arange(6.).reshape(2, 3))
    numpy.savez("some.npz", a=numpy.ones(2, numpy.float32), b=numpy.array([1, 2], ">i4"))
    one, some = found().values()
    assert one.kind == some.kind == "arrays" and one.arrays["the array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(some.arrays["a"], torch.ones(2)) and some.arrays["b"].tolist() == [1, 2]


def test_safetensors_as_its_package_wrote_them(folder):
    state = {"weight": torch.randn(3, 2), "half": torch.randn(4).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3),
             "mask": torch.tensor([True, False])}
    safetensors.save_file(state, "model.safetensors", metadata={"epoch": "3"})
    one = found()["model.safetensors"]
    assert one.kind == "arrays" and one.text == "epoch: 3" and one.arrays.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(one.arrays[name].to(tensor.dtype), tensor, rtol=0, atol=0)


class Trap:
    def __reduce__(self):
        return Path("sprung").touch, ()


def test_nothing_pickled_is_opened(folder):
    Path("plain.pkl").write_bytes(pickle.dumps(Trap()))
    numpy.save("objects.npy", numpy.array([Trap()], object), allow_pickle=True)
    torch.save(torch.ones(2), "model.pt")
    assert {one.kind for one in found().values()} == {"unread"} and not Path("sprung").exists()


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 9, b"\xff" * 7 + b"\x7f{}", (2).to_bytes(8, "little") + b"[]",
                                     (99).to_bytes(8, "little") + HEADER, len(HEADER).to_bytes(8, "little") + HEADER])
def test_broken_files_are_unread(folder, content):
    Path("model.safetensors").write_bytes(content)
    Path("broken.npy").write_bytes(b"\x93NUMPY" + content)
    Path("broken.npz").write_bytes(b"PK\3\4" + content)
    assert {one.kind for one in found().values()} == {"unread"}


def test_what_is_too_large_is_unread(folder, monkeypatch):
    monkeypatch.setattr(left, "MOST", 1000)
    Path("long.txt").write_text("0" * 1001)
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"0" * 100_000)
    assert {name: one.why for name, one in found().items()} == {"bomb.npz": "too large", "long.txt": "too large"}


def test_how_far_two_arrays_are_apart():
    nan = float("nan")
    assert left.distance(torch.tensor([3., 4., nan]), torch.tensor([3., 4., nan])) == (0, 5)
    assert left.distance(torch.tensor([3, 4]), torch.tensor([3, 0])) == (4, 5)
    assert left.distance(torch.tensor([1.]), torch.tensor([nan]))[0] == float("inf")


# What both scripts leave.

CSV = "epoch,loss\n1,0.50000000\n2,0.25000000\n"


def run(name, *ranks, **files):
    written = [Process(rank, 0, [Remark(About.WRITTEN, file) for file in them]) for rank, them in enumerate(ranks)]
    left = {name.replace("_", "."): one if isinstance(one, Left) else Left("text", one) if isinstance(one, str)
            else Left("arrays", arrays=one) for name, one in files.items()}
    return Run(name, 0, "", "", written, files=left)


def compared(before, after, again=None, ranks=(), drift=1e-7):
    return compare_left(run("train.py", **before), run("train.py", **before | (again or {})),
                        run("train_ddp.py", *ranks, **after), drift)


def test_files_that_rounding_alone_parts_are_the_same():
    arrays, other = {"a": torch.tensor([1., 2.])}, {"a": torch.tensor([1., 2.0000001])}
    found = compared(dict(log_csv=CSV, a_npy=arrays), dict(log_csv=CSV.replace("0.5000000", "0.5000001"), a_npy=other))
    assert found.said == "2 files the same: log.csv, a.npy" and not found.faults and not found.remarks


FAULTS = {
    "another figure": (dict(log_csv=CSV.replace("0.50", "0.51")),
                       "log.csv: written differently: train.py: 1,0.50000000 train_ddp.py: 1,0.51"),
    "a line twice": (dict(log_csv=CSV + "2,0.25000000\n"), "log.csv: written 3 times instead of 2"),
    "no file": (dict(other_csv=Left("unread")), "train_ddp.py does not write a.npy"),
    "another shape": (dict(log_csv=CSV, a_npy={"a": torch.ones(1)}), "a.npy: a has the shape [1] instead of [2]"),
    "other numbers": (dict(log_csv=CSV, a_npy={"a": torch.tensor([1., 3.])}), "a.npy: a different a is saved"),
    "no number": (dict(log_csv=CSV, a_npy={"a": torch.tensor([1., float("nan")])}), "a.npy: a different a is saved"),
    "other names": (dict(log_csv=CSV, a_npy={"module.a": torch.tensor([1., 2.])}),
                    "a.npy: a is missing (names begin with `module.`)")}


@pytest.mark.parametrize("after, said", FAULTS.values(), ids=FAULTS)
def test_what_is_not_the_same_is_named(after, said):
    found = compared(dict(log_csv=CSV, a_npy={"a": torch.tensor([1., 2.])}), after)
    assert said in " ".join(" ".join(map(str, found.faults)).split())


def test_a_file_that_two_ranks_write_is_a_fault_however_it_ends():
    found = compared(dict(log_csv=CSV), dict(log_csv=CSV), ranks=[["log.csv"], ["log.csv"]])
    assert [fault.text for fault in found.faults] == ["log.csv is written by ranks 0 and 1"]
    assert not compared(dict(log_csv=CSV), dict(log_csv=CSV), ranks=[["log.csv"], ["1.csv"]]).faults


def test_what_was_not_compared_is_said():
    moves, other = {"a": torch.tensor([1., 2.])}, {"a": torch.tensor([9., 2.])}
    events = Left("unread", why="neither text nor arrays")
    found = compared(dict(time_npy=moves, events=events), dict(time_npy=other, events=events, more_txt="1"),
                     again=dict(time_npy=other))
    assert not found.faults and found.remarks == [
        "written by train_ddp.py alone: more.txt", "not compared, because another run of train.py leaves another: time.npy: a",
        "not read: events (neither text nor arrays)"]
