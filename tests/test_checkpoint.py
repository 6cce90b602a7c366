"""What is saved can be continued by any script, and no accident costs the last good checkpoint."""
import pickle

import pytest
import torch
from launch import SCRIPTS, command, figures, Job, run, run_all


def load(path):
    return torch.load(path, weights_only=True)


def test_each_script_goes_on_where_another_stopped(tmp_path, float64):
    options = dict(cwd=tmp_path, **float64)
    unbroken = run("single_gpu.py", 4, "--checkpoint", "unbroken.pt", **options)
    relay = [("dp.py", 1), ("multigpu_spawn.py", 2), ("multigpu_torchrun.py", 4), ("single_gpu.py", 1)]
    printed = {}
    for epochs, (script, processes) in enumerate(relay, start=1):
        job = run(script, epochs, "--checkpoint", "relay.pt", processes=processes, **options)
        assert epochs == 1 or f"relay.pt: {epochs - 1} of {epochs} epochs are done" in job.stdout
        printed |= figures(job)
    assert printed == figures(unbroken)
    one, other = load(tmp_path / "unbroken.pt"), load(tmp_path / "relay.pt")
    assert one["epoch"] == other["epoch"] == 4
    assert not any(name.startswith("module.") for name in other["model"])
    for name, tensor in one["model"].items():
        torch.testing.assert_close(other["model"][name], tensor, rtol=1e-9, atol=1e-9)

    before = (tmp_path / "relay.pt").read_bytes()
    done = run("dp.py", 3, "--checkpoint", "relay.pt", "--lr", 0.001, **options)
    assert "relay.pt: 4 of 3 epochs are done; to start afresh, delete it or name another" in done.stdout
    assert (tmp_path / "relay.pt").read_bytes() == before
    run("single_gpu.py", 5, "--checkpoint", "relay.pt", "--lr", 0.001, **options)
    assert load(tmp_path / "relay.pt")["optimizer"]["param_groups"][0]["lr"] == 0.001  # not the file's
    assert not list(tmp_path.glob("*.tmp"))


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_spawn.py", "multigpu_torchrun.py"])
def test_a_file_that_is_no_checkpoint_of_this_model_ends_the_run_in_one_line(script, tmp_path):
    good = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": {}, "param_groups": []}, "epoch": 1}
    torch.save(good, tmp_path / "foreign.pt")
    torch.save(good | {"model": Hostile()}, tmp_path / "hostile.pt", pickle_module=pickle)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "foreign.pt").read_bytes()[:-100])
    (tmp_path / "text.pt").write_text("epoch 3\n")
    (tmp_path / "empty.pt").touch()
    torch.save([1, 2], tmp_path / "list.pt")
    run("single_gpu.py", 1, "--checkpoint", "flipped.pt", cwd=tmp_path)
    whole = (tmp_path / "flipped.pt").read_bytes()
    (tmp_path / "flipped.pt").write_bytes(whole[:len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1])
                                          + whole[len(whole) // 2 + 1:])
    files = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    assert len(files) == 7
    if script != "single_gpu.py":
        files = {path: files[path] for path in files if path.stem in ("cut", "hostile")}
    jobs = run_all(*[(script, 2, "--checkpoint", path.name, dict(cwd=tmp_path, status=1)) for path in files])
    for (path, content), job in zip(files.items(), jobs):
        said = [line for line in job.stderr.splitlines() if path.name in line]
        assert len(said) == 1 and "cannot be resumed and is left as it was" in said[0]
        assert script == "multigpu_torchrun.py" or job.stderr.count("\n") == 1  # torchrun adds its report
        assert "epoch" not in job.stdout
        assert path.read_bytes() == content
    assert not (tmp_path / "executed").exists()


def test_a_kill_while_saving_leaves_the_old_checkpoint_whole(tmp_path, customize):
    at_the_second = customize("""
import os, signal
fsync, calls = os.fsync, []
def fsync_or_die(file):
    calls.append(file)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = fsync_or_die
""")
    job = run("multigpu_spawn.py", 3, 1, "--checkpoint", "run.pt", cwd=tmp_path, status=1, **at_the_second)
    assert "saved" in job.stdout and load(tmp_path / "run.pt")["epoch"] == 1
    assert "1 of 3 epochs are done" in run("single_gpu.py", 3, "--checkpoint", "run.pt", cwd=tmp_path).stdout


def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    run("single_gpu.py", 1, "--checkpoint", "run.pt", cwd=tmp_path)
    before = (tmp_path / "run.pt").read_bytes()
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash"]  # no file may exceed 100 KiB
    jobs = [Job([*limited, *command(script, 2, "--checkpoint", "run.pt")], cwd=tmp_path) for script in SCRIPTS if script != "dp.py"]
    for job in jobs:
        assert job.wait() == 1
        assert "run.pt was not saved: [Errno 27] File too large" in job.stderr
    assert (tmp_path / "run.pt").read_bytes() == before and not list(tmp_path.glob("*.tmp"))


def test_a_place_that_takes_no_checkpoint_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    places = [tmp_path / "missing" / "run.pt", tmp_path / "file" / "run.pt", "/proc/run.pt", tmp_path]
    jobs = run_all(*[(script, 2, "--checkpoint", place, dict(cwd=tmp_path, status=1))
                     for place, script in zip(places, ["single_gpu.py", "multigpu_spawn.py"] * 2)])
    for place, job in zip(places, jobs):
        assert str(place).removesuffix("/run.pt") in job.stderr and job.stderr.count("\n") == 1
        assert "epoch" not in job.stdout
