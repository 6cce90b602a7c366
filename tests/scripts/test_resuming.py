"""What is saved can be continued by any script, as it was; what is not of them is refused and left as it was."""
import re
from pathlib import Path

import pytest
import torch
from launch import BY_TORCHRUN, EXACT, LITTLE_DATA, ROOT, SCRIPTS, SMALL, check_equal, figures, load, needs, train
from runs import check_resuming


def test_each_script_goes_on_where_another_stopped_with_another_number_of_processes_and_the_rate_of_the_file():
    unbroken = train("single_gpu.py", 9, *SMALL, "--lr", 0.009, before=EXACT)
    printed = figures(train("single_gpu.py", 1, *SMALL, "--lr", 0.009, "--checkpoint", "relay.pt", before=EXACT).stdout)
    relay = [("multigpu_torchrun.py", 3), ("dp.py", 1), ("multigpu_spawn.py", 2), ("multinode.py", 4), ("recipes/fsdp.py", 2),
             ("multigpu_torchrun.py", 1), ("recipes/preempt.py", 3), ("single_gpu.py", 1)]
    for epochs, (script, processes) in enumerate(relay, start=2):
        job = train(script, epochs, *SMALL, "--lr", 0.5, "--checkpoint", "relay.pt", processes=processes, before=EXACT)
        assert f"relay.pt: {epochs - 1} of {epochs} epochs done\n" in job.stdout
        printed |= figures(job.stdout)
    assert printed == figures(unbroken.stdout)
    check_equal("relay.pt", "single_gpu.pt")
    before = Path("relay.pt").read_bytes()
    done = train("dp.py", 3, "--checkpoint", "relay.pt")
    assert done.stdout.endswith("relay.pt: 9 of 3 epochs done\n") and Path("relay.pt").read_bytes() == before


# Of the recipes, those that save or load otherwise than their base, or wrap the model otherwise.
@pytest.mark.parametrize("script", [*SCRIPTS, *(f"recipes/{name}.py" for name in "compile fsdp large loop preempt".split())])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(script):
    if script == "recipes/compile.py":
        needs("g++")
    processes = 2 if script in BY_TORCHRUN or script.startswith("recipes") else 0
    spawn = ("-g", 2) if script == "multigpu_spawn.py" else ()
    status, said = check_resuming(
        (ROOT / script).read_text(), 3, 1, *SMALL, *spawn, processes=processes, name=script, before=LITTLE_DATA)
    steps = re.search(r"killed at step (\d+) of \d+, resumed from step (\d+) printed: (\d+) of \3 lines? the same", said)
    assert status == 0 and steps and int(steps[1]) == int(steps[2]) + 1
    assert script == "recipes/large.py" or re.search(r" written: (\d+) of \1 files? the same", said)  # shards are not read


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


def test_a_damaged_or_foreign_file_ends_the_run_before_it_trains_is_left_as_it_was_and_is_never_executed():
    train("single_gpu.py", 1, *SMALL, "--checkpoint", "run.pt", before=LITTLE_DATA)
    good, whole = load("run.pt"), Path("run.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # one bit of a weight: torch.load would not notice
    contents = {"run.pt is damaged": flipped, "File is not a zip file": whole[:-100], "not a zip file": b"epoch 3\n", "zip": b"",
                "Missing key": good | {"model": torch.nn.Linear(2, 2).state_dict()},
                "KeyError: 'optimizer'": {"model": good["model"]},
                "doesn't match the size": good | {"optimizer": torch.optim.SGD([torch.ones(1)]).state_dict()},
                "Weights only load failed": good | {"model": Hostile()}}
    for says, content in contents.items():
        torch.save(content, "run.pt") if isinstance(content, dict) else Path("run.pt").write_bytes(content)
        before = Path("run.pt").read_bytes()
        for script in SCRIPTS if says == "run.pt is damaged" else ["single_gpu.py"]:
            processes = 2 if script == "multigpu_spawn.py" else 1
            job = train(script, 2, *SMALL, "--checkpoint", "run.pt", processes=processes, status=1, before=LITTLE_DATA)
            assert says in job.stderr and "in main" in job.stderr
            assert "epoch" not in job.stdout and Path("run.pt").read_bytes() == before and not Path("executed").exists()


@pytest.mark.parametrize("place", ["missing/run.pt", "file/run.pt", "/proc/run.pt", ".", ""])
def test_a_folder_is_made_and_a_place_that_takes_no_checkpoint_is_refused_before_training(place, folder):
    Path("file").touch()
    good = place == "missing/run.pt"
    job = train("single_gpu.py", 1, *SMALL, "--checkpoint", place, status=0 if good else 1, before=LITTLE_DATA)
    assert Path(place).is_file() if good else "Error: [Errno" in job.stderr and "epoch" not in job.stdout
