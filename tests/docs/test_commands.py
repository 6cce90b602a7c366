"""The commands that README, its chapters and the scripts show work as they stand there."""
import functools
import re
import shlex
import sys

from chapters import CHAPTERS, blocks
from launch import RECIPES, ROOT, SCRIPTS, Job, train
from torch.distributed.run import get_args_parser

EXAMPLES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("examples/*.py"))
CODE = {name: (ROOT / name).read_text() for name in [*SCRIPTS, *RECIPES, *EXAMPLES]}


def commands():
    """The command lines in the chapters' blocks and in the scripts' docstrings."""
    texts = [*blocks("sh"), *(text.split('"""')[1] for text in CODE.values())]
    found = re.findall(r"(?:\w+=\S* )*(?:\S*/)?(?:python3?|torchrun) .*", "\n".join(texts).replace("\\\n", ""))
    return [part.strip() for line in found for part in line.split("&&")]


def given(words):
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def test_every_command_names_files_and_options_that_exist():
    launcher = {option for action in get_args_parser()._actions for option in action.option_strings}

    @functools.cache
    def options(file):
        job = train(file.removesuffix("/__main__.py"), "--help", processes=0, device=False)
        found = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", job.stdout)
        return {*found, *(launcher if "check_cluster" in file else [])}  # which takes them too

    found = commands()
    assert len(found) > 20
    for line in found:
        line = re.sub(r" recipes\.(\w+)", r" recipes/\1.py", line)
        line = re.sub(r" (tools/\w+)(?= |$)", r" \1/__main__.py", line)
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"\w+=", word)]
        files = [word for word in words if word.endswith((".py", ".txt"))]
        assert all((ROOT / file).is_file() for file in files), line
        if not files or files[0].endswith(".txt"):
            continue
        place = words.index(files[0])
        if words[0].endswith("torchrun") or "torch.distributed.launch" in words:
            assert given(words[1:place]) <= launcher, line
        if given(words[place + 1:]):
            assert given(words[place + 1:]) <= options(files[0]), line


def test_no_command_restarts_without_what_restarts_need():
    texts = [*CHAPTERS.values(), *CODE.values()]
    found = re.findall(r".*torchrun .*--max.restarts\S* .*\.py.*", "\n".join(texts).replace("\\\n", ""))
    assert len(found) >= 3
    for line in found:
        assert re.search(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun .*(--standalone|c10d)", line), line
    batch = (ROOT / "multinode.sbatch").read_text().replace("\\\n", "")
    assert re.search(r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*--max-restarts=\d .*c10d", batch, re.DOTALL)


def test_the_summary_says_what_is_skipped_for_want_of_a_package_and_how_to_install_it():
    bare = Job([sys.executable, "-m", "pytest", ROOT / "tests/recipes/test_compile.py", "-n0"], PATH="/nowhere")
    assert bare.wait() == 0
    assert re.search(r"^SKIPPED \[4] .*: needs a package: apt-get install g\+\+$", bare.stdout, re.MULTILINE)
