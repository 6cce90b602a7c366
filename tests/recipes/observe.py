"""What tests of several recipes look at."""
import pytest
import torch
from launch import load, needs

# Dynamo's graphs as they are: what a compiler makes of them costs half a minute.
EAGERLY = """
import functools, torch
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""


def formats(path):
    saved = load(path)
    return [tensor.dtype for part in (saved["model"], *saved["optimizer"]["state"].values()) for tensor in part.values()]


def needs_compilation():
    needs("g++")
    if torch.__version__ < (2, 14):
        pytest.skip("needs torch 2.14, which compiles a bare nn.Sequential, as cnn is")
