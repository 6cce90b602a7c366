"""The mistakes that README warns of are real, and its remedies work."""
from forked import train
from launch import TORCHRUN, Job

BRANCH = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
"""


def test_the_pitfalls_of_readme_are_real_and_its_lines_prevent_them(tmp_path):
    train("tests/pitfalls.py", device=None, cwd=tmp_path)


def test_a_collective_in_a_rank_0_branch_finds_no_partner(tmp_path):
    (tmp_path / "branch.py").write_text(BRANCH)
    job = Job([*TORCHRUN, "--standalone", "--nproc_per_node=2", "branch.py"], tmp_path)
    assert job.wait() == 1
    assert "in <module>\n[rank0]:     dist.all_reduce(torch.ones(1))" in job.stderr
