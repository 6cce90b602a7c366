"""What an observed process may write, and where it notes, prints, and says on a signal where it is."""
import errno
import faulthandler
import functools
import os
import re
import signal
import sys
import time

import torch
import torch.distributed as dist

from check_conversion import records
from check_conversion.records import Record, Settings

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

settings = Settings.given()
clock = time.monotonic  # before the second run has another
rank = int(os.environ.get("RANK", 0))  # the last one that was known: a script may leave its group before it ends
steps = 0  # taken by optimizers so far
noted_at = {}  # the step at which something was noted that is noted once a step
last_sign = 0


def note(kind, name="", value=None):
    global rank
    if dist.is_initialized():
        rank = dist.get_rank()
    records.write(settings.file("notes"), Record(rank, steps, kind, name, value))


def note_once(kind, name, value=None):
    """Once a step."""
    if noted_at.get((kind, name, value)) != steps:
        noted_at[kind, name, value] = steps
        note(kind, name, value)


def be_alive(*_):
    """Before each forward of any module: a long evaluation is no hang."""
    global last_sign
    if clock() > last_sign + 1:
        settings.file("alive").touch()
        last_sign = clock()


# Functions that are watched, or replaced.

def replace(owner, name, make):
    """A function by what is made of it."""
    function = getattr(owner, name)
    setattr(owner, name, functools.wraps(function)(make(function)))


def before(owner, name, action):
    """Before each call an action is done with what the function is given."""
    def make(function):
        def act_and_go(*given, **options):
            action(*given, **options)
            return function(*given, **options)
        return act_and_go
    replace(owner, name, make)


def after(owner, name, action):
    """After each call an action is done with its result, and with what the function was given."""
    def make(function):
        def go_and_act(*given, **options):
            result = function(*given, **options)
            action(result, *given, **options)
            return result
        return go_and_act
    replace(owner, name, make)


# Output.

def note_error(text):
    """What a line of the copy writes, perhaps by a logger; what packages warn of is not the script's."""
    frame = sys._getframe(1).f_back  # None where the interpreter itself prints a traceback
    while frame and re.search("/(logging|loguru)/", frame.f_code.co_filename):
        frame = frame.f_back
    if frame and frame.f_code.co_filename.startswith(settings.copy):
        with open(settings.file("errors"), "a") as file:
            file.write(text)


def note_lines():
    """In a file of its own, so that the lines of two ranks do not mix; not where the user has them elsewhere."""
    if os.path.samestat(os.fstat(1), os.stat(os.path.join(settings.records, "stdout"))):
        os.dup2(os.open(settings.file("stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)


# Files: a script writes into its copy alone.

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
    return "__pycache__" not in real.split("/") and not any(below(real, os.path.realpath(folder)) for folder in FREE)


def protect(path, event="open"):
    if isinstance(path, int) or (event == "os.mkdir" and os.path.isdir(path)):  # which is an error of its own
        return
    if is_users(os.fsdecode(path), event in FOLLOW):
        note("refused", os.fsdecode(path))
        raise PermissionError(errno.EACCES, "write-protected by check_conversion", os.fsdecode(path))


def note_file(kind, path):
    if isinstance(path, (str, bytes, os.PathLike)):
        real = os.path.realpath(os.fsdecode(path))
        if below(real, settings.copy):
            note(kind, os.path.relpath(real, settings.copy))


def watch(event, given):
    """A note is itself a file that is opened, which lies in the records and so is let through."""
    if event == "open" and (given[2] or 0) & WRITES:
        protect(given[0])
        if given[2] & (os.O_TRUNC | os.O_CREAT) and not given[2] & os.O_APPEND:
            note_file("wrote", given[0])
    for place in CHANGES.get(event, ()):
        protect(given[place], event)
    if event == "os.rename":
        note_file("wrote", given[1])


def note_save(value, file, *given, **options):
    """torch opens a path in C++, where Python sees nothing of it."""
    if isinstance(file, (str, os.PathLike)):
        protect(file)
        note_file("wrote", file)


def install():
    if "RANK" in os.environ:
        note_lines()
        settings.file("rank").write_text(str(rank))  # also where it will note nothing
    before(sys.stderr, "write", note_error)
    faulthandler.register(signal.SIGUSR2, open(settings.file("stack"), "w"), all_threads=False)
    torch.nn.modules.module.register_module_forward_pre_hook(be_alive)
    before(torch, "save", note_save)
    before(torch, "load", lambda file, *_, **__: note_file("read", getattr(file, "name", file)))
    sys.addaudithook(watch)
