"""tools/check_conversion.py puts this folder on PYTHONPATH, where each Python process looks for a
module of this name first: it makes training comparable, and notes how it goes."""
import collections
import faulthandler
import functools
import gc
import json
import os
import signal
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

FILE = os.environ["CHECK_CONVERSION"] + "/{}.{}"
passes = collections.defaultdict(list)  # over each dataset, as they came
optimizers, state = [], {"fed": None, "loader": None, "dropout": False, "alive": 0}
# Switches that say how an optimizer computes, not what.
SWITCHES = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")


def note(**what):
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    with open(FILE.format(os.getpid(), "log"), "a") as file:  # each time: a process may fork
        print(json.dumps({"rank": rank, **what}), file=file)


# Comparable: full precision, no dropout, BatchNorm that stands still, one order of the samples.

if "CHECK_CONVERSION_FLOAT64" in os.environ:
    torch.set_default_dtype(torch.float64)
attend, enter_autocast = F.scaled_dot_product_attention, torch.autocast.__init__
shuffle, share = RandomSampler.__iter__, DistributedSampler.__iter__


def keep_all(input, p=0.5, training=True, *given, **options):
    state["dropout"] |= training and p > 0
    return input


def attend_all(query, key, value, attn_mask=None, dropout_p=0.0, *given, **options):
    return attend(query, key, value, attn_mask, 0.0, *given, **options)


def in_full_precision(context, device_type, *given, **options):
    enter_autocast(context, device_type, enabled=False)


def random_state():
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


def shuffle_as_distributed(sampler):
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        state["drawn"] = random_state()
        return shuffle(sampler)  # perhaps without an end
    before = torch.get_rng_state()
    drawn = list(shuffle(sampler))  # what all ranks must agree on where each of them draws it
    torch.set_rng_state(before)  # DistributedSampler takes nothing from it
    if torch.is_grad_enabled():
        state["drawn"] = zlib.crc32(repr(drawn).encode())
    passes[id(sampler.data_source)].append(None)
    seed = len(passes[id(sampler.data_source)]) - 1
    return iter(torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed)).tolist())


def share_by_passes(sampler):
    """The epoch counts as it came: set_epoch may begin with 1."""
    asked, seen = (sampler.seed, sampler.epoch), passes[id(sampler.dataset)]
    state["again"] = sampler.shuffle and asked in seen
    if asked not in seen:
        seen.append(asked)
    sampler.seed, sampler.epoch = 0, seen.index(asked)
    indices = share(sampler)
    sampler.seed, sampler.epoch = asked
    return indices


for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
    setattr(F, name, keep_all)
F.scaled_dot_product_attention, torch.autocast.__init__ = attend_all, in_full_precision
RandomSampler.__iter__, DistributedSampler.__iter__ = shuffle_as_distributed, share_by_passes


# Noted: each optimizer step, each file that is saved, and that a process is alive.

@functools.cache
def fixed_numbers(size, dtype, device):
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype).to(device)


@torch.no_grad()
def projections(tensors):
    """Of each tensor its norm, and its product with fixed random rows and columns."""
    found = []
    for tensor in tensors:
        tensor = torch.zeros(1) if tensor is None or not tensor.numel() else tensor.to_dense()
        tensor = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        matrix = tensor.reshape(len(tensor) if tensor.dim() else 1, -1)
        rows, columns = (fixed_numbers(n, matrix.dtype, matrix.device) for n in matrix.shape)
        found += [matrix.norm(), rows @ matrix @ columns]
    return torch.stack([number.to(found[-1].device) for number in found]).tolist()


def describe(parameters):
    """The longest name that a module has for each, and which of them no DDP has."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    names, shared = {}, set()
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            shared.update(map(id, module.parameters()))
        else:
            for name, parameter in module.named_parameters():
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
    return [names.get(id(parameter), "?") + " (in no DDP)" * (id(parameter) not in shared)
            for parameter in parameters]


def before_step(optimizer, given, options):
    closure = given[1] if len(given) > 1 else options.get("closure")
    if closure is None:
        return note_step(optimizer)
    losses = []

    def note_first():
        losses.append(closure())  # LBFGS calls it many times in a step
        if len(losses) == 1:
            note_step(optimizer)
        return losses[-1]
    return (given[0], note_first), {}


def note_step(optimizer):
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer not in optimizers:
        optimizers.append(optimizer)
        note(names=describe(parameters), eps=torch.finfo(parameters[0].dtype).eps)
    groups = [{"optimizer": type(optimizer).__name__, "lr": float(group["lr"]), **{
        name: value for name, value in group.items()
        if name not in SWITCHES and isinstance(value, (int, float, tuple, list))}}
        for group in optimizer.param_groups]
    random = random_state()
    note(**state, optimizer=optimizers.index(optimizer), random=random, groups=groups,
         draws=state.get("since", random) != random,
         weights=projections(parameters), gradients=projections(one.grad for one in parameters))
    state.update(fed=None, loader=None, since=random)


def before_forward(module, given):
    if isinstance(module, _BatchNorm):
        module.training = False
    if isinstance(getattr(module, "dropout", None), float):  # RNNs, attention
        state["dropout"] |= module.training and module.dropout > 0
        module.dropout = 0.0
    if not state["fed"] and module.training and torch.is_grad_enabled():
        state["fed"] = next((list(part.shape) for part in given if hasattr(part, "shape")), None)
    if time.monotonic() > state["alive"] + 1:  # evaluates, perhaps: that is no hang
        note(alive=True)
        state["alive"] = time.monotonic()


save, go_through, form_group = torch.save, DataLoader.__iter__, dist.init_process_group


def note_and_save(value, file, *given, **options):
    whole = value.state_dict() if isinstance(value, torch.nn.Module) else value
    parts = {}
    for path, part in tree_leaves_with_path(whole):
        name = keystr(path).replace("']['", ".").strip("[']")
        if isinstance(part, torch.Tensor):
            parts[name] = [list(part.shape), *projections([part])]
        elif isinstance(part, (int, float)):
            parts[name] = [None, part]
    note(path=str(getattr(file, "name", file)), saved=parts)
    return save(value, file, *given, **options)


def note_and_go_through(loader):
    if torch.is_grad_enabled():
        sampler = loader.sampler
        shuffles = getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))
        state["loader"] = [type(sampler).__name__, shuffles]
    iterator = go_through(loader)  # which draws a seed for its workers
    state["since"] = random_state()
    return iterator


def note_and_form_group(*given, **options):
    note()
    form_group(*given, **options)
    note()


torch.save, DataLoader.__iter__ = note_and_save, note_and_go_through
dist.init_process_group = note_and_form_group
torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
register_optimizer_step_pre_hook(before_step)
if "RANK" in os.environ:  # so that the lines of two ranks do not mix
    printed = os.open(FILE.format(os.getpid(), "stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
faulthandler.register(signal.SIGUSR2, open(FILE.format(os.getpid(), "stack"), "w"), all_threads=False)
