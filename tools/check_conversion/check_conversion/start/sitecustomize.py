"""The check puts this folder on PYTHONPATH, where each Python process looks for this module first."""
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location(  # by its path: it may be installed elsewhere, or not at all
    "check_conversion", HERE.parent / "__init__.py", submodule_search_locations=[str(HERE.parent)])
sys.modules["check_conversion"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module("check_conversion.observed").install()

# The user may have a module of this name too.
others = [path for path in sys.path if Path(path).resolve() != HERE]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", others):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
