"""Makes training comparable: full precision, no dropout, BatchNorm that keeps its statistics."""
import os

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from conversion_check.inside import notes

stood_still = set()  # what the script has of these
attend, enter_autocast = F.scaled_dot_product_attention, torch.autocast.__init__


def keep_all(input, p=0.5, training=True, *given, **options):
    if training and p > 0:
        stood_still.add("dropout")
    return input


def attend_all(query, key, value, attn_mask=None, dropout_p=0.0, *given, **options):
    if dropout_p > 0:
        stood_still.add("dropout")
    return attend(query, key, value, attn_mask, 0.0, *given, **options)


def in_full_precision(context, device_type, dtype=None, enabled=True, cache_enabled=None):
    if enabled:
        stood_still.add("autocast")
    enter_autocast(context, device_type, enabled=False)


def hold(module, given):
    """Before each forward of any module."""
    if isinstance(module, _BatchNorm) and module.training:
        stood_still.add("BatchNorm")
        if not isinstance(module, SyncBatchNorm):
            F._verify_batch_size(given[0].size())  # which refuses one value for each channel
        module.training = module.running_mean is None
    if isinstance(getattr(module, "dropout", None), float):  # RNNs, attention
        if module.training and module.dropout > 0:
            stood_still.add("dropout")
        module.dropout = 0.0
    notes.be_alive()


for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
             "feature_alpha_dropout"):
    setattr(F, name, keep_all)
F.scaled_dot_product_attention, torch.autocast.__init__ = attend_all, in_full_precision
torch.nn.modules.module.register_module_forward_pre_hook(hold)
if "CHECK_CONVERSION_FLOAT64" in os.environ:
    torch.set_default_dtype(torch.float64)
