"""The check touches nothing of the user's: each run has a copy of the folder."""
import os
import re
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, Job
from pairs import AFTER, BEFORE, PATH, STEP, changed, judge


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
                       "data/points.txt": "1", "elsewhere/points.txt": "1"}.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    Path("project/behind").symlink_to("../elsewhere")
    Path("project/nowhere").symlink_to("not/there")
    Path("project/latest").symlink_to("checkpoints")
    monkeypatch.chdir("project")
    Path("train.py").write_text(BEFORE)
    Path("train_ddp.py").write_text(AFTER)
    return folder


ALLOWED = """
import os, shutil
os.chdir(os.path.dirname(os.path.abspath(__file__)))
for place in ("../data", "large/part", "behind"):
    assert open(f"{place}/points.txt").read() == "1"
os.makedirs("../data", exist_ok=True)
assert os.path.islink("nowhere") and not os.path.exists(".git")
if os.environ.get("RANK", "0") == "0":
    open("log.txt", "w").write("a line")
    os.remove("latest/other.pt")
    open("checkpoints/model.pt", "w").write("lost")
    shutil.rmtree("checkpoints")
"""


def test_what_a_script_writes_and_removes_is_its_copy_s(project):
    before = contents(project)
    status, _ = judge(ALLOWED + BEFORE, ALLOWED + AFTER, 2, links=["large"])
    for name in ("train.py", "train_ddp.py"):
        (project / "project" / name).unlink()
    after = contents(project)
    assert status == 0 and {name: after[name] for name in after if name not in (".", "project")} == {
        name: before[name] for name in after if name not in (".", "project")} and len(after) == len(before) - 2


KEPT = {"a file that is linked": "open('large/part/points.txt', 'w')",
        "a new file in a linked folder": "open('large/part/new.txt', 'w')",
        "a tensor in a linked folder": "torch.save(model.state_dict(), 'large/part/points.txt')",
        "a file behind a link": "open('behind/points.txt', 'a')",
        "a file beside the folder": "open('../data/points.txt', 'r+')",
        "a new folder beside the folder": "os.mkdir('../data/new')",
        "by the folder's own path": "open('{folder}/log.txt', 'w')",
        "an older file anywhere": "open('{folder}/../elsewhere/points.txt', 'w')",
        "removed": "os.remove('behind/points.txt')",
        "removed with all that is in it": "shutil.rmtree('large/part')",
        "renamed": "os.rename('log.txt', '../data/points.txt')"}


@pytest.mark.parametrize("way", KEPT)
def test_what_is_not_copied_is_read_and_never_written(way, project):
    first = f"import os, shutil\nopen('log.txt', 'w').close()\n{BEFORE}{KEPT[way]}\n".replace("{folder}", os.getcwd())
    Path("train.py").write_text(first)
    before = contents(project)
    status, said = judge(first, AFTER, 2, links=["large"])
    after = contents(project)
    assert status == 2 and re.search(r"train.py would write \S+: under the check", said)
    assert {name: after[name] for name in before if name != "project/train.py"} == {
        name: before[name] for name in before if name != "project/train.py"}


def check(*words, status, wait=None):
    job = Job([sys.executable, ROOT / "tools/check_conversion.py", *words], CUDA_VISIBLE_DEVICES="", PATH=PATH)
    if wait:
        wait(job)
    assert job.wait() == status, job.stdout + job.stderr
    return [line for line in job.stderr.splitlines() if not line.startswith("running: ")], job.stdout


def interrupt(job):
    """As soon as its script runs."""
    while not any(b"train_ddp.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != job.process.pid
                  for pid in job.processes()):
        time.sleep(0.05)
    job.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("how", ["a fault", "a hang", "Ctrl-C"])
def test_the_folder_is_as_it_was_however_the_check_ends(how, project, monkeypatch):
    ways = {"a fault": "raise ValueError", "a hang": "time.sleep(6000)", "Ctrl-C": "time.sleep(6000)"}
    Path("train_ddp.py").write_text("import time\n" + changed(AFTER, (
        STEP, f"{STEP}        if rank == 1 and epoch == 1:\n            {ways[how]}\n")))
    Path("temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(project / "temporary"))
    (project / "temporary").mkdir()
    before = contents(project)
    _, said = check("--patience", 20, f"python {project}/project/train.py",
                    "torchrun --standalone --nproc_per_node=2 train_ddp.py",
                    status=2 if how == "Ctrl-C" else 1, wait=interrupt if how == "Ctrl-C" else None)
    assert how != "a hang" or re.search(r"rank 0, after 7 steps, waits at train_ddp.py:\d+, in backward", said)
    after = contents(project)
    assert {**after, "temporary": None} == {**before, "temporary": None} and not os.listdir(project / "temporary")


def test_more_than_a_gigabyte_is_refused_and_named(project):
    Path("large/much").mkdir()
    for place in ("large/much/one.bin", "two.bin"):
        with open(place, "wb") as file:
            file.truncate(2**30 - 10**6)
    said, _ = check("python train.py", "python train.py", status=2)
    assert said == ["cannot be judged: each run would copy 2.1 GB of this folder: large (1.1 GB), two.bin (1.1 GB); "
                    "--link large lets them read it where it is"]


def test_a_run_that_goes_on_from_a_file_is_told_how_to_leave_it_out(project):
    resumes = "import os\nif os.path.exists('checkpoints/run.pt'):\n    import torch\n    torch.load('checkpoints/run.pt')\nelse:"
    text = resumes + BEFORE.replace("\n", "\n    ")
    Path("train.py").write_text(text)
    import torch
    torch.save({}, "checkpoints/run.pt")
    status, said = judge(text, AFTER)
    assert status == 2 and "train.py takes no optimizer step; it reads checkpoints/run.pt: " in said
    assert "--without 'checkpoints/run.pt'" in said
    assert judge(text, AFTER, without=["checkpoints/*.pt"])[0] == 0
    assert Path("checkpoints/model.pt").read_text() == "three weeks of training"
