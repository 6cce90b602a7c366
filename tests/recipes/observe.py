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


def spans(trace, name):
    """(start, end) of each event of this name, in microseconds."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in trace["traceEvents"]
            if event.get("ph") == "X" and event["name"].startswith(name)]


def needs_compilation():
    needs("g++")
    graphs, model = [], torch.nn.Sequential(torch.nn.ReLU())
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    model(torch.ones(1))
    if not graphs:
        pytest.skip("for want of a torch that compiles a bare nn.Sequential")  # as cnn is; 2.13 does not, 2.15 does
