"""check-conversion as a command: what it says of two scripts, of one that is no measure, and of a folder that changes."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from check_conversion import command
from check_conversion.verdict import Verdict
from runs import AFTER, BEFORE, TOOL, changed, check


@pytest.fixture(autouse=True)
def signals():
    """The command has handlers of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


SPAWNED = """
import runpy, sys
import torch.multiprocessing as mp

def be_rank(rank):
    sys.argv = ["ranks.py", str(rank)]
    runpy.run_path("ranks.py")

if __name__ == "__main__":
    mp.spawn(be_rank, nprocs=2)
"""


def test_two_commands_are_compared_also_ranks_that_their_script_spawns(monkeypatch, capsys):
    Path("train.py").write_text("def main(args):\n" + re.sub("^", "    ", BEFORE, flags=re.MULTILINE) + "\nmain([])\n")
    Path("train_ddp.py").write_text(SPAWNED)
    Path("ranks.py").write_text("import os, sys\n" + changed(AFTER, ('("gloo")', '("gloo", rank=int(sys.argv[1]), world_size=2, '
                                                                     'init_method=f"file://{os.getcwd()}/met")')))
    files = {*os.listdir()}
    monkeypatch.setattr("sys.argv", ["check-conversion", "--patience=300", "python train.py", "python train_ddp.py"])
    status, said = command.main(), capsys.readouterr().out
    assert status == 0 and re.match(
        r"the same training: 12 steps with 2 processes; compared: training, 2 lines, 1 save\n"
        r"weights within \de-1\d of their norm; rounding alone moves them by \de-1\d\n"
        r"printed: 2 of 2 lines the same\nsaved: 1 file the same: model.pt\n", said), said
    assert {*os.listdir()} == files


@pytest.mark.parametrize("outputs, status", [((), 2), ((3,), 0)], ids=["by somebody", "by the verdict, which goes there"])
def test_a_file_that_changes_meanwhile_is_said_before_any_verdict(outputs, status, monkeypatch, capsys):
    file = os.open("check.txt", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(command, "compare", lambda *_: Verdict(0, ["the same training" * bool(os.write(file, b"changed"))]))
    monkeypatch.setattr(command, "OUTPUTS", [file for _ in outputs])
    monkeypatch.setattr("sys.argv", ["check-conversion", "python train.py", "torchrun train_ddp.py"])
    assert command.main() == status
    said = capsys.readouterr()
    assert ("the same training" in said.out) == (not status) == ("check.txt changed during the check" not in said.err)


def test_help_fits_a_screen():
    said = subprocess.run([sys.executable, TOOL, "--help"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "COLUMNS": "80"}).stdout.splitlines()
    assert len(said) <= 32 and all(len(line) <= 80 for line in said)


def test_all_packages_are_installed_with_it():
    packages = {str(file.parent.relative_to(TOOL)).replace("/", ".") for file in TOOL.glob("check_conversion/**/*.py")}
    listed = re.search(r"packages = \[(.*)\]", (TOOL / "pyproject.toml").read_text())[1]
    assert packages == {*re.findall('"(.*?)"', listed)}


UNSEEDED = ("torch.manual_seed(0)", "torch.manual_seed(int(time.time()))")


@pytest.mark.parametrize("script, says", [
    ("import time\n" + changed(BEFORE, UNSEEDED), r"draws different random numbers in each run \(it begins with different weights\): begin it"),
    ("import numpy\n" + BEFORE.replace("model(x)", "model(x + numpy.random.rand())"),
     r"draws different random numbers in each run \(step 1: by numpy\)"),
    ("import torch\n1 / 0\n", r"fails under the check \(it at train.py:2: ZeroDivisionError: division by zero\): does"),
    ("import torch\n", "takes no optimizer step$")], ids=["weights by the time", "samples by numpy", "an error", "no step"])
def test_an_original_that_cannot_be_the_measure_is_said_in_one_line(script, says):
    status, said = check(script, "import torch")
    assert status == 2 and re.match(f"cannot be judged: train.py {says}", said)
