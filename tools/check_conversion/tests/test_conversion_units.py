"""The functions that a verdict rests on."""
import math

import pytest
from check_conversion.judge import own_error
from check_conversion.outputs import Figures, compare_texts
from check_conversion.protocol import Step
from check_conversion.samples import Losses, Relation, Samples, losses, relate


@pytest.mark.parametrize("relation, ranks", [
    (Relation.SAME, [[1, 3], [2, 4]]), (Relation.WHOLE, [[4, 3, 2, 1], [1, 2, 3, 4]]), (Relation.ALIKE, [[1, 2], [2, 1]]),
    (Relation.REPEATED, [[1, 2, 3], [3, 4]]), (Relation.LEFT_OUT, [[1, 2], [3]]), (Relation.OVERLAP, [[1, 2], [2, 3]]),
    (Relation.OTHERS, [[1, 2], [3, 5]]), (Relation.UNKNOWN, [[], []])])
def test_samples_of_all_ranks_relate_to_the_original_s(relation, ranks):
    assert relate([1, 2, 3, 4], ranks)[0] == relation


def test_samples_that_only_rounding_parts_are_the_same():
    assert relate([1, 2, 3, 1e3], [[1, 2 + 1e-3], [3, 1e3]])[0] == Relation.SAME


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
    assert own_error("") == "it says nothing"


def test_a_figure_may_part_as_far_as_rounding_parts_it():
    figures = Figures(drift=1e-6)
    assert not figures.parts(1.0, 1.0, 1.0 + 4e-6) and figures.parts(1.0, 1.0, 1.0 + 6e-6)
    assert figures.varies(1.0, 1.001) and not figures.varies(1.0, 1.00001)
    assert not figures.parts(math.nan, math.nan, math.nan) and figures.parts(1.0, 1.0, math.nan)


def test_a_whole_number_that_both_runs_of_the_original_have_is_no_rounding():
    blurred = Figures(drift=0.5)
    assert blurred.parts(96, 96, 48) and not blurred.parts(96, 95, 94)


def lines(original, nudged, converted, drift=1e-6):
    found = compare_texts((original, nudged, converted), ("train.py", "train_ddp.py"), drift)
    return [fault.text for fault in found.faults], found.said, found.remarks


@pytest.mark.parametrize("original, nudged, converted", [
    ("The time elapse of epoch 000 is: 00: 00: 01", "The time elapse of epoch 000 is: 00: 03: 44",
     "The time elapse of epoch 000 is: 00: 00: 02"),
    ("Tot: 249ms\nTot: 251ms", "Tot: 1m12s\nTot: 71s", "Tot: 1s12ms\nTot: 980ms"),
    ("Tokens / Sec: 1219.2", "Tokens / Sec: 3.1", "Tokens / Sec: 800.7"),
    ("2026-01-31 12:30:01,123 loss 0.5", "2026-02-02 00:31:15,007 loss 0.5", "2026-01-31 12:30:07,220 loss 0.5"),
    ("<State object at 0x7f12ab> 0.5", "<State object at 0x7f99cd> 0.5", "<State object at 0x55e0f1> 0.5")])
def test_what_varies_between_two_runs_of_the_original_is_not_compared_and_said(original, nudged, converted):
    faults, _, remarks = lines(original, nudged, converted)
    assert not faults and remarks == [
        "compared except for what differs in each run, such as a time: " + original.split("\n")[0]
        + " (and 1 more line)" * ("\n" in original)]


@pytest.mark.parametrize("original, converted", [
    ("beta 0.50", "beta 0.60"), ("theta: 1.25", "theta: 1.5"), ("[96/240]", "[48/240]"), ("3.5 s of speech", "3.9 s of speech"),
    ("loss 0.5", "loss nan"), ("2026-01-31 12:30:01 loss 0.5", "2026-01-31 12:30:07 loss 0.9")])
def test_what_does_not_move_with_the_clock_is_a_figure(original, converted):
    faults, _, _ = lines(original, original.replace("12:30:01", "00:30:15"), converted)
    assert faults == [f"printed differently:\n  train.py: {original}\n  train_ddp.py: {converted}\n "]


def test_all_lines_that_part_are_counted_and_three_of_them_shown():
    faults, _, _ = lines(*["".join(f"step {k} loss 0.{k}\n" for k in range(1, 7))] * 2,
                         "".join(f"step {k} loss 0.9{k}\n" for k in range(1, 7)))
    assert faults[0].count("train_ddp.py: ") == 3 and "and 3 more lines" in faults[0]


def test_lines_that_another_run_of_the_original_does_not_have_are_named():
    faults, said, remarks = lines("loss 0.5\nspike 3", "loss 0.5", "loss 0.5")
    assert not faults and said == "1 of 2 lines the same"
    assert remarks == ["not compared, because another run of train.py has other lines: spike 3"]


def test_a_line_may_have_more_words_in_the_converted_script():
    assert lines("loss 0.5", "loss 0.5", "rank 0: loss 0.5")[0] == []
    assert lines("loss 0.5", "loss 0.5", "rank 0: loss 0.9")[0] != []
