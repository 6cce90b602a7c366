"""CONTRIBUTING.md's rules: nothing but what a launch style needs may differ between the scripts, and it may not grow."""
import re
import subprocess

import pytest
from launch import BASES, RECIPES, ROOT, SCRIPTS

# At most so many lines differ from the base, with room for one or two: whoever mends a line need not come here.
LIMITS = {"dp.py": 10, "multigpu_torchrun.py": 65, "multigpu_spawn.py": 40, "multinode.py": 20}


def test_what_a_launch_style_does_not_change_is_the_same_to_the_byte():
    def function(name, script):
        return re.search(rf"^(@\S+\n)?def {name}\(.*?\n\n\n", (ROOT / script).read_text(), re.DOTALL | re.MULTILINE)[0]

    for name, scripts in [("train_epoch", SCRIPTS), ("evaluate", SCRIPTS), ("ddp_setup", SCRIPTS[2:]), ("main", SCRIPTS[2:4]),
                          ("ddp_setup", [*ROOT.glob("examples/*_ddp.py")])]:
        assert len({function(name, script) for script in scripts}) == 1, name


def test_the_examples_save_and_resume_as_the_scripts_do():
    utils, multinode = ((ROOT / file).read_text() for file in ("utils.py", "multinode.py"))
    save = re.search(r"    temporary = [\s\S]*?os.replace.*\n", utils)[0].replace("args.checkpoint", "path")
    lines = re.findall(r"^.*(?:other machines might not see the file|until rank 0 has saved).*\n", multinode, re.MULTILINE)
    for example in ("waves_ddp", "steps_ddp"):
        text = (ROOT / f"examples/{example}.py").read_text()
        assert all(line in text for line in [save, *lines]) and len(lines) == 2, example


@pytest.mark.parametrize("script", [*BASES, *RECIPES])
def test_no_line_that_a_script_shares_with_its_base_is_moved_and_few_are_changed(script):
    base = BASES.get(script, "multigpu_torchrun.py")
    diff = subprocess.run(["diff", ROOT / base, ROOT / script], capture_output=True, text=True).stdout
    changed = re.findall(r"^([<>]) (.*)$", diff, re.MULTILINE)
    gone, come = ({line for side, line in changed if side == sign} - {""} for sign in "<>")
    assert gone & come <= {'if __name__ == "__main__":', "        raise SystemExit(__doc__)"}  # below run, in multigpu_spawn.py
    assert len(changed) <= LIMITS.get(script, 60)


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES])
def test_a_script_is_short_and_narrow_and_reads_in_the_order_in_which_it_runs_on_any_device(script):
    text = (ROOT / script).read_text()
    assert len(text.splitlines()) <= (70 if script == "single_gpu.py" else 160) and max(map(len, text.splitlines())) <= 100
    defined = re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)
    assert defined == [name for name in ("ddp_setup", "train_epoch", "evaluate", "main", "run") if name in defined]
    assert not re.search('"cuda|xpu|"nccl', text)


def test_utils_is_short_and_narrow_and_hides_nothing_that_a_launch_style_does():
    text = (ROOT / "utils.py").read_text().replace("import torch.distributed.nn ", "").replace("torch.distributed.launch", "")
    assert len(text.splitlines()) <= 170 and max(map(len, text.splitlines())) <= 100
    assert not re.search(r"[Dd]istributed|Parallel|SyncBatchNorm|all_|barrier|broadcast|set_epoch|set_device|mp\.|\.module", text)
