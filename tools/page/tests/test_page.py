"""tools/page keeps the chapters' diffs those of the files; docs/index.html shows what is so, in a real browser."""
import re
import shutil
import subprocess
import sys

import pytest
from launch import ARROWS, ROOT, needs
from playwright.sync_api import expect, sync_playwright

PAGE = (ROOT / "docs/index.html").as_uri()
EXAMPLES = [(str(file.relative_to(ROOT)).replace("_ddp", ""), str(file.relative_to(ROOT)))
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]
PAIRS = [*ARROWS, *EXAMPLES, ("single_gpu.py", "multigpu_torchrun.py"), ("recipes/bf16.py", "dp.py")]
HUNKS = """hunks => hunks.map(hunk => ["pre", ".why p", ".why code"].map(
    kind => [...hunk.querySelectorAll(kind)].map(one => one.textContent)))"""


def diff(left, right):
    """Where GNU diff finds that they differ: start and stop in the left file, and in the right."""
    command = ["diff", "--unchanged-group-format=", "--changed-group-format=%de %dl %dE %dL\n", ROOT / left, ROOT / right]
    return [[*map(int, line.split())] for line in subprocess.run(command, capture_output=True).stdout.splitlines()]


@pytest.fixture(scope="module")
def page():
    """The page, opened from disk. Whatever the tests do, nothing else is asked for or goes wrong."""
    needs("chromium")
    expect.set_options(timeout=60_000)  # milliseconds: a busy machine takes its time
    with sync_playwright() as playwright, playwright.chromium.launch(
            executable_path=shutil.which("chromium"), timeout=300_000) as browser:
        page, seen = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page(), []
        page.set_default_timeout(60_000)
        page.on("request", lambda request: seen.append(request.url))
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(error.message))
        yield page
        assert {*seen} == {PAGE}


def expect_pair(page, left, right):
    expect(page.locator("#pair")).to_have_text(f"{left} → {right}")
    assert [page.locator(side).input_value() + ".py" for side in ("#left", "#right")] == [left, right]


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_pair_shows_both_files_whole_and_what_diff_finds_with_reasons_that_stand_once_where_their_code_is(page, pair):
    page.goto(f"{PAGE}#{'..'.join(pair)}".replace(".py", ""))
    expect_pair(page, *pair)
    for side, name, edge, tag in (("left", pair[0], 0, "DEL"), ("right", pair[1], 2, "INS")):
        changed = {line for hunk in diff(*pair) for line in range(*hunk[edge:edge + 2])}
        lines = enumerate((ROOT / name).read_text().splitlines(keepends=True))
        assert page.eval_on_selector_all(f".{side} > *", "lines => lines.map(line => [line.tagName, line.textContent])") == [
            [tag if at in changed else "SPAN", text] for at, text in lines]
    told = []
    for lines, reasons, names in page.eval_on_selector_all(".hunk", HUNKS):
        assert all("".join(name.split()) in "".join("".join(lines).split()) for name in names)
        told += [reason for reason in reasons if not re.fullmatch(r"See change \d+\.", reason)]
    assert len(told) == len({*told}) and (told or pair not in ARROWS)


def test_it_opens_on_what_most_want_and_each_change_has_an_address(page):
    page.goto(PAGE)
    expect_pair(page, "single_gpu.py", "multigpu_torchrun.py")
    for left, right in [*ARROWS, *EXAMPLES]:
        page.click(f".map a[href='#{left}..{right}']".replace(".py", ""))
        expect_pair(page, left, right)
    page.select_option("#left", "dp")  # from an example, whose other half alone stands beside it
    expect_pair(page, "dp.py", "single_gpu.py")
    page.click("#swap")
    expect_pair(page, "single_gpu.py", "dp.py")
    page.locator(".hunk h3 a").nth(1).click()
    page.reload()  # as when it was given to somebody else
    expect(page.locator(".hunk:focus h3")).to_have_text("Change 2 of 3")


def test_copy_gives_a_file_or_new_lines_byte_for_byte(page):
    page.goto(f"{PAGE}#multigpu_torchrun..recipes/fsdp")
    lines = (ROOT / "recipes/fsdp.py").read_text().splitlines(keepends=True)
    added = [(start, stop) for _, _, start, stop in diff("multigpu_torchrun.py", "recipes/fsdp.py") if start < stop]
    buttons = [page.locator("#whole"), *page.locator(".hunk button").all()]
    for button, (start, stop) in zip(buttons, [(0, len(lines)), *added], strict=True):
        button.click()
        expect(button).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == "".join(lines[start:stop])


def test_narrow_or_wide_all_can_be_read(page):
    page.goto(PAGE)
    for width, columns in [(320, 1), (799, 1), (800, 2), (1440, 2)]:
        page.set_viewport_size({"width": width, "height": 844})
        assert max(page.eval_on_selector_all("body *", "all => all.map(node => node.getBoundingClientRect().right)")) <= width
        gone, come = (page.locator(".hunk", has_text="def main").locator(side).bounding_box() for side in (".left", ".right"))
        assert (gone["y"] + gone["height"] <= come["y"]) == (columns == 1)


def test_diffs_are_those_of_the_files():
    done = subprocess.run([sys.executable, ROOT / "tools/page", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("files, old, new, says", [
    ("*.py", r"model\.eval\(\)", "model.train(False)", "docs/index.html is behind: run python tools/page"),
    ("docs/diffs.md", "<!-- diff single_gpu.py dp.py 3 -->", "", "shows 2 hunks of single_gpu.py -> dp.py, which has 3"),
    ("docs/diffs.md", "(?s)(dp.py 3 -->\n).*?(<!-- end)", r"\1+another\n\2", "hunk 3 of single_gpu.py -> dp.py is not what"),
    ("docs/diffs.md", "`local_rank` is", "`mp.spawn` gives", "this names code that these lines do not have"),
    ("docs/diffs.md", "`all_reduce` adds", "It adds", "of several hunks this explains one: name code that shows which")])
def test_render_says_what_is_behind_and_puts_no_other_hunk_over_a_reason(tmp_path, files, old, new, says):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
    for file in copy.rglob(files):
        file.write_text(re.sub(old, new, file.read_text()))
    done = subprocess.run([sys.executable, copy / "tools/page", "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr
