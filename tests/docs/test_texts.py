"""README leads to its chapters, links lead somewhere, and the commands shown work as they stand there."""
import functools
import re
from pathlib import Path

from chapters import CHAPTERS, block, blocks
from launch import ROOT, run
from torch.distributed.run import get_args_parser


def test_readme_leads_to_every_chapter_and_every_link_between_the_chapters_leads_to_a_file_and_a_heading():
    readme = CHAPTERS[ROOT / "README.md"]
    assert all(f"]({file.relative_to(ROOT)})" in readme for file in CHAPTERS if file.name != "README.md")
    found = [(file, *link) for file in CHAPTERS for link in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", CHAPTERS[file])]
    for file, path, anchor in found:
        target = (file.parent / path).resolve() if path else file
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        places = ["", *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)]
        assert target.exists() and anchor in places, (file, path, anchor)


def test_every_command_in_a_chapter_or_at_the_top_of_a_script_names_files_and_options_that_their_help_shows_without_a_launcher():
    def options_in(text):
        return {*re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text)}

    options = functools.cache(lambda file: options_in(run(ROOT / file, "--help", processes=0).stdout))
    launcher = options_in(get_args_parser().format_help())
    scripts = [*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py"), *ROOT.glob("examples/*.py"), ROOT / "multinode.sbatch"]
    lines = "\n".join([*blocks("sh"), *(file.read_text().partition("import ")[0] for file in scripts)]).replace("\\\n", "")
    for command in re.findall(r"(?:python|torchrun) (.*?)(?:$|&&|  #)", lines, re.MULTILINE):
        command = re.sub(r'"[^"]*"', "", command)  # commands for another command
        command = re.sub(r"-m recipes\.(\w+)", r"recipes/\1.py", command)
        if file := re.search(r"[\w/]+\.py|tools/\w+", command):
            assert options_in(command) <= launcher | options(file[0]), command
    assert lines.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == lines.count("--max-restarts") > 0  # which need it


def test_the_lines_that_show_how_gradients_are_averaged_print_what_the_chapter_says():
    Path("gradients.py").write_text(block("averaged = net.weight.grad"))
    lines = sorted(re.findall(r"rank \d: .*?(?=rank|$)", run(Path("gradients.py").resolve()).stdout, re.M))  # perhaps in one line
    assert "```\n{}\n{}\n```".format(*lines) in CHAPTERS[ROOT / "docs/how_it_works.md"]
