"""The modules that are alive: names for parameters, and all tensors that no optimizer holds, such as a momentum
encoder, a queue, running statistics. None of these is averaged: only the script itself keeps them alike on all
ranks."""
import gc
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from check_conversion.observed.process import note, of_script
from check_conversion.records import Parameters
from check_conversion.sketch import sketch

watched = {}  # tensors that no optimizer holds, by names: all of them at times, in between those that have moved
at_first = {}  # as each was when it was first seen


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
            note("unsupported", "FullyShardedDataParallel, FSDP's first version")
    found = [names.get(id(one), "?") for one in parameters]
    without = [name for name, one in zip(found, parameters) if id(one) not in shared]
    eps = next(torch.finfo(one.dtype).eps for one in parameters if one.is_floating_point() or one.is_complex())
    return Parameters(found, without, eps)


def named_by_user():
    """Modules by the names that the functions under way have for them: model, or self.model_k."""
    names, frame = {}, sys._getframe()
    while frame := frame.f_back:
        if of_script(frame):
            own = getattr(frame.f_locals.get("self"), "__dict__", {})
            for name, module in [*frame.f_locals.items(), *own.items(), *frame.f_globals.items()]:
                while isinstance(module, DistributedDataParallel):
                    module = module.module
                names.setdefault(id(module), f"{name}.")
    return names


def find_buffers(trained):
    """All tensors of all modules, but those that an optimizer holds; of several names the longest."""
    names, found = named_by_user(), {}
    for module in all_modules():
        if not isinstance(module, DistributedDataParallel):
            for name, one in [*module.named_parameters(), *module.named_buffers()]:
                name = names.get(id(module), "") + name
                if id(one) not in found or name.count(".") > found[id(one)][0].count("."):
                    found[id(one)] = name, one
    return {name: one for key, (name, one) in found.items()
            if key not in trained and not name.endswith("num_batches_tracked") and one.device.type != "meta"
            and not isinstance(one, (DTensor, torch.nn.parameter.UninitializedTensorMixin))}


def note_buffers(step, trained):
    """All of them before steps 1, 2, 4, 8, …; in between, what has moved: most of it never does."""
    if step & (step - 1) == 0:
        watched.clear()
        watched.update(find_buffers({id(one) for one in trained}))
    for name, tensor in [*watched.items()]:
        noted = sketch([tensor])
        note("buffer", name, noted)
        if at_first.setdefault(name, noted) == noted:
            del watched[name]
