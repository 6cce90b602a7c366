"""Notes what is saved, and the figures for TensorBoard and wandb."""
import contextlib
import faulthandler
import functools
import importlib.machinery
import os
import signal
import sys

import torch
from torch.utils._pytree import tree_leaves_with_path

from check_conversion.observed import bars, guard, notes
from check_conversion.observed.sketch import sketch
from check_conversion.protocol import About, Logged, Remark, Saved

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
        guard.keep(file)  # torch opens it in C++
    whole = value.state_dict() if isinstance(value, torch.nn.Module) else value
    tensors, values = {}, {}
    for path, part in tree_leaves_with_path(whole):
        name = ".".join(map(name_of, path)) or "the tensor"
        if isinstance(part, torch.Tensor) and not is_generator_state(part):
            tensors[name] = list(part.shape), sketch([part])
        elif isinstance(part, (bool, int, float)) and ".params." not in name:  # just a count
            values[name] = part
    notes.note(Saved(inside_copy(file), tensors, values))
    return save(value, file, *given, **options)


def note_and_load(file, *given, **options):
    notes.note(Remark(About.LOADED, inside_copy(file)))
    return load(file, *given, **options)


def note_figures(to, prefix, figures):
    for name, value in figures.items():
        if isinstance(value, dict):
            note_figures(to, f"{prefix}{name}/", value)
            continue
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value if isinstance(value, (int, float)) else value.item()  # of one element
            notes.note(Logged(to, f"{prefix}{name}", float(number)))


# Modules that are not there yet: changed as soon as they are imported.

def change_tensorboard(module):
    one, many = module.SummaryWriter.add_scalar, module.SummaryWriter.add_scalars

    def add_scalar(writer, tag, scalar_value, *given, **options):
        note_figures("TensorBoard", "", {tag: scalar_value})
        return one(writer, tag, scalar_value, *given, **options)

    def add_scalars(writer, main_tag, tag_scalar_dict, *given, **options):
        note_figures("TensorBoard", f"{main_tag}/", tag_scalar_dict)
        return many(writer, main_tag, tag_scalar_dict, *given, **options)
    module.SummaryWriter.add_scalar, module.SummaryWriter.add_scalars = add_scalar, add_scalars


def noting(log):
    """wandb.log calls the run's own: what is logged once counts once."""
    @functools.wraps(log)
    def logged(data, *given, **options):
        if not noting.under_way:
            note_figures("wandb", "", data)
        noting.under_way += 1
        try:
            return log(data, *given, **options)
        finally:
            noting.under_way -= 1
    return logged


def change_wandb(module):
    if not hasattr(module, "init") or not hasattr(module, "log"):
        return  # a module of the user's own, perhaps
    noting.under_way = 0
    init = module.init

    @functools.wraps(init)
    def start(*given, **options):
        run = init(*given, **options)
        if hasattr(run, "log"):
            run.log = noting(run.log)
        module.log = noting(module.log)
        return run
    module.init, module.log = start, noting(module.log)


def change_torchvision(module):
    save_image = module.save_image

    @functools.wraps(save_image)
    def note_and_save_image(tensor, fp, *given, **options):
        notes.note(Remark(About.IMAGE, inside_copy(fp)))
        return save_image(tensor, fp, *given, **options)
    module.save_image = note_and_save_image


CHANGED = {"torch.utils.tensorboard.writer": change_tensorboard, "wandb": change_wandb,
           "tensorboardX.writer": change_tensorboard, "torchvision.utils": change_torchvision,
           "tqdm.std": bars.change}


class Finder:
    """Asked first of all where a module is to be found."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in CHANGED:
            return None
        change = CHANGED.pop(name)  # and so it is not asked again
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_change(module):
                execute(module)
                change(module)
            spec.loader.exec_module = execute_and_change
        return spec


def install(settings):
    torch.save, torch.load = note_and_save, note_and_load
    for name in CHANGED.keys() & sys.modules.keys():  # torch has imported it
        CHANGED.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, Finder)
    if "RANK" in os.environ:  # so that the lines of two ranks do not mix
        os.dup2(os.open(settings.file("stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    stack = open(settings.file("stack"), "w")
    faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
