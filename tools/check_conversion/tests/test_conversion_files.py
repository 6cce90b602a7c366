"""The check touches nothing of the user's: each run has a copy of the folder, and no process outlives it."""
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from check_conversion import command, running
from check_conversion.protocol import About
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace
from runs import AFTER, BEFORE, record, record_twice


def contents(folder):
    """Names, kinds, contents and times of all there is."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        seen = path.lstat()
        text = os.readlink(path) if path.is_symlink() else path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[str(path.relative_to(folder))] = seen.st_mode, seen.st_mtime_ns, text
    return found


@pytest.fixture
def project(folder, monkeypatch):
    """Somebody's folder, with data beside it and behind links."""
    for path, text in {"project/checkpoints/model.pt": "three weeks of training", "project/checkpoints/other.pt": "more",
                       "project/large/part/points.txt": "1", "project/.git/config": "", "project/.venv/pyvenv.cfg": "",
                       "data/points.txt": "1", "elsewhere/points.txt": "1", ".hidden/points.txt": "1"}.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    Path("project/behind").symlink_to("../elsewhere")
    Path("project/nowhere").symlink_to("not/there")
    Path("project/latest").symlink_to("checkpoints")
    monkeypatch.chdir("project")
    return folder


ALLOWED = """
import os, shutil
for place in ("../data", "large/part", "behind"):
    assert open(f"{place}/points.txt").read() == "1"
os.makedirs("../data", exist_ok=True)
assert os.path.islink("nowhere") and not os.path.exists(".git") and not os.path.exists("checkpoints/run.pt")
open("log.txt", "w").write("a line")
os.remove("latest/other.pt")
open("checkpoints/model.pt", "w").write("lost")
shutil.rmtree("checkpoints")
import torch
"""
KEPT = {"large/part/points.txt": "open('large/part/points.txt', 'w')",  # linked
        "large/part/new.txt": "open('large/part/new.txt', 'w')",
        "large/part/tensor": "torch.save(torch.ones(1), 'large/part/tensor')",
        "behind/points.txt": "open('behind/points.txt', 'a')",
        "../data/points.txt": "open('../data/points.txt', 'r+')",
        "../data/new": "os.mkdir('../data/new')",
        "{folder}/project/log.txt": "open('{folder}/project/log.txt', 'w')",  # by the folder's own path
        "{folder}/.hidden/points.txt": "open('{folder}/.hidden/points.txt', 'w')",
        "{folder}/new.txt": "open('{folder}/new.txt', 'w')",  # outside, and not there yet
        "behind/removed": "os.remove('behind/removed')",
        "large/part": "shutil.rmtree('large/part')",
        "../data/renamed": "os.rename('log.txt', '../data/renamed')"}


def test_a_script_reads_what_is_there_and_writes_in_its_copy_alone(project):
    tries = "".join(f"\ntry:\n    {line}\nexcept PermissionError:\n    pass" for line in KEPT.values())
    text = (ALLOWED + tries).replace("{folder}", str(project))
    torch.save({}, "checkpoints/run.pt")
    Path("train.py").write_text(text)
    workspace, before = Workspace(".", links=["large"], without=["checkpoints/run*"]), contents(project)
    run = record(text, workspace=workspace)
    workspace.remove()
    after = contents(project)
    del before["project/train.py"], after["project/train.py"]  # written by this test, once more
    assert run.status == 0 and after == before
    assert run.remarks(About.WRITE) == [path.replace("{folder}", str(project)) for path in KEPT]


@pytest.mark.parametrize("outputs, status", [((), 2), ((3,), 0)])
def test_a_file_that_changes_meanwhile_is_said_before_any_verdict_unless_the_verdict_goes_there(
        outputs, status, project, monkeypatch, capsys):
    runs = [record(AFTER, 2, "train_ddp.py"), *record_twice(BEFORE)]
    file = os.open("check.txt", os.O_WRONLY | os.O_CREAT)

    def next_run(*_, **__):
        os.write(file, b"changed")
        return runs.pop(0)
    monkeypatch.setattr(command, "run", next_run)
    monkeypatch.setattr(command, "OUTPUTS", [file for _ in outputs])
    monkeypatch.setattr("sys.argv", ["check-conversion", "python train.py", "torchrun train_ddp.py"])
    assert command.main() == status
    said = capsys.readouterr()
    assert ("the same training" in said.out) == (not status) == ("check.txt changed during the check" not in said.err)


def test_more_than_a_gigabyte_is_refused_and_named(project):
    Path("large/much").mkdir()
    for place in ("large/much/one.bin", "two.bin"):
        with open(place, "wb") as file:
            file.truncate(2**30 - 10**6)
    with pytest.raises(CannotSay, match=r"would copy 2.1 GB of this folder: large \(1.1 GB\), two.bin \(1.1 GB\); --link large"):
        Workspace(".")


@pytest.fixture
def run(project, monkeypatch):
    """Of any command, after which nothing of it is left."""
    monkeypatch.setattr(running, "ENDING", 1)
    workspace = Workspace(".")
    yield lambda command, *interrupted: running.run(command, workspace, SimpleNamespace(patience=60, interrupted=interrupted))
    running.kill(str(workspace.home))
    workspace.remove()


def test_a_process_that_outlives_its_script_is_ended_and_said(run):
    process, = run("sleep 600 & true").outlived
    assert process not in running.processes("CHECK_CONVERSION")


def test_a_process_that_cannot_be_ended_is_named_and_not_waited_for(run, monkeypatch):
    signals = []
    with monkeypatch.context() as deaf:
        deaf.setattr(os, "kill", lambda *given: signals.append(given))
        with pytest.raises(CannotSay, match=r"process \d+, which a script has started, cannot be ended"):
            run("sleep 600 & true")
    os.kill(*signals[0])


def test_ctrl_c_ends_what_runs_and_a_command_that_is_not_there_is_said(run):
    with pytest.raises(CannotSay, match="interrupted"):
        run("sleep 600", True)
    with pytest.raises(CannotSay, match=r"cannot be started: .*no_such_command.*not found"):
        run("no_such_command train.py")
