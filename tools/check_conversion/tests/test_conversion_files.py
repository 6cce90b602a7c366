"""The check touches nothing of the user's: each run has a copy of the folder."""
import os
import stat
from pathlib import Path

import pytest
import torch
from check_conversion.protocol import About
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace
from runs import record


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


def test_what_a_link_leads_to_is_seen_to_change_also_by_no_write_of_python_s(project):
    Path("up").symlink_to("..")  # whose other folders are none of the check's business
    workspace = Workspace(".")
    (project / "elsewhere/points.txt").write_text("22")
    (project / "data/points.txt").write_text("22")
    assert project / "elsewhere/points.txt" in workspace.changed()
    assert project / "data/points.txt" not in workspace.changed()
    workspace.remove()


def test_more_than_a_gigabyte_is_refused_and_named(project):
    Path("large/much").mkdir()
    for place in ("large/much/one.bin", "two.bin"):
        with open(place, "wb") as file:
            file.truncate(2**30 - 10**6)
    with pytest.raises(CannotSay, match=r"would copy 2.1 GB of this folder: large \(1.1 GB\), two.bin \(1.1 GB\); --link large"):
        Workspace(".")
