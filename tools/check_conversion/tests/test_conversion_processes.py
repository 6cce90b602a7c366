"""Processes as a user starts them: how a run ends is seen, and nothing of it is left."""
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from check_conversion import running
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace
from runs import AFTER, STEP, changed


@pytest.fixture
def start(monkeypatch):
    """Runs any command in a copy of what the folder holds by now; nothing of it is left after the test."""
    monkeypatch.setattr(running, "ENDING", 1)
    workspace = Workspace(".")
    yield lambda command, *interrupted: running.run(command, workspace, SimpleNamespace(patience=5, interrupted=interrupted))
    running.kill(str(workspace.home))
    workspace.remove()


LOADED = """
class Loaded(TensorDataset):
    def __getitem__(self, index):
        torch.load("nothing.pt")
        return super().__getitem__(index)


torch.save([], "nothing.pt")
data = Loaded("""


def test_a_hang_is_shown_by_the_line_at_which_each_rank_waits_also_with_workers_that_load_files(request):
    Path("train_ddp.py").write_text(changed(AFTER, ("data = TensorDataset(", LOADED), (
        "24 // world_size", "24 // world_size, num_workers=1"), (
        STEP, f"{STEP}        if rank == 0:\n            dist.barrier()\n")))
    waits = request.getfixturevalue("start")("torchrun --standalone --nproc_per_node=2 train_ddp.py").waits
    assert len(waits) == 2 and all(re.fullmatch(
        rf"rank {rank}, after \d steps, waits at train_ddp.py:\d+, in \w+", one) for rank, one in enumerate(waits))


def test_a_process_that_outlives_its_script_is_ended_and_said(start):
    process, = start("sleep 600 & true").outlived
    assert process not in running.processes("CHECK_CONVERSION")


def test_a_process_that_cannot_be_ended_is_named_and_not_waited_for(start, monkeypatch):
    signals = []
    with monkeypatch.context() as deaf:
        deaf.setattr(os, "kill", lambda *given: signals.append(given))
        with pytest.raises(CannotSay, match=r"process \d+, which a script has started, cannot be ended"):
            start("sleep 600 & true")
    os.kill(*signals[0])


def test_ctrl_c_ends_what_runs_and_a_command_that_is_not_there_is_said(start):
    with pytest.raises(CannotSay, match="interrupted"):
        start("sleep 600", True)
    with pytest.raises(CannotSay, match=r"cannot be started: .*no_such_command.*not found"):
        start("no_such_command train.py")
