"""tools/embed_diffs.py keeps the diffs and counts in the texts those of the scripts."""
import re
import shutil
import subprocess
import sys

import pytest
from launch import ROOT


def embed(folder, *options):
    return subprocess.run([sys.executable, folder / "tools/embed_diffs.py", *options], capture_output=True, text=True).stderr


def test_diffs_and_counts_are_those_of_the_scripts():
    assert embed(ROOT, "--check") == ""


@pytest.mark.parametrize("files, old, new, says", [
    ("*.py", "drop_last=True", "drop_last=False", "README.md is behind"),
    ("README.md", r"-\d+ \+\d+", "-1 +1", "README.md is behind"),
    ("README.md", "<!-- diff .* set_epoch .*", "", "shows this of single_gpu.py -> multigpu_torchrun.py 0 times"),
    ("docs/recipes.md", "<!-- diff .* recipes/bf16.py .*", "", "docs/recipes.md shows nothing of recipes/bf16.py"),
    ("docs/diffs.md", r"def run \|", "def walk |", "no change has def walk")])
def test_what_is_behind_or_missing_is_named(tmp_path, files, old, new, says):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
    for file in copy.glob(files):
        file.write_text(re.sub(old, new, file.read_text()))
    assert says in embed(copy, "--check")
    if "behind" in says:
        assert embed(copy) == embed(copy, "--check") == ""
