"""The examples and a recipe, held by tools/check_conversion."""
import re
from pathlib import Path

import pytest
from launch import ROOT
from runs import check

PAIRS = {"waves": ("--epochs", "2", "--batch-size", "48"),
         "language_model": ("--epochs", "5"),  # after the third its learning rate falls
         "autoencoder": ("--epochs", "2"),
         "stream": ("--samples", "961"),
         "contrastive": ("--epochs", "2")}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_three_processes(pair):
    before, after = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    status, said = check(before, after, 3, PAIRS[pair], name=f"{pair}_ddp.py")
    assert status == 0 and re.search(r"lines the same .*saved: \d files? the same", said)
    assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


def test_a_recipe_is_held_by_the_check():
    Path("utils.py").write_text((ROOT / "utils.py").read_text().replace("3840, 509", "480, 101"))
    texts = [(ROOT / name).read_text() for name in ("single_gpu.py", "recipes/fsdp.py")]
    words = ("1", "1", "--batch-size", "48", "--device", "cpu")
    assert check(*texts, 3, words, name="by_fsdp.py")[0] == 0
