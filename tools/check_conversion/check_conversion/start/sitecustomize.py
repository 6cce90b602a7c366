"""The check puts this folder on PYTHONPATH, where each Python process looks for this module first."""
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # it may be installed elsewhere, or not at all
import check_conversion

del sys.path[0]  # torch is to be the script's own
import check_conversion.observed

check_conversion.observed.install()

# The user may have a module of this name too.
others = [path for path in sys.path if Path(path).resolve() != HERE]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", others):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
