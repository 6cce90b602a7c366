"""tools/benchmark.py measures the real scripts, and says what it measured with."""
import json
import re
import signal
import sys

import pytest
from launch import ROOT, Job

BENCHMARK = [sys.executable, ROOT / "tools/benchmark.py"]
SAME_TRAINING = {("single_gpu.py", 1), ("dp.py", 1), ("multigpu_spawn.py", 2), ("multigpu_torchrun.py", 2),
                 ("multinode.py", 2)}


@pytest.fixture
def benchmark(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.syspath_prepend(ROOT / "tools")
    import benchmark
    signal.signal(signal.SIGINT, before)  # utils has changed it
    return benchmark


@pytest.mark.long
def test_a_round_gives_table_and_record(tmp_path):
    job = Job([*BENCHMARK, "--gpus", "2", "--rounds", "1", "--epochs", "3", "--output", "figures.json"],
              tmp_path, CUDA_VISIBLE_DEVICES="")
    assert job.wait(300) == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py[^|]*) \| (\d+) \|.* (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    losses = {(style, int(processes)): loss for style, processes, loss in rows}
    assert losses.keys() == SAME_TRAINING | {("single_gpu.py --batch-size 120", n) for n in (1, 2)}
    assert len({losses[row] for row in SAME_TRAINING}) == 1, "nobody wins by doing less"
    assert "round 1 of 1: multinode.py, processes: 2\n" in job.stderr

    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["command"].startswith("python tools/benchmark.py --gpus 2")
    assert {"torch", "torchvision", "python", "cpu", "cores", "gpus"} <= record.keys()
    for row in record["rows"]:
        assert row["runs"][0]["samples/s"] > 0 and 100 < row["runs"][0]["memory, MB"] < 10_000


def test_the_chapter_shows_the_figures_of_the_record(benchmark):
    chapter = (ROOT / "docs/measured.md").read_text()
    record = json.loads((ROOT / "docs/benchmark.json").read_text())
    assert record["command"] in " ".join(chapter.split())
    for row in record["rows"]:
        assert f"| {' | '.join(map(str, benchmark.figures(row)))} |\n" in chapter


def test_a_script_that_fails_is_shown_with_its_own_line(tmp_path):
    job = Job([*BENCHMARK, "--model", "no_such_model", "--output", "figures.json"], tmp_path)
    assert job.wait() == 1
    assert "argument --model: invalid choice: 'no_such_model'" in job.stderr and not (tmp_path / "figures.json").exists()
