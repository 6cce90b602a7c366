"""The mistakes that README warns of are real, and its remedies work."""
import json
import sys

from launch import ROOT, Job


def test_the_pitfalls_of_readme_are_real_and_its_lines_prevent_them(tmp_path):
    job = Job([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(ROOT / "tests" / "pitfalls.py")], cwd=tmp_path)
    assert job.wait() == 0, job.stderr
    seen = json.loads(job.stdout)

    first, second = seen["order without set_epoch"]
    assert first == second != seen["order with set_epoch"]
    assert seen["global order"] == seen["global order of one process"]  # the base's RandomSampler
    assert seen["padded evaluation"] == 510 and seen["exact evaluation"] == 509
    one, other = seen["masks under equal seeds"]
    assert one == other
    one, other = seen["masks under a seed for each rank"]
    assert one != other
    assert all(key.startswith("module.") for key in seen["keys"])
    assert [key.removeprefix("module.") for key in seen["keys"]] == seen["keys of .module"]
    one, other = seen["running means"]
    assert one != other
    one, other = seen["running means after broadcast"]
    assert one == other
    one, other = seen["gradients"]
    assert one == other


def test_a_collective_in_a_rank_0_branch_finds_no_partner(tmp_path):
    program = tmp_path / "branch.py"
    program.write_text("import torch\n"
                       "import torch.distributed as dist\n"
                       "dist.init_process_group('gloo')\n"
                       "if dist.get_rank() == 0:\n"
                       "    dist.all_reduce(torch.ones(1))\n")
    job = Job([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program)],
              cwd=tmp_path)
    assert job.wait() == 1
    assert "in <module>\n[rank0]:     dist.all_reduce(torch.ones(1))" in job.stderr
