"""check-conversion as a command: what it says, and how processes end that it starts."""
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from check_conversion import running
from check_conversion.command import interrupt
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace
from runs import AFTER, BEFORE, STEP, TOOL, changed

SPAWN = "\nif __name__ == '__main__':\n    import torch\n    torch.multiprocessing.spawn(main, nprocs=2)\n"


def test_two_commands_are_compared_by_torch_alone_also_ranks_that_their_script_spawns(tmp_path_factory):
    (packages := tmp_path_factory.mktemp("packages") / "numpy.py").write_text("raise ModuleNotFoundError")
    after = changed(AFTER, ("('gloo')", "('gloo', f'file://{os.getcwd()}/met', rank=rank, world_size=2)"),
                    ("del model\n", "kept = weakref.ref(model)\ndel model\n"))
    after += "assert kept() is None"  # by the check neither: with torch 2.11, DDP hangs if it outlives the process group
    Path("train.py").write_text(f"def main():\n{textwrap.indent(BEFORE, '    ')}\nmain()\n")
    Path("train_ddp.py").write_text(f"import os, weakref\ndef main(rank):\n{textwrap.indent(after, '    ')}{SPAWN}")
    files = {*os.listdir()}
    found = subprocess.run([sys.executable, TOOL, "--patience=300", "python train.py", "python train_ddp.py"],
                           capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(packages.parent)})
    assert found.returncode == 0 and re.match(
        r"the same training: 12 steps with 2 processes\nweights within \de-1\d of their norm; rounding alone moves them by "
        r"\de-1\d\nprinted: 2 of 2 lines the same\nwritten: 1 of 1 file the same: model.pt\n", found.stdout), found
    assert re.findall("run .*", found.stderr) == [f"run {k} of 3: python train{'_ddp' * (k == 1)}.py" for k in (1, 2, 3)]
    assert {*os.listdir()} == files


def start(command):
    workspace = Workspace(".")
    try:
        return running.run(command, workspace, 5, running.prepare(workspace))
    finally:
        workspace.remove()


def test_a_hang_is_shown_by_the_line_at_which_each_rank_waits_also_with_workers_that_load_files():
    Path("train_ddp.py").write_text(changed(
        AFTER, (STEP, f"{STEP}        if rank == 0:\n            dist.barrier()\n"), ("sampler=sampler", (
            "sampler=sampler, num_workers=1, worker_init_fn=lambda _: torch.load('nothing.pt')")),
        ("sampler = ", "torch.save([], 'nothing.pt')\nsampler = ")))
    waits = start("torchrun --standalone --nproc_per_node=2 train_ddp.py").waits
    assert len(waits) == 2 and all(re.fullmatch(
        rf"rank {rank}, after \d steps, waits at train_ddp.py:\d+, in \w+", one) for rank, one in enumerate(waits))


def test_a_process_that_outlives_its_script_is_ended_and_said(monkeypatch):
    monkeypatch.setattr(running, "ENDING", 1)
    run = start("sleep 600 & false | tee log.txt")
    assert run.outlived[0] not in running.processes("CHECK_CONVERSION") and run.status == 1  # not that of tee


def test_ctrl_c_ends_what_runs_and_a_command_that_is_not_there_is_said():
    signal.signal(signal.SIGHUP, interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(f"kill -HUP {os.getpid()}; sleep 600")
    with pytest.raises(CannotSay, match=r"cannot be started: .*no_such_command.*not found"):
        start("no_such_command train.py")
