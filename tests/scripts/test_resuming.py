"""What is saved can be continued by any script, as it was; what is not of them is refused and left as it was."""
import re
from pathlib import Path

import pytest
import torch
from launch import EXACT, LITTLE_DATA, ROOT, SCRIPTS, SMALL, WITHOUT_LAUNCHER, train
from results import check_equal, figures, load
from runs import check_resuming


def test_each_script_goes_on_where_another_stopped_with_another_number_of_processes_and_the_rate_of_the_file():
    options = *SMALL, "--checkpoint", "made/relay.pt"
    unbroken = train("single_gpu.py", 9, *SMALL, "--lr", 0.009, before=EXACT)
    printed = figures(train("single_gpu.py", 1, *options, "--lr", 0.009, before=EXACT).stdout)
    relay = [("multigpu_torchrun.py", 3), ("dp.py", 1), ("multigpu_spawn.py", 2), ("multinode.py", 4), ("recipes/fsdp.py", 2),
             ("multigpu_torchrun.py", 1), ("recipes/preempt.py", 3), ("single_gpu.py", 1)]
    for epochs, (script, processes) in enumerate(relay, start=2):
        job = train(script, epochs, *options, "--lr", 0.5, processes=processes, before=EXACT)
        assert f"relay.pt: {epochs - 1} of {epochs} epochs done\n" in job.stdout
        printed |= figures(job.stdout)
    assert printed == figures(unbroken.stdout)
    check_equal("made/relay.pt", "single_gpu.pt")


# Of the recipes, those that save or load otherwise than their base.
@pytest.mark.parametrize("script", [*SCRIPTS, *(f"recipes/{name}.py" for name in "fsdp loop preempt".split())])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(script):
    spawn = ["-g", 2] if script == "multigpu_spawn.py" else []
    status, said = check_resuming((ROOT / script).read_text(), 3, 1, *SMALL, *spawn, name=script,
                                  before=LITTLE_DATA, processes=0 if script in WITHOUT_LAUNCHER else 2)
    steps = re.search(r"killed at step (\d+) of \d+, resumed from step (\d+) printed: (\d+) of \3 lines? the same", said)
    assert status == 0 and steps and int(steps[1]) == int(steps[2]) + 1
    assert re.search(r" written: (\d+) of \1 files? the same", said)


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


def test_a_file_that_is_damaged_foreign_or_hostile_ends_the_run_before_it_trains_is_left_as_it_was_and_never_executed():
    train("single_gpu.py", 1, *SMALL, "--checkpoint", "run.pt", before=LITTLE_DATA)
    flipped = bytearray(Path("run.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1  # one bit of a weight: torch.load would not notice
    contents = {"run.pt is damaged": flipped, "File is not a zip file": b"epoch 3\n",
                "Missing key": load("run.pt") | {"model": torch.nn.Linear(2, 2).state_dict()},
                "Weights only load failed": {"model": Hostile()}}
    for says, content in contents.items():
        torch.save(content, "run.pt") if isinstance(content, dict) else Path("run.pt").write_bytes(content)
        before = Path("run.pt").read_bytes()
        for script in SCRIPTS if says == "run.pt is damaged" else ["single_gpu.py"]:
            job = train(script, 2, *SMALL, "--checkpoint", "run.pt", status=1, before=LITTLE_DATA)
            assert says in job.stderr and "epoch" not in job.stdout
            assert Path("run.pt").read_bytes() == before and not Path("executed").exists()
