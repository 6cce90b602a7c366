"""Python imports this first in each process of a run, because the check puts this folder on PYTHONPATH."""
import re
import sys

# torchrun and what multiprocessing starts for itself train nothing: torch is not loaded there.
if not re.search(r"(^|[ /])(torchrun|torch\.distributed\.run|accelerate)( |$)|resource_tracker", " ".join(sys.orig_argv[1:4])):
    import check_conversion_observer  # noqa: F401
