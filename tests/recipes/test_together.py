"""Recipes go together: the diffs of several make one script."""
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from launch import ROOT, check_close, figures, train
from observe import EAGERLY, formats, needs_compilation, spans


def merged(*recipes):
    """One script with the diffs of several recipes, which touch no line twice but the one that names the recipe."""
    base = (ROOT / "multigpu_torchrun.py").read_text().splitlines(keepends=True)
    together, added = Path(f"recipes/{'_'.join(recipes)}.py"), Counter()
    together.parent.mkdir()
    for file in (Path("base.py"), together):
        file.write_text("".join(base))
    for recipe in recipes:
        lines = (ROOT / f"recipes/{recipe}.py").read_text().splitlines(keepends=True)
        lines[2:4] = base[2:3]  # which command starts it, and where its reasons stand
        added += Counter(lines) - Counter(base)
        Path("recipe.py").write_text("".join(lines))
        subprocess.run(["git", "merge-file", together, "base.py", "recipe.py"], check=True)
    assert Counter(together.read_text().splitlines(keepends=True)) - Counter(base) == added
    return together


def test_an_ema_under_bfloat16_is_evaluated_by_its_own_weights():
    """Which lag behind so early: the live model is far better."""
    options = 4, "--batch-size", 240, "--lr", 0.009
    averaged = figures(train("recipes/loop.py", *options).stdout)
    found = figures(train(merged("loop", "bf16").resolve(), *options).stdout)
    check_close(found, averaged, loss=0.02, accuracy=5)


def test_accumulation_bfloat16_compilation_and_a_profile_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    needs_compilation()
    together = merged("accumulate", "compile", "profiler")
    lines = re.search(r"```python\n( +with nullcontext.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)[1]
    text, count = re.subn(r" +with nullcontext.*?\.backward\(\)\n", lines, together.read_text(), flags=re.DOTALL)
    assert count == 1 and "torch.autocast" in lines
    together.write_text(text)

    job = train(together.resolve(), 3, before=EAGERLY + "torch._logging.set_logs(aot_graphs=True)")
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", 3).stdout), loss=5e-3, accuracy=100)
    assert formats(f"{together.stem}.pt") == formats("multigpu_torchrun.pt")
    forward = re.search(r"Forward graph.*?return", job.stderr, re.DOTALL)[0]
    assert '"f32[30, 3, 32, 32]' in forward and '"bf16[30, 10]' in forward  # 30 of the 480 samples, in bfloat16
    trace = json.loads(Path(f"{together.stem}.pt.rank1.json").read_text())
    assert len(spans(trace, "DistributedDataParallel.forward")) == 3 * 16
    assert len(spans(trace, "gloo:all_reduce")) == 3
