"""Notes tensors of modules that no optimizer holds: a momentum encoder, a queue, running statistics.
None of it is averaged: only the script itself keeps it alike on all ranks."""
import gc
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from check_conversion.observed.sketch import describe, sketch
from check_conversion.protocol import Untrained

tensors, first, moving = {}, {}, set()  # by names; as they were at first; what is no longer so
steps, folder = 0, ""


def all_modules():
    """All that are alive."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]


def named_by_user():
    """Modules by the names that the functions under way have for them: model, or self.model_k."""
    names, frame = {}, sys._getframe()
    while frame:
        if frame.f_code.co_filename.startswith(folder):
            own = getattr(frame.f_locals.get("self"), "__dict__", {})
            for name, module in [*frame.f_locals.items(), *own.items(), *frame.f_globals.items()]:
                while isinstance(module, DistributedDataParallel):
                    module = module.module
                names.setdefault(id(module), name)
        frame = frame.f_back
    return names


def look(trained):
    """All tensors of all modules, but those that an optimizer holds."""
    modules = [one for one in all_modules() if not isinstance(one, DistributedDataParallel)]
    names, longest = named_by_user(), {}
    for module in modules:
        prefix = f"{names[id(module)]}." if id(module) in names else ""
        for name, one in [*module.named_parameters(), *module.named_buffers()]:
            if id(one) not in trained and not isinstance(one, DTensor) and one.device.type != "meta" \
                    and not name.endswith("num_batches_tracked"):
                longest[id(one)] = max(longest.get(id(one), ("", None)), (prefix + name, one),
                                       key=lambda known: known[0].count("."))
    tensors.clear()
    tensors.update(longest.values())


def note(name, tensor):
    fed = describe(name, tensor, False)
    noted = Untrained(sketch([tensor]), sorted(fed.rows), sorted(fed.columns))
    if first.setdefault(name, noted) != noted:
        moving.add(name)
    return noted


def before_step(trained):
    """All of it before steps 1, 2, 4, 8, …; in between, what has moved: most of it never does."""
    global steps
    steps += 1
    if all_of_it := steps & (steps - 1) == 0:
        look({id(one) for one in trained})
    return {name: note(name, tensor) for name, tensor in [*tensors.items()]
            if (all_of_it or name in moving) and not torch.nn.parameter.is_lazy(tensor)}


def install(settings):
    global folder
    folder = settings.copy
