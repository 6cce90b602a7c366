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


def test_a_round_gives_table_record_look_ahead_and_check_of_the_model(tmp_path, customize):
    without_matplotlib = customize("import sys\nsys.modules['matplotlib'] = None\n")
    job = Job([*BENCHMARK, "--gpus", "2", "--rounds", "1", "--epochs", "3", "--output", "figures"],
              tmp_path, CUDA_VISIBLE_DEVICES="", **without_matplotlib)
    assert job.wait(300) == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py[^|]*) \| (\d+) \|.* (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    losses = {(style, int(processes)): loss for style, processes, loss in rows}
    assert losses.keys() == SAME_TRAINING | {("single_gpu.py --batch-size 120", n) for n in (1, 2)}
    assert len({losses[row] for row in SAME_TRAINING}) == 1, "nobody wins by doing less"
    assert "| 1,024 |" in job.stdout and "| efficiency: measured, multinode.py |" in job.stdout
    assert "round 1 of 1: multinode.py, processes: 2, " in job.stderr

    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["command"].startswith("python tools/benchmark.py --gpus 2")
    assert {"torch", "torchvision", "python", "cpu", "cores", "gpus"} <= record.keys()
    for row in record["rows"]:
        assert row["runs"][0]["samples/s"] > 0 and 100 < row["runs"][0]["memory, MB"] < 10_000
    assert "pip install matplotlib" in job.stderr and not (tmp_path / "figures.svg").exists()


def test_the_chapter_shows_the_figures_of_the_record(benchmark):
    chapter = (ROOT / "docs/measured.md").read_text()
    record = json.loads((ROOT / "docs/benchmark.json").read_text())
    assert record["command"] in " ".join(chapter.split())
    for row in record["rows"]:
        assert f"| {' | '.join(map(str, benchmark.figures(row)))} |\n" in chapter
    for devices, efficiencies in record["look ahead"]["efficiency: without overlap, with it"].items():
        assert f"| {int(devices):,} | {' | '.join(f'{part:.0%}' for part in efficiencies)} |\n" in chapter
    checked = record["model checked"]
    efficiencies = {f"efficiency: {name}": values for name, values in checked.pop("efficiency").items()}
    for name, values in {**checked, **efficiencies}.items():
        assert f"| {name} | {benchmark.spread(values, 2)} |\n" in chapter


def test_the_model_is_the_rings_and_nothing_hides_a_single_bucket(benchmark):
    assert benchmark.ring(2, 4000, 1000, 0.5) == 4 + 2 * 0.5  # the bytes once, and two latencies
    assert benchmark.ring(4, 4000, 1000, 0.5) == 6 * (1 + 0.5)  # a quarter in each of six rounds
    assert benchmark.efficiency(3, 1, size=2**20) == (0.75, 1)
    assert benchmark.efficiency(3, 5, size=2**20) == (3 / 8, 0.5)
    assert benchmark.efficiency(3, 1, size=2**20 - 1) == (0.75, 0.75)


def test_a_script_that_fails_is_shown_with_its_own_line(tmp_path):
    job = Job([*BENCHMARK, "--model", "no_such_model", "--output", "figures"], tmp_path)
    assert job.wait() == 1
    assert "argument --model: invalid choice: 'no_such_model'" in job.stderr and not (tmp_path / "figures.json").exists()
