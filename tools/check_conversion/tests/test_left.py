"""What runs leave in their copies of the folder is read without running any of it, and compared."""
import json
import pickle
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from check_conversion import left
from check_conversion.left import Left, compare_left
from check_conversion.running import Run

CSV = "epoch,loss\n1,0.50000000\n2,0.25000000\n"
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()


def found(known=()):
    return left.read(Path("."), known)


def test_new_text_is_read_whatever_its_ending_and_nothing_behind_a_link(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in ("log.csv", "notes", "old.txt", elsewhere / "data.csv"):
        Path(path).write_text(CSV)
    Path("linked").symlink_to(elsewhere)
    Path("data.csv").symlink_to(elsewhere / "data.csv")
    assert {name: one.text for name, one in found({"old.txt"}).items()} == {"log.csv": CSV, "notes": CSV}


def test_arrays_are_read_as_their_packages_wrote_them(folder):
    state = {"weight": torch.randn(3, 2), "half": torch.randn(4).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3)}
    pytest.importorskip("safetensors.torch").save_file(state, "model.safetensors", metadata={"epoch": "3"})
    numpy.save("one.npy", numpy.arange(6.).reshape(2, 3))
    numpy.savez("some.npz", a=numpy.array([1, 2], ">i4"))
    model, one, some = found().values()
    assert model.text == "epoch: 3" and model.arrays.keys() == state.keys()
    assert all(torch.equal(model.arrays[name].to(tensor.dtype), tensor) for name, tensor in state.items())
    assert one.arrays["the array"].tolist() == [[0, 1, 2], [3, 4, 5]] and some.arrays["a"].tolist() == [1, 2]


class Trap:
    def __reduce__(self):
        return Path("sprung").touch, ()


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\xff" * 7 + b"\x7f{}", (2).to_bytes(8, "little") + b"[]",
                                     (99).to_bytes(8, "little") + HEADER, len(HEADER).to_bytes(8, "little") + HEADER])
def test_nothing_pickled_broken_or_too_large_is_read(folder, monkeypatch, content):
    Path("plain.pkl").write_bytes(pickle.dumps(Trap()))
    numpy.save("objects.npy", numpy.array([Trap()], object), allow_pickle=True)
    for name, start in (("model.safetensors", b""), ("broken.npy", b"\x93NUMPY"), ("broken.npz", b"PK\3\4")):
        Path(name).write_bytes(start + content)
    monkeypatch.setattr(left, "MOST", 1000)
    Path("long.txt").write_text("0" * 1001)
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"0" * 100_000)
    assert {one.kind for one in found().values()} == {"unread"} and not Path("sprung").exists()


# What both scripts leave.

def compared(before, after, again=None):
    runs = [Run(name, 0, "", "", [], files={name: one if isinstance(one, Left) else Left("text", one) if isinstance(one, str)
                                            else Left("arrays", arrays={"a": torch.tensor(one)}) for name, one in files.items()})
            for name, files in (("train.py", before), ("train.py", before | (again or {})), ("train_ddp.py", after))]
    return compare_left(*runs, 1e-7)


BEFORE = {"log.csv": CSV, "a.npy": [1., 2.], "same.txt": "1 line\n"}
FAULTS = {"another figure": ({"log.csv": CSV.replace("0.50", "0.51")}, "log.csv: written differently: train.py: 1,0.50000000 "),
          "a line twice": ({"log.csv": CSV + "2,0.25000000\n"}, "log.csv: written 3 times instead of 2"),
          "another shape": ({"a.npy": [1.]}, "a.npy: a has the shape [1] instead of [2]"),
          "other numbers": ({"a.npy": [1., 3.]}, "a.npy: a different a is saved"),
          "no number": ({"a.npy": [1., float("nan")]}, "a.npy: a different a is saved")}


def test_files_that_rounding_alone_parts_are_the_same():
    one = compared(BEFORE, BEFORE | {"log.csv": CSV.replace("0.5000000", "0.5000001"), "a.npy": [1., 2.0000001]})
    assert (one.count, one.said) == ("1 csv, 1 npy, 1 txt", "3 files the same: log.csv, a.npy, same.txt") and not one.faults


@pytest.mark.parametrize("after, said", FAULTS.values(), ids=FAULTS)
def test_what_is_not_the_same_is_named(after, said):
    assert said in " ".join(" ".join(map(str, compared(BEFORE, BEFORE | after).faults)).split())


def test_what_was_not_compared_is_said():
    events = Left("unread", why="neither text nor arrays")
    other = {"time.npy": [9.], "events": events}
    one = compared({"time.npy": [1.], "events": events}, other | {"more.txt": "1"}, again=other)
    assert not one.faults and one.remarks == [
        "written by train_ddp.py alone: more.txt",
        "not compared, because train.py writes it differently in each run: time.npy: a",
        "not read: events (neither text nor arrays)"]
