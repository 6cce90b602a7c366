"""Which generators of random numbers have moved, and by which line of the user's."""
import os
import random
import sys
import zlib

import torch
from torch.utils.data._utils import fetch as fetching

from check_conversion.observed import notes
from check_conversion.protocol import About, Remark

moved_in_workers = set()


def states():
    """A checksum of the state of each."""
    found = {"torch": bytes(torch.get_rng_state().tolist()),
             "Python": repr(random.getstate()).encode()}
    if torch.accelerator.is_available() and torch.cuda.is_initialized():
        found["torch"] += bytes(torch.cuda.get_rng_state().tolist())
    if "numpy.random" in sys.modules:
        _, keys, *position = sys.modules["numpy.random"].get_state()
        found["numpy"] = keys.tobytes() + repr(position).encode()
    return {name: zlib.crc32(state) for name, state in found.items()}


last = {}


def look():
    """From here on: the loaders have drawn what they need."""
    last.update(states())


def moved():
    """The states now, and which are others than when last looked at."""
    now = states()
    draws = [name for name, state in now.items() if last.get(name, state) != state]
    last.update(now)
    return now, draws


# In one step each call is looked at: which of them has moved a generator.

places, under_way = {}, []


def users_line(frame):
    """The innermost that is in the copy, or outside all packages."""
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(notes.settings.copy) or ("/lib/python" not in path and "/" in path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def of_random_numbers(called):
    return isinstance(getattr(called, "__self__", None), random.Random) or (
        getattr(called, "__name__", "").strip("_").startswith((
            "rand", "normal", "uniform", "bernoulli", "multinomial", "poisson", "exponential")))


def numpys():
    """Its calls are compiled, and seen by nothing but what they have done."""
    return sys.modules["numpy.random"].get_state()[2] if "numpy.random" in sys.modules else None


def watch(frame, event, called):
    if (position := numpys()) != watch.numpys:
        watch.numpys = position
        places.setdefault("numpy", users_line(frame.f_back if event == "call" else frame))
    if event == "c_call" and of_random_numbers(called):
        under_way[:] = [called, states()]
    elif event in ("c_return", "c_exception") and under_way and called == under_way[0]:
        before = under_way[1]
        under_way.clear()
        for name, state in states().items():
            if before.get(name, state) != state:
                places.setdefault(name, users_line(frame))


def watch_draws():
    if sys.getprofile() is None:
        watch.numpys = numpys()
        sys.setprofile(watch)


def end_watching():
    """The places that were seen."""
    if sys.getprofile() is watch:
        sys.setprofile(None)
    return dict(places)


def note_fetch(fetch):
    """Of a loader's dataset, in a worker."""
    def fetch_and_note(fetcher, index):
        if torch.utils.data.get_worker_info() is None:
            return fetch(fetcher, index)
        before = states()
        batch = fetch(fetcher, index)
        for name, state in states().items():
            if before.get(name, state) != state and name not in moved_in_workers:
                moved_in_workers.add(name)
                notes.note(Remark(About.DREW, name))
        return batch
    return fetch_and_note


def install(settings):
    look()
    for kind in (fetching._MapDatasetFetcher, fetching._IterableDatasetFetcher):
        kind.fetch = note_fetch(kind.fetch)
