"""tools/page keeps the chapters' diffs those of the files; docs/index.html shows what is so, in a real browser."""
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("playwright", reason="needs a package: pip install -r requirements-dev.txt")
pytest.importorskip("pygments", reason="needs a package: pip install -r requirements-dev.txt")
from launch import BASES, RECIPES, ROOT, needs
from playwright.sync_api import expect, sync_playwright

PAGE = (ROOT / "docs/index.html").as_uri()
EXAMPLES = [(str(file.relative_to(ROOT)).replace("_ddp", ""), str(file.relative_to(ROOT)))
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]
ARROWS = [*((old, new) for new, old in BASES.items()),
          *(("recipes/fsdp.py" if new == "recipes/large.py" else "multigpu_torchrun.py", new) for new in RECIPES)]
PAIRS = [*ARROWS, *EXAMPLES, ("single_gpu.py", "multinode.py"), ("recipes/bf16.py", "dp.py")]
HUNKS = """hunks => hunks.map(hunk => [...hunk.querySelectorAll(".why p")].map(one => one.textContent))"""


def docstring(name):
    return 1 + (ROOT / name).read_text().split('"""')[1].count("\n")


def diff(left, right):
    """Where GNU diff finds that they differ below their docstrings: start and stop in the left file, in the right."""
    command = ["diff", "--unchanged-group-format=", "--changed-group-format=%de %dl %dE %dL\n", ROOT / left, ROOT / right]
    output = subprocess.run(command, capture_output=True).stdout
    least = [docstring(name) for name in (left, left, right, right)]
    found = [[*map(max, map(int, line.split()), least)] for line in output.splitlines()]
    return [hunk for hunk in found if hunk != least]


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
def test_a_pair_shows_both_files_whole_and_what_diff_finds_with_reasons_that_stand_once(page, pair):
    page.goto(f"{PAGE}#{'..'.join(pair)}".replace(".py", ""))
    expect_pair(page, *pair)
    for side, name, edge, tag in (("left", pair[0], 0, "DEL"), ("right", pair[1], 2, "INS")):
        changed = {line for hunk in diff(*pair) for line in range(*hunk[edge:edge + 2])}
        lines = enumerate((ROOT / name).read_text().splitlines(keepends=True))
        assert page.eval_on_selector_all(f".{side} > *", "lines => lines.map(line => [line.tagName, line.textContent])") == [
            [tag if at in changed else "SPAN", text] for at, text in lines]
    told = [reason for reasons in page.eval_on_selector_all(".hunk", HUNKS) for reason in reasons
            if not re.fullmatch(r"See change \d+\.", reason)]
    assert len(told) == len({*told}) and (told or pair not in ARROWS)
    if pair in [*BASES.items()] or (pair[0] in BASES.values() and "/" not in pair[1]):
        assert all(page.eval_on_selector_all(".hunk", HUNKS)), "each change of a launch style has its reason"


def test_every_pair_of_the_map_can_be_chosen_and_each_change_has_an_address(page):
    page.goto(PAGE)
    page.click("#others summary")
    for left, right in [*ARROWS, *EXAMPLES]:
        page.click(f".map a[href='#{left}..{right}']".replace(".py", ""))
        expect_pair(page, left, right)
    page.select_option("#left", "dp")  # from an example, whose other half alone stands beside it
    expect_pair(page, "dp.py", "single_gpu.py")
    page.click("#swap")
    expect_pair(page, "single_gpu.py", "dp.py")
    page.locator(".hunk h3 a").nth(1).click()
    page.reload()  # as when it was given to somebody else
    expect(page.locator(".hunk:focus h3")).to_have_text("Change 2 of 2")


def test_it_opens_on_the_diff_of_readme_with_the_reasons_that_stand_there(page):
    page.goto("about:blank")
    page.goto(PAGE)
    expect_pair(page, "single_gpu.py", "multigpu_torchrun.py")
    shown, readme = "".join(page.locator("ins").all_text_contents()), (ROOT / "README.md").read_text()
    for line in ("init_process_group", "DistributedSampler(", "set_epoch", " DDP(", ".module.state_dict()", "destroy_process"):
        assert re.search(rf"(?m)^\+.*{re.escape(line)}", readme) and line in shown, line
    reasons = page.locator(".why").all_text_contents()
    for hunk, reason in ((0, "Set up."), (-1, "Download, start, end.")):
        assert reason in reasons[hunk] or "See change" in reasons[hunk]


def test_a_link_leads_to_a_file(page):
    files = set()
    for pair in PAIRS:
        page.goto(f"{PAGE}#{'..'.join(pair)}".replace(".py", ""))
        links = page.eval_on_selector_all("a", "all => all.map(link => link.getAttribute('href'))")
        files |= {link for link in links if not link.startswith(("#", "http"))}
    assert {"../README.md", "how_it_works.md"} <= files and all((ROOT / "docs" / file).is_file() for file in files), files
    assert not re.search(r"\[[A-Z][^]]*\]\([#\w]", (ROOT / "docs/index.html").read_text())  # a link that stayed Markdown


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
        gone, come = (page.locator(".hunk", has_text="set_epoch").locator(side).bounding_box() for side in (".left", ".right"))
        assert (gone["y"] + gone["height"] <= come["y"]) == (columns == 1)


TOKENS = """lines => lines.map(line => [...line.querySelectorAll("[class]:not(.w, .c1, .p):not(:has(*))")].map(
    token => [token.textContent, ...[...token.getClientRects()].map(part => part.left)])).filter(line => line[0]?.length > 1)"""


def test_on_a_phone_no_word_is_split_and_a_long_line_goes_on_right_of_its_beginning(page):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{PAGE}#multigpu_torchrun..recipes/fsdp")
    for (first, start, *_), *tokens in page.eval_on_selector_all(".right > :is(ins, span)", TOKENS):
        for text, *lefts in tokens:
            assert not text.isidentifier() or len(lefts) <= 1, text
            assert all(left >= start - 1 for left in lefts), (first, text)


def test_diffs_are_those_of_the_files():
    done = subprocess.run([sys.executable, ROOT / "tools/page", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("files, old, new, says", [
    ("*.py", r"model\.eval\(\)", "model.train(False)", "docs/index.html is behind: run python tools/page"),
    ("README.md", "(?s)(barrier -->\n).*?(<!-- end)", r"\1another\n\2", "README.md is behind: run python tools/page"),
    ("README.md", r"-\d+ \+\d+", "-1 +1", "README.md is behind: run python tools/page"),
    ("README.md", "<!-- diff .* set_epoch .*", "", "README.md shows this of single_gpu.py -> multigpu_torchrun.py 0 times"),
    ("docs/diffs.md", r"(?s)(<!-- diff \S+ dp.py Data.*?<!-- end -->)", r"\1\n\n\1",
     "diffs.md shows this of single_gpu.py -> dp.py 2 times"),
    ("docs/recipes.md", r"\| \[`bf16.py`\].*", "", "docs/recipes.md: no row of a table has [`bf16.py`]"),
    ("docs/diffs.md", "def run -->", "def walk -->", "no hunk has def walk: name other code in its place")])
def test_render_says_what_is_behind_or_missing(tmp_path, files, old, new, says):
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
    for file in copy.rglob(files):
        file.write_text(re.sub(old, new, file.read_text()))
    done = subprocess.run([sys.executable, copy / "tools/page", "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr
