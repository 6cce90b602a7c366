"""The product is the difference between the scripts: nothing else may differ, and it may not grow."""
import difflib
import re

import pytest
from launch import RECIPES, ROOT, SCRIPTS

LINES = {"single_gpu.py": 71, "dp.py": 73, "multigpu_spawn.py": 105, "multigpu_torchrun.py": 108, "multinode.py": 116,
         "utils.py": 232}
CHANGED = {"single_gpu.py dp.py": 6, "single_gpu.py multigpu_spawn.py": 64, "multigpu_spawn.py multigpu_torchrun.py": 25,
           "multigpu_torchrun.py multinode.py": 16, "multigpu_torchrun.py recipes/accumulate.py": 16,
           "multigpu_torchrun.py recipes/bf16.py": 10, "multigpu_torchrun.py recipes/compile.py": 8,
           "multigpu_torchrun.py recipes/compress.py": 4, "multigpu_torchrun.py recipes/fsdp.py": 33,
           "multigpu_torchrun.py recipes/loop.py": 50, "multigpu_torchrun.py recipes/preempt.py": 32,
           "multigpu_torchrun.py recipes/profiler.py": 10}


def read(script):
    return (ROOT / script).read_text()


def changes(one, other):
    found = difflib.unified_diff(read(one).splitlines(), read(other).splitlines(), n=0, lineterm="")
    return [line for line in found if line[0] in "+-" and not line.startswith(("+++", "---"))]


def rule(number):
    """What a test that fails says: the rule, in CONTRIBUTING.md's words."""
    text, = re.findall(rf"^{number}\. (.*?)(?=^\d\. |^$)", read("CONTRIBUTING.md"), re.DOTALL | re.MULTILINE)
    return f"CONTRIBUTING.md, rule {number}: {' '.join(text.split())}"


@pytest.mark.parametrize("arrow", CHANGED)
def test_common_lines_are_the_same_to_the_byte_and_in_the_same_order_and_the_others_are_few(arrow):
    """A line that is both removed and added has moved, or differs by its spacing alone: bf16.py puts two below a `with`."""
    one, other = arrow.split()
    changed = changes(one, other)
    gone, come = ({"".join(line[1:].split()) for line in changed if line[0] == sign} - {""} for sign in "-+")
    assert gone & come == set() or (other == "recipes/bf16.py" and len(gone & come) == 2), rule(1)
    assert len(changed) <= CHANGED[arrow], rule(4)
    assert f"<!-- diff {arrow} 1" in read("docs/diffs.md") + read("docs/recipes.md")
    assert other not in RECIPES or f"]({other}) | {len(changed)} |" in read("README.md"), rule(4)


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES])
def test_a_script_is_short_and_reads_in_the_order_in_which_it_runs_on_any_device(script):
    text, setup = read(script), [] if script in ("single_gpu.py", "dp.py") else ["ddp_setup"]
    order = re.findall(r"^(?:(?:def|class) (\w+)|if __name__)", text, flags=re.MULTILINE)
    assert order == [*setup, "train_epoch", "evaluate", "main", ""], rule(2)
    assert len(text.splitlines()) <= LINES.get(script, 200), rule(4)
    assert [line for line in text.splitlines() if len(line) > 100] == [], rule(4)
    assert not re.search(r"cuda|xpu|nccl", text), rule(5)


def test_nothing_that_a_launch_style_does_is_hidden_in_utils():
    text = read("utils.py")
    assert re.findall(r"^.*import.*distributed.*$|^from .*distributed.*$", text, flags=re.MULTILINE) == [
        "from torch.distributed import get_default_backend_for_device"], rule(3)
    for word in ("torch.distributed.", "DistributedDataParallel", "DataParallel", "DistributedSampler", "SyncBatchNorm",
                 "init_process_group", "destroy_process_group", "all_reduce", "barrier", "all_gather", "broadcast", "set_epoch",
                 "set_device", "mp.spawn", ".module"):
        assert word not in re.sub(r"#.*", "", text), rule(3)
    assert len(text.splitlines()) <= LINES["utils.py"] and max(map(len, text.splitlines())) <= 100, rule(4)
    assert {arrow.split()[1] for arrow in CHANGED} == {*SCRIPTS[1:], *RECIPES}, rule(4)
