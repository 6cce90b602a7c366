"""What all tests have, those of tools/ too: their settings, then the fixtures that both conftest.py import."""
import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; what is forked later must not have used threads
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # another way to look for GPUs cannot be followed by a fork
os.environ.setdefault("TEST_DEVICE", "cpu")  # tools/ has no --device
pytest.register_assert_rewrite("chapters", "launch", "results", "runs")  # their assertions too show what differs

from hosts import hosts, slurm
from jobs import folder

__all__ = ["folder", "hosts", "slurm"]
