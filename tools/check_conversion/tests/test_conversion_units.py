"""The functions that a verdict rests on, and how files are read without running any of what is in them."""
import math
import pickle
import random
from pathlib import Path

import numpy
import pytest
import torch
from check_conversion import new_files
from check_conversion.observed.contents import contents
from check_conversion.outputs import Figures
from check_conversion.samples import Relation, relate


@pytest.mark.parametrize("relation, ranks", [
    (Relation.SAME, [[1, 3], [2, 4 + 1e-5]]), (Relation.ALIKE, [[1, 2], [2, 1]]), (Relation.REPEATED, [[1, 2, 3], [3, 4]]),
    (Relation.LEFT_OUT, [[1, 2], [3]]), (Relation.OVERLAP, [[1, 2], [2, 3]])])
def test_samples_of_all_ranks_relate_to_the_original_s_as_far_as_rounding_lets_them(relation, ranks):
    assert relate([1, 2, 3, 4], ranks)[0] == relation


def test_a_figure_may_part_as_far_as_rounding_parts_it_but_a_count_that_both_runs_of_the_original_have_may_not():
    figures, blurred = Figures(drift=1e-6), Figures(drift=0.5)
    assert not figures.differs(1.0, 1.0, 1.0 + 4e-6) and figures.differs(1.0, 1.0, 1.0 + 6e-6)
    assert figures.varies(1.0, 1.001) and not figures.varies(1.0, 1.00001)
    assert not figures.differs(math.nan, math.nan, math.nan) and figures.differs(1.0, 1.0, math.nan)
    assert blurred.differs(96, 96, 48) and not blurred.differs(96, 95, 94)
    assert not figures.differs(91.4, 91.4, 91.3, unit=0.1) and figures.flipped_by_fault(1) and not figures.flipped_by_fault(100)


def test_modules_and_numpy_s_numbers_in_what_is_saved_are_compared_large_tensors_in_their_order_and_other_objects_named():
    numbers = torch.randn(2**16)
    assert contents("", {"large": numbers}) != contents("", {"large": numbers.roll(2**15)})
    saved = contents("a.pt", {
        "nets": [torch.nn.Linear(1, 1, bias=False)], "array": numpy.ones(3, "f4"), "loss": numpy.float32(0.5), "at": Path("x"),
        "meta": torch.ones(1, device="meta"),
        "none": None, "best": "net", "buffer": torch.ones(torch.get_rng_state().shape),
        "states": [numpy.random.get_state(), numpy.random.get_state()[1], random.getstate(), torch.get_rng_state()]})
    assert [*saved.tensors] == ["nets.0.weight", "array", "buffer"] and saved.tensors["array"].shape == [3]
    assert saved.values == {"loss": 0.5} and saved.strings == {"best": "net"} and [*saved.unknown] == ["at", "meta"]


class Trap:
    def __reduce__(self):
        return Path("sprung").touch, ()


def test_new_files_are_read_by_what_is_in_them_and_nothing_is_run_or_behind_a_link(monkeypatch):
    Path("old").mkdir()
    Path("linked").symlink_to("old")
    for name in ("notes", "old/data.csv"):
        Path(name).write_text("epoch,loss\n")
    numpy.save("one.npy", numpy.arange(6.).reshape(2, 3))
    numpy.savez("some.npz", a=numpy.array([1, 2], ">i4"))
    torch.save({"weight": torch.ones(2), "loss": 0.5, "best": "net"}, "best.pt")
    torch.save({"args": Trap()}, "trap.pt")
    Path("plain.pkl").write_bytes(pickle.dumps(Trap()))
    numpy.save("objects.npy", numpy.array([Trap()], object), allow_pickle=True)
    for name, start in (("broken.safetensors", b""), ("broken.npy", b"\x93NUMPY"), ("broken.npz", b"PK\3\4")):
        Path(name).write_bytes(start + b"\xff" * 9)
    Path("long.txt").write_text("0" * 10_001)
    monkeypatch.setattr(new_files, "MOST", 10_000)
    found = new_files.read(".", {"old/data.csv"})
    assert found.pop("notes").text == "epoch,loss\n" and found.pop("linked").text == "a link to old"
    assert found.pop("one.npy").saved == contents("", {"array": torch.arange(6.).reshape(2, 3).double()})
    assert found.pop("some.npz").saved.tensors["a"].shape == [2]
    assert found.pop("best.pt").saved == contents("", torch.load("best.pt"))
    assert len(found) == 7 and {one.kind for one in found.values()} == {"unread"} and not Path("sprung").exists()


def test_safetensors_are_read_as_their_package_wrote_them():
    state = {"weight": torch.randn(3, 2), "half": torch.randn(4).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3)}
    pytest.importorskip("safetensors.torch").save_file(state, "model.safetensors", {"epoch": "3"})
    assert new_files.read(".", ())["model.safetensors"].saved == contents("", {"epoch": "3", **state})
