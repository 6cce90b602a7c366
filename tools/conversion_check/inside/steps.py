"""Notes each optimizer step, and what led to it."""
import gc
import os
import signal
import faulthandler
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from conversion_check.inside import comparable, generators, notes, shuffles
from conversion_check.inside.sketch import describe, sketch
from conversion_check.record import Began, Remark, Score, Step

# Switches that say how an optimizer computes, not what.
SWITCHES = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
NUDGED = "CHECK_CONVERSION_NUDGE" in os.environ  # the second run of the original
made, stepped = weakref.WeakSet(), []  # optimizers, and those that have taken a step
trained = weakref.WeakSet()  # modules with parameters of an optimizer
inside = {"step": [], "forward": 0}  # what is under way
now = Step()  # what has been noted since the last step
call, backward = torch.nn.Module.__call__, torch.autograd.backward
add_group = Optimizer.add_param_group
form_group = dist.init_process_group
to_nudge = torch.Generator().manual_seed(0)


def parameters_of(optimizer):
    return [one for group in optimizer.param_groups for one in group["params"]]


@torch.no_grad()
def nudge(optimizer):
    """Move the weights by one rounding each: what comes of it is the measure of rounding."""
    for parameter in parameters_of(optimizer):
        eps = torch.finfo(parameter.dtype).eps
        moves = torch.randn(parameter.shape, generator=to_nudge, device="cpu", dtype=torch.float64)
        parameter.mul_((1 + eps * moves).to(parameter.device, parameter.dtype))


# What leads to a step.

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
    if inside["forward"] or not torch.is_grad_enabled() or not is_trained(module):
        return call(module, *given, **options)
    if NUDGED and not stepped and not inside.get("nudged"):
        inside["nudged"] = [nudge(optimizer) for optimizer in made]
    note_fed(module, given, options)
    inside["forward"] += 1
    try:
        return call(module, *given, **options)
    finally:
        inside["forward"] -= 1


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


# The step.

def names_of(parameters):
    """The longest name that a module has for each, and which of them nothing averages."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    names, shared = {}, {id(one) for one in parameters if isinstance(one, DTensor)}
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            shared.update(map(id, module.parameters()))
        else:
            for name, parameter in module.named_parameters():
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
        if type(module).__name__ == "FullyShardedDataParallel":
            notes.note(Remark("cannot follow", "FullyShardedDataParallel, FSDP's first version"))
    names = {id(one): names.get(id(one), "?") for one in parameters}
    return [*names.values()], [name for key, name in names.items() if key not in shared]


def options_of(group):
    return {"lr": float(group["lr"]), **{
        name: value for name, value in group.items() if name not in (*SWITCHES, "lr")
        and isinstance(value, (bool, int, float, tuple, list))}}


def note_gradients(optimizer):
    parameters = parameters_of(optimizer)
    if optimizer not in stepped:
        stepped.append(optimizer)
        floats = [one.dtype for one in parameters if one.is_floating_point()]
        notes.note(Began(len(stepped) - 1, *names_of(parameters), torch.finfo(floats[0]).eps))
    now.optimizer = stepped.index(optimizer)
    now.options = [{"optimizer": type(optimizer).__name__, **options_of(group)}
                   for group in optimizer.param_groups]
    now.before = sketch(parameters)
    now.gradients = sketch(one.grad for one in parameters)
    now.states, now.draws = generators.moved()


def before_step(optimizer, given, options):
    if optimizer in inside["step"]:  # its last step was broken off
        inside["step"].clear()
    inside["step"].append(optimizer)
    closure = given[1] if len(given) > 1 else options.get("closure")
    if len(inside["step"]) > 1:  # one optimizer calls another
        return None
    if closure is None:
        return note_gradients(optimizer)

    def note_first():
        loss = closure()  # LBFGS calls it many times in a step
        if now.gradients is None:
            note_gradients(optimizer)
        return loss
    return (given[0], note_first), {}


def after_step(optimizer, given, options):
    global now
    inside["step"].pop()
    if inside["step"] or now.gradients is None:
        return
    if not any(now.gradients) and not any(group["lr"] for group in now.options):
        now = Step()  # torch.distributed.checkpoint makes an optimizer's state by such a step
        return
    now.after = sketch(parameters_of(optimizer))
    now.passes = shuffles.lead_to_a_step()
    now.stood_still = set(comparable.stood_still)
    notes.note(now)
    now = Step()
    if NUDGED:
        nudge(optimizer)


def note_group_of_ranks(*given, **options):
    notes.note(Remark("starts"))
    form_group(*given, **options)
    notes.note(Remark("has its group"))


Optimizer.add_param_group, torch.nn.Module.__call__ = note_group, note_call
torch.autograd.backward, dist.init_process_group = note_loss, note_group_of_ranks
clip = torch.nn.utils.clip_grad
torch.nn.utils.clip_grad_norm_ = clip.clip_grad_norm_ = note_norm(clip.clip_grad_norm_)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
plateau.step = note_score(plateau.step)
shuffles.after_loader = generators.look
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
