"""tools/check_conversion.py puts this folder on PYTHONPATH, where each Python process looks for a
module of this name first."""
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
for name in ("guard", "comparable", "shuffles", "steps", "files"):
    importlib.import_module(f"conversion_check.inside.{name}")
sys.path.remove(str(HERE.parent.parent))

# The user may have a module of this name too.
others = [path for path in sys.path if Path(path).resolve() != HERE]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", others):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
