"""CONTRIBUTING.md's rules: nothing but what a launch style needs may differ between the scripts, and it may not grow."""
import ast
import re
import subprocess

import pytest
from launch import BASES, RECIPES, ROOT, SCRIPTS

# At most, with room for a line or two: whoever mends a line need not come here.
LINES = {"single_gpu.py": 70, "dp.py": 70, "multigpu_torchrun.py": 105, "multigpu_spawn.py": 120, "multinode.py": 110,
         "utils.py": 170}
CHANGED = {"dp.py": 10, "multigpu_torchrun.py": 65, "multigpu_spawn.py": 40, "multinode.py": 20}
ARROWS = [*BASES.items(), *((recipe, "multigpu_torchrun.py") for recipe in RECIPES)]
EXAMPLES = [f"examples/{file.name}" for file in ROOT.glob("examples/*_ddp.py")]


def read(script):
    return (ROOT / script).read_text()


def test_what_a_launch_style_does_not_change_is_the_same_to_the_byte():
    def function(name, script):
        found, = (part for part in ast.parse(read(script)).body if getattr(part, "name", "") == name)
        return ast.get_source_segment(read(script), found)

    for name, scripts in [("train_epoch", SCRIPTS), ("evaluate", SCRIPTS), ("ddp_setup", SCRIPTS[2:]), ("ddp_setup", EXAMPLES),
                          ("main", ["multigpu_torchrun.py", "multigpu_spawn.py"])]:
        assert len({function(name, script) for script in scripts}) == 1, name


@pytest.mark.parametrize("script, base", ARROWS)
def test_no_line_that_two_scripts_share_is_moved_and_few_are_changed(script, base):
    diff = subprocess.run(["diff", ROOT / base, ROOT / script], capture_output=True, text=True).stdout
    changed = re.findall(r"^([<>]) (.*)$", diff, re.MULTILINE)
    gone, come = ({line for side, line in changed if side == sign} - {""} for sign in "<>")
    below_run = {'if __name__ == "__main__":', "        raise SystemExit(__doc__)"}  # of multigpu_spawn.py
    assert gone & come <= below_run
    assert len(changed) <= CHANGED.get(script, 60)


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES])
def test_a_script_is_short_and_narrow_and_reads_in_the_order_in_which_it_runs_on_any_device(script):
    text = read(script)
    assert len(text.splitlines()) <= LINES.get(script, 160) and max(map(len, text.splitlines())) <= 100
    defined = re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)
    assert defined == [name for name in ("ddp_setup", "train_epoch", "evaluate", "main", "run") if name in defined]
    assert not re.search('"cuda|xpu|"nccl', text)


def test_utils_is_short_and_hides_nothing_that_a_launch_style_does():
    text = read("utils.py").replace("import torch.distributed.nn ", "").replace("torch.distributed.launch", "")
    assert len(text.splitlines()) <= LINES["utils.py"]
    assert not re.search(r"[Dd]istributed|Parallel|SyncBatchNorm|all_|barrier|broadcast|set_epoch|set_device|mp\.|\.module", text)
