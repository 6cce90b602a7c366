"""The check touches nothing of the user's: each run has a copy of the folder."""
from pathlib import Path

import pytest
import torch
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace
from runs import record


@pytest.fixture
def project(folder, monkeypatch):
    """Somebody's folder, with data beside it and behind links."""
    for path in ("project/checkpoints/model.pt", "project/checkpoints/other.pt", "project/.git/config",
                 "project/large/points.txt", "data/points.txt", "elsewhere/points.txt"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("1")
    Path("project/wandb.py").write_text("offline = True\n")  # a module of the user's own
    Path("project/behind").symlink_to("../elsewhere")
    Path("project/nowhere").symlink_to("not/there")
    Path("project/latest").symlink_to("checkpoints")
    Path("project/up").symlink_to("..")  # whose other folders are none of the check's business
    monkeypatch.chdir("project")
    return folder


ALLOWED = """
import os, pytest, shutil, torch, wandb
for place in ("../data", "large", "behind"):
    assert open(f"{place}/points.txt").read() == "1"
os.makedirs("../data", exist_ok=True)
assert os.path.islink("nowhere") and not os.path.exists(".git") and not os.path.exists("checkpoints/run.pt")
open("log.txt", "w").write("a line")
os.remove("latest/other.pt")
open("checkpoints/model.pt", "w").write("lost")
shutil.rmtree("checkpoints")
"""
KEPT = {"large/tensor": "torch.save(torch.ones(1), 'large/tensor')",  # linked
        "behind/points.txt": "open('behind/points.txt', 'a')",
        "../data/new": "os.mkdir('../data/new')",
        "../data/renamed": "os.rename('log.txt', '../data/renamed')",
        "{folder}/project/log.txt": "open('{folder}/project/log.txt', 'w')",  # by the folder's own path
        "{folder}/new.txt": "open('{folder}/new.txt', 'r+')"}  # outside, and not there yet


def test_a_script_reads_what_is_there_and_writes_in_its_copy_alone_and_other_writes_are_seen(project):
    refused = "".join(f"\nwith pytest.raises(PermissionError):\n    {line}" for line in KEPT.values())
    script = (ALLOWED + refused).replace("{folder}", str(project))
    torch.save({}, "checkpoints/run.pt")
    Path("train.py").write_text(script)
    workspace = Workspace(".", links=["large"], without=["checkpoints/run*"])
    run = record(script, workspace=workspace)
    for place in ("elsewhere", "data"):
        (project / place / "points.txt").write_text("22")
    Path("train.py").touch()
    changed = workspace.changed()
    workspace.remove()
    assert run.status == 0 and run.names("refused") == [path.replace("{folder}", str(project)) for path in KEPT]
    assert changed == [project / "elsewhere/points.txt", project / "project/train.py"]


def test_more_than_a_gigabyte_is_refused_and_named(project):
    for place in ("large/one.bin", "two.bin"):
        with open(place, "wb") as file:
            file.truncate(2**30 - 10**6)
    with pytest.raises(CannotSay, match=r"would copy 2.1 GB of this folder: large \(1.1 GB\), two.bin \(1.1 GB\); --link large"):
        Workspace(".")
