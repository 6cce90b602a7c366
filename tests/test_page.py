"""docs/index.html shows what is so, in a real browser: the files, their differences, the reasons."""
import contextlib
import functools
import http.server
import itertools
import re
import shutil
import subprocess
import sys
import threading

import pytest
from browser import chromium
from launch import RECIPES, ROOT, SCRIPTS

PAGE = ROOT / "docs/index.html"
CHANGES = (ROOT / "docs/changes.md").read_text() + (ROOT / "docs/recipes.md").read_text()
FILES = {script: (ROOT / script).read_text() for script in [*SCRIPTS, *RECIPES]}
PAIRS = [*itertools.permutations(SCRIPTS, 2), *(("multigpu_torchrun.py", recipe) for recipe in RECIPES),
         *itertools.pairwise([*RECIPES, "single_gpu.py"])]
WIDTHS = [320, 390, 768, 800, 1024, 1280, 1440, 1920]
SHOWN = """
const texts = (selector, home = document) => [...home.querySelectorAll(selector)].map(node => node.textContent);
const lines = (side, home = document) => [...home.querySelectorAll(`[data-side=${side}]`)].map(node => ({
    number: +node.dataset.line, text: node.textContent, changed: node.matches(".changed"), tag: node.tagName,
    sign: getComputedStyle(node, "::after").content[1], marked: texts("mark", node),
    plain: [...node.childNodes].filter(child => child.nodeName !== "MARK").map(child => child.textContent).join("")}));
return {title: texts("#pair")[0], left: lines("left"), right: lines("right"), summary: texts("#summary")[0],
    pickers: [document.getElementById("left").value, document.getElementById("right").value],
    hunks: [...document.querySelectorAll(".hunk")].map(hunk => ({title: texts("h3", hunk)[0], left: lines("left", hunk),
        right: lines("right", hunk), from: texts(".from a", hunk), reasons: texts(".reason", hunk)}))}
"""


@pytest.fixture(scope="session")
def chrome():
    for program in ("chromium", "chromedriver"):
        if not shutil.which(program):
            pytest.skip("needs Debian's packages chromium chromium-driver")
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(chrome):
    """The page, opened from disk. Whatever a test does, nothing else is asked for and nothing goes wrong."""
    chrome.window(1440)
    chrome.media()
    chrome.requests(), chrome.console()
    chrome.open(PAGE.as_uri())
    yield chrome
    assert chrome.console() == []
    assert {re.sub("#.*", "", url) for url in chrome.requests()} <= {PAGE.as_uri(), "about:blank"}


def link(left, right):
    return f"#{left}..{right}".replace(".py", "")


def wait_for_pair(browser, left, right):
    browser.wait_for(f"return document.getElementById('pair').textContent == '{left} → {right}'")


def show(browser, left, right):
    browser.run("location.hash = arguments[0]", link(left, right))
    wait_for_pair(browser, left, right)


def as_text(lines):
    return "".join(line["text"] + "\n" for line in lines)


@pytest.fixture(scope="module")
def shown(chrome):
    """What the page shows of each pair."""
    chrome.window(1440)
    chrome.open(PAGE.as_uri())
    pages = {}
    for pair in PAIRS:
        show(chrome, *pair)
        pages[pair] = chrome.run(SHOWN)
    return pages


@functools.cache
def numbers_by_diff(left, right):
    """The numbers of the lines that GNU diff prints, of each file."""
    output = subprocess.run(["diff", ROOT / left, ROOT / right], capture_output=True, text=True).stdout
    numbers = [], []
    for start, stop, kind, new_start, new_stop in re.findall(
            r"^(\d+)(?:,(\d+))?([acd])(\d+)(?:,(\d+))?$", output, re.MULTILINE):
        if kind != "a":
            numbers[0].extend(range(int(start), int(stop or start) + 1))
        if kind != "d":
            numbers[1].extend(range(int(new_start), int(new_stop or new_start) + 1))
    return numbers


def words(markdown):
    return " ".join(re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown).replace("`", "").split())


def reasons_in_the_chapter(old, new):
    """By the chapters alone: the words under each hunk of an arrow."""
    found = {}
    place = rf"<!-- diff {old} {new} (\d+)(?:-(\d+))? -->.*?<!-- end -->(.*?)(?=<!-- diff|\n#|\Z)"
    for first, last, text in re.findall(place, CHANGES, re.DOTALL):
        for number in range(int(first), int(last or first) + 1):
            found[number] = words(text)
    return found


def test_every_pair_holds_both_files_whole(shown):
    for (left, right), page in shown.items():
        assert page["title"] == f"{left} → {right}"
        assert page["pickers"] == [left, right]
        for name, lines in ((left, page["left"]), (right, page["right"])):
            assert as_text(lines) == FILES[name]
            assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))


def test_every_line_that_diff_finds_is_marked_and_no_other(shown):
    for pair, page in shown.items():
        gone, come = numbers_by_diff(*pair)
        assert [line["number"] for line in page["left"] if line["changed"]] == gone, pair
        assert [line["number"] for line in page["right"] if line["changed"]] == come, pair
        for side, tag, sign in (("left", "DEL", "-"), ("right", "INS", "+")):
            assert {(line["changed"], line["tag"], line["sign"]) for line in page[side]} <= {
                (True, tag, sign), (False, "DIV", "o")}  # "none" has an o there
        total = len(gone) + len(come)
        assert page["summary"] == (f"{total} changed lines in {len(page['hunks'])} changes: "
                                   f"{len(gone)} removed, {len(come)} added.")
        assert sum(len(hunk["left"]) + len(hunk["right"]) for hunk in page["hunks"]) == total


def test_the_part_of_a_line_that_changed_is_marked_within_it(shown):
    """Without what is marked, a line is the same on both sides."""
    saving, = (line for line in shown["single_gpu.py", "multigpu_spawn.py"]["right"] if "save_checkpoint" in line["text"])
    assert saving["marked"] in ([".module"], ["module."])
    found = 0
    for pair, page in shown.items():
        for hunk in page["hunks"]:
            for side, other in (("left", "right"), ("right", "left")):
                for line in hunk[side]:
                    if line["marked"]:
                        found += 1
                        assert line["plain"] in [twin["plain"] for twin in hunk[other]], (pair, line)
        assert not any(line["marked"] for line in page["left"] + page["right"] if not line["changed"])
    assert found > 100


def test_every_change_has_its_reason_in_the_words_of_the_chapter(shown):
    arrows = [pair for pair in PAIRS if reasons_in_the_chapter(*pair)]
    assert len(arrows) == 4 + len(RECIPES)
    known = {f"{old} → {new}": reasons_in_the_chapter(old, new) for old, new in arrows}
    for pair, page in shown.items():
        for number, hunk in enumerate(page["hunks"], start=1):
            assert hunk["title"] == f"Change {number} of {len(page['hunks'])}"
            assert hunk["reasons"] and all(hunk["reasons"]), (pair, hunk)
            if pair in arrows:
                assert not hunk["from"]
                assert [words(reason) for reason in hunk["reasons"]] == [reasons_in_the_chapter(*pair)[number]]
            else:
                assert len(hunk["from"]) == len(hunk["reasons"])
                for arrow, reason in zip(hunk["from"], hunk["reasons"]):
                    assert words(reason) in known[arrow].values(), (pair, arrow)
        if pair[::-1] in arrows:
            assert ([words(hunk["reasons"][0]) for hunk in page["hunks"]]
                    == list(reasons_in_the_chapter(*pair[::-1]).values()))
    setup, = (hunk for hunk in shown["single_gpu.py", "multigpu_torchrun.py"]["hunks"]
              if any("init_process_group(" in line["text"] for line in hunk["right"]))
    assert setup["from"] == ["single_gpu.py → multigpu_spawn.py", "multigpu_spawn.py → multigpu_torchrun.py"]


def test_every_link_has_a_target(browser):
    links = set()
    for pair in PAIRS:
        show(browser, *pair)
        links |= set(browser.run("return [...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"))
    assert {"#step", "#processes"} < links
    for target in links - {link(*pair) for pair in PAIRS}:
        assert browser.run("return !!document.getElementById(arguments[0])", target.removeprefix("#")), target


def test_links_pickers_keys_of_the_browser_and_address_stay_in_step(browser):
    def showing(left, right):
        wait_for_pair(browser, left, right)
        assert browser.run("return ['left', 'right'].map(id => document.getElementById(id).value)") == [left, right]
        assert browser.run("return document.title").startswith(f"{left} → {right}")

    showing("single_gpu.py", "multigpu_spawn.py")
    for old, new in [("single_gpu.py", "dp.py"), ("multigpu_spawn.py", "multigpu_torchrun.py"),
                     ("multigpu_torchrun.py", "multinode.py"), ("single_gpu.py", "multigpu_spawn.py")]:
        browser.click(f"nav a[href='{link(old, new)}']")
        showing(old, new)
        assert browser.run("return location.hash") == link(old, new)
        arrows, = browser.run("return [[...document.querySelectorAll('[aria-current]')].map(a => a.textContent)]")
        changed = sum(map(len, numbers_by_diff(old, new)))
        assert arrows == [f"{old} → {new}, {changed} lines"]
    browser.click("#right option:nth-of-type(5)")
    showing("single_gpu.py", "multinode.py")
    assert browser.run("return location.hash") == "#single_gpu..multinode"
    browser.click("#swap")
    showing("multinode.py", "single_gpu.py")
    browser.run("history.back()")
    showing("single_gpu.py", "multinode.py")
    browser.run("history.back()")
    showing("single_gpu.py", "multigpu_spawn.py")
    browser.run("history.forward()")
    showing("single_gpu.py", "multinode.py")
    browser.click("a[href='#step']")
    showing("single_gpu.py", "multinode.py")
    for unknown in ("#nothing", "#dp..nothing", "#dp..constructor", "#%"):
        browser.open(PAGE.as_uri() + unknown)
        showing("single_gpu.py", "multigpu_spawn.py")
    browser.open(PAGE.as_uri() + "#dp..dp")
    showing("dp.py", "dp.py")
    assert browser.run(SHOWN)["summary"] == "No difference: both sides are dp.py."
    assert as_text(browser.run(SHOWN)["left"]) == FILES["dp.py"]


def test_keys_go_to_the_next_and_the_previous_change(browser):
    total = browser.run("return document.querySelectorAll('.hunk').length")
    now = "return document.activeElement.matches('.hunk') ? document.activeElement.querySelector('h3').textContent : ''"
    for key, change in [("n", 1), ("n", 2), ("j", 3), ("p", 2), ("k", 1), ("p", 1)]:
        browser.press(key)
        assert browser.run(now) == f"Change {change} of {total}"
        top, bottom = browser.run("const box = document.activeElement.getBoundingClientRect();"
                                  "const bar = document.querySelector('.bar').getBoundingClientRect();"
                                  "return [box.top - bar.bottom, box.bottom - innerHeight]")
        assert top >= -1 and bottom <= 0
    for _ in range(total):
        browser.press("n")
    assert browser.run(now) == f"Change {total} of {total}"
    browser.click("#previous")
    assert browser.run(now) == f"Change {total - 1} of {total}"
    browser.run("document.getElementById('left').focus()")
    browser.press("n", "j", "p")
    assert browser.run("return document.activeElement.id") == "left"


@pytest.mark.parametrize("clipboard", ["the browser's", "none"])
def test_copy_gives_a_file_and_the_new_lines_byte_for_byte(clipboard, browser):
    browser.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    def copied(selector):
        browser.run("return clipboard.writeText('')")
        browser.click(selector)
        return browser.wait_for("return clipboard.readText()")

    for left, right in zip(SCRIPTS, [*SCRIPTS[1:], SCRIPTS[0]]):
        browser.open(PAGE.as_uri() + link(left, right))
        browser.run("window.clipboard = navigator.clipboard")
        if clipboard == "none":
            browser.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        assert copied("#copy-left") == FILES[left]
        assert copied("#copy-right") == FILES[right]
        for number, hunk in list(enumerate(browser.run(SHOWN)["hunks"], start=1))[-4:]:
            if hunk["right"]:
                lines = as_text(hunk["right"])
                assert copied(f".hunk:has(#change-{number}) button") == lines and lines in FILES[right]
            else:
                assert browser.run(f"return document.querySelector('.hunk:has(#change-{number}) button').disabled")


def test_a_selection_is_the_text_of_one_file_alone(browser):
    browser.window(1440, 1200)
    for side, name in (("left", "single_gpu.py"), ("right", "multigpu_spawn.py")):
        points = browser.run("""return [1, 5].map(number => {
            const range = document.createRange();
            range.selectNodeContents(document.querySelector(`[data-side=${arguments[0]}][data-line="${number}"]`));
            const boxes = [...range.getClientRects()];
            return number === 1 ? [Math.ceil(boxes[0].left), Math.round(boxes[0].top + 8)]
                : [Math.round(boxes.at(-1).right) + 20, Math.round(boxes.at(-1).top + 8)];
        })""", side)
        browser.drag(*points)
        selected = browser.run("return getSelection().toString()")
        assert re.sub("\n+", "\n", selected) == re.sub("\n+", "\n", "\n".join(FILES[name].splitlines()[:5]))


def test_common_lines_are_level_and_long_stretches_of_them_folded(browser):
    place = """return ["left", "right"].map(side => [...document.querySelectorAll(`.common [data-side=${side}]`)]
        .filter(node => node.checkVisibility()).map(node => [node.textContent, node.getBoundingClientRect().top]))"""
    left, right = browser.run(place)
    folded = len(left)
    assert left == right and 0 < folded < 50
    assert browser.run("return document.querySelector('.hunk .line').getBoundingClientRect().bottom < innerHeight")
    browser.click(".fold")
    left, right = browser.run(place)
    number, = re.findall(r"\d+", browser.run("return document.querySelector('.fold').textContent"))
    assert left == right and len(left) == folded + int(number)
    browser.click(".fold")
    assert len(browser.run(place)[0]) == folded
    browser.click("#unfold")
    left, right = browser.run(place)
    assert left == right and len(left) == len(FILES["single_gpu.py"].splitlines()) - len(
        numbers_by_diff("single_gpu.py", "multigpu_spawn.py")[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_or_overlaps(width, browser):
    browser.window(width)
    for pair in [PAIRS[1], ("multinode.py", "dp.py"), ("multigpu_torchrun.py", "multinode.py")]:
        show(browser, *pair)
        browser.run("for (const fold of document.querySelectorAll('.fold')) fold.fold(false)")
        outside = browser.run("""
            const all = document.body.querySelectorAll("*:not(.hidden, .hidden *, svg *, script, noscript)");
            return [...all].filter(node => {
                const box = node.getBoundingClientRect(), block = getComputedStyle(node).display !== "inline";
                return node.checkVisibility() && (box.left < 0 || box.right > document.documentElement.clientWidth + .5
                    || block && node.clientWidth && node.scrollWidth > node.clientWidth + 1);
            }).map(node => node.outerHTML.slice(0, 100))""")
        assert outside == []
        assert browser.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        overlapping = browser.run("""
            const found = [], boxes = [...document.querySelectorAll(".line, .why > *, .fold, .tools > *, .bar > div > *, "
                + ".map .box, .map a, .tree span, h1, h2, section > p, text")]
                .filter(node => node.checkVisibility() && !node.matches(".hidden"))
                .map(node => [node, node.getBoundingClientRect()]);
            boxes.sort((one, other) => one[1].top - other[1].top);
            boxes.forEach(([node, box], at) => {
                for (const [next, other] of boxes.slice(at + 1)) {
                    if (other.top >= box.bottom - 1) break;
                    if (other.left < box.right - 1 && box.left < other.right - 1)
                        found.push(node.outerHTML.slice(0, 80) + " over " + next.outerHTML.slice(0, 80));
                }
            });
            return found""")
        assert overlapping == []


def test_a_phone_shows_one_column_with_what_goes_above_what_comes(browser):
    browser.window(390, 844)
    browser.click("#unfold")
    assert browser.run("""return [...document.querySelectorAll(".common .line")].every(node =>
        node.dataset.side === "left" ? node.getBoundingClientRect().width > 350 : !node.checkVisibility())""")
    places = browser.run("""return [...document.querySelectorAll(".hunk")].map(hunk =>
        [...hunk.querySelectorAll(".line")].map(node => node.getBoundingClientRect()).map(box => [box.top, box.width]))""")
    for hunk in places:
        assert [top for top, _ in hunk] == sorted({top for top, _ in hunk}) and all(width > 350 for _, width in hunk)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_a_contrast_of_at_least_4_5(scheme, browser):
    browser.media(scheme)
    for pair in [PAIRS[1], ("multinode.py", "dp.py")]:
        show(browser, *pair)
        pairs = browser.run("""
            const found = new Set(), clear = "rgba(0, 0, 0, 0)";
            const back = node => !node ? "rgb(255, 255, 255)" :
                getComputedStyle(node).backgroundColor !== clear ? getComputedStyle(node).backgroundColor : back(node.parentElement);
            const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
                const node = walker.currentNode.parentElement;
                if (!walker.currentNode.data.trim() || node.closest("script, noscript, svg")) continue;
                found.add(getComputedStyle(node).color + " on " + back(node));
            }
            for (const line of document.querySelectorAll(".line"))
                for (const part of ["::before", "::after"]) found.add(getComputedStyle(line, part).color + " on " + back(line));
            const behind = [...document.querySelectorAll("svg rect")].map(rect => getComputedStyle(rect).fill);
            for (const text of document.querySelectorAll("svg text"))
                for (const colour of [back(document.body), ...behind])
                    found.add(getComputedStyle(text).fill + " on " + colour);
            return [...found]""")
        assert len(pairs) > 15
        for colours in pairs:
            light, dark = sorted(map(luminance, colours.split(" on ")), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, colours
    backgrounds = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(backgrounds) > 0.5) == (scheme == "light")


def luminance(colour):
    parts = [int(part) / 255 for part in re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour).groups()]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("width, columns", [(720, 1), (1100, 2)], ids=["upright", "lying"])
def test_paper_shows_every_line_and_no_controls(width, columns, browser):
    browser.media(media="print")
    browser.window(width)
    lines = ".line" if columns == 2 else ".line:not(.common [data-side=right])"
    assert browser.run("return [...document.querySelectorAll(arguments[0])].every(node => node.checkVisibility())", lines)
    assert not browser.run("return [...document.querySelectorAll('button, select')].some(node => node.checkVisibility())")


def test_a_screen_reader_finds_headings_names_and_no_line_twice(browser):
    nodes = [node for node in browser.devtools("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]

    def named(*roles):
        return [node["name"]["value"].strip() for node in nodes if node["role"]["value"] in roles]

    controls = named("link", "button", "combobox", "image", "img")
    assert all(controls) and {"Left file", "Right file", "Copy single_gpu.py", "Copy new lines of change 3",
                              "One training step on two ranks, from top to bottom"} <= set(controls)
    changed = sum(map(len, numbers_by_diff("single_gpu.py", "multigpu_spawn.py")))
    assert f"single_gpu.py → multigpu_spawn.py, {changed} lines" in controls
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map(node => +node.tagName[1])")
    assert len(levels) == len(named("heading")) and levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert named("StaticText").count("time") == 1  # `import time`, in both columns
    assert browser.run("return document.documentElement.lang") == "en"


def test_tab_reaches_all_controls_and_shows_where_it_is(browser):
    count = browser.run("return document.querySelectorAll('a, button:enabled, select').length")
    seen = set()
    for _ in range(count):
        browser.press("tab")
        seen.add(browser.run("""const node = document.activeElement, all = document.querySelectorAll("a, button, select");
            return [...all].indexOf(node) + " " + getComputedStyle(node).outlineStyle"""))
    assert len(seen) == count and all(place.endswith("solid") for place in seen)


def test_the_page_is_one_small_file(browser):
    assert PAGE.stat().st_size < 300_000
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=ROOT))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket):
        browser.open(f"http://127.0.0.1:{server.server_port}/docs/index.html#dp..multinode")
        wait_for_pair(browser, "dp.py", "multinode.py")
        browser.click("nav a")
        browser.click("#copy-left")
        browser.press("n")
        server.shutdown()
    assert asked == ["/docs/index.html"]
    assert [re.sub("#.*", "", url).rpartition(":")[2].partition("/")[2] for url in browser.requests()
            if url.startswith("http")] == ["docs/index.html"]


def test_without_javascript_a_sentence_points_to_the_chapter(browser):
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(PAGE.as_uri())
        assert "changes.md" in browser.send("GET", browser.element("noscript p") + "/text")
    finally:
        browser.devtools("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("files", [[*FILES], ["multigpu_spawn.py"], ["dp.py"]], ids=["all", "spawn", "dp"])
def test_a_changed_line_fails_with_the_command_to_run(files, tmp_path):
    for name in [*SCRIPTS, "recipes", "README.md", "docs", "tools"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    check = [sys.executable, tmp_path / "tools/render.py", "--check"]
    assert subprocess.run(check, timeout=60).returncode == 0
    for name in files:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace("model.eval()", "model.train(False)"))
    done = subprocess.run(check, timeout=60, capture_output=True, text=True)
    assert done.returncode == 1 and "run python tools/render.py" in done.stderr
    if files == [*FILES]:
        assert done.stderr == "docs/index.html is behind: run python tools/render.py\n"
        assert subprocess.run(check[:2], timeout=60).returncode == 0
        assert subprocess.run(check, timeout=60).returncode == 0
