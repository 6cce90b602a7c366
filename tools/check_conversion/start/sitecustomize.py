"""Python imports this first in each process of a run, because the check puts this folder on PYTHONPATH."""
import sys
from pathlib import Path

# torchrun and what multiprocessing starts for itself train nothing: torch is not loaded there.
if {"torchrun", "torch.distributed.run", "accelerate"}.isdisjoint(Path(argument).name for argument in sys.orig_argv[1:3]) and (
        "resource_tracker" not in " ".join(sys.orig_argv)):
    import check_conversion_observer  # noqa: F401
