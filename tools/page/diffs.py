"""Where two scripts differ, and where the chapters show it."""
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [ROOT / "docs/diffs.md", ROOT / "docs/recipes.md"]
PLACE = re.compile(r"(<!-- diff (\S+) (\S+) (\d+)(?:-(\d+))? -->\n)(.*?)(<!-- end -->)"
                   r"(.*?)(?=\n<!-- diff |\n#|\Z)", re.DOTALL)
ARROWS = [*dict.fromkeys(place[1:3] for chapter in CHAPTERS  # each after that to its base
                         for place in PLACE.findall(chapter.read_text()))]
SCRIPTS = ["single_gpu.py", *(new for _, new in ARROWS)]


def hunks(old, new):
    """Where two files differ, by `diff`: (start, stop) in the old one's lines and in the new's."""
    output = subprocess.run(["diff", "-U0", ROOT / old, ROOT / new], capture_output=True, text=True)
    found = []
    for numbers in re.findall(r"^@@ -(\d+),?(\d*) \+(\d+),?(\d*) @@", output.stdout, re.MULTILINE):
        first, count, new_first, new_count = (int(number or 1) for number in numbers)
        start, new_start = first - (count > 0), new_first - (new_count > 0)
        found.append((start, start + count, new_start, new_start + new_count))
    return found


def show(old, new, hunks):
    """These hunks as a diff, each after the line before it, which says where it stands."""
    old, new = ((ROOT / name).read_text().splitlines() for name in (old, new))
    lines, end = [], None
    for start, stop, new_start, new_stop in hunks:
        if end is not None and start - end > 1:
            lines.append("...")
            end = None
        lines += [" " + line for line in old[max(0, start - 1) if end is None else end:start]]
        lines += ["-" + line for line in old[start:stop]]
        lines += ["+" + line for line in new[new_start:new_stop]]
        end = stop
    return "\n".join(line.rstrip() for line in lines).strip("\n")
