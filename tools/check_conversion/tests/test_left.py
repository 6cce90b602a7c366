"""What a run leaves in its copy of the folder is read without running any of it."""
import json
import pickle
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from check_conversion import left

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
