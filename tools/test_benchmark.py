"""tools/benchmark.py compares the scripts."""
import re
import sys

from launch import LITTLE_DATA, ROOT, Job


def test_a_round_gives_a_table_of_what_each_way_costs(tmp_path):
    options = "--scripts multinode.py --gpus 1 --rounds 1 --epochs 3 --batch-size 48".split()
    job = Job([sys.executable, ROOT / "tools/benchmark.py", *options], tmp_path, before=LITTLE_DATA)
    assert job.wait() == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py[^|]*) \| (\d+) \| [\d,]+ \(.* \| (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [("single_gpu.py", "1"), ("multinode.py", "1")]
    assert rows[0][2] == rows[1][2], "nobody wins by doing less"
