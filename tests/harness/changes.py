"""What `before` changes in a script's process: launch.py has lines that call these functions."""
import functools
import importlib
import itertools
import os
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


# What lines that run `after` a function may use
NAMES = {name: importlib.import_module(name) for name in "multiprocessing os resource signal sys time torch".split()}
NAMES |= {"Path": Path, "log": log}


def after(function, lines):
    """Run these lines after each call of a function, with the number of the `call`, what it was `given`, and its `result`."""
    module, *path, name = function.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    follow, calls, code = getattr(owner, name), itertools.count(1), compile(dedent(lines), f"after {function}", "exec")

    @functools.wraps(follow)
    def followed(*given, **options):
        result = follow(*given, **options)
        exec(code, {**NAMES, "call": next(calls), "given": given, "result": result})
        return result

    setattr(owner, name, followed)
