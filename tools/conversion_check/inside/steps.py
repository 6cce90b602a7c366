"""Notes each optimizer step."""
import gc

import torch
import torch.distributed as dist
from conversion_check.inside import comparable, feeding, generators, notes, shuffles
from conversion_check.inside.feeding import parameters_of
from conversion_check.inside.sketch import sketch
from conversion_check.record import Began, Remark, Step
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Switches that say how an optimizer computes, not what.
SWITCHES = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
stepped, stepping = [], []  # optimizers that have taken a step; that take one
form_group = dist.init_process_group


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
    parameters, now = parameters_of(optimizer), feeding.now
    if optimizer not in stepped:
        stepped.append(optimizer)
        floats = [one.dtype for one in parameters if one.is_floating_point()]
        notes.note(Began(len(stepped) - 1, *names_of(parameters), torch.finfo(floats[0]).eps))
    now.optimizer = stepped.index(optimizer)
    kind = type(getattr(optimizer, "optim", optimizer)).__name__  # that ZeroRedundancyOptimizer has
    now.options = [{"optimizer": kind, **options_of(group)}
                   for group in optimizer.param_groups]
    now.before = sketch(parameters)
    now.gradients = sketch(one.grad for one in parameters)
    now.states, now.draws = generators.moved()


def before_step(optimizer, given, options):
    if optimizer in stepping:  # its last step was broken off
        stepping.clear()
    stepping.append(optimizer)
    closure = given[1] if len(given) > 1 else options.get("closure")
    if len(stepping) > 1:  # one optimizer calls another
        return None
    if closure is None:
        return note_gradients(optimizer)

    def note_first():
        loss = closure()  # LBFGS calls it many times in a step
        if feeding.now.gradients is None:
            note_gradients(optimizer)
        return loss
    return (given[0], note_first), {}


def after_step(optimizer, given, options):
    stepping.pop()
    now = feeding.now
    if stepping or now.gradients is None:
        return
    feeding.now = Step()
    if not any(now.gradients) and not any(group["lr"] for group in now.options):
        return  # torch.distributed.checkpoint makes an optimizer's state by such a step
    now.after = sketch(parameters_of(optimizer))
    now.passes = shuffles.lead_to_a_step()
    now.stood_still = set(comparable.stood_still)
    notes.note(now)
    if feeding.NUDGED:
        feeding.nudge(optimizer)


def note_group_of_ranks(*given, **options):
    notes.note(Remark("starts"))
    form_group(*given, **options)
    notes.note(Remark("has its group"))


dist.init_process_group = note_group_of_ranks
shuffles.after_loader = generators.look
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
