"""CONTRIBUTING.md's rules: nothing but what a launch style needs may differ between the scripts, and it may not grow."""
import difflib
import re

import pytest
from launch import ARROWS, RECIPES, ROOT, SCRIPTS

# Lines that differ from a script's base, at most
CEILINGS = {"dp.py": 6, "multigpu_spawn.py": 64, "multigpu_torchrun.py": 25, "multinode.py": 16, **dict.fromkeys(RECIPES, 60)}


def read(script):
    return (ROOT / script).read_text()


def test_every_script_is_shown_as_a_change_of_one_other_and_stands_in_a_table():
    assert sorted(new for _, new in ARROWS) == sorted(CEILINGS)
    assert all(f"\n| `{script}` |" in read("README.md") for script in SCRIPTS)
    assert all(f"\n| [`{recipe.removeprefix('recipes/')}`]" in read("docs/recipes.md") for recipe in RECIPES)


@pytest.mark.parametrize("base, script", ARROWS)
def test_common_lines_are_the_same_to_the_byte_and_in_the_same_order_and_the_others_are_few(base, script):
    diff = difflib.unified_diff(read(base).splitlines(), read(script).splitlines(), n=0, lineterm="")
    changed = [line for line in diff if line[0] in "+-" and not line.startswith(("+++", "---"))]
    gone, come = ({line[1:] for line in changed if line[0] == sign} - {""} for sign in "-+")
    assert gone & come == set()  # lines that have moved
    before, after = ({"".join(line.split()): line.strip() for line in lines} for lines in (gone, come))
    assert all(before[line] == after[line] for line in before.keys() & after.keys())  # by spaces only the indentation may differ
    assert len(changed) <= CEILINGS[script]


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES])
def test_a_script_is_narrow_and_reads_in_the_order_in_which_it_runs_on_any_device(script):
    text = read(script)
    setup = ["ddp_setup"] if "init_process_group" in text else []
    order = re.findall(r"^(?:(?:def|class) (\w+)|if __name__)", text, flags=re.MULTILINE)
    checks = [name for name in order if name.startswith("check_")]
    assert order == [*setup, *checks, "train_epoch", "evaluate", "main", ""]
    assert max(map(len, text.splitlines())) <= 100
    assert not re.search(r"cuda|xpu|nccl", text)


def test_nothing_that_a_launch_style_does_is_hidden_in_utils():
    text = re.sub(r"#.*|import torch.distributed as dist|from torch.distributed import get_default_backend_for_device", "",
                  read("utils.py"))
    text = re.sub(r"def check_gloo.*?\n\n\n", "", text, flags=re.DOTALL)  # it ends the group that it asks
    for word in ("distributed", "Distributed", "DataParallel", "SyncBatchNorm", "process_group", "all_reduce", "barrier",
                 "all_gather", "broadcast", "set_epoch", "set_device", "mp.spawn", ".module"):
        assert word not in text, word
