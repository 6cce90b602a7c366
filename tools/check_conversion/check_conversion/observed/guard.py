"""Keeps what is the user's as it was: under the check a script writes into its copy alone."""
import errno
import os
import sys

from check_conversion.observed import notes
from check_conversion.protocol import About, Remark

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # which arguments of an event are paths that change
    "os.rename": (0, 1), "os.symlink": (1,), "os.link": (1,), **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime",
         "shutil.rmtree"), (0,))}
FOLLOW = "open", "os.truncate", "os.chmod", "os.chown", "os.utime"  # a link to what it stands for
# What is nobody's work: devices, and what packages keep to be faster the next time.
FREE = ["/dev", "/proc", "/sys", *map(os.path.expanduser, (
    os.environ.get("XDG_CACHE_HOME", "~/.cache"), "~/.triton", "~/.nv", "~/.config/matplotlib")),
    *(os.environ[name] for name in ("TORCH_HOME", "HF_HOME", "MPLCONFIGDIR") if os.environ.get(name))]
settings = None
written = set()  # files of the copy that this process has begun anew


def below(path, folder):
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_users(path, follow):
    """Whether it is the user's: all but what the check made, behind no link of the copy."""
    given = os.path.abspath(path)
    parent, name = os.path.split(given)
    real = os.path.realpath(given) if follow else os.path.join(os.path.realpath(parent), name)
    if below(real, settings.home):
        return False
    if below(given, settings.root) or any(below(real, folder) for folder in settings.protected):
        return True
    return "__pycache__" not in real.split("/") and not any(
        below(real, os.path.realpath(folder)) for folder in FREE)


def protect(path, event="open"):
    if isinstance(path, int):
        return
    path = os.fsdecode(path)
    if event == "os.mkdir" and os.path.isdir(path):
        return  # which is an error of its own
    if is_users(path, event in FOLLOW):
        notes.note(Remark(About.WRITE, path))
        raise PermissionError(errno.EACCES, "write-protected by check_conversion", path)


def note_written(path):
    real = os.path.realpath(os.fsdecode(path))
    if below(real, settings.copy) and real not in written:
        written.add(real)
        notes.note(Remark(About.WRITTEN, os.path.relpath(real, settings.copy)))


def watch(event, given):
    """A note is itself a file that is opened, which lies in the records and so is let through."""
    if event == "open" and (given[2] or 0) & WRITES:
        protect(given[0])
        anew = given[2] & (os.O_TRUNC | os.O_CREAT) and not given[2] & os.O_APPEND
        if anew and not isinstance(given[0], int):
            note_written(given[0])
    for place in CHANGES.get(event, ()):
        protect(given[place], event)


def install(given):
    global settings
    settings = given
    sys.addaudithook(watch)
