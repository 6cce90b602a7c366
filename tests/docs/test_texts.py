"""README leads to its chapters, links lead somewhere, and the commands shown work as they stand there."""
import functools
import re
from pathlib import Path

from chapters import CHAPTERS, block, blocks
from launch import RECIPES, ROOT, SCRIPTS, train
from torch.distributed.run import get_args_parser

CODE = {name: (ROOT / name).read_text() for name in [
    *SCRIPTS, *RECIPES, *(str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("examples/*.py")))]}


def test_readme_leads_to_every_chapter_and_every_link_between_the_chapters_leads_to_a_file_and_a_heading():
    readme = CHAPTERS[ROOT / "README.md"]
    assert all(f"]({file.relative_to(ROOT)})" in readme for file in CHAPTERS if file.name != "README.md")
    found = [(file, *link) for file in CHAPTERS for link in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", CHAPTERS[file])]
    assert len(found) > 20
    for file, path, anchor in found:
        target = (file.parent / path).resolve() if path else file
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        places = ["", *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)]
        assert target.exists() and anchor in places, (file, path, anchor)


def test_readme_shows_how_multigpu_spawn_starts_as_it_is():
    assert block("def run(local_rank") in CODE["multigpu_spawn.py"]


def options_in(text):
    return {*re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text)}


def test_every_command_names_files_and_options_that_exist():
    launcher = {option for action in get_args_parser()._actions for option in action.option_strings}

    @functools.cache
    def options(file):  # of its --help, which needs no launcher
        shown = train(file.removesuffix("/__main__.py"), "--help", processes=1, device=False).stdout
        return options_in(shown) | (launcher if "check_cluster" in file else set())  # which takes them too

    texts = [*blocks("sh"), *(text.split('"""')[1] for text in CODE.values())]
    commands = re.findall(r"(?:python3?|pip|torchrun) (.*?)(?:$|&&|  #)", "\n".join(texts).replace("\\\n", ""), re.MULTILINE)
    for command in commands:
        command = re.sub(r'"[^"]*"', "", command)  # commands for another command
        command = re.sub(r"-m recipes\.(\w+)", r"recipes/\1.py", re.sub(r"(tools/\w+)(?= |$)", r"\1/__main__.py", command))
        if found := re.search(r"(.*?)(\S+\.(?:py|txt))(.*)", command):
            before, file, after = found.groups()
            assert (ROOT / file).is_file(), command
            assert options_in(before) <= launcher | {"-m", "-r"}, command
            assert file.endswith(".txt") or options_in(after) <= options(file), command


def test_no_command_restarts_without_what_restarts_need():
    texts = "\n".join([*CHAPTERS.values(), *CODE.values()]).replace("\\\n", "")
    found = re.findall(r".*torchrun .*--max.restarts\S* .*\.py.*", texts)
    assert len(found) >= 2
    for line in found:
        assert re.search(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun .*(--standalone|c10d)", line), line
    batch = (ROOT / "multinode.sbatch").read_text().replace("\\\n", "")
    assert re.search(r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*--max-restarts=\d .*c10d", batch, re.DOTALL)


def test_the_short_scripts_in_the_chapters_print_what_the_chapters_say():
    Path("gradients.py").write_text(block("averaged = net.weight.grad"))
    printed = train(Path("gradients.py").resolve(), device=False).stdout
    lines = sorted(re.findall(r"rank \d: .*?(?=rank|$)", printed, re.MULTILINE))  # two ranks may write at the same time
    assert "```\n{}\n{}\n```".format(*lines) in CHAPTERS[ROOT / "docs/how_it_works.md"]
    Path("ring.py").write_text(block("/proc/net/dev"))
    assert 1.5 <= float(train(Path("ring.py").resolve(), processes=4, device=False).stdout)  # others may send meanwhile
