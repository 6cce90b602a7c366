import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of check_conversion, which need not be installed
pytest.register_assert_rewrite("runs")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, and finds torchrun."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path
