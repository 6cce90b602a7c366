"""tools/render.py keeps the diffs in the chapters those of the files, and each reason under its own hunk."""
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, copy_project


def test_diffs_are_those_of_the_files():
    done = subprocess.run([sys.executable, ROOT / "tools/render.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("files, old, new, says", [
    ("*.py", r"model\.eval\(\)", "model.train(False)", "docs/index.html is behind: run python tools/render.py"),
    ("docs/diffs.md", "<!-- diff single_gpu.py dp.py 3 -->", "", "shows 2 hunks of single_gpu.py -> dp.py, which has 3"),
    ("docs/diffs.md", "(?s)(dp.py 3 -->\n).*?(<!-- end)", r"\1+another\n\2", "hunk 3 of single_gpu.py -> dp.py is not what")],
    ids=["a line changed", "a hunk more", "another hunk"])
def test_render_says_what_is_behind_and_puts_no_other_hunk_over_a_reason(files, old, new, says):
    copy_project(Path("copy"))
    for file in Path("copy").rglob(files):
        file.write_text(re.sub(old, new, file.read_text()))
    done = subprocess.run([sys.executable, "copy/tools/render.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr
