"""The mistakes that README warns of are real, and its remedies work."""
import json

from forked import train
from launch import TORCHRUN, Job


def test_the_pitfalls_of_readme_are_real_and_its_lines_prevent_them(tmp_path):
    seen = json.loads(train("tests/pitfalls.py", device=None, cwd=tmp_path).stdout)

    first, second = seen["order without set_epoch"]
    assert first == second != seen["order with set_epoch"]
    assert seen["global order"] == seen["global order of one process"]  # the base's RandomSampler
    assert seen["padded evaluation"] == 510 and seen["exact evaluation"] == 509
    for wrong, right in (("masks under a seed for each rank", "masks under equal seeds"),
                         ("running means", "running means after broadcast")):
        assert seen[wrong][0] != seen[wrong][1] and seen[right][0] == seen[right][1]
    assert all(key.startswith("module.") for key in seen["keys"])
    assert [key.removeprefix("module.") for key in seen["keys"]] == seen["keys of .module"]
    assert seen["gradients"][0] == seen["gradients"][1]


def test_a_collective_in_a_rank_0_branch_finds_no_partner(tmp_path):
    program = tmp_path / "branch.py"
    program.write_text("import torch\n"
                       "import torch.distributed as dist\n"
                       "dist.init_process_group('gloo')\n"
                       "if dist.get_rank() == 0:\n"
                       "    dist.all_reduce(torch.ones(1))\n")
    job = Job([*TORCHRUN, "--standalone", "--nproc_per_node=2", program], tmp_path)
    assert job.wait() == 1
    assert "in <module>\n[rank0]:     dist.all_reduce(torch.ones(1))" in job.stderr
