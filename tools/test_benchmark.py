"""tools/benchmark.py compares the scripts."""
import re
import sys

from fixtures import folder  # noqa: F401
from launch import ROOT, Job

BENCHMARK = ROOT / "tools/benchmark.py"


def test_a_round_gives_a_table_and_a_script_that_fails_is_shown_with_its_own_line():
    job = Job([sys.executable, BENCHMARK, "--scripts", "multinode.py", "--gpus", "2", "--rounds", "1", "--epochs", "3"],
              CUDA_VISIBLE_DEVICES="")
    assert job.wait() == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py[^|]*) \| (\d+) \| ([\d,]+) \(.* \| (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    losses = {f"{style} {processes}": loss for style, processes, speed, loss in rows}
    assert losses.keys() == {"single_gpu.py 1", "multinode.py 2", *(f"single_gpu.py --batch-size 480 {n}" for n in (1, 2))}
    assert losses["single_gpu.py 1"] == losses["multinode.py 2"], "nobody wins by doing less"
    job = Job([sys.executable, BENCHMARK, "--model", "no_such_model"])
    assert job.wait() == 1 and "argument --model: invalid choice: 'no_such_model'" in job.stderr
