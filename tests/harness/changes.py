"""What `before` changes in a script's process: launch.py has lines that call these functions."""
# ruff: noqa: F401  lines that run `after` a function use these modules
import functools
import importlib
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from textwrap import dedent

import torch

import utils


def little_data(train, held_out):
    """The data that are made in memory are these few."""
    def few(size):
        labels = torch.arange(size) % 10
        images = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(size)) + labels[:, None, None, None] / 5
        return torch.utils.data.TensorDataset(images, labels)

    utils.synthetic_data = lambda: (few(train), few(held_out))


def log(*words):
    with open("log." + os.environ.get("RANK", "0"), "a") as file:
        print(*words, file=file)


def after(name, lines):
    """Run these lines after each call of a function, with the number of the `call`, what it was `given`, and its `result`."""
    module, *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    function, calls, code = getattr(owner, last), itertools.count(1), compile(dedent(lines), f"after {name}", "exec")

    @functools.wraps(function)
    def followed(*given, **options):
        result = function(*given, **options)
        exec(code, {**globals(), "call": next(calls), "given": given, "options": options, "result": result})
        return result

    setattr(owner, last, followed)
