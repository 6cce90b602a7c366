"""tools/benchmark.py compares the scripts."""
import re
import sys

from launch import LITTLE_DATA, ROOT, Job


def test_it_prints_a_row_for_each_script_all_of_which_have_trained_alike(tmp_path):
    options = "--device cpu --devices 1 --rounds 1 --epochs 3 --batch-size 48".split()
    job = Job([sys.executable, ROOT / "tools/benchmark.py", *options], tmp_path, before=LITTLE_DATA)
    assert job.wait() == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py) \| 1 \| [\d,]+ \(.* \| \d+\.\d\d \(.* \| (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    assert [script for script, _ in rows] == ["single_gpu.py", "multigpu_spawn.py", "multigpu_torchrun.py"]
    assert len({loss for _, loss in rows}) == 1
