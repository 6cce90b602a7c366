"""What is saved can be continued by any script, as it was; what is not of them is refused and left as it was."""
import re
from pathlib import Path

import pytest
import torch
from launch import (
    BY_TORCHRUN,
    EAGERLY,
    EXACT,
    EXAMPLES,
    LITTLE_DATA,
    RECIPES,
    ROOT,
    SCRIPTS,
    SMALL,
    TWO_RATES,
    after,
    figures,
    load,
    needs,
    train,
    with_optimizer,
)
from runs import check_resuming


def leg(script, epochs, *options):
    return train(with_optimizer(script, TWO_RATES), epochs, *SMALL, *options, before=EXACT).stdout


def test_each_script_and_fsdp_go_on_where_another_stopped_with_the_rates_of_the_file():
    unbroken = leg("single_gpu.py", 8, "--lr", 0.009)
    printed = figures(leg("single_gpu.py", 1, "--lr", 0.009, "--checkpoint", "relay.pt"))
    for epochs, script in enumerate([*SCRIPTS, "recipes/fsdp.py", "single_gpu.py"], start=2):
        said = leg(script, epochs, "--lr", 0.5, "--checkpoint", "relay.pt")
        assert f"relay.pt: {epochs - 1} of {epochs} epochs are done; the saved learning rate, 0.0045, 0.009, is kept" in said
        printed |= figures(said)
    assert printed == figures(unbroken)
    one, other = load("single_gpu.pt"), load("relay.pt")
    assert one["epoch"] == other["epoch"] == 8
    torch.testing.assert_close(other["model"], one["model"], rtol=1e-9, atol=1e-9)
    assert [group["lr"] for group in other["optimizer"]["param_groups"]] == [0.0045, 0.009]

    before = Path("relay.pt").read_bytes()
    done = leg("dp.py", 3, "--checkpoint", "./relay.pt/")
    assert "relay.pt: 8 of 3 epochs are done; to start afresh, delete it or change" in done
    assert Path("relay.pt").read_bytes() == before and not list(Path().glob("*.tmp"))


APART = """import os
os.makedirs(os.environ["RANK"], exist_ok=True)
os.chdir(os.environ["RANK"])
if os.environ["RANK"] == "1":
    for name in ("run.pt", "autoencoder.pt", "contrastive.pt", "language_model_run.pt", "stream_run.pt"):
        open(name, "w").write("of another run")
"""
RUNS = {  # how each script runs: its arguments, and the lines before it
    **dict.fromkeys([*SCRIPTS, *RECIPES], ((3, 1, *SMALL), LITTLE_DATA)),
    "multigpu_spawn.py": ((3, 1, *SMALL, "-g", 2), LITTLE_DATA),
    "recipes/compile.py": ((3, 1, *SMALL), LITTLE_DATA + EAGERLY),
    # Each rank works in a folder of its own, as on a machine of its own.
    **{f"examples/{name}_ddp.py": (arguments, APART) for name, arguments in EXAMPLES.items()}}


@pytest.mark.parametrize("script", RUNS)
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(script, capsys):
    if script == "recipes/compile.py":
        needs("g++")
    arguments, before = RUNS[script]
    processes = 0 if script in {*SCRIPTS} - {*BY_TORCHRUN} else 2
    status, said = check_resuming((ROOT / script).read_text(), *arguments, processes=processes, name=script, before=before)
    steps = re.search(r"killed at step (\d+) of \d+, resumed from step (\d+) printed: (\d+) of \3 lines? the same", said)
    assert status == 0 and steps and int(steps[1]) == int(steps[2]) + 1
    assert script == "recipes/large.py" or re.search(r" written: (\d+) of \1 files? the same", said)  # shards are not read
    assert re.search(r"\.pt: \d+.* (epochs|steps|samples) .*done", capsys.readouterr().out)


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


def check_refused(script, processes=1):
    before = Path("run.pt").read_bytes()
    job = train(script, 2, *SMALL, "--checkpoint", "run.pt", processes=processes, status=1, before=LITTLE_DATA)
    assert "run.pt cannot be resumed and is left as it was" in job.stderr and job.stderr.count("\n") == 1
    assert "epoch" not in job.stdout and Path("run.pt").read_bytes() == before and not Path("executed").exists()


def test_a_file_that_is_no_checkpoint_of_this_model_ends_the_run_in_one_line():
    train("single_gpu.py", 1, *SMALL, "--checkpoint", "run.pt", before=LITTLE_DATA)
    whole, good = Path("run.pt").read_bytes(), load("run.pt")
    foreign = good | {"model": torch.nn.Linear(2, 2).state_dict()}
    for content in (foreign, good | {"model": Hostile()}, good | {"epoch": "1"}, [1, 2]):
        torch.save(content, "run.pt")
        check_refused("single_gpu.py")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (whole[:-100], b"epoch 3\n", flipped):
        Path("run.pt").write_bytes(content)
        check_refused("single_gpu.py")


def test_every_script_and_recipe_checks_its_file_before_processes_wait_for_each_other():
    Path("run.pt").write_text("epoch 3\n")
    for script in [*SCRIPTS, *RECIPES]:
        check_refused(script, processes=2 if script == "multigpu_spawn.py" else 1)


def test_a_process_lets_go_of_what_it_resumed_from_before_it_trains():
    train("multigpu_torchrun.py", 1)
    train("multigpu_torchrun.py", 2, before="import gc\n" + after("torch.optim.SGD.step", """[
            one for one in gc.get_objects() if isinstance(one, dict) and {"model", "optimizer", "epoch"} <= {*map(str, one)}]"""))
    assert {*Path("log.0").read_text().splitlines()} == {"[]"}
