"""What ranks are forked from. What an import leaves is not garbage: no rank's collector looks through it."""
import gc

gc.disable()
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.nn  # noqa: F401
import torchvision.models  # noqa: F401

gc.enable()
gc.freeze()
