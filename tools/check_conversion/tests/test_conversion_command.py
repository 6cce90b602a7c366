"""check-conversion as a command: what it says, how processes end that it starts, and that nothing of them is left."""
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from check_conversion import command, running
from check_conversion.verdict import CannotSay, Verdict
from check_conversion.workspace import Workspace
from runs import AFTER, BEFORE, STEP, changed, check


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
    Path("ranks.py").write_text("import os, sys\n" + changed(
        AFTER, ('("gloo")', '("gloo", rank=int(sys.argv[1]), world_size=2, init_method=f"file://{os.getcwd()}/met")')))
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


@pytest.mark.parametrize("script, says", [
    ("import time\n" + changed(BEFORE, ("seed(0)", "seed(int(time.time()))")),
     r"draws different random numbers in each run \(it begins with different weights\): begin it"),
    ("import numpy\n" + BEFORE.replace("model(x)", "model(x + numpy.random.rand())"),
     r"draws different random numbers in each run \(step 1: by numpy\)"),
    ("import torch\n1 / 0\n", r"fails under the check \(it at train.py:2: ZeroDivisionError: division by zero\): does")])
def test_an_original_that_cannot_be_the_measure_is_said_in_one_line(script, says):
    status, said = check(script, "import torch")
    assert status == 2 and re.match(f"cannot be judged: train.py {says}", said)


@pytest.fixture
def start(monkeypatch):
    """Runs any command in a copy of the folder; nothing of it is left after the test."""
    monkeypatch.setattr(running, "ENDING", 1)
    workspaces = []

    def run(command, *interrupted):
        workspaces.append(Workspace("."))
        return running.run(command, workspaces[0], SimpleNamespace(patience=5, interrupted=interrupted))
    yield run
    running.kill(str(workspaces[0].home))
    workspaces[0].remove()


def test_a_hang_is_shown_by_the_line_at_which_each_rank_waits_also_with_workers_that_load_files(start):
    Path("train_ddp.py").write_text(changed(
        AFTER, (STEP, f"{STEP}        if rank == 0:\n            dist.barrier()\n"), ("sampler=sampler", (
            "sampler=sampler, num_workers=1, worker_init_fn=lambda _: torch.load('nothing.pt')")),
        ("sampler = ", "torch.save([], 'nothing.pt')\nsampler = ")))
    waits = start("torchrun --standalone --nproc_per_node=2 train_ddp.py").waits
    assert len(waits) == 2 and all(re.fullmatch(
        rf"rank {rank}, after \d steps, waits at train_ddp.py:\d+, in \w+", one) for rank, one in enumerate(waits))


def test_a_process_that_outlives_its_script_is_ended_and_said(start):
    process, = start("sleep 600 & true").outlived
    assert process not in running.processes("CHECK_CONVERSION")


def test_a_process_that_cannot_be_ended_is_named_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(running, "ENDING", 0)
    monkeypatch.setattr(running, "processes", lambda records: [2**30])  # larger than any process id
    with pytest.raises(CannotSay, match=f"process {2**30}, which a script has started, cannot be ended"):
        running.kill("records")


def test_ctrl_c_ends_what_runs_and_a_command_that_is_not_there_is_said(start):
    with pytest.raises(CannotSay, match="interrupted"):
        start("sleep 600", True)
    with pytest.raises(CannotSay, match=r"cannot be started: .*no_such_command.*not found"):
        start("no_such_command train.py")
