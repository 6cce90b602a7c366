"""Notes the figures for TensorBoard and wandb and the last state of each of tqdm's bars, once a script
has imported one of these packages."""
import contextlib
import functools
import importlib.machinery
import sys

from check_conversion.observed import notes
from check_conversion.protocol import Bar, Logged


def note_figures(to, prefix, figures, step=None):
    for name, value in figures.items():
        if isinstance(value, dict):
            note_figures(to, f"{prefix}{name}/", value, step)
            continue
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value if isinstance(value, (int, float)) else value.item()  # of one element
            notes.note(Logged(to, f"{prefix}{name}", float(number), step))


def step_of(given, options):
    """That a figure is logged for: the first thing after it."""
    return options.get("global_step", options.get("step", given[0] if given else None))


def change_tensorboard(module):
    one, many = module.SummaryWriter.add_scalar, module.SummaryWriter.add_scalars

    def add_scalar(writer, tag, scalar_value, *given, **options):
        note_figures("TensorBoard", "", {tag: scalar_value}, step_of(given, options))
        return one(writer, tag, scalar_value, *given, **options)

    def add_scalars(writer, main_tag, tag_scalar_dict, *given, **options):
        note_figures("TensorBoard", f"{main_tag}/", tag_scalar_dict, step_of(given, options))
        return many(writer, main_tag, tag_scalar_dict, *given, **options)
    module.SummaryWriter.add_scalar, module.SummaryWriter.add_scalars = add_scalar, add_scalars


def noting(log):
    """wandb.log calls the run's own: what is logged once counts once."""
    @functools.wraps(log)
    def logged(data, *given, **options):
        if not (noting.under_way or noting.disabled):
            note_figures("wandb", "", data, step_of(given, options))
        noting.under_way += 1
        try:
            return log(data, *given, **options)
        finally:
            noting.under_way -= 1
    return logged


def change_wandb(module):
    if not hasattr(module, "init") or not hasattr(module, "log"):
        return  # a module of the user's own, perhaps
    noting.under_way, noting.disabled = 0, False
    init = module.init

    @functools.wraps(init)
    def start(*given, **options):
        run = init(*given, **options)
        noting.disabled = options.get("mode") == "disabled"  # on all ranks but one, perhaps
        if hasattr(run, "log"):
            run.log = noting(run.log)
        module.log = noting(module.log)
        return run
    module.init, module.log = start, noting(module.log)


def state(bar):
    """Without its clock: `epoch 1: 6/6, loss=0.5`."""
    count = f"{bar.n}/{bar.total}" if bar.total is not None else f"{bar.n}"
    name = f"{bar.desc.removesuffix(': ')}: " if bar.desc else ""
    return f"{name}{count}" + (f", {bar.postfix}" if bar.postfix else "")


def change_tqdm(module):
    """tqdm.std, whose bars all others inherit from."""
    close = module.tqdm.close

    @functools.wraps(close)
    def close_and_note(bar):
        if not getattr(bar, "disable", True):  # closing it again, it is disabled
            with contextlib.suppress(AttributeError):  # it was never whole
                notes.note(Bar(state(bar)))
        return close(bar)
    module.tqdm.close = close_and_note


CHANGED = {"torch.utils.tensorboard.writer": change_tensorboard, "wandb": change_wandb,
           "tensorboardX.writer": change_tensorboard,
           "tqdm.std": change_tqdm}


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
    for name in CHANGED.keys() & sys.modules.keys():  # torch has imported it
        CHANGED.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, Finder)
