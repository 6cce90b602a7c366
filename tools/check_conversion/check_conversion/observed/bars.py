"""Notes the last state of each of tqdm's progress bars."""
import contextlib
import functools

from check_conversion.observed import notes
from check_conversion.protocol import Bar


def state(bar):
    """Without its clock: `epoch 1: 6/6, loss=0.5`."""
    count = f"{bar.n}/{bar.total}" if bar.total is not None else f"{bar.n}"
    name = f"{bar.desc.removesuffix(': ')}: " if bar.desc else ""
    return f"{name}{count}" + (f", {bar.postfix}" if bar.postfix else "")


def change(module):
    """tqdm.std, whose bars all others inherit from."""
    close = module.tqdm.close

    @functools.wraps(close)
    def close_and_note(bar):
        if not getattr(bar, "disable", True):  # closing it again, it is disabled
            with contextlib.suppress(AttributeError):  # it was never whole
                notes.note(Bar(state(bar)))
        return close(bar)
    module.tqdm.close = close_and_note
