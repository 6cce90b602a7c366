"""What an observed process may write, and where it notes, prints, and says on a signal where it is."""
import errno
import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from check_conversion import records, running
from check_conversion.records import Record, Settings

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # which arguments of an event are paths that change; a hard link is a second name of the user's file
    "os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,), **dict.fromkeys((
        "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"), (0,))}
# What is nobody's work: devices, and what packages keep to be faster the next time.
FREE = [os.path.realpath(os.path.expanduser(path)) for path in (
    "/dev", "/proc", "/sys", "~/.triton", "~/.nv", "~/.config/matplotlib",
    os.environ.get("XDG_CACHE_HOME") or "~/.cache",
    *filter(None, map(os.environ.get, ("TORCH_HOME", "HF_HOME", "MPLCONFIGDIR"))))]

settings = Settings.given()
rank = int(os.environ.get("RANK", 0))  # the last one that was known: a script may leave its group before it ends
steps = 0  # taken by optimizers so far
last_sign = 0


def note(kind, name="", value=None):
    global rank
    if dist.is_initialized():
        rank = dist.get_rank()
    records.write(settings.file("notes"), Record(rank, steps, kind, name, value))


def be_alive(*_):
    """Before each forward of any module: a long evaluation is no hang."""
    global last_sign
    if time.monotonic() > last_sign + 1:
        settings.file("alive").touch()
        last_sign = time.monotonic()


# Functions that are replaced, or watched.

def replace(owner, name, replacement):
    """Calls the replacement instead, with the function and with what that is given."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def replaced(*given, **options):
        return replacement(function, *given, **options)
    setattr(owner, name, replaced)


def on_call(owner, name, before=lambda *_, **__: None, after=lambda *_, **__: None):
    """Around each call something is done: before it with what the function is given, after it with its result too."""
    def go_between(function, *given, **options):
        before(*given, **options)
        result = function(*given, **options)
        after(result, *given, **options)
        return result
    replace(owner, name, go_between)


def of_script(frame):
    """Not of a package in a virtual environment that lies in the folder."""
    file = frame.f_code.co_filename
    return file.startswith(settings.copy) and not re.search(running.PACKAGES, file[len(settings.copy):])


# Output.

def write(stream, text):
    with open(settings.file(stream), "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def note_error(text):
    """What a line of the copy writes, perhaps by a logger; what packages warn of is not the script's."""
    frame = sys._getframe(2).f_back  # None where the interpreter itself prints a traceback
    while frame and re.search("/(logging|loguru)/", frame.f_code.co_filename):
        frame = frame.f_back
    if frame and of_script(frame):
        write("errors", text)


def note_lines():
    """In a file of its own, so that the lines of two ranks do not mix; not where the user has them elsewhere."""
    if os.path.samestat(os.fstat(1), os.stat(os.path.join(settings.records, "stdout"))):
        os.dup2(os.open(settings.file("stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)


# Files: a script writes into its copy alone.

def is_users(path):
    """All but what the check made, and what is free, unless the user's folder or a link in it leads there."""
    def below(folders):
        return any(Path(path).is_relative_to(folder) for folder in folders)
    return not below([Path(settings.records).parent]) and (
        below(settings.protected) or not (below(FREE) or "__pycache__" in Path(path).parts))


def protect(path):
    """The name, and what it is a link to."""
    if isinstance(path, int):
        return
    path = os.fsdecode(path)
    folder, name = os.path.split(os.path.abspath(path))
    if is_users(os.path.join(os.path.realpath(folder), name)) or is_users(os.path.realpath(path)):
        note("refused", path)
        raise PermissionError(errno.EACCES, "write-protected by check_conversion", path)


def note_file(kind, path):
    if isinstance(path, (str, os.PathLike)):
        real = os.path.realpath(path)
        if Path(real).is_relative_to(settings.copy):
            note(kind, os.path.relpath(real, settings.copy))


def watch(event, given):
    """A note is itself a file that is opened, which lies in the records and so is let through."""
    if event == "open" and (given[2] or 0) & WRITES:
        protect(given[0])
        if given[2] & (os.O_TRUNC | os.O_CREAT) and not given[2] & os.O_APPEND:
            note_file("wrote", given[0])
    if event != "os.mkdir" or not os.path.isdir(given[0]):  # which is an error of its own
        for place in CHANGES.get(event, ()):
            protect(given[place])
    if event == "os.rename":
        note_file("wrote", given[1])


def note_save(save, *given, **options):
    """torch writes a path in C++, safetensors in Rust, where Python sees nothing of it."""
    file = given[1] if len(given) > 1 else options.get("f", options.get("filename"))
    if isinstance(file, (str, os.PathLike)):
        protect(file)
        note_file("wrote", file)
    save(*given, **options)
    note("saved")


def kill_run():
    """Within the step of the rank that saves: what it saved before is whole, and no rank writes anything more."""
    sys.stdout.flush()
    if rank != settings.killer:
        threading.Event().wait()
    for one in sorted(running.processes(settings.records), key=lambda pid: pid == os.getpid()):  # itself last
        os.kill(one, signal.SIGKILL)


def install():
    if "RANK" in os.environ:
        note_lines()
        note("group")
    on_call(sys.stderr, "write", note_error)
    faulthandler.register(signal.SIGUSR2, open(settings.file("stack"), "w"), all_threads=False)
    torch.nn.modules.module.register_module_forward_pre_hook(be_alive)
    replace(torch, "save", note_save)
    on_call(torch, "load", lambda f, *_, **__: note_file(
        "read", f if isinstance(f, os.PathLike) else getattr(f, "name", f)))
    sys.addaudithook(watch)
