"""Recipes go together: the diffs of several make one script."""
import re
import subprocess
from pathlib import Path

from launch import ROOT, check_close, figures, train
from observe import EAGERLY, formats, needs_compilation


def test_accumulation_bfloat16_compilation_and_a_profile_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    needs_compilation()
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

    job = train(together, 3, before=EAGERLY + "torch._logging.set_logs(aot_graphs=True)")
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", 3).stdout), loss=5e-3, accuracy=100)
    assert formats("together.pt") == formats("multigpu_torchrun.pt")
    forward = re.search(r"Forward graph.*?return", job.stderr, re.DOTALL)[0]
    assert '"f32[30, 3, 32, 32]' in forward and '"bf16[30, 10]' in forward  # 30 of the 480 samples, in bfloat16
    assert Path("together.pt.rank1.json").exists()
