"""Makes training comparable: no dropout."""
import torch
import torch.nn.functional as F

from check_conversion.observed import notes

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
            "feature_alpha_dropout")
stood_still = set()  # what the script has of these
attend = F.scaled_dot_product_attention


def keep_all(input, p=0.5, training=True, *given, **options):
    if training and p > 0:
        stood_still.add("dropout")
    return input


def attend_all(query, key, value, attn_mask=None, dropout_p=0.0, *given, **options):
    if dropout_p > 0:
        stood_still.add("dropout")
    return attend(query, key, value, attn_mask, 0.0, *given, **options)


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
    F.scaled_dot_product_attention = attend_all
    torch.nn.modules.module.register_module_forward_pre_hook(hold)
    if settings.float64:
        torch.set_default_dtype(torch.float64)
