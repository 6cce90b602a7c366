"""Shows two files side by side in a browser: python tools/side_by_side.py single_gpu.py multigpu_torchrun.py"""
import argparse
import difflib
import html
import tempfile
import webbrowser
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --gone: #ffd9d4; --come: #cbf2d0; --dim: #767676 }
@media (prefers-color-scheme: dark) { :root { --gone: #64242a; --come: #17512c; --dim: #949494 } }
body { margin: 0; font: clamp(12px, .73vw, 14px)/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
table { width: 100%; table-layout: fixed; border-collapse: collapse }
.diff_next, colgroup:nth-child(3n + 1) { display: none }  /* links to the next change */
colgroup { border: 0 }
colgroup:nth-child(3n + 2) { width: 4em }  /* line numbers */
colgroup:nth-child(5) { border-left: 1px solid var(--dim) }
th { position: sticky; top: 0; padding: .5em 1em; background: Canvas; text-align: left; box-shadow: 0 1px var(--dim) }
td { padding: 0 1em 0 12ch; text-indent: -12ch; white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top }
td.diff_header { padding: 0 1em 0 0; text-align: right; text-indent: 0; color: var(--dim); user-select: none }
td:nth-child(3) span { background: var(--gone) }
td:nth-child(6) span { background: var(--come) }
"""


def page(old, new):
    names = [html.escape(str(file)) for file in (old, new)]
    lines = [file.read_text("utf-8").splitlines() for file in (old, new)]
    table = difflib.HtmlDiff(tabsize=4).make_table(*lines, *names).replace("&nbsp;", " ")
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{' and '.join(names)}</title><style>{STYLE}</style>{table}</html>
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".html", delete=False) as file:
        file.write(page(args.old, args.new))
    print(Path(file.name).as_uri(), flush=True)
    webbrowser.open(Path(file.name).as_uri())
