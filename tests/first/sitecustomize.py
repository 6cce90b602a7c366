"""The first that each Python process of a test runs."""
import gc
import os
import sys

if "resource_tracker" not in " ".join(sys.orig_argv):  # the one that needs no torch
    # What an import leaves is not garbage: not to look through it spares a third of the time that a process takes to start.
    gc.disable()
    import torch  # noqa: F401
    gc.enable()
    gc.freeze()

exec(os.environ.get("FIRST", ""))
