"""What is saved can be continued by any script, and no accident costs the last good checkpoint."""
import pickle
import resource

import torch
from launch import SCRIPTS, figures, load, run, run_all, start, two_at_a_time


def test_each_script_goes_on_where_another_stopped(tmp_path, float64):
    options = dict(cwd=tmp_path, **float64)
    unbroken, job = run_all(("single_gpu.py", 4, "--checkpoint", "unbroken.pt", options),
                            ("dp.py", 1, "--checkpoint", "relay.pt", options))
    printed = figures(job)
    for epochs, script in enumerate(["multigpu_spawn.py", "multigpu_torchrun.py", "single_gpu.py"], start=2):
        job = run(script, epochs, "--checkpoint", "relay.pt", **options)
        assert f"relay.pt: {epochs - 1} of {epochs} epochs are done" in job.stdout
        printed |= figures(job)
    assert printed == figures(unbroken)
    one, other = load(tmp_path / "unbroken.pt"), load(tmp_path / "relay.pt")
    assert one["epoch"] == other["epoch"] == 4
    assert not any(name.startswith("module.") for name in other["model"])
    for name, tensor in one["model"].items():
        torch.testing.assert_close(other["model"][name], tensor, rtol=1e-9, atol=1e-9)

    before = (tmp_path / "relay.pt").read_bytes()
    done, _ = run_all(("dp.py", 3, "--checkpoint", "relay.pt", "--lr", 0.001, options),
                      ("single_gpu.py", 5, "--checkpoint", "unbroken.pt", "--lr", 0.001, options))
    assert "relay.pt: 4 of 3 epochs are done; to start afresh, delete it or name another" in done.stdout
    assert (tmp_path / "relay.pt").read_bytes() == before
    assert load(tmp_path / "unbroken.pt")["optimizer"]["param_groups"][0]["lr"] == 0.001  # not the file's
    assert not list(tmp_path.glob("*.tmp"))


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


def test_a_file_that_is_no_checkpoint_of_this_model_ends_the_run_in_one_line(tmp_path):
    good = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": {}, "param_groups": []}, "epoch": 1}
    torch.save(good, tmp_path / "foreign.pt")
    torch.save(good | {"model": Hostile()}, tmp_path / "hostile.pt", pickle_module=pickle)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "foreign.pt").read_bytes()[:-100])
    (tmp_path / "text.pt").write_text("epoch 3\n")
    torch.save([1, 2], tmp_path / "list.pt")
    run("single_gpu.py", 1, "--checkpoint", "flipped.pt", cwd=tmp_path)
    whole = (tmp_path / "flipped.pt").read_bytes()
    (tmp_path / "flipped.pt").write_bytes(whole[:len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1])
                                          + whole[len(whole) // 2 + 1:])
    files = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    assert len(files) == 6
    cases = [("single_gpu.py", path) for path in files]
    cases += [(script, tmp_path / "hostile.pt") for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]
    jobs = run_all(*[(script, 2, "--checkpoint", path.name, dict(cwd=tmp_path, status=1)) for script, path in cases])
    for (script, path), job in zip(cases, jobs):
        said = [line for line in job.stderr.splitlines() if path.name in line]
        assert len(said) == 1 and "cannot be resumed and is left as it was" in said[0]
        assert script == "multigpu_torchrun.py" or job.stderr.count("\n") == 1  # torchrun adds its report
        assert "epoch" not in job.stdout
        assert path.read_bytes() == files[path]
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


def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    def fill_up(script):
        job = start(script, 1000, 1, "--checkpoint", f"{script}.pt", cwd=tmp_path)
        job.wait_for(f"saved {script}.pt after epoch 1\n")
        for pid in job.pids():  # from now on no file may exceed 100 KiB
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100 * 1024, resource.RLIM_INFINITY))
        assert job.wait() == 1
        assert f"{script}.pt was not saved: [Errno 27] File too large" in job.stderr
        assert load(tmp_path / f"{script}.pt")["epoch"] == job.stdout.count("saved")
    two_at_a_time(fill_up, *SCRIPTS[:-1])  # multinode.py saves by the lines of multigpu_torchrun.py
    assert not list(tmp_path.glob("*.tmp"))


def test_a_place_that_takes_no_checkpoint_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    places = [tmp_path / "missing" / "run.pt", tmp_path / "file" / "run.pt", "/proc/run.pt", tmp_path]
    jobs = run_all(*[(script, 2, "--checkpoint", place, dict(cwd=tmp_path, status=1))
                     for place, script in zip(places, ["single_gpu.py", "multigpu_spawn.py"] * 2)])
    for place, job in zip(places, jobs):
        assert str(place).removesuffix("/run.pt") in job.stderr and job.stderr.count("\n") == 1
        assert "epoch" not in job.stdout
