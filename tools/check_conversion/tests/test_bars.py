"""The last state of each of tqdm's bars is noted, without its clock."""
import io

import pytest
from check_conversion.observed import bars, notes

tqdm = pytest.importorskip("tqdm")


@pytest.fixture
def noted(monkeypatch):
    found = []
    monkeypatch.setattr(tqdm.std.tqdm, "close", tqdm.std.tqdm.close)  # put back afterwards
    monkeypatch.setattr(notes, "note", found.append)
    bars.change(tqdm.std)
    return found


def go(**options):
    bar = tqdm.tqdm(range(6), file=io.StringIO(), **options)
    for i in bar:
        bar.set_postfix(loss=i / 10)


@pytest.mark.parametrize("options, state", [
    ({"desc": "epoch 1"}, "epoch 1: 6/6, loss=0.5"), ({}, "6/6, loss=0.5"), ({"leave": False}, "6/6, loss=0.5"),
    ({"mininterval": 1000}, "6/6, loss=0.5"), ({"total": 8}, "6/8, loss=0.5")])
def test_its_last_state_whether_it_was_shown_or_not(noted, options, state):
    go(**options)
    assert [one.state for one in noted] == [state]


def test_one_that_is_updated_by_hand_and_closed_twice(noted):
    with tqdm.tqdm(total=48, file=io.StringIO(), unit="img") as bar:
        bar.update(24)
        bar.close()
    assert [one.state for one in noted] == ["24/48"]


def test_none_of_a_bar_that_is_disabled(noted):
    go(disable=True)
    assert noted == []


def test_each_of_bars_in_one_another(noted):
    for epoch in tqdm.trange(2, desc="epochs", file=io.StringIO()):
        go(desc=f"epoch {epoch}")
    assert [one.state for one in noted] == ["epoch 0: 6/6, loss=0.5", "epoch 1: 6/6, loss=0.5", "epochs: 2/2"]
