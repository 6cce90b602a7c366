"""README and its chapters say what is so: diffs are the files', commands exist, links lead somewhere."""
import functools
import re
import shlex
import subprocess
import sys

import pytest
from forked import train
from launch import RECIPES, ROOT, SCRIPTS
from torch.distributed.run import get_args_parser

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CHAPTERS = {file: file.read_text() for file in FILES}
CHANGES = CHAPTERS[ROOT / "docs/changes.md"]
OWN_SCRIPTS = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").glob("own_*.py"))


def blocks(language):
    text = "\n".join(CHAPTERS.values())
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands():
    """The command lines in the chapters' blocks and in the scripts' docstrings."""
    texts = [*blocks("sh"), *((ROOT / script).read_text().split('"""')[1] for script in [*SCRIPTS, *RECIPES])]
    lines = "\n".join(texts).replace("\\\n", "").splitlines()
    starts = [re.search(r"(\w+=\S* )*(\S*/)?(python3?|torchrun) .*", line) for line in lines]
    return [part.strip() for start in starts if start for part in start[0].split("&&")]


def given(words):
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def test_diffs_are_those_of_the_files():
    for arrow in ["single_gpu.py dp.py", "single_gpu.py multigpu_spawn.py",
                  "multigpu_spawn.py multigpu_torchrun.py", "multigpu_torchrun.py multinode.py"]:
        assert f"<!-- diff {arrow}" in CHANGES
    for recipe in RECIPES:
        assert f"<!-- diff multigpu_torchrun.py {recipe}" in CHAPTERS[ROOT / "docs/recipes.md"]
    done = subprocess.run([sys.executable, ROOT / "tools/render.py", "--check"], timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def anchors(text):
    """The places that GitHub makes of a text's headings, and those of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {*(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings),
            *re.findall(r' id="([^"]+)"', text)}


def test_every_link_between_the_chapters_leads_to_a_file_and_a_heading():
    found = [(file, *link) for file, text in CHAPTERS.items()
             for link in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text)]
    assert len(found) > 20
    for file, path, anchor in found:
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), (file, path)
        assert not anchor or anchor in anchors(target.read_text()), (file, path, anchor)


def test_the_front_door_is_short_and_leads_to_every_chapter():
    readme = CHAPTERS[ROOT / "README.md"]
    assert readme.count("\n") <= 250
    assert all(f"]({file.relative_to(ROOT)})" in readme for file in CHAPTERS if file != ROOT / "README.md")


def test_every_command_names_files_and_options_that_exist(recipes):
    @functools.cache
    def options(name):
        if name == "torchrun":
            return {option for action in get_args_parser()._actions for option in action.option_strings}
        name = re.sub(r"^recipes/(\w+)\.py$", r"recipes.\1", name)
        found = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", train(name, "--help", cwd=recipes, processes=0, device=None).stdout)
        return {*found, *(options("torchrun") if name == "tools/check_cluster.py" else [])}  # which it takes too

    found = commands()
    assert len(found) > 20
    for line in found:
        words = [re.sub(r"^recipes\.(\w+)$", r"recipes/\1.py", word) for word in shlex.split(line, comments=True)]
        while re.match(r"\w+=", words[0]):
            del words[0]
        files = [word for word in words if word.endswith((".py", ".txt"))]
        assert all((ROOT / file).is_file() for file in files), line
        if not files or files[0].endswith(".txt"):
            continue
        place = words.index(files[0])
        if words[0].endswith("torchrun") or "torch.distributed.launch" in words:
            before = given(words[1:place]) - {"-m", "--use-env"}
            assert before <= options("torchrun"), line
        if given(words[place + 1:]):
            assert given(words[place + 1:]) <= options(files[0]), line


def test_no_command_restarts_without_what_restarts_need():
    docs = "\n".join([*CHAPTERS.values(), *((ROOT / script).read_text() for script in [*SCRIPTS, *RECIPES, *OWN_SCRIPTS])])
    lines = [line for line in docs.replace("\\\n", "").splitlines()
             if re.search(r"torchrun .*--max.restarts\S* .*\.py", line)]
    assert len(lines) >= 3
    for line in lines:
        assert re.search(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun .*(--standalone|c10d)", line), line
    batch = (ROOT / "multinode.sbatch").read_text().replace("\\\n", "")
    assert re.search(r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*--max-restarts=\d .*c10d", batch, re.DOTALL)


def test_saved_weights_work_elsewhere_as_readme_shows(tmp_path):
    snippet, = (block for block in blocks("python") if "load_state_dict" in block)
    train("single_gpu.py", 1, "--checkpoint", "multigpu_spawn.pt", cwd=tmp_path, processes=0)
    (tmp_path / "snippet.py").write_text(snippet)
    (tmp_path / "utils.py").symlink_to(ROOT / "utils.py")
    done = train(tmp_path / "snippet.py", cwd=tmp_path, processes=0, device=None)
    assert re.fullmatch(r"predicted: \d label: \d\n", done.stdout)


@pytest.mark.parametrize("change, says", [
    ("<!-- diff single_gpu.py dp.py 3 -->", "shows 2 hunks of single_gpu.py -> dp.py, which has 3"),
    ("+    parallel = model", "hunk 2 of single_gpu.py -> dp.py is not what")],
    ids=["a hunk more", "another hunk"])
def test_render_refuses_to_put_another_hunk_over_a_reason(change, says, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import render
    if change.startswith("<"):
        text = CHANGES.replace(change, "")
    else:
        start = CHANGES.index("<!-- diff single_gpu.py dp.py 2 -->")
        end = CHANGES.index("<!-- end -->", start)
        text = CHANGES[:start] + "<!-- diff single_gpu.py dp.py 2 -->\n+another line\n" + CHANGES[end:]
    with pytest.raises(SystemExit, match=re.escape(says)):
        render.render(text, "changes.md")
