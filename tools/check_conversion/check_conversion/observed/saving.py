"""Notes what torch.save saves, what torch.load reads, and that an image is saved."""
import functools
import os

import torch
from torch.utils._pytree import tree_leaves_with_path

from check_conversion.observed import guard, notes
from check_conversion.observed.sketch import sketch
from check_conversion.protocol import About, Remark, Saved

GENERATOR = torch.get_rng_state().shape  # of its state, which is no part of training
save, load = torch.save, torch.load


def inside_copy(file):
    """A file's name in the copy, or nothing that can be told from another."""
    path = getattr(file, "name", file)
    if not isinstance(path, (str, os.PathLike)):
        return "(memory)"
    return os.path.relpath(os.path.realpath(path), notes.settings.copy)


def is_generator_state(tensor):
    return tensor.dtype == torch.uint8 and tensor.shape == GENERATOR


def name_of(key):
    """One step of the way to a part of what is saved."""
    return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))


def note_and_save(value, file, *given, **options):
    if isinstance(file, (str, os.PathLike)):
        guard.protect(file)  # torch opens it in C++
    whole = value.state_dict() if isinstance(value, torch.nn.Module) else value
    tensors, values, strings = {}, {}, {}
    for path, part in tree_leaves_with_path(whole):
        name = ".".join(map(name_of, path)) or "the tensor"
        if isinstance(part, torch.Tensor) and not is_generator_state(part):
            tensors[name] = list(part.shape), sketch([part])
        elif isinstance(part, (bool, int, float)) and ".params." not in name:  # just a count
            values[name] = part
        elif isinstance(part, str):
            strings[name] = part
    notes.note(Saved(inside_copy(file), tensors, values, strings))
    return save(value, file, *given, **options)


def note_and_load(file, *given, **options):
    notes.note(Remark(About.LOADED, inside_copy(file)))
    return load(file, *given, **options)


def change_torchvision(module):
    save_image = module.save_image

    @functools.wraps(save_image)
    def note_and_save_image(tensor, fp, *given, **options):
        notes.note(Remark(About.IMAGE, inside_copy(fp)))
        return save_image(tensor, fp, *given, **options)
    module.save_image = note_and_save_image


def install(settings):
    torch.save, torch.load = note_and_save, note_and_load
