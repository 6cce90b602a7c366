"""Notes what torch.save saves, and what torch.load reads."""
import os

import torch

from check_conversion.observed import guard, notes
from check_conversion.observed.contents import contents
from check_conversion.protocol import About, Remark

save, load = torch.save, torch.load


def inside_copy(file):
    """A file's name in the copy, or nothing that can be told from another."""
    path = getattr(file, "name", file)
    if not isinstance(path, (str, os.PathLike)):
        return "(memory)"
    return os.path.relpath(os.path.realpath(path), notes.settings.copy)


def note_and_save(value, file, *given, **options):
    if isinstance(file, (str, os.PathLike)):
        guard.protect(file)  # torch opens it in C++
    notes.note(contents(inside_copy(file), value))
    return save(value, file, *given, **options)


def note_and_load(file, *given, **options):
    notes.note(Remark(About.LOADED, inside_copy(file)))
    return load(file, *given, **options)


def install(settings):
    torch.save, torch.load = note_and_save, note_and_load
