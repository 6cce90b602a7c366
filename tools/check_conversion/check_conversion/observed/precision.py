"""Full precision, and what would be on without the check."""
import torch

on = set()  # for training, since the last step: "autocast in bfloat16", "GradScaler", "dropout of 0.5"
make, enter = torch.autocast.__init__, torch.autocast.__enter__
make_scaler, scale, step = (
    torch.amp.GradScaler.__init__, torch.amp.GradScaler.scale, torch.amp.GradScaler.step)


def make_without(context, device_type, dtype=None, enabled=True, cache_enabled=None):
    make(context, device_type, enabled=False)
    less = dtype or torch.get_autocast_dtype(device_type)
    context.check_conversion = f"autocast in {str(less).removeprefix('torch.')}" if enabled else None


def enter_and_note(context):
    if torch.is_grad_enabled() and getattr(context, "check_conversion", None):
        on.add(context.check_conversion)
    return enter(context)


def make_scaler_as_asked(scaler, *given, **options):
    make_scaler(scaler, *given, **options)
    asked = options.get("enabled", given[5] if len(given) > 5 else True)
    scaler.check_conversion = asked  # it may be off for want of the device


def scale_and_note(scaler, outputs):
    if getattr(scaler, "check_conversion", False):
        on.add("GradScaler")
    return scale(scaler, outputs)


def step_and_note(scaler, optimizer, *given, **options):
    if getattr(scaler, "check_conversion", False):
        on.add("GradScaler.step")
    return step(scaler, optimizer, *given, **options)


def of_this_step():
    found = {*on}
    on.clear()
    return found


def install(settings):
    torch.autocast.__init__, torch.autocast.__enter__ = make_without, enter_and_note
    torch.amp.GradScaler.__init__ = make_scaler_as_asked
    torch.amp.GradScaler.scale, torch.amp.GradScaler.step = scale_and_note, step_and_note
