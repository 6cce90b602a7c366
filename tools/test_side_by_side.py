"""tools/side_by_side.py opens a page in a browser that shows two files whole, with what differs marked."""
import html
import re
import subprocess
import sys

from launch import ROOT


def test_it_opens_a_page_that_has_every_line_of_both_files_and_marks_the_new_ones(tmp_path):
    files = [ROOT / "single_gpu.py", ROOT / "multigpu_torchrun.py"]
    opened = subprocess.check_output([sys.executable, ROOT / "tools/side_by_side.py", *files], text=True, env={
        "BROWSER": "echo opened %s", "TMPDIR": str(tmp_path)})
    page, = tmp_path.iterdir()
    assert opened == f"{page.as_uri()}\nopened {page.as_uri()}\n"
    rows = [re.findall("<td.*?>(.*?)</td>", row) for row in page.read_text("utf-8").splitlines() if "<td" in row]
    for file, column in zip(files, (2, 5)):
        shown = [html.unescape(re.sub("<.*?>", "", row[column])).rstrip() for row in rows if row[column - 1]]
        assert shown == file.read_text().splitlines()
    assert all("<span" in row[5] and row[2] == "" for row in rows if "dist.init_process_group" in row[5])
