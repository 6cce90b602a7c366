"""Notes the figures for TensorBoard and wandb, the last state of each of tqdm's bars, and the files of safetensors,
once a script has imported one of these packages."""
import builtins
import contextlib
import sys

from check_conversion.observed.process import note_save, on_call, replace, write


def note_figures(to, figures, step=None):
    for name, value in figures.items():
        if isinstance(value, dict):
            note_figures(to, {f"{name}/{key}": one for key, one in value.items()}, step)
            continue
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value if isinstance(value, (int, float)) else value.item()  # of one element
            write("logged", f"{to}: {name} {float(number)} for step {step}\n")


def change_tensorboard(module):
    on_call(module.SummaryWriter, "add_scalar", lambda writer, tag, scalar_value, global_step=None, *_, **__:
            note_figures("TensorBoard", {tag: scalar_value}, global_step))
    on_call(module.SummaryWriter, "add_scalars", lambda writer, main_tag, tag_scalar_dict, global_step=None, *_, **__:
            note_figures("TensorBoard", {main_tag: tag_scalar_dict}, global_step))


def note_bar(bar):
    """Its last state without its clock: `epoch 1: 6/6, loss=0.5`."""
    if not getattr(bar, "disable", True):  # closing it again, it is disabled
        with contextlib.suppress(AttributeError):  # it was never whole
            name = f"{bar.desc.removesuffix(': ')}: " if bar.desc else ""
            count = f"{bar.n}/{bar.total}" if bar.total is not None else f"{bar.n}"
            write("bars", f"{name}{count}" + (f", {bar.postfix}" if bar.postfix else "") + "\n")


CHANGES = {  # of each module, once it is imported
    "torch.utils.tensorboard.writer": change_tensorboard,
    "tensorboardX.writer": change_tensorboard,
    # wandb.log is the run's own; a run that is disabled, on all ranks but one perhaps, has another.
    "wandb.sdk.wandb_run": lambda module: on_call(
        module.Run, "log", lambda run, data, step=None, *_, **__: note_figures("wandb", data, step)),
    "tqdm.std": lambda module: on_call(module.tqdm, "close", note_bar),  # all other bars inherit from it
    "safetensors.torch": lambda module: replace(module, "save_file", note_save)}


def change_imported(*_, **__):
    """What has been imported whole."""
    for name in CHANGES.keys() & sys.modules.keys():
        if not getattr(sys.modules[name].__spec__, "_initializing", False):
            CHANGES.pop(name)(sys.modules[name])


def install():
    on_call(builtins, "__import__", after=change_imported)
    change_imported()  # what torch has imported
