"""What is saved can be continued by any script, and no accident costs the last good checkpoint."""
import pickle
import resource

import pytest
import torch
from forked import train
from launch import IN_FLOAT64, SCRIPTS, figures, load, start


def test_each_script_goes_on_where_another_stopped(tmp_path, small):
    def leg(script, *arguments):
        return train(script, *arguments, *small, processes=2 * script.startswith("multi"), cwd=tmp_path, before=IN_FLOAT64)

    unbroken = leg("single_gpu.py", 6, "--checkpoint", "unbroken.pt")
    printed = {}
    for epochs, script in enumerate([*SCRIPTS, "single_gpu.py"], start=1):
        job = leg(script, epochs, "--checkpoint", "relay.pt")
        assert epochs == 1 or f"relay.pt: {epochs - 1} of {epochs} epochs are done" in job.stdout
        printed |= figures(job.stdout)
    assert printed == figures(unbroken.stdout)
    one, other = load(tmp_path / "unbroken.pt"), load(tmp_path / "relay.pt")
    assert one["epoch"] == other["epoch"] == 6
    assert not any(name.startswith("module.") for name in other["model"])
    for name, tensor in one["model"].items():
        torch.testing.assert_close(other["model"][name], tensor, rtol=1e-9, atol=1e-9)

    before = (tmp_path / "relay.pt").read_bytes()
    done = leg("dp.py", 3, "--checkpoint", "relay.pt", "--lr", 0.001)
    assert "relay.pt: 6 of 3 epochs are done; to start afresh, delete it or name another" in done.stdout
    assert (tmp_path / "relay.pt").read_bytes() == before
    leg("single_gpu.py", 7, "--checkpoint", "unbroken.pt", "--lr", 0.001)
    assert load(tmp_path / "unbroken.pt")["optimizer"]["param_groups"][0]["lr"] == 0.001  # not the file's
    assert not list(tmp_path.glob("*.tmp"))


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


@pytest.mark.parametrize("what", ["foreign", "hostile", "cut", "text", "list", "flipped"])
def test_a_file_that_is_no_checkpoint_of_this_model_ends_the_run_in_one_line(what, tmp_path):
    path = tmp_path / "run.pt"
    good = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": {}, "param_groups": []}, "epoch": 1}
    torch.save([1, 2] if what == "list" else good, path)
    if what == "hostile":
        torch.save(good | {"model": Hostile()}, path, pickle_module=pickle)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "text":
        path.write_text("epoch 3\n")
    elif what == "flipped":
        path.unlink()
        train("single_gpu.py", 1, "--checkpoint", "run.pt", cwd=tmp_path, processes=0)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    content = path.read_bytes()
    for script, processes in (("single_gpu.py", 0), ("multigpu_spawn.py", 2), ("multigpu_torchrun.py", 1)):
        job = train(script, 2, "--checkpoint", "run.pt", processes=processes, cwd=tmp_path, status=1)
        assert "run.pt cannot be resumed and is left as it was" in job.stderr and job.stderr.count("\n") == 1
        assert "epoch" not in job.stdout
        assert path.read_bytes() == content
    assert not (tmp_path / "executed").exists()


DIES_AT_THE_SECOND = """
import os, signal
fsync, calls = os.fsync, []
def fsync_or_die(file):
    calls.append(file)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = fsync_or_die
"""


def test_a_kill_while_saving_leaves_the_old_checkpoint_whole(tmp_path):
    job = train("single_gpu.py", 3, 1, "--checkpoint", "run.pt", cwd=tmp_path, processes=0, status=-9, before=DIES_AT_THE_SECOND)
    assert "saved" in job.stdout and load(tmp_path / "run.pt")["epoch"] == 1


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_spawn.py", "multigpu_torchrun.py"])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(script, tmp_path):
    job = start(script, 1000, 1, "--checkpoint", "run.pt", cwd=tmp_path)
    job.wait_for("saved run.pt after epoch 1\n")
    for pid in job.environments():  # from now on no file may exceed 100 KiB
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100 * 1024, resource.RLIM_INFINITY))
    assert job.wait() == 1
    assert "run.pt was not saved: [Errno 27] File too large" in job.stderr
    assert load(tmp_path / "run.pt")["epoch"] == job.stdout.count("saved")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_spawn.py"])
def test_a_place_that_takes_no_checkpoint_is_told_before_training(script, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "missing" / "run.pt", tmp_path / "file" / "run.pt", "/proc/run.pt", tmp_path):
        job = train(script, 2, "--checkpoint", place, cwd=tmp_path, processes=0, status=1)
        assert str(place).removesuffix("/run.pt") in job.stderr and job.stderr.count("\n") == 1
        assert "epoch" not in job.stdout
