"""What makes the second run of the original differ on purpose: its weights are moved by one rounding
at each step, and what comes of it is the measure of rounding; its clocks go otherwise, and what moves
with them is a time, no figure."""
import ctypes
import datetime
import gc
import sys
import time
import weakref

import torch

LATER, FASTER = 129_600, 3  # seconds: a day and a half; times as fast
AT_EACH_READING = 71  # seconds more for lines of the script, so that a short time moves too, by its minutes as well
LOGGING = {"logging", "loguru", "datetime"}  # which read the clock for a line of the script
BY_SECONDS = "time", "monotonic", "perf_counter", "process_time", "thread_time"
# What waits until a time has come goes by the real clock.
WAITING = {"threading", "queue", "multiprocessing", "concurrent", "asyncio", "selectors", "socket",
           "subprocess", "torch"}
readings = 0
begun = weakref.WeakSet()  # optimizers whose weights have moved
to_nudge = torch.Generator().manual_seed(0)


@torch.no_grad()
def nudge(optimizer):
    begun.add(optimizer)
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if torch.nn.parameter.is_lazy(parameter):  # it has no values before the first forward
            continue
        eps = torch.finfo(parameter.dtype).eps
        moves = torch.randn(parameter.shape, generator=to_nudge, device="cpu", dtype=torch.float64)
        parameter.mul_((1 + eps * moves).to(parameter.device, parameter.dtype))


def nudge_first(optimizers):
    """Before the first forward."""
    for optimizer in optimizers:
        if optimizer not in begun:
            nudge(optimizer)


# Clocks.

def otherwise(real):
    """A clock that says another time to all but those who wait."""
    began = real()

    def read():
        global readings
        now, caller = real(), sys._getframe(1)
        while caller.f_back and caller.f_globals is globals():
            caller = caller.f_back
        package = caller.f_globals.get("__name__", "").partition(".")[0]
        if package in WAITING:
            return now
        readings += caller.f_code.co_filename.startswith(folder) or package in LOGGING  # others may wait for a deadline
        return now + LATER + (FASTER - 1) * (now - began) + AT_EACH_READING * readings
    return read


def in_nanoseconds(seconds):
    return lambda: int(seconds() * 1e9)


def by_default(convert, clock):
    """time.localtime and its like, which take the time now where none is given."""
    return lambda seconds=None: convert(clock() if seconds is None else seconds)


def replace(builtin, **methods):
    """In the class itself, for there are classes in C that have it as their base (pandas.Timestamp)."""
    own = gc.get_referents(vars(builtin))[0]
    own.update({name: classmethod(method) for name, method in methods.items()})
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(builtin))


def install(settings):
    global folder
    folder = settings.copy
    if not settings.nudged:
        return
    strftime, asctime = time.strftime, time.asctime
    for name in BY_SECONDS:
        setattr(time, name, otherwise(getattr(time, name)))
        setattr(time, f"{name}_ns", in_nanoseconds(getattr(time, name)))
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, by_default(getattr(time, name), time.time))
    time.strftime = lambda form, when=None: strftime(form, when or time.localtime())
    time.asctime = lambda when=None: asctime(when or time.localtime())
    if "timeit" in sys.modules:
        sys.modules["timeit"].default_timer = time.perf_counter

    replace(datetime.date, today=lambda cls: cls.fromtimestamp(time.time()))
    replace(datetime.datetime, now=lambda cls, tz=None: cls.fromtimestamp(time.time(), tz),
            today=lambda cls: cls.now(), utcnow=lambda cls: cls(*time.gmtime()[:6]))
