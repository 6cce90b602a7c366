"""Makes training comparable: no dropout, and float64 where it is asked for."""
import os
import weakref

import torch
import torch.nn.functional as F

from check_conversion.observed import notes, precision
from check_conversion.protocol import About, Remark

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
            "feature_alpha_dropout")
attend = F.scaled_dot_product_attention
held = weakref.WeakKeyDictionary()  # modules that hand their dropout on, and what it was


def note_dropout(p):
    if p > 0 and torch.is_grad_enabled():
        precision.on.add(f"dropout of {p:g}")


def drop_nothing(input, p=0.5, training=True, inplace=False):
    if not training:
        return input
    note_dropout(p)
    return input if inplace or not p else input.clone()  # which may be changed in place


def attend_all(query, key, value, attn_mask=None, dropout_p=0.0, *given, **options):
    note_dropout(dropout_p)
    return attend(query, key, value, attn_mask, 0.0, *given, **options)


def hold(module, given):
    """Before each forward of any module."""
    if isinstance(getattr(module, "dropout", None), float):  # RNNs, attention
        note_dropout(held.setdefault(module, module.dropout) if module.training else 0)
        module.dropout = 0.0
    notes.be_alive()
    return in_float64(module, given) if notes.settings.float64 else None


def in_float64(module, given):
    """What a layer is given, where data have a precision of their own."""
    if any(one is not None and one.dtype == torch.float64 for one in module._parameters.values()):
        return tuple(one.double() if isinstance(one, torch.Tensor) and one.dtype == torch.float32
                     else one for one in given)
    return None


def check_precision(loss):
    """At each backward until the first step: nothing behind the loss may compute in less than float64, in which
    rounding would be larger than what is measured."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for output in node._input_metadata:
            if output.dtype in (torch.float32, torch.float16, torch.bfloat16):
                notes.note(Remark(About.FLOAT32, f"{node.name()} computes in {output.dtype}"))
                os._exit(1)  # to be run again, in its own precision
        waiting += [one for one, _ in node.next_functions]


def install(settings):
    for name in DROPOUTS:
        if hasattr(F, name):
            setattr(F, name, drop_nothing)
    F.scaled_dot_product_attention = attend_all
    torch.nn.modules.module.register_module_forward_pre_hook(hold)
    if settings.float64:
        torch.set_default_dtype(torch.float64)
