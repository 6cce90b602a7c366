"""Notes each optimizer step and what leads to it: samples, losses, norms, random numbers, gradients, weights."""
import math
import random
import sys
import weakref
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch as fetching

from check_conversion.observed import modules, process
from check_conversion.observed.process import note, on_call, replace
from check_conversion.sketch import describe, gathered, sketch

# Switches that say how an optimizer computes, not what.
SWITCHES = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
optimizers = weakref.WeakSet()
stepped, stepping = [], []  # optimizers that have taken a step; that take one
described = {}  # how many parameters of each are named: groups may be added later
noted = []  # the optimizer whose step is under way, once its gradients are noted
under_way = []  # the forward of a model in training, and those of its modules
scaled = []  # whether gradients are those of a loss that a GradScaler has scaled, as a GPU's would be
modes = []  # whether the model that was called last was in training mode


def parameters_of(optimizer):
    return [one for group in optimizer.param_groups for one in group["params"]]


# Random numbers.

last_states = {}


def generator_states():
    """A checksum of the state of each generator."""
    found = {"torch": bytes(torch.get_rng_state().tolist()), "Python": repr(random.getstate()).encode()}
    device = torch.accelerator.current_accelerator()  # without a look at the driver, after which no fork could use it
    module = torch.get_device_module(device) if device else None
    if hasattr(module, "get_rng_state") and getattr(module, "is_initialized", lambda: True)():
        found["torch"] += bytes(module.get_rng_state().tolist())
    if "numpy.random" in sys.modules:
        _, keys, *position = sys.modules["numpy.random"].get_state()
        found["numpy"] = keys.tobytes() + repr(position).encode()
    return {name: zlib.crc32(state) for name, state in found.items()}


def draws(*_):
    """Of each generator its state, and whether it has moved since this was asked last. What a loader has drawn as the
    seed of its workers is no step's: so it is asked then too."""
    global last_states
    before, last_states = last_states, generator_states()
    return {name: (state, before.get(name, state) != state) for name, state in last_states.items()}


def note_worker_draws(fetch, fetcher, index):
    """Of a loader's dataset, in a worker."""
    if torch.utils.data.get_worker_info() is None:
        return fetch(fetcher, index)
    draws()
    batch = fetch(fetcher, index)
    for name, (_, moved) in draws().items():
        if moved:
            note("worker drew", name)
    return batch


# What a model is fed.

def is_trained(module):
    known = {id(one) for optimizer in optimizers for one in parameters_of(optimizer)}
    return any(id(one) in known for one in module.parameters())


def enter(module, given):
    """Of all modules in one another the outermost is fed samples."""
    if under_way or (torch.is_grad_enabled() and is_trained(module)):
        under_way.append(module)


def leave(module, given, options, result):
    if under_way:
        under_way.pop()
        if not under_way:
            note_fed(module, given, options)


def note_fed(module, given, options):
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    modes[:] = [module.training]
    name = type(module).__name__.removeprefix("FSDP")
    if torch._C._get_tracing_state() is None:
        for place, argument in [*enumerate(given), *options.items()]:
            for path, tensor in tensors_in(argument, str(place)):
                note("fed", f"{name} {path}", describe(tensor, "[]" in path))


def tensors_in(value, path, depth=5):
    """Each with its way there, which a list's elements share: a rank has fewer of them."""
    parts = {}
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        parts = value
    elif isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif hasattr(value, "__dict__") and not callable(value):  # an object that has tensors
        parts, depth = vars(value), min(depth, 2)
    for key, one in parts.items() if depth else ():
        yield from tensors_in(one, f"{path}[]" if isinstance(value, list) else f"{path}.{key}", depth - 1)


# Losses, and the scaler of a loss.

def note_loss(tensors, *given, **options):
    if False in modes:
        note("switch", "model.eval()", False)
    for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if one.numel() == 1 and not isinstance(one, DTensor):
            note("loss", "", one.item() / getattr(one, "scaled_by", 1))


def note_scaler(result, scaler, device="cuda", init_scale=0, growth=0, backoff=0, interval=0, enabled=True, **options):
    """One that is off although the script has it on needs a device that is not here."""
    scaler.only_there = enabled and not scaler.is_enabled()


def note_use(name, scaler):
    if scaler.is_enabled() or scaler.only_there:
        note("switch", name, scaler.only_there)


def note_scaled(loss, scaler, outputs):
    scaled[:] = [True]
    note_use("GradScaler", scaler)
    if scaler.is_enabled() and isinstance(loss, torch.Tensor):
        loss.scaled_by = scaler.get_scale()
        note("scale", "", loss.scaled_by)


def note_norm(norm, parameters, max_norm, *given, **options):
    if math.isinf(max_norm):
        return  # which clips nothing
    if scaled:
        note("switch", "clipping before scaler.unscale_(optimizer)", False)
    note("norm", "", float(gathered(norm)))


def note_scaler_step(scaler, *given, **options):
    scaled.clear()
    note_use("GradScaler.step", scaler)


# Steps.

def options_of(optimizer):
    kind = type(getattr(optimizer, "optim", optimizer)).__name__  # that ZeroRedundancyOptimizer has
    found = []
    for group in optimizer.param_groups:
        found.append({"optimizer": kind, "parameters": len(group["params"])})
        for name, value in group.items():
            if name == "lr":
                value = float(value)  # of a tensor, perhaps
            if isinstance(value, list):
                value = tuple(value)  # betas may be either
            if name not in SWITCHES and isinstance(value, (bool, int, float, tuple)):
                found[-1][name] = value
    return found


def note_optimizer(result, optimizer, *given, **options):
    optimizers.add(optimizer)
    note("seed", "", torch.initial_seed())


def note_gradients(optimizer):
    parameters, options = parameters_of(optimizer), options_of(optimizer)
    gradients = sketch(one.grad for one in parameters)
    if not any(gradients) and all(group.get("lr") == 0 for group in options):
        return  # torch.distributed.checkpoint makes an optimizer's state by such a step
    noted.append(optimizer)
    if optimizer not in stepped:
        stepped.append(optimizer)
    which = stepped.index(optimizer)
    if described.get(which) != len(parameters):
        described[which] = len(parameters)
        note("parameters", which, modules.describe_parameters(parameters))
    note("optimizer", "", which)
    note("options", "", options)
    for name, drawn in draws().items():
        note("drew", name, drawn)
    modules.note_buffers(process.steps + 1, [one for held in optimizers for one in parameters_of(held)])
    note("gradients", "", gradients)
    note("old_weights", "", sketch(parameters))


def before_step(optimizer, given, options):
    if optimizer in stepping:  # its last step was broken off
        stepping.clear()
    stepping.append(optimizer)
    closure = given[1] if len(given) > 1 else options.get("closure")
    if len(stepping) > 1:  # one optimizer calls another
        return None
    noted.clear()
    if closure is None:
        return note_gradients(optimizer)

    def note_first():
        loss = closure()  # LBFGS calls it many times in a step
        if not noted:
            note_gradients(optimizer)
        return loss
    return (given[0], note_first), {}


def after_step(optimizer, given, options):
    stepping.pop()
    if noted and not stepping:
        note("new_weights", "", sketch(parameters_of(optimizer)))
        process.steps += 1
        if process.steps == process.settings.killed_at:
            process.kill_run()


def keep_first_buckets():
    """DDP forms them anew after the first step: a restarted run would do so later, and round its sums otherwise."""
    dist.Reducer._rebuild_buckets = lambda *_: False


def install():
    torch.nn.modules.module.register_module_forward_pre_hook(enter)
    torch.nn.modules.module.register_module_forward_hook(leave, with_kwargs=True, always_call=True)
    on_call(Optimizer, "add_param_group", after=note_optimizer)
    on_call(torch.autograd, "backward", note_loss)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):  # which have the same functions
        on_call(owner, "clip_grad_norm_", after=note_norm)
        on_call(owner, "clip_grad_value_", lambda parameters, clip_value, *_, **__: note(
            "switch", f"clipping of values at {clip_value:g}", False))
    on_call(ReduceLROnPlateau, "step", lambda scheduler, metrics, *_, **__: note("score", "", float(metrics)))
    on_call(torch.amp.GradScaler, "__init__", after=note_scaler)
    on_call(torch.amp.GradScaler, "scale", after=note_scaled)
    on_call(torch.amp.GradScaler, "unscale_", lambda *_, **__: scaled.clear())
    on_call(torch.amp.GradScaler, "step", note_scaler_step)
    on_call(dist, "init_process_group", lambda *_, **__: note("group"))
    on_call(dist, "init_process_group", after=lambda *_, **__: note("group"))
    # Until Python 3.13 a frame keeps what its f_locals had, also a DDP model that the script has deleted: look again.
    on_call(dist, "destroy_process_group", lambda *_, **__: modules.named_by_user())
    for kind in (fetching._MapDatasetFetcher, fetching._IterableDatasetFetcher):
        replace(kind, "fetch", note_worker_draws)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    on_call(DataLoader, "__iter__", after=draws)
    draws()
