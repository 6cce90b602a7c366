"""Notes what leads to an optimizer step: samples, losses, norms, scores. In the second run of the
original it moves the weights by one rounding at each step."""
import os
import weakref

import torch
from conversion_check.inside import notes, shuffles
from conversion_check.inside.sketch import describe
from conversion_check.record import Score, Step
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

NUDGED = "CHECK_CONVERSION_NUDGE" in os.environ
made, begun = weakref.WeakSet(), weakref.WeakSet()  # optimizers; those whose weights have moved
trained = weakref.WeakSet()  # modules with their parameters
under_way = {"forward": False}
now = Step()  # what has been noted since the last step
call, backward = torch.nn.Module.__call__, torch.autograd.backward
add_group = Optimizer.add_param_group
to_nudge = torch.Generator().manual_seed(0)


def parameters_of(optimizer):
    return [one for group in optimizer.param_groups for one in group["params"]]


@torch.no_grad()
def nudge(optimizer):
    """Move the weights by one rounding each: what comes of it is the measure of rounding."""
    begun.add(optimizer)
    for parameter in parameters_of(optimizer):
        if torch.nn.parameter.is_lazy(parameter):  # it has no values before the first forward
            continue
        eps = torch.finfo(parameter.dtype).eps
        moves = torch.randn(parameter.shape, generator=to_nudge, device="cpu", dtype=torch.float64)
        parameter.mul_((1 + eps * moves).to(parameter.device, parameter.dtype))


def note_group(optimizer, group):
    add_group(optimizer, group)
    made.add(optimizer)


def is_trained(module):
    if module not in trained:
        known = {id(one) for optimizer in made for one in parameters_of(optimizer)}
        if any(id(one) in known for one in module.parameters()):
            trained.add(module)
    return module in trained


def note_call(module, *given, **options):
    """Of all modules in one another the outermost is fed samples."""
    if under_way["forward"] or not torch.is_grad_enabled() or not is_trained(module):
        return call(module, *given, **options)
    for optimizer in [*made] if NUDGED else []:
        if optimizer not in begun:
            nudge(optimizer)
    note_fed(module, given, options)
    under_way["forward"] = True
    try:
        return call(module, *given, **options)
    finally:
        under_way["forward"] = False


def note_fed(module, given, options):
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    name = type(module).__name__.removeprefix("FSDP")
    if torch._C._get_tracing_state() is None:
        for place, one in [*enumerate(given), *options.items()]:
            if isinstance(one, torch.Tensor):
                now.fed.append(describe(f"{name} {place}", one))


def note_loss(tensors, *given, **options):
    for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if one.numel() == 1 and not isinstance(one, DTensor):
            now.losses.append(one.item())
    return backward(tensors, *given, **options)


def note_norm(clip):
    def clipped(*given, **options):
        norm = clip(*given, **options)
        if not isinstance(norm, DTensor):
            now.norms.append(float(norm))
        return norm
    return clipped


def note_score(step):
    def with_score(scheduler, metrics, *given, **options):
        notes.note(Score(float(metrics), shuffles.steps))
        return step(scheduler, metrics, *given, **options)
    return with_score


Optimizer.add_param_group, torch.nn.Module.__call__ = note_group, note_call
torch.autograd.backward = note_loss
clip = torch.nn.utils.clip_grad
torch.nn.utils.clip_grad_norm_ = clip.clip_grad_norm_ = note_norm(clip.clip_grad_norm_)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
plateau.step = note_score(plateau.step)
