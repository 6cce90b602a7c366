"""What makes two runs comparable: nothing is drawn by dropout, all is computed in float64, BatchNorm is that of the
whole batch; and what differs on purpose in the second run of the original, rounding and clocks."""
import functools
import os
import sys
import time
import timeit
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_map
from torch.utils.data.dataloader import _BaseDataLoaderIter

from check_conversion.observed import process, steps
from check_conversion.observed.process import note, of_script, on_call, replace, settings

# No dropout, and no autocast.

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
held = weakref.WeakKeyDictionary()  # modules that hand their dropout on, and what it was


def note_dropout(p):
    if p > 0 and torch.is_grad_enabled():
        note("switch", f"dropout of {p:g}", False)


def drop_nothing(drop, input, p=0.5, training=True, inplace=False):
    note_dropout(p * training)
    return input if inplace or not training else input.clone()  # which may be changed in place


def attend_to_all(attend, query, key, value, attn_mask=None, dropout_p=0.0, *given, **options):
    note_dropout(dropout_p)
    return attend(query, key, value, attn_mask, 0.0, *given, **options)


def keep_all(bernoulli, tensor, p=0.5, *given, **options):
    """Stochastic depth is a dropout of whole samples."""
    if steps.under_way and isinstance(p, float):
        note_dropout(1 - p)
        return tensor.fill_(1)
    return bernoulli(tensor, p, *given, **options)


def hold_dropout(module, given):
    """Before each forward: RNNs and attention hand it on to C++."""
    if isinstance(getattr(module, "dropout", None), float):
        note_dropout(held.setdefault(module, module.dropout) * module.training)
        module.dropout = 0.0


def turn_off(result, context, device_type, dtype=None, enabled=True, cache_enabled=None):
    """One that is off although the script has it on needs a device that is not here."""
    less = str(dtype or torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    context.switch = (f"autocast in {less}", not context._enabled) if enabled else None
    context._enabled = False


def note_autocast(context):
    if torch.is_grad_enabled() and getattr(context, "switch", None):
        note("switch", *context.switch)


# Float64.

NARROW = {torch.float32, torch.float16, torch.bfloat16}


def in_float64(value):
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def feed_in_float64(module, given):
    """What a layer is given, where data have a precision of their own."""
    if any(one is not None and one.dtype == torch.float64 for one in module._parameters.values()):
        return tuple(map(in_float64, given))
    return None


def by_torch():
    """Whether the replaced function was called by torch itself."""
    return sys._getframe(3).f_globals.get("__name__", "").startswith("torch.")


def make_in_float64(make, *given, **options):
    """Where the script asks for float32, or gets it of numpy."""
    if by_torch():
        return make(*given, **options)
    given = [torch.float64 if one is torch.float32 else one for one in given]
    options = {name: torch.float64 if one is torch.float32 else one for name, one in options.items()}
    return in_float64(make(*given, **options))


def stay_in_float64(convert, tensor, *given, **options):
    return convert(tensor, *given, **options) if by_torch() else tensor.double()


def check_precision(tensors, *given, **options):
    """Until the first step: nothing behind a loss may compute in less, where rounding would be larger than what is
    measured."""
    nodes, seen = {one.grad_fn for one in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)}, {None}
    while not process.steps and (nodes := nodes - seen):
        for node in nodes:
            for narrow in {one.dtype for one in node._input_metadata} & NARROW:
                note("float32", f"{node.name()} computes in {narrow}")
                os._exit(1)
        seen |= nodes
        nodes = {one for node in nodes for one, _ in node.next_functions}


def compute_in_float64():
    torch.set_default_dtype(torch.float64)
    for kind in (torch.Tensor, torch.nn.Module):
        replace(kind, "float", stay_in_float64)
        replace(kind, "to", make_in_float64)
    for name in ("tensor", "as_tensor", "from_numpy", "zeros", "ones", "empty", "full", "rand", "randn", "arange"):
        replace(torch, name, make_in_float64)
    replace(_BaseDataLoaderIter, "__next__", lambda load, iterator: tree_map(in_float64, load(iterator)))
    on_call(torch.autograd, "backward", check_precision)
    torch.nn.modules.module.register_module_forward_pre_hook(feed_in_float64)


# BatchNorm: over the whole batch, on CPUs too; or its statistics stand still.

class Sum(torch.autograd.Function):
    """Over the ranks, in which each rank's loss depends on the sum: so a gradient is such a sum too."""

    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        whole = mine.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient, ctx.group), None


def normalize_together(input, running_mean, running_var, weight, bias, momentum, eps, group=None):
    """By mean and variance of what all ranks have; ranks may have unequally much."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1] + [1] * (input.dim() - 2)
    exact = input.double()
    count = exact.new_full((1,), input.numel() // input.shape[1])
    sums = Sum.apply(torch.cat([exact.sum(dims), exact.square().sum(dims), count]), group)
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    variance = (square - mean.square()).clamp(min=0)
    if running_mean is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * sums[-1] / (sums[-1] - 1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = ((exact - mean.view(shape)) * (variance + eps).rsqrt().view(shape)).to(input.dtype)
    result = result if weight is None else result * weight.view(shape)
    return result if bias is None else result + bias.view(shape)


synchronising = []  # the process group of the SyncBatchNorm that is under way


def normalize_as_asked(
        normalize, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """All BatchNorm comes here."""
    several = training and dist.is_initialized() and dist.get_world_size() > 1
    if training and settings.batchnorm == "rank" and running_mean is not None:
        note("batchnorm", "frozen")
        F._verify_batch_size(input.size())
        training, momentum = False, 0
    elif several and (synchronising or settings.batchnorm == "sync"):
        note("batchnorm", "synchronised")
        return normalize_together(input, running_mean, running_var, weight, bias, momentum, eps, *synchronising)
    elif several:
        note("batchnorm", "plain")
        os._exit(1)  # until the user has said what it is to be
    return normalize(input, running_mean, running_var, weight, bias, training, momentum, eps)


def synchronise(forward, module, input):
    """As any BatchNorm, on GPUs too."""
    synchronising.append(module.process_group)
    try:
        return _BatchNorm.forward(module, input)
    finally:
        synchronising.clear()


# The second run of the original. What comes of its rounding is the measure; what moves with its clocks is a time.

FASTER = 1000  # times, for lines of the script, so that a short time moves too
to_nudge = torch.Generator().manual_seed(0)


@torch.no_grad()
def nudge(parameters):
    for parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):  # it has no values before the first forward
            continue
        eps = torch.finfo(parameter.dtype).eps
        moves = torch.randn(parameter.shape, generator=to_nudge, device="cpu", dtype=torch.float64)
        parameter.mul_((1 + eps * moves).to(parameter.device, parameter.dtype))


def run_faster(began, clock):
    """For lines of the script; packages may wait until a time has come."""
    now = clock()
    return now + FASTER * (now - began) if of_script(sys._getframe(2)) else now


def be_second_run():
    """The time of day differs by its time zone, see running.py."""
    on_call(Optimizer, "add_param_group", after=lambda result, one, *_, **__: nudge(one.param_groups[-1]["params"]))
    register_optimizer_step_post_hook(lambda optimizer, *_: nudge(steps.parameters_of(optimizer)))  # once it is noted
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        replace(time, name, functools.partial(run_faster, getattr(time, name)()))
    replace(timeit, "default_timer", functools.partial(run_faster, timeit.default_timer()))


def install():
    for name in DROPOUTS:
        replace(F, name, drop_nothing)
    replace(F, "scaled_dot_product_attention", attend_to_all)
    replace(torch.Tensor, "bernoulli_", keep_all)
    torch.nn.modules.module.register_module_forward_pre_hook(hold_dropout)
    on_call(torch.autocast, "__init__", after=turn_off)
    on_call(torch.autocast, "__enter__", note_autocast)
    replace(F, "batch_norm", normalize_as_asked)
    replace(SyncBatchNorm, "forward", synchronise)
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # refuses CPUs
    if settings.float64:
        compute_in_float64()
    if settings.nudged:
        be_second_run()
