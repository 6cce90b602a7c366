"""The modules that are alive: names for parameters, and all tensors that no optimizer holds, such as a momentum
encoder, a queue, running statistics. None of these is averaged: only the script itself keeps them alike on all
ranks."""
import gc
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from check_conversion.observed import process
from check_conversion.records import Parameters
from check_conversion.sketch import describe, sketch

buffers = {}  # all tensors that no optimizer holds, by names, as last looked at
first, moving = {}, set()  # as each was at first; the names of those that are no longer so


def all_modules():
    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]


def describe_parameters(parameters):
    """The longest name that a module has for each, and which of them nothing averages."""
    names, shared = {}, {id(one) for one in parameters if isinstance(one, DTensor)}
    for module in all_modules():
        if isinstance(module, DistributedDataParallel):
            shared.update(map(id, module.parameters()))
        else:
            for name, parameter in module.named_parameters():
                names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
        if type(module).__name__ == "FullyShardedDataParallel":
            process.note("unsupported", "FullyShardedDataParallel, FSDP's first version")
    names = {id(one): names.get(id(one), "?") for one in parameters}
    floats = [one.dtype for one in parameters if one.is_floating_point()]
    return Parameters([*names.values()], [name for key, name in names.items() if key not in shared],
                      torch.finfo(floats[0]).eps)


def named_by_user():
    """Modules by the names that the functions under way have for them: model, or self.model_k."""
    names, frame = {}, sys._getframe()
    while frame:
        if frame.f_code.co_filename.startswith(process.settings.copy):
            own = getattr(frame.f_locals.get("self"), "__dict__", {})
            for name, module in [*frame.f_locals.items(), *own.items(), *frame.f_globals.items()]:
                while isinstance(module, DistributedDataParallel):
                    module = module.module
                names.setdefault(id(module), name)
        frame = frame.f_back
    return names


def find_buffers(trained):
    """All tensors of all modules, but those that an optimizer holds; of several names the longest."""
    names, longest = named_by_user(), {}
    for module in all_modules():
        if isinstance(module, DistributedDataParallel):
            continue
        prefix = f"{names[id(module)]}." if id(module) in names else ""
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            if id(one) not in trained and not isinstance(one, DTensor) and one.device.type != "meta" \
                    and not name.endswith("num_batches_tracked"):
                longest[id(one)] = max(longest.get(id(one), ("", None)), (prefix + name, one),
                                       key=lambda known: known[0].count("."))
    buffers.clear()
    buffers.update(longest.values())


def note_buffers(step, trained):
    """All of them before steps 1, 2, 4, 8, …; in between, what has moved: most of it never does."""
    if all_of_them := step & (step - 1) == 0:
        find_buffers({id(one) for one in trained})
    for name, tensor in [*buffers.items()]:
        if (all_of_them or name in moving) and not torch.nn.parameter.is_lazy(tensor):
            noted = describe(tensor)
            noted.sketch, noted.rows, noted.columns = sketch([tensor]), sorted(noted.rows), sorted(noted.columns)
            if first.setdefault(name, noted) != noted:
                moving.add(name)
            process.note("buffer", name, noted)
