"""docs/index.html shows what is so, in a real browser: files, their differences, the reasons."""
import itertools
import re
import shutil
import subprocess

import pytest
from axe_playwright_python.sync_playwright import Axe
from launch import ARROWS, RECIPES, ROOT, SCRIPTS, needs
from playwright.sync_api import expect, sync_playwright

PAGE = (ROOT / "docs/index.html").as_uri()
EXAMPLES = [(str(file.relative_to(ROOT)).replace("_ddp", ""), str(file.relative_to(ROOT)))
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]
FILES = {name: (ROOT / name).read_text().splitlines(keepends=True)
         for name in [*SCRIPTS, *RECIPES, *itertools.chain(*EXAMPLES)]}
PAIRS = [*itertools.pairwise([*SCRIPTS, *RECIPES, "single_gpu.py", "multinode.py", "dp.py", "dp.py"])]
LINES = """lines => lines.map(line => [
    line.tagName, line.textContent, [...line.parentNode.children].indexOf(line)
        + 1 + Number(line.parentNode.style.counterReset.split(" ")[1])])"""  # the number shown


def diff(left, right):
    """Where GNU diff finds that they differ: start and stop in the left file, and in the right."""
    command = ["diff", "--unchanged-group-format=", "--changed-group-format=%de %dl %dE %dL\n", ROOT / left, ROOT / right]
    return [[*map(int, line.split())] for line in subprocess.run(command, capture_output=True).stdout.splitlines()]


@pytest.fixture(scope="module")
def context():
    needs("chromium")
    expect.set_options(timeout=60_000)  # milliseconds: a busy machine takes its time
    with sync_playwright() as playwright, playwright.chromium.launch(
            executable_path=shutil.which("chromium"), timeout=300_000) as browser:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(60_000)
        yield context


@pytest.fixture
def page(context):
    """The page, opened from disk. Whatever a test does, nothing else is asked for or goes wrong."""
    with context.new_page() as page:
        seen = []
        page.on("request", lambda request: seen.append(request.url))
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(error.message))
        page.goto(PAGE)
        yield page
        assert {*seen} == {PAGE}


def show(page, left, right):
    page.goto(f"{PAGE}#{left}..{right}".replace(".py", ""))
    expect_pair(page, left, right)


def expect_pair(page, left, right):
    expect(page.locator("#pair")).to_have_text(f"{left} → {right}")
    assert [page.locator(side).input_value() + ".py" for side in ("#left", "#right")] == [left, right]


def test_a_pair_shows_both_files_whole_and_marks_the_lines_that_diff_finds(page):
    for pair in [*PAIRS, *EXAMPLES]:
        show(page, *pair)
        hunks = diff(*pair)
        for side, name, edge, tag in (("left", pair[0], 0, "DEL"), ("right", pair[1], 2, "INS")):
            changed = {line for hunk in hunks for line in range(*hunk[edge:edge + 2])}
            assert page.eval_on_selector_all(f".{side} > *", LINES) == [
                [tag if at in changed else "SPAN", text, at + 1] for at, text in enumerate(FILES[name])]
    show(page, "multigpu_torchrun.py", "single_gpu.py")
    expect(page.locator("del", has_text="save_checkpoint").locator("mark")).to_have_text(["module"])


SAID = """() => [...pairs.keys()].filter(pair => {  // a pair the other way round has the same reasons
    const [one, other] = pair.split("..").map(name => [...files.keys()].indexOf(name));
    return one < other;
}).map(pair => {
    showPair(pair);
    return [pair, [...view.querySelectorAll(".hunk")].map(hunk => ({
        lines: [...hunk.querySelectorAll("pre")].map(side => side.textContent).join(""),
        reasons: [...hunk.querySelectorAll(".why p")].filter(each => !each.textContent.startsWith("See change "))
            .map(each => [each.textContent, [...each.querySelectorAll("code")].map(code => code.textContent)]),
        see: [...hunk.querySelectorAll(".why p")].map(each => each.textContent.match(/^See change (.*)[.]$/)?.[1])
            .filter(Boolean).map(Number)}))];
})"""


def test_a_reason_stands_once_where_its_lines_first_change_and_names_only_what_stands_there(page):
    said = {tuple(f"{name}.py" for name in pair.split("..")): hunks for pair, hunks in page.evaluate(SAID)}
    assert said.keys() > {*itertools.pairwise(SCRIPTS), *EXAMPLES}
    for pair, hunks in said.items():
        told = [reason for hunk in hunks for reason, _ in hunk["reasons"]]
        assert len({*told}) == len(told), pair
        for number, hunk in enumerate(hunks, 1):
            for reason, names in hunk["reasons"]:
                missing = [name for name in names if "".join(name.split()) not in "".join(hunk["lines"].split())]
                assert not missing, (pair, number, reason)
            assert all(earlier < number and hunks[earlier - 1]["reasons"] for earlier in hunk["see"]), (pair, number)
    assert [number for number, hunk in enumerate(said["single_gpu.py", "multigpu_torchrun.py"], 1)
            if not hunk["reasons"] + hunk["see"]] == [3]  # imports, which need no reason


def test_it_opens_on_what_most_want_and_map_pickers_swap_history_and_address_keep_in_step(page):
    assert page.locator("body").inner_text().startswith("What changes in my script?\n")
    expect_pair(page, "single_gpu.py", "multigpu_torchrun.py")
    expect(page.locator("#which")).to_have_text(
        "Left: Training on one device, the base of every diff. Right: Training on one machine, one process per GPU.")
    expect(page.locator("#unknown")).to_be_hidden()
    page.click("header a")
    expect_pair(page, "examples/waves.py", "examples/waves_ddp.py")
    for left, right in [*ARROWS, *EXAMPLES]:
        link = f"a[href='#{left}..{right}']".replace(".py", "")
        page.click(f".map {link}")
        expect_pair(page, left, right)
        expect(page.locator(".map [aria-current]")).to_have_count(1)
        assert re.search(r" \(\S+( \S+){1,4}\)$", page.locator(f".map span:has({link})").inner_text())  # what it is for
    page.select_option("#left", "dp")  # from an example, whose other half alone stands beside it
    expect_pair(page, "dp.py", "single_gpu.py")
    page.select_option("#right", "multinode")
    page.click("#swap")
    expect_pair(page, "multinode.py", "dp.py")
    assert page.url == PAGE + "#multinode..dp"
    page.go_back()
    expect_pair(page, "dp.py", "multinode.py")
    for unknown in ("#multigpu", "#single_gpu..dp/99"):
        page.goto(PAGE + unknown)
        expect(page.locator("#unknown")).to_have_text(f"This page has no {unknown}. It shows this instead:")
    expect_pair(page, "single_gpu.py", "dp.py")


def test_keys_go_from_change_to_change_and_tab_to_all_controls(page):
    show(page, "single_gpu.py", "multigpu_spawn.py")
    for key, number in [("n", 1), ("n", 2), ("j", 3), ("p", 2), ("k", 1), ("p", 1), ("n", 11)]:
        if number == 11:  # the reader has scrolled to change 10
            page.evaluate("document.querySelectorAll('.hunk')[9].scrollIntoView()")
        page.keyboard.press(key)
        expect(page.locator(".hunk:focus h3")).to_have_text(f"Change {number} of 15")
        bar, hunk = (page.locator(place).bounding_box() for place in (".bar", ".hunk:focus"))
        assert bar["y"] + bar["height"] <= hunk["y"] + 1 < 720
    page.focus("#left")
    page.keyboard.press("n")
    expect(page.locator("#left")).to_be_focused()
    page.evaluate("seen = new Set(), addEventListener('focusin', event => seen.add(event.target))")
    controls = page.locator("a, button, select, summary").count()
    for _ in range(controls + 1):  # from the first one on, and past the end of the page
        page.keyboard.press("Tab")
    assert page.evaluate("seen.size") == controls


def test_a_narrow_screen_shows_code_at_once_and_keeps_the_bar_and_a_change_has_a_link_of_its_own(page):
    page.set_viewport_size({"width": 360, "height": 740})
    page.reload()
    assert page.locator(".hunk .right").first.bounding_box()["y"] < 600
    show(page, "single_gpu.py", "multigpu_spawn.py")
    page.locator(".hunk h3 a").nth(6).click()
    page.reload()  # as when it was given to somebody else
    expect(page.locator(".hunk:focus h3")).to_have_text("Change 7 of 15")
    bar, hunk = (page.locator(place).bounding_box() for place in (".bar", ".hunk:focus"))
    assert page.url.endswith("#single_gpu..multigpu_spawn/7") and -1 <= bar["y"] <= 1
    assert bar["y"] + bar["height"] <= hunk["y"] + 1 < 370  # which leaves half of the screen


def test_copy_gives_a_file_or_new_lines_byte_for_byte_and_selects_them_where_there_is_no_clipboard(page):
    show(page, "multigpu_torchrun.py", "recipes/fsdp.py")
    page.click("#whole")
    page.wait_for_function("async () => await navigator.clipboard.readText()")
    assert page.evaluate("navigator.clipboard.readText()") == "".join(FILES["recipes/fsdp.py"])
    for number, (_, _, start, stop) in enumerate(diff("multigpu_torchrun.py", "recipes/fsdp.py")):
        button = page.locator(".hunk").nth(number).locator("button")
        expect(button).to_have_count(1 if start < stop else 0)
        if start < stop:
            button.click()
            expect(button).to_have_text("Copied")
            assert page.evaluate("navigator.clipboard.readText()") == "".join(FILES["recipes/fsdp.py"][start:stop])
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    button.click()
    expect(button).to_contain_text("Ctrl+C")
    assert page.evaluate("getSelection().toString() + '\\n'") == "".join(FILES["recipes/fsdp.py"][start:stop])


def test_long_unchanged_stretches_are_folded_and_both_sides_level_and_narrow_screens_have_one_column(page):
    show(page, "single_gpu.py", "multigpu_spawn.py")
    folded, change = page.locator("#view details .left"), page.locator(".hunk", has_text="def main(args)")
    expect(folded.first).to_be_hidden()
    page.locator("#view summary").first.click()
    expect(folded.first).to_be_visible()
    page.click("#unfold")
    expect(folded.last).to_be_visible()
    tops = "lines => lines.map(line => line.getBoundingClientRect().top)"
    assert page.eval_on_selector_all(".same .left > *", tops) == page.eval_on_selector_all(".same .right > *", tops)
    for width, columns in [(320, 1), (799, 1), (800, 2), (1440, 2)]:
        page.set_viewport_size({"width": width, "height": 844})
        assert max(page.eval_on_selector_all("body *", "all => all.map(node => node.getBoundingClientRect().right)")) <= width
        gone, come = (change.locator(side).bounding_box() for side in (".left", ".right"))
        assert (gone["y"] + gone["height"] <= come["y"]) == (columns == 1)
        assert page.locator(".same .right span").first.is_visible() == (columns == 2)


def test_light_or_dark_all_has_a_name_and_enough_contrast(page):
    show(page, "single_gpu.py", "dp.py")
    for scheme, grey in (("light", 255), ("dark", 18)):
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("body")).to_have_css("background-color", f"rgb({grey}, {grey}, {grey})")
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
    assert "href" not in "".join(re.findall(r"<[^>]*\.md.*?>", page.content()))  # which a browser would show as plain text
