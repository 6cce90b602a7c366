"""The functions that a verdict rests on, and how files are read without running any of what is in them."""
import argparse
import os
import pickle
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from check_conversion import files, records
from check_conversion.outputs import compare_column
from check_conversion.records import Step
from check_conversion.samples import Relation, Samples, relate
from check_conversion.sketch import describe


@pytest.mark.parametrize("relation, ranks", [
    (Relation.SAME, [[1, 3], [2, 4 + 1e-5]]), (Relation.ALIKE, [[1, 2], [2, 1]]), (Relation.MORE, [[1, 2, 3], [3, 4]]),
    (Relation.LEFT_OUT, [[1, 2], [3]]), (Relation.LEFT_OUT, [[1, 2], [2, 3]]), (Relation.OTHERS, [[1, 2], [3, 9]])])
def test_samples_of_all_ranks_relate_to_the_original_s_as_far_as_rounding_lets_them(relation, ranks):
    assert relate([1, 2, 3, 4], ranks)[0] == relation


@pytest.mark.parametrize("original, ranks", [
    ({"nodes": [[0.5], [0.7]], "edges": [[0, 1]]},
     [{"nodes": [[0.5]], "edges": [[0, 0]]}, {"nodes": [[0.7]], "edges": [[0, 0]]}]),
    ({"ids": [[1, 2], [3, 0]], "labels": [[1, 2], [3, -100]]},
     [{"ids": [[1, 2]], "labels": [[1, 2]]}, {"ids": [[3]], "labels": [[3]]}])])
def test_numbers_that_a_batch_makes_its_own_hide_no_samples_that_are_the_same(original, ranks):
    """A graph's edges count from the batch's first node; labels are padded to its longest sample."""
    step, *shares = (Step(fed=[(name, describe(torch.tensor(value))) for name, value in each.items()])
                     for each in (original, *ranks))
    found = Samples(step, step, shares, [step], "train.py")
    assert (found.relation, found.known) == (Relation.SAME, f"the same samples in {next(iter(original))}")


@pytest.mark.parametrize("drift, parted, varying, rows", [
    (1e-6, {1, 3}, set(), ["1.0 1.0 1.000004", "1.0 1.0 1.000007", "nan nan nan", "none none 1.0"]),
    (1e-6, set(), {0, 1, 2}, ["1.0 1.2 9.0", "1.0 1.4 9.0", "1.0 1.00001 9.0"]),  # a time, in most of them
    (1e-6, {1}, {0}, ["0.5s 0.7s 0.9s", "0.5s 0.5s 0.5m"]),
    (0.5, {0}, set(), ["96 96 95", "96 95 94"]),  # a count that both runs of the original have is exact
    (1e-6, {0}, set(), ["91.4 91.4 91.3", "91.4 91.3 91.3", "91.4 91.4 91.3"]),  # rounding has changed a last digit
    (1e-3, set(), set(), ["91.4 91.4 91.3"])])
def test_a_figure_may_part_as_far_as_rounding_parts_it(drift, parted, varying, rows):
    assert compare_column([row.split() for row in rows], drift) == (parted, varying)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_files_are_read_by_what_is_in_them_and_nothing_is_run_or_behind_a_link(monkeypatch):
    Path("old").mkdir()
    Path("linked").symlink_to("old")
    for name in ("notes", "old/data.csv"):
        Path(name).write_text("epoch,loss\n")
    numpy.save("one.npy", numpy.arange(6.).reshape(2, 3))
    torch.save({
        "nets": [torch.nn.Linear(1, 1, bias=False)], "array": numpy.ones(3, "f4"), "loss": numpy.float64(0.5), "at": Path("x"),
        "args": argparse.Namespace(lr=0.1), "trap": Trap(), "none": None, "buffer": torch.ones(torch.get_rng_state().shape),
        "states": [numpy.random.get_state(), random.getstate(), torch.get_rng_state()]}, "best.pt")
    Path("plain.pkl").write_bytes(pickle.dumps([Trap(), 7]))
    numpy.save("objects.npy", numpy.array([Trap()], object), allow_pickle=True)
    for name, start in (("broken.safetensors", b""), ("broken.npy", b"\x93NUMPY"), ("broken.pt", b"PK\3\4")):
        Path(name).write_bytes(start + b"\xff" * 9)
    Path("long.txt").write_text("0" * 100_001)
    Path("trace.json").write_text('{"traceEvents": []}')
    monkeypatch.setattr(files, "MOST", 100_000)
    found = files.read_all(Path(), {"old/data.csv"})
    assert found.pop("notes").text == "epoch,loss\n"
    assert found.pop("one.npy").values["value"].shape == [2, 3] and found.pop("plain.pkl").values["1"] == 7
    values = found.pop("best.pt").values
    assert {name: one.shape for name, one in values.items() if isinstance(one, files.Tensor)} == {
        "nets.0.weight": [1, 1], "array": [3], "buffer": [*torch.get_rng_state().shape]}
    assert (values["loss"], values["at.0"], values["args.lr"]) == (0.5, "x", 0.1)
    assert len(found) == 6 and {one.kind for one in found.values()} == {"unread"} and not Path("sprung").exists()


def test_large_tensors_are_compared_in_their_order_and_safetensors_read_as_their_package_wrote_them():
    numbers = torch.randn(2**16)
    assert files.describe_tensor(numbers).sketches != files.describe_tensor(numbers.roll(2**15)).sketches
    state = {"weight": torch.randn(3, 2), "half": torch.randn(4).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3)}
    pytest.importorskip("safetensors.torch").save_file(state, "model.safetensors")
    assert files.read_all(Path(), ())["model.safetensors"] == files.with_values(state)


def test_each_record_is_of_a_kind_of_the_table():
    code = "".join(file.read_text() for file in Path(records.__file__).parent.glob("observed/*.py"))
    assert {*re.findall(r'note(?:_file)?\(\s*"([a-z0-9_ ]+)"', code)} == records.KINDS.keys()
