"""tools/benchmark.py compares the scripts, and leaves a record."""
import json
import re
import sys
from pathlib import Path

from launch import ROOT, SCRIPTS, Job

BENCHMARK = ROOT / "tools/benchmark.py"


def test_a_round_gives_table_and_record_and_a_script_that_fails_is_shown_with_its_own_line():
    job = Job([sys.executable, BENCHMARK, "--gpus", "2", "--rounds", "1", "--epochs", "3", "--output", "figures.json"],
              CUDA_VISIBLE_DEVICES="")
    assert job.wait() == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py[^|]*) \| (\d+) \|.* (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    losses = {f"{style} {processes}": loss for style, processes, loss in rows}
    same_training = {f"{script} {1 if script in ('single_gpu.py', 'dp.py') else 2}" for script in SCRIPTS}
    assert losses.keys() == same_training | {f"single_gpu.py --batch-size 480 {n}" for n in (1, 2)}
    assert len({losses[row] for row in same_training}) == 1, "nobody wins by doing less"
    assert "round 1 of 1: multinode.py, processes: 2\n" in job.stderr

    record = json.loads(Path("figures.json").read_text())
    assert record["command"].startswith("python tools/benchmark.py --gpus 2")
    assert {"torch", "torchvision", "python", "cpu", "cores", "gpus"} <= record.keys()
    for row in record["rows"]:
        assert row["runs"][0]["samples/s"] > 0 and 100 < row["runs"][0]["memory, MB"] < 10_000

    job = Job([sys.executable, BENCHMARK, "--model", "no_such_model", "--output", "none.json"])
    assert job.wait() == 1 and not Path("none.json").exists()
    assert "argument --model: invalid choice: 'no_such_model'" in job.stderr
