"""Notes each optimizer step and what leads to it: samples, losses, norms, scores."""
import functools
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from check_conversion.observed import (
    batchnorm,
    comparable,
    generators,
    notes,
    precision,
    sampling,
    second_run,
    untrained,
)
from check_conversion.observed.sketch import describe, sketch
from check_conversion.protocol import About, Began, Remark, Score, Step

# Switches that say how an optimizer computes, not what.
SWITCHES = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
nudged = False
made = weakref.WeakSet()  # optimizers
trained = weakref.WeakSet()  # modules with their parameters
stepped, stepping = [], []  # optimizers that have taken a step; that take one
in_forward = False
now = Step()  # what has been noted since the last step
backward = torch.autograd.backward
add_group, form_group = Optimizer.add_param_group, dist.init_process_group


def parameters_of(optimizer):
    return [one for group in optimizer.param_groups for one in group["params"]]


def note_group(optimizer, group):
    add_group(optimizer, group)
    made.add(optimizer)


def is_trained(module):
    if module not in trained:
        known = {id(one) for optimizer in made for one in parameters_of(optimizer)}
        if any(id(one) in known for one in module.parameters()):
            trained.add(module)
    return module in trained


def outermost(forward):
    """Of all modules in one another the outermost is fed samples, by model(x) or model.forward(x)."""
    @functools.wraps(forward)
    def note_and_go(module, *given, **options):
        global in_forward
        if in_forward or not torch.is_grad_enabled() or not is_trained(module):
            return forward(module, *given, **options)
        if nudged:
            second_run.nudge_first([*made])
        note_fed(module, given, options)
        in_forward = True
        try:
            return forward(module, *given, **options)
        finally:
            in_forward = False
            now.after_model = generators.states()
    return note_and_go


def note_class(cls, **options):
    """A class of the user's own, or of a package that comes later."""
    super(torch.nn.Module, cls).__init_subclass__(**options)
    if "forward" in vars(cls):
        cls.forward = outermost(cls.forward)


def note_fed(module, given, options):
    """Each tensor that a call is given, also in lists, whose elements are samples, and in mappings."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    name = type(module).__name__.removeprefix("FSDP")
    if torch._C._get_tracing_state() is None:
        for place, argument in [*enumerate(given), *options.items()]:
            for path, tensor in tensors_in(argument, str(place)):
                now.fed.append(describe(f"{name} {path}", tensor, "[]" in path))


def tensors_in(value, path, depth=5):
    """Each with its way there, which a list's elements share: a rank has fewer of them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and isinstance(value, list):
        for one in value:
            yield from tensors_in(one, f"{path}[]", depth - 1)
    elif depth and isinstance(value, tuple):
        for place, one in enumerate(value):
            yield from tensors_in(one, f"{path}.{place}", depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors_in(one, f"{path}.{key}", depth - 1)
    elif depth and hasattr(value, "__dict__") and not callable(value):  # an object that has tensors
        for key, one in vars(value).items():
            yield from tensors_in(one, f"{path}.{key}", min(depth, 2) - 1)


def note_loss(tensors, *given, **options):
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    for one in tensors:
        if notes.settings.float64 and not sampling.steps:
            comparable.check_precision(one)
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
        notes.note(Score(float(metrics), sampling.steps))
        return step(scheduler, metrics, *given, **options)
    return with_score


def names_of(parameters):
    """The longest name that a module has for each, and which of them nothing averages."""
    names, shared = {}, {id(one) for one in parameters if isinstance(one, DTensor)}
    for module in untrained.all_modules():
        if isinstance(module, DistributedDataParallel):
            shared.update(map(id, module.parameters()))
        else:
            for name, parameter in module.named_parameters():
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
        if type(module).__name__ == "FullyShardedDataParallel":
            notes.note(Remark(About.UNSUPPORTED, "FullyShardedDataParallel, FSDP's first version"))
    names = {id(one): names.get(id(one), "?") for one in parameters}
    return [*names.values()], [name for key, name in names.items() if key not in shared]


def options_of(group):
    rate = {"lr": float(group["lr"])} if "lr" in group else {}  # a tensor, perhaps
    return rate | {name: value for name, value in group.items() if name not in (*SWITCHES, "lr")
                   and isinstance(value, (bool, int, float, tuple, list))}


def note_gradients(optimizer):
    now.drawn_at = generators.end_watching()
    parameters = parameters_of(optimizer)
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
    now.untrained = untrained.before_step(one for held in made for one in parameters_of(held))


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
        if now.gradients is None:
            note_gradients(optimizer)
        return loss
    return (given[0], note_first), {}


def after_step(optimizer, given, options):
    global now
    stepping.pop()
    if stepping or now.gradients is None:
        return
    step, now = now, Step()
    if not any(step.gradients) and all(group.get("lr") == 0 for group in step.options):
        return  # torch.distributed.checkpoint makes an optimizer's state by such a step
    step.after = sketch(parameters_of(optimizer))
    step.passes = sampling.lead_to_a_step()
    step.batchnorm, step.synchronised_at = set(batchnorm.seen), batchnorm.synchronised_at
    step.on = precision.of_this_step()
    notes.note(step)
    if len(stepped) == 1 and sampling.steps == 1:
        generators.watch_draws()  # in the second step
    if nudged:
        second_run.nudge(optimizer)


def note_group_of_ranks(*given, **options):
    notes.note(Remark(About.GROUP))
    form_group(*given, **options)
    notes.note(Remark(About.GROUP))


def install(settings):
    global nudged
    nudged = settings.nudged
    Optimizer.add_param_group = note_group
    torch.nn.Module.__call__ = outermost(torch.nn.Module.__call__)
    torch.nn.Module.__init_subclass__ = classmethod(note_class)
    torch.nn.Sequential.forward = outermost(torch.nn.Sequential.forward)
    torch.autograd.backward, dist.init_process_group = note_loss, note_group_of_ranks
    clip = torch.nn.utils.clip_grad
    torch.nn.utils.clip_grad_norm_ = clip.clip_grad_norm_ = note_norm(clip.clip_grad_norm_)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    plateau.step = note_score(plateau.step)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
