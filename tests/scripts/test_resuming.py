"""What is saved can be continued by any script, and no accident costs the last good checkpoint."""
from pathlib import Path

import pytest
import torch
from launch import IN_FLOAT64, SCRIPTS, after, figures, load, train


def test_each_script_goes_on_where_another_stopped(small):
    def leg(script, epochs, path="relay.pt", lr=0.009):
        return train(script, epochs, "--checkpoint", path, "--lr", lr, *small, before=IN_FLOAT64).stdout

    unbroken, printed = leg("single_gpu.py", 6, "unbroken.pt"), {}
    for epochs, script in enumerate([*SCRIPTS, "single_gpu.py"], start=1):
        said = leg(script, epochs)
        assert epochs == 1 or f"relay.pt: {epochs - 1} of {epochs} epochs are done" in said
        printed |= figures(said)
    assert printed == figures(unbroken)
    one, other = load("unbroken.pt"), load("relay.pt")
    assert one["epoch"] == other["epoch"] == 6
    torch.testing.assert_close(other["model"], one["model"], rtol=1e-9, atol=1e-9)

    before = Path("relay.pt").read_bytes()
    assert "relay.pt: 6 of 3 epochs are done; to start afresh, delete it or change" in leg("dp.py", 3, lr=0.001)
    assert Path("relay.pt").read_bytes() == before
    leg("single_gpu.py", 7, lr=0.001)
    assert load("relay.pt")["optimizer"]["param_groups"][0]["lr"] == 0.001  # not the file's
    assert not list(Path().glob("*.tmp"))


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


@pytest.mark.parametrize("what", ["foreign", "hostile", "cut", "text", "list", "flipped", "epoch"])
def test_a_file_that_is_no_checkpoint_of_this_model_ends_the_run_in_one_line(what):
    path = Path("run.pt")
    foreign = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": {}, "param_groups": []}, "epoch": 1}
    torch.save({"list": [1, 2], "hostile": foreign | {"model": Hostile()}}.get(what, foreign), path)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "text":
        path.write_text("epoch 3\n")
    elif what == "flipped":
        path.unlink()
        train("single_gpu.py", 1, "--checkpoint", path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif what == "epoch":
        path.unlink()
        train("single_gpu.py", 1, "--checkpoint", path)
        torch.save(load(path) | {"epoch": "1"}, path)
    content = path.read_bytes()
    for script, processes in (("single_gpu.py", 1), ("multigpu_spawn.py", 2), ("multigpu_torchrun.py", 1)):
        job = train(script, 2, "--checkpoint", path, processes=processes, status=1)
        assert "run.pt cannot be resumed and is left as it was" in job.stderr and job.stderr.count("\n") == 1
        assert "epoch" not in job.stdout and path.read_bytes() == content
    assert not Path("executed").exists()


def test_a_kill_while_saving_leaves_the_old_checkpoint_whole():
    dies_at_the_second = after("os.fsync", "os.path.exists('run.pt') and os.kill(os.getpid(), 9)")
    job = train("single_gpu.py", 3, 1, "--checkpoint", "run.pt", status=-9, before=dies_at_the_second)
    assert "saved" in job.stdout and load("run.pt")["epoch"] == 1
    assert [*Path().glob("*.tmp")] == [Path("run.pt.tmp")]  # which the next save takes
    train("single_gpu.py", 2, "--checkpoint", "run.pt")
    assert load("run.pt")["epoch"] == 2 and not [*Path().glob("*.tmp")]


def test_the_learning_rate_of_the_command_line_counts_in_all_groups_of_the_optimizer(small):
    groups = """import torch
init = torch.optim.SGD.__init__
torch.optim.SGD.__init__ = lambda self, params, **options: init(self, [{"params": [one]} for one in params], **options)
"""
    for epochs, rate in ((1, 0.003), (2, 0.001)):
        train("multigpu_torchrun.py", epochs, "--lr", rate, "--checkpoint", "run.pt", *small, before=groups)
    rates = [group["lr"] for group in load("run.pt")["optimizer"]["param_groups"]]
    assert len(rates) > 1 and {*rates} == {0.001}


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_spawn.py", "multigpu_torchrun.py"])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(script):
    """Once the first epoch is saved, no file may exceed 100 KiB."""
    fills = "import resource\n" + after("os.replace", "resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))")
    job = train(script, 1000, 1, "--checkpoint", "run.pt", status=1, before=fills)
    assert "run.pt was not saved: [Errno 27] File too large" in job.stderr
    assert load("run.pt")["epoch"] == job.stdout.count("saved") == 1
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_spawn.py"])
@pytest.mark.parametrize("place", ["missing/run.pt", "file/run.pt", "/proc/run.pt", "."])
def test_a_place_that_takes_no_checkpoint_is_told_before_training(place, script, folder):
    Path("file").touch()
    job = train(script, 2, "--checkpoint", folder / place, status=1)
    assert str(folder / place).removesuffix("/run.pt") in job.stderr and job.stderr.count("\n") == 1
    assert "epoch" not in job.stdout
