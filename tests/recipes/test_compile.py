"""recipes/compile.py, alone and with other recipes: all is compiled in the first epoch, and trains the same."""
import re
import subprocess
from pathlib import Path

import pytest
import torch
from launch import EAGERLY, LITTLE_DATA, ROOT, SMALL, after, check_close, figures, formats, needs, train

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch before 2.14 compiles no nn.Sequential")
COUNTS_GRAPHS = "import utils, torch._dynamo" + after("utils.report", "torch._dynamo.utils.counters['stats']['unique_graphs']")
# A compiler takes a second or two for each kernel: it is given few.
ONE_LAYER = """
import torch, utils
utils.build_model = lambda name: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10), torch.nn.ReLU())
"""


@pytest.mark.parametrize("model, before", [("cnn", ONE_LAYER), ("cnn", EAGERLY), ("vit", EAGERLY)])
def test_compilation_takes_place_in_the_first_epoch_alone_and_trains_the_same(model, before):
    needs("g++")
    options, before = (3, *SMALL, "--model", model), LITTLE_DATA + before
    job = train("recipes/compile.py", *options, processes=1, before=before + COUNTS_GRAPHS, TORCHINDUCTOR_VEC_ISA_OK=1,
                TORCHINDUCTOR_CACHE_DIR="compiled")  # what was compiled for one instruction set fails with another
    first, *later = map(int, Path("log.0").read_text().split())
    assert later == [first] * 2 and first > 1  # for training, and for evaluation
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", *options, processes=1, before=before).stdout))
    assert formats("compile.pt") == {"torch.float32"}


def test_a_compiler_that_is_missing_is_said():
    job = train("recipes/compile.py", 1, "--device", "cpu", device=False, processes=1, status=2, CXX="no-such-compiler")
    assert job.stderr == "compile.py: compiling for the CPU needs g++, or another C++ compiler named by CXX\n"


def test_accumulation_bfloat16_compilation_and_a_profile_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    needs("g++")
    together = Path("recipes/together.py").resolve()
    together.parent.mkdir()
    base, *recipes = ((ROOT / script).read_text() for script in (
        "multigpu_torchrun.py", "recipes/accumulate.py", "recipes/compile.py", "recipes/profiler.py"))
    for file in (Path("base.py"), together):
        file.write_text(base)
    for recipe in recipes:
        Path("recipe.py").write_text(base[:base.index("import os")] + recipe[recipe.index("import os"):])  # with one docstring
        subprocess.run(["git", "merge-file", together, "base.py", "recipe.py"], check=True)
    lines = re.search(r"```python\n( +with nullcontext.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)[1]
    text, count = re.subn(r" +with nullcontext.*?\.backward\(\)\n", lines, together.read_text(), flags=re.DOTALL)
    assert count == 1 and "torch.autocast" in lines
    together.write_text(text)

    options = 3, *SMALL
    job = train(together, *options, before=LITTLE_DATA + EAGERLY)
    without = train("multigpu_torchrun.py", *options, before=LITTLE_DATA)
    check_close(figures(job.stdout), figures(without.stdout), loss=5e-3, accuracy=100)
    assert formats("together.pt") == {"torch.float32"} and Path("together.pt.rank1.json").exists()
