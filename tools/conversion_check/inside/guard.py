"""Keeps what is the user's as it was: under the check a script writes into its copy alone."""
import errno
import os
import stat
import sys
from pathlib import Path

from conversion_check import record

HOME, COPY = (os.environ[f"CHECK_CONVERSION_{name}"] for name in ("HOME", "COPY"))
KEPT = os.environ["CHECK_CONVERSION_KEPT"].splitlines()  # folders
BEGAN = float(os.environ["CHECK_CONVERSION_BEGAN"])
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # which arguments of an event are paths that change
    "os.rename": (0, 1), "os.symlink": (1,), "os.link": (1,), **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime",
         "shutil.rmtree"), (0,))}
FOLLOW = "open", "os.truncate", "os.chmod", "os.chown", "os.utime"  # a link to what it stands for


def below(path, folder):
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_kept(path, follow):
    """Whether it is the user's: in the folder, behind a link of the copy, or older than the run."""
    given = os.path.abspath(path)
    parent, name = os.path.split(given)
    real = os.path.realpath(given) if follow else os.path.join(os.path.realpath(parent), name)
    if below(real, HOME):
        return False
    if below(given, COPY) or any(below(real, folder) for folder in KEPT):
        return True
    try:
        found = os.stat(real)
    except OSError:
        return False  # it is new
    cached = any(part.startswith((".", "__pycache__")) for part in Path(real).parts)
    return (stat.S_ISREG(found.st_mode) and found.st_ctime < BEGAN and not cached
            and not real.startswith(("/dev/", "/proc/", "/sys/")))


def keep(path, event="open"):
    if isinstance(path, int):
        return
    path = os.fsdecode(path)
    if event == "os.mkdir" and os.path.isdir(path):
        return  # which is an error of its own
    if is_kept(path, event in FOLLOW):
        record.write(f"{os.environ['CHECK_CONVERSION']}/{os.getpid()}.notes",
                     int(os.environ.get("RANK", 0)), record.Remark("would write", path))
        raise PermissionError(errno.EACCES, "kept as it is by tools/check_conversion.py", path)


def watch(event, given):
    if event == "open" and (given[2] or 0) & WRITES:
        keep(given[0])
    for place in CHANGES.get(event, ()):
        keep(given[place], event)


sys.addaudithook(watch)
