"""The functions that a verdict rests on, and how files are read without running any of what is in them."""
import json
import math
import pickle
import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from check_conversion import new_files
from check_conversion.observed import batchnorm, comparable, sketch
from check_conversion.observed.contents import contents
from check_conversion.outputs import Figures
from check_conversion.protocol import Step
from check_conversion.running import own_error
from check_conversion.samples import Losses, Relation, Samples, losses, relate

HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize("relation, ranks", [
    (Relation.SAME, [[1, 3], [2, 4]]), (Relation.WHOLE, [[4, 3, 2, 1], [1, 2, 3, 4]]), (Relation.ALIKE, [[1, 2], [2, 1]]),
    (Relation.REPEATED, [[1, 2, 3], [3, 4]]), (Relation.LEFT_OUT, [[1, 2], [3]]), (Relation.OVERLAP, [[1, 2], [2, 3]]),
    (Relation.OTHERS, [[1, 2], [3, 5]]), (Relation.UNKNOWN, [[], []]), (Relation.SAME, [[1, 2 + 1e-5], [3, 4]])])
def test_samples_of_all_ranks_relate_to_the_original_s_as_far_as_rounding_lets_them(relation, ranks):
    assert relate([1, 2, 3, 4], ranks)[0] == relation


@pytest.mark.parametrize("relation, parts", [
    (Losses.EACH, [3, 3]), (Losses.MEAN, [2, 4]), (Losses.SUM, [1, 2]), (Losses.MEAN_OF_SAMPLES, [2, 3.5]),
    (Losses.OTHER, [1, 1]), (Losses.UNKNOWN, [])])
def test_losses_of_the_ranks_make_up_the_original_s(relation, parts):
    shares = [Step(losses=[part]) for part in parts] or [Step()]
    assert losses(Step(losses=[3]), shares, Samples(ranks=(1, 2))) == relation


def test_an_error_is_named_by_the_last_line_of_the_user_s_own():
    assert own_error("""[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train_ddp.py", line 7, in <module>
[rank1]:     step()
[rank1]:   File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear
[rank1]: RuntimeError: mat1 and mat2 shapes cannot be multiplied
ValueError: what came later""") == "rank1 at train_ddp.py:7: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert own_error("") == "it prints no error"


def test_a_figure_may_part_as_far_as_rounding_parts_it_but_a_count_that_both_runs_of_the_original_have_may_not():
    figures, blurred = Figures(drift=1e-6), Figures(drift=0.5)
    assert not figures.parts(1.0, 1.0, 1.0 + 4e-6) and figures.parts(1.0, 1.0, 1.0 + 6e-6)
    assert figures.varies(1.0, 1.001) and not figures.varies(1.0, 1.00001)
    assert not figures.parts(math.nan, math.nan, math.nan) and figures.parts(1.0, 1.0, math.nan)
    assert blurred.parts(96, 96, 48) and not blurred.parts(96, 95, 94)


def test_new_text_is_read_whatever_its_ending_and_nothing_behind_a_link(tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in ("log.csv", "notes", "old.txt", elsewhere / "data.csv"):
        Path(path).write_text("epoch,loss\n")
    Path("linked").symlink_to(elsewhere)
    Path("data.csv").symlink_to(elsewhere / "data.csv")
    assert {name: one.text for name, one in new_files.read(".", {"old.txt"}).items()} == dict.fromkeys(
        ("log.csv", "notes"), "epoch,loss\n")


def test_arrays_are_read_as_their_packages_wrote_them():
    state = {"weight": torch.randn(3, 2), "half": torch.randn(4).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3)}
    pytest.importorskip("safetensors.torch").save_file(state, "model.safetensors", metadata={"epoch": "3"})
    numpy.save("one.npy", numpy.arange(6.).reshape(2, 3))
    numpy.savez("some.npz", a=numpy.array([1, 2], ">i4"))
    model, one, some = new_files.read(".", ()).values()
    assert model.text == "epoch: 3" and model.arrays.keys() == state.keys()
    assert all(torch.equal(model.arrays[name].to(tensor.dtype), tensor) for name, tensor in state.items())
    assert one.arrays["the array"].tolist() == [[0, 1, 2], [3, 4, 5]] and some.arrays["a"].tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_file_of_torch_save_is_read_and_what_needs_code_is_named():
    torch.save({"weight": torch.ones(2), "loss": 0.5, "best": "net"}, "first.pt")
    Path("best.pt").write_bytes(Path("first.pt").read_bytes())
    torch.save({"args": Trap()}, "trap.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), "script.pt")
    found = new_files.read(".", ())
    assert found["best.pt"].kind == "saved" and found["best.pt"].saved == contents("", torch.load("first.pt"))
    assert found["script.pt"].kind == found["trap.pt"].kind == "unread" and not Path("sprung").exists()


def test_modules_and_numpy_s_numbers_in_what_is_saved_are_compared_and_other_objects_named():
    net = torch.nn.Linear(1, 1, bias=False)
    saved = contents("a.pt", {"nets": [net], "array": numpy.ones(3, "f4"), "loss": numpy.float32(0.5), "at": Path("x"),
                              "none": None, "state": numpy.random.get_state()[1], "torch": torch.get_rng_state()})
    assert [*saved.tensors] == ["nets.0.weight", "array"] and saved.tensors["array"][0] == [3]
    assert saved.values == {"loss": 0.5} and saved.unknown == {"at": "PosixPath"}


@pytest.mark.parametrize("gpus", [False, True])
def test_batchnorm_that_is_converted_on_gpus_alone_is_synchronised_where_there_is_none(gpus, monkeypatch):
    for name, become in {"wrap": lambda *_: None, "asked_for": lambda: "train.py:7", "synchronised_at": "",
                         "synchronised": weakref.WeakSet()}.items():
        monkeypatch.setattr(batchnorm, name, become)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    norm = torch.nn.BatchNorm1d(2)
    batchnorm.note_wrapped(None, norm)
    assert (norm in batchnorm.synchronised) == (batchnorm.synchronised_at == "train.py:7") == (not gpus)


class Trap:
    def __reduce__(self):
        return Path("sprung").touch, ()


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\xff" * 7 + b"\x7f{}", (2).to_bytes(8, "little") + b"[]",
                                     (99).to_bytes(8, "little") + HEADER, len(HEADER).to_bytes(8, "little") + HEADER],
                         ids=["empty", "no text", "a header too long", "a header that is none", "half a header", "half an array"])
def test_nothing_pickled_broken_or_too_large_is_read(monkeypatch, content):
    Path("plain.pkl").write_bytes(pickle.dumps(Trap()))
    numpy.save("objects.npy", numpy.array([Trap()], object), allow_pickle=True)
    for name, start in (("model.safetensors", b""), ("broken.npy", b"\x93NUMPY"), ("broken.npz", b"PK\3\4")):
        Path(name).write_bytes(start + content)
    monkeypatch.setattr(new_files, "MOST", 1000)
    Path("long.txt").write_text("0" * 1001)
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"0" * 100_000)
    assert {one.kind for one in new_files.read(".", ()).values()} == {"unread"} and not Path("sprung").exists()


def test_an_accelerator_that_is_full_is_told(monkeypatch):
    monkeypatch.setattr(sketch, "whole", lambda tensor: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        sketch.describe("images", torch.ones(2, 2), False)


def test_functions_that_torch_does_not_have_are_not_made(monkeypatch):
    F, missing, *others = torch.nn.functional, *comparable.DROPOUTS
    for name in (*others, "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, getattr(F, name))  # which is put back after the test
    monkeypatch.delattr(F, missing)
    monkeypatch.setattr(torch.nn.modules.module, "register_module_forward_pre_hook", id)
    comparable.install(SimpleNamespace(float64=False))
    assert not hasattr(F, missing) and all(getattr(F, name) is comparable.drop_nothing for name in others)
