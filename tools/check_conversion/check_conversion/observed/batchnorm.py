"""BatchNorm over the whole batch, on CPUs too; where each rank would normalize its part alone, its
statistics stand still."""
import re
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from check_conversion.protocol import BatchNorm

normalize, normalize_plainly = F.batch_norm, _BatchNorm.forward
normalize_on_gpus, convert, wrap = (
    SyncBatchNorm.forward, SyncBatchNorm.convert_sync_batchnorm, DistributedDataParallel.__init__)
synchronised = weakref.WeakSet()  # plain BatchNorm that other devices would synchronise
seen = set()  # of BatchNorm
synchronised_at = ""  # the line of the user's own that asks for it on GPUs
converted = False  # the script has called convert_sync_batchnorm


class Sum(torch.autograd.Function):
    """Over the ranks, in which each rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        whole = mine.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def normalize_together(input, running_mean, running_var, weight, bias, momentum, eps, group):
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


def normalize_frozen(input, running_mean, running_var, weight, bias, training, eps):
    if training and running_mean is not None:
        seen.add(BatchNorm.FROZEN)
        try:
            F._verify_batch_size(input.size())
        except ValueError as error:
            raise ValueError(f"{error}: a rank's part has only one sample, and BatchNorm needs more") from None
    return normalize(input, running_mean, running_var, weight, bias, running_mean is None, 0, eps)


def several():
    return dist.is_initialized() and dist.get_world_size() > 1


def normalize_all(input, running_mean, running_var, weight=None, bias=None, training=False,
                  momentum=0.1, eps=1e-5):
    """What plain BatchNorm computes in the end."""
    if always_frozen or several():
        return normalize_frozen(input, running_mean, running_var, weight, bias, training, eps)
    return normalize(input, running_mean, running_var, weight, bias, training, momentum, eps)


def forward(module, input):
    """Of SyncBatchNorm, and of BatchNorm that is treated as such."""
    if always_frozen or not (module.training and several()):
        return normalize_plainly(module, input)
    seen.add(BatchNorm.SYNCHRONISED)
    if input.device.type != "cpu":
        return normalize_on_gpus(module, input)
    module._check_input_dim(input)
    momentum = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked += 1
        momentum = 1 / module.num_batches_tracked.item() if momentum is None else momentum
    return normalize_together(input, module.running_mean, module.running_var, module.weight,
                              module.bias, momentum, module.eps,
                              getattr(module, "process_group", None))


def forward_plain(module, input):
    return (forward if module in synchronised else normalize_plainly)(module, input)


def note_conversion(cls, *given, **options):
    global converted
    converted = True
    return convert(*given, **options)


def asked_for():
    """The line of the user's own that converts, on other devices: train.py:71."""
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or ".")
        if path.is_relative_to(folder) and path.suffix == ".py":
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if re.search(r"^[^#]*\bconvert_sync_batchnorm\(", line):
                    return f"{path.name}:{number}"
    return None


def note_wrapped(ddp, module, *given, **options):
    """A script that converts where there are GPUs has plain BatchNorm where there is none. Where there
    is one it has had its choice, and the line may be for something else."""
    global synchronised_at
    plain = [one for one in module.modules() if isinstance(one, _BatchNorm)
             and not isinstance(one, SyncBatchNorm)]
    if plain and not converted and not torch.cuda.is_available() and (place := asked_for()):
        synchronised_at = place
        synchronised.update(plain)
    wrap(ddp, module, *given, **options)


def install(settings):
    global always_frozen, folder
    always_frozen, folder = settings.batchnorm_frozen, settings.copy
    F.batch_norm, SyncBatchNorm.forward, _BatchNorm.forward = normalize_all, forward, forward_plain
    SyncBatchNorm.convert_sync_batchnorm = classmethod(note_conversion)
    DistributedDataParallel.__init__ = note_wrapped
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # refuses CPUs
