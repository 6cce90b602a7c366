"""The product is the difference between the scripts: nothing else may differ, and it may not grow."""
import difflib
import re

import pytest
from launch import RECIPES, ROOT, SCRIPTS

LINES = {"single_gpu.py": 72, "dp.py": 74, "multigpu_spawn.py": 113, "multigpu_torchrun.py": 110, "multinode.py": 118}
CHANGED = {("single_gpu.py", "dp.py"): 6, ("single_gpu.py", "multigpu_spawn.py"): 73,
           ("multigpu_spawn.py", "multigpu_torchrun.py"): 27, ("multigpu_torchrun.py", "multinode.py"): 16,
           **{("multigpu_torchrun.py", f"recipes/{name}.py"): most for name, most in {
               "accumulate": 16, "bf16": 8, "compile": 6, "fsdp": 24, "profiler": 10, "preempt": 30}.items()}}
DDP = [script for script in [*SCRIPTS, *RECIPES] if script not in ("single_gpu.py", "dp.py")]


def lines(script):
    return (ROOT / script).read_text().splitlines()


def changes(one, other):
    return [line for line in difflib.unified_diff(lines(one), lines(other), n=0, lineterm="")
            if line[0] in "+-" and not line.startswith(("+++", "---"))]


def rule(number):
    """What a test that fails says: the rule, in CONTRIBUTING.md's words."""
    text, = re.findall(rf"^{number}\. (.*?)(?=^\d\. |^$)", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    return f"CONTRIBUTING.md, rule {number}: {' '.join(text.split())}"


@pytest.mark.parametrize("one, other", CHANGED)
def test_common_lines_are_the_same_to_the_byte_and_in_the_same_order(one, other):
    """A line that is both removed and added has moved, or differs by its spacing alone."""
    changed = [(line[0], "".join(line[1:].split())) for line in changes(one, other) if line[1:].strip()]
    both = {text for sign, text in changed if sign == "-"} & {text for sign, text in changed if sign == "+"}
    assert both == set(), rule(1)


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES])
def test_a_script_reads_in_the_order_in_which_it_runs(script):
    order = re.findall(r"^(?:(?:def|class) (\w+)|if __name__)", (ROOT / script).read_text(), flags=re.MULTILINE)
    assert order == [*(["ddp_setup"] if script in DDP else []), "train_epoch", "evaluate", "main", ""], rule(2)


def test_nothing_that_a_launch_style_does_is_hidden_in_utils():
    text = (ROOT / "utils.py").read_text()
    assert re.findall(r"^.*import.*distributed.*$|^from .*distributed.*$", text, flags=re.MULTILINE) == [
        "from torch.distributed import get_default_backend_for_device"], rule(3)
    for word in ("torch.distributed.", "DistributedDataParallel", "DataParallel", "DistributedSampler", "SyncBatchNorm",
                 "init_process_group", "destroy_process_group", "all_reduce", "barrier", "all_gather", "broadcast", "set_epoch",
                 "set_device", "mp.spawn", ".module"):
        assert word not in re.sub(r"#.*", "", text), rule(3)


@pytest.mark.parametrize("script", LINES)
def test_no_file_grows_and_no_line_is_wider_than_half_a_screen(script):
    assert len(lines(script)) <= LINES[script], rule(4)
    assert [line for file in (script, "utils.py", *RECIPES) for line in lines(file) if len(line) > 100] == [], rule(4)


@pytest.mark.parametrize("one, other", CHANGED)
def test_no_arrow_grows(one, other):
    assert len(changes(one, other)) <= CHANGED[one, other], rule(4)


def test_readme_names_each_recipe_with_the_number_of_its_changed_lines():
    rows = re.findall(r"\]\((recipes/\w+\.py)\) \| (\d+) \|", (ROOT / "README.md").read_text())
    assert dict(rows) == {recipe: str(len(changes("multigpu_torchrun.py", recipe))) for recipe in RECIPES}, rule(4)


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES])
def test_a_script_names_no_make_of_device(script):
    assert not re.search(r"cuda|xpu|nccl", (ROOT / script).read_text()), rule(5)
