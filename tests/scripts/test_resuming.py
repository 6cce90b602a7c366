"""What is saved can be continued by any script, as it was; what is not of them is refused and left as it was."""
import re
from pathlib import Path

import pytest
import torch
from launch import EXACT, LITTLE_DATA, SCRIPTS, SMALL, after, train
from results import check_equal, check_same_bits, figures, load


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
    assert load("made/relay.pt")["optimizer"]["param_groups"][0]["lr"] == 0.009


@pytest.mark.parametrize("script, kill, options", [  # kill: after which backward pass; main of multigpu_spawn.py is torchrun's
    *((script, 8, (3, 1, *SMALL)) for script in [*SCRIPTS, "recipes/fsdp.py", "recipes/preempt.py"] if "spawn" not in script),
    ("recipes/loop.py", 8, (3, 1, *SMALL, "--lr", 0.0001)),  # the first epoch is the best
    ("examples/waves_ddp.py", 65, ("--epochs", 3)), ("examples/steps_ddp.py", 44, ("--max-steps", 22))])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(script, kill, options):
    def lines(checkpoint, before="", **settings):
        before += LITTLE_DATA + after("utils.build_model", "result.insert(7, torch.nn.Dropout())")
        printed = train(script, *options, "--checkpoint", checkpoint, before=before, **settings).stdout
        return {*re.findall(r"^(?:epoch|step) [^|]+\| [^|]+(?:\| accuracy \S+)?", printed, re.MULTILINE)}

    whole = lines("whole.pt")
    dies = after("torch.Tensor.backward", f"if call == {kill}: os.kill(os.getpid(), signal.SIGKILL)")
    killed = lines("run.pt", dies, status=-9)
    resumed = lines("run.pt")
    assert killed | resumed == whole and killed < whole and resumed < whole
    check_same_bits("run.pt", "whole.pt")


def test_a_finished_run_that_is_started_again_says_what_to_do_and_saves_nothing():
    line = "multigpu_torchrun.py", 1, *SMALL
    train(*line, before=LITTLE_DATA)
    assert train(*line, before=LITTLE_DATA).stdout.endswith(
        "multigpu_torchrun.pt: 1 of 1 epochs done\n"
        "Nothing is left to train. To continue, ask for more epochs; to start over, delete multigpu_torchrun.pt.\n")


READERS = "single_gpu.py multigpu_torchrun.py multinode.py examples/waves_ddp.py examples/steps_ddp.py".split()


def test_a_file_that_is_damaged_foreign_or_holds_code_ends_the_run_before_it_trains_and_is_left_as_it_was():
    train("single_gpu.py", 1, *SMALL, "--checkpoint", "run.pt", before=LITTLE_DATA)
    flipped = bytearray(Path("run.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1  # one bit of a weight: torch.load would not notice
    contents = {"run.pt is damaged": flipped, "File is not a zip file": b"epoch 3\n",
                "Missing key": load("run.pt") | {"model": torch.nn.Linear(2, 2).state_dict()},
                "Weights only load failed": {"model": eval}}
    for says, content in contents.items():
        torch.save(content, "run.pt") if isinstance(content, dict) else Path("run.pt").write_bytes(content)
        before = Path("run.pt").read_bytes()
        for script in READERS if says == "run.pt is damaged" else ["dp.py"]:
            job = train(script, "--checkpoint", "run.pt", status=1, before=LITTLE_DATA)
            assert says in job.stderr and not re.search("epoch|step", job.stdout)
            assert Path("run.pt").read_bytes() == before
