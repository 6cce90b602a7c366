"""What all tests have, those of tools too: settings, then the fixtures that each conftest.py imports from here."""
import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; what is forked later must not have used threads
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # another way to look for GPUs cannot be followed by a fork
pytest.register_assert_rewrite("chapters", "hosts", "launch", "processes", "results")  # their assertions too show what differs

from hosts import hosts, slurm  # noqa: F401
from processes import folder  # noqa: F401
