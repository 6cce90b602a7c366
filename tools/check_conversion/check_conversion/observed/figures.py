"""Notes the figures for TensorBoard and wandb, the last state of each of tqdm's bars, and the files of safetensors,
once a script has imported one of these packages."""
import builtins
import contextlib
import sys

from check_conversion.observed.process import note, note_save, on_call, on_return, write


def note_figures(to, figures, step=None):
    for name, value in figures.items():
        if isinstance(value, dict):
            note_figures(to, {f"{name}/{key}": one for key, one in value.items()}, step)
            continue
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value if isinstance(value, (int, float)) else value.item()  # of one element
            write("logged", f"{to}: {name} {float(number)} for step {step}\n")


def change_tensorboard(module):
    def note_scalar(writer, tag, scalar_value, global_step=None, *_, **__):
        note_figures("TensorBoard", {tag: scalar_value}, global_step)

    def note_scalars(writer, main_tag, tag_scalar_dict, global_step=None, *_, **__):
        note_figures("TensorBoard", {main_tag: tag_scalar_dict}, global_step)
    on_call(module.SummaryWriter, "add_scalar", note_scalar)
    on_call(module.SummaryWriter, "add_scalars", note_scalars)


def change_wandb(module):
    """wandb.log is the run's own; a run that is disabled, on all ranks but one perhaps, has another."""
    on_call(module.Run, "log", lambda run, data, step=None, *_, **__: note_figures("wandb", data, step))


def note_bar(bar):
    """Its last state without its clock: `epoch 1: 6/6, loss=0.5`."""
    if not getattr(bar, "disable", True):  # closing it again, it is disabled
        with contextlib.suppress(AttributeError):  # it was never whole
            name = f"{bar.desc.removesuffix(': ')}: " if bar.desc else ""
            count = f"{bar.n}/{bar.total}" if bar.total is not None else f"{bar.n}"
            write("bars", f"{name}{count}" + (f", {bar.postfix}" if bar.postfix else "") + "\n")


def change_tqdm(module):
    """tqdm.std, whose bars all others inherit from."""
    on_call(module.tqdm, "close", note_bar)


def change_safetensors(module):
    """Its files are written in Rust, where Python sees nothing of it."""
    on_call(module, "save_file", lambda tensors, filename, *_, **__: note_save(tensors, filename))
    on_return(module, "save_file", lambda *_, **__: note("saved"))


CHANGES = {"torch.utils.tensorboard.writer": change_tensorboard, "tensorboardX.writer": change_tensorboard,
           "wandb.sdk.wandb_run": change_wandb, "tqdm.std": change_tqdm,
           "safetensors.torch": change_safetensors}


def change_imported(*_, **__):
    """What has been imported whole."""
    for name in CHANGES.keys() & sys.modules.keys():
        if not getattr(sys.modules[name].__spec__, "_initializing", False):
            CHANGES.pop(name)(sys.modules[name])


def install():
    on_return(builtins, "__import__", change_imported)
    change_imported()  # what torch has imported
