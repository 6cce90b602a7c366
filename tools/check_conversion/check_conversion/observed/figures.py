"""Notes the figures for TensorBoard and wandb and the last state of each of tqdm's bars, once a script has imported one
of these packages."""
import contextlib
import functools
import importlib.machinery
import sys

from check_conversion.observed.process import before, note


def note_figures(to, figures, step=None):
    for name, value in figures.items():
        if isinstance(value, dict):
            note_figures(to, {f"{name}/{key}": one for key, one in value.items()}, step)
            continue
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value if isinstance(value, (int, float)) else value.item()  # of one element
            note("figure", f"{to}: {name}", (float(number), step))


def note_scalar(writer, tag=None, value=None, global_step=None, *given, **options):
    figures = options.get("tag_scalar_dict", options.get("scalar_value", value))
    note_figures("TensorBoard", {options.get("main_tag", tag): figures}, global_step)


def change_tensorboard(module):
    before(module.SummaryWriter, "add_scalar", note_scalar)
    before(module.SummaryWriter, "add_scalars", note_scalar)


def change_wandb(module):
    """wandb.log calls the run's own: what is logged once counts once."""
    under_way, disabled = [], []

    def noting(log):
        @functools.wraps(log)
        def log_and_note(data, step=None, *given, **options):
            if not (under_way or disabled):
                note_figures("wandb", data, step)
            under_way.append(True)
            try:
                return log(data, step, *given, **options) if step is not None else log(data, *given, **options)
            finally:
                under_way.pop()
        return log_and_note

    def start(*given, **options):
        run = init(*given, **options)
        disabled[:] = [True] * (options.get("mode") == "disabled")  # on all ranks but one, perhaps
        if hasattr(run, "log"):
            run.log = noting(run.log)
        module.log = noting(module.log)
        return run
    if hasattr(module, "init") and hasattr(module, "log"):  # else a module of the user's own, perhaps
        init, module.init, module.log = module.init, start, noting(module.log)


def note_bar(bar):
    """Its last state without its clock: `epoch 1: 6/6, loss=0.5`."""
    if not getattr(bar, "disable", True):  # closing it again, it is disabled
        with contextlib.suppress(AttributeError):  # it was never whole
            name = f"{bar.desc.removesuffix(': ')}: " if bar.desc else ""
            count = f"{bar.n}/{bar.total}" if bar.total is not None else f"{bar.n}"
            note("bar", "", f"{name}{count}" + (f", {bar.postfix}" if bar.postfix else ""))


def change_tqdm(module):
    """tqdm.std, whose bars all others inherit from."""
    before(module.tqdm, "close", note_bar)


CHANGES = {"torch.utils.tensorboard.writer": change_tensorboard, "tensorboardX.writer": change_tensorboard,
           "wandb": change_wandb, "tqdm.std": change_tqdm}


class Finder:
    """Asked first of all where a module is to be found."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)  # and so it is not asked again
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_change(module):
                execute(module)
                change(module)
            spec.loader.exec_module = execute_and_change
        return spec


def install():
    for name in CHANGES.keys() & sys.modules.keys():  # torch has imported it
        CHANGES.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, Finder)
