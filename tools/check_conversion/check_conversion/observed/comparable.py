"""Makes training comparable: full precision, no dropout, BatchNorm that keeps its statistics."""
import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm

from check_conversion.observed import notes

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
            "feature_alpha_dropout")
stood_still = set()  # what the script has of these
attend, enter_autocast = F.scaled_dot_product_attention, torch.autocast.__init__
normalize = F.batch_norm


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


def normalize_as_before(input, running_mean, running_var, weight=None, bias=None, training=False,
                        momentum=0.1, eps=1e-5):
    if training:
        stood_still.add("BatchNorm")
        try:
            F._verify_batch_size(input.size())
        except ValueError as error:
            raise ValueError(f"{error}: a part of one sample under BatchNorm") from None
    return normalize(input, running_mean, running_var, weight, bias, running_mean is None, 0, eps)


def normalize_without_others(module, input):
    """SyncBatchNorm, which takes one sample a rank."""
    if module.training:
        stood_still.add("BatchNorm")
    return normalize(input, module.running_mean, module.running_var, module.weight, module.bias,
                     module.running_mean is None, 0, module.eps)


def hold(module, given):
    """Before each forward of any module."""
    if isinstance(getattr(module, "dropout", None), float):  # RNNs, attention
        if module.training and module.dropout > 0:
            stood_still.add("dropout")
        module.dropout = 0.0
    notes.be_alive()


def install(settings):
    for name in DROPOUTS:
        if hasattr(F, name):
            setattr(F, name, keep_all)
    F.scaled_dot_product_attention, torch.autocast.__init__ = attend_all, in_full_precision
    F.batch_norm, SyncBatchNorm.forward = normalize_as_before, normalize_without_others
    torch.nn.modules.module.register_module_forward_pre_hook(hold)
    if settings.float64:
        torch.set_default_dtype(torch.float64)
