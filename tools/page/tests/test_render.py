"""tools/page keeps the diffs in the chapters those of the files, and each reason under its own hunk."""
import re
import shutil
import subprocess
import sys

import pytest
from launch import ROOT


def test_diffs_are_those_of_the_files():
    done = subprocess.run([sys.executable, ROOT / "tools/page", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("files, old, new, says", [
    ("*.py", r"model\.eval\(\)", "model.train(False)", "docs/index.html is behind: run python tools/page"),
    ("docs/diffs.md", "<!-- diff single_gpu.py dp.py 3 -->", "", "shows 2 hunks of single_gpu.py -> dp.py, which has 3"),
    ("docs/diffs.md", "(?s)(dp.py 3 -->\n).*?(<!-- end)", r"\1+another\n\2", "hunk 3 of single_gpu.py -> dp.py is not what"),
    ("docs/diffs.md", "`local_rank` is", "`mp.spawn` gives", "this names code that these lines do not have"),
    ("docs/diffs.md", "`all_reduce` adds", "It adds", "of several hunks this explains one: name code that shows which")])
def test_render_says_what_is_behind_and_puts_no_other_hunk_over_a_reason(tmp_path, files, old, new, says):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
    for file in copy.rglob(files):
        file.write_text(re.sub(old, new, file.read_text()))
    done = subprocess.run([sys.executable, copy / "tools/page", "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr
