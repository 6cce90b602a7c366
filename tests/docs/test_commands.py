"""README and its chapters say what is so: commands and links, diffs and reasons, figures, scripts of one's own."""
import functools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import NOT_COPIED, RECIPES, ROOT, SCRIPTS, Job, check_close, figures, train
from torch.distributed.run import get_args_parser

CHAPTERS = {file: file.read_text() for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
README = CHAPTERS[ROOT / "README.md"]
EXAMPLES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("examples/*.py"))
CODE = {name: (ROOT / name).read_text() for name in [*SCRIPTS, *RECIPES, *EXAMPLES]}
BENCHMARK = ROOT / "tools/benchmark.py"


def blocks(language):
    text = "\n".join(CHAPTERS.values())
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands():
    """The command lines in the chapters' blocks and in the scripts' docstrings."""
    texts = [*blocks("sh"), *(text.split('"""')[1] for text in CODE.values())]
    found = re.findall(r"(?:\w+=\S* )*(?:\S*/)?(?:python3?|torchrun) .*", "\n".join(texts).replace("\\\n", ""))
    return [part.strip() for line in found for part in line.split("&&")]


def given(words):
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def test_diffs_are_those_of_the_files():
    done = subprocess.run([sys.executable, ROOT / "tools/render.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_front_door_is_short_and_every_link_between_the_chapters_leads_to_a_file_and_a_heading():
    assert len(README.split()) <= 1200
    assert sum(len(text.split()) for text in CHAPTERS.values()) <= 12_500
    assert all(f"]({file.relative_to(ROOT)})" in README for file in CHAPTERS if file != ROOT / "README.md")
    found = [(file, *link) for file in CHAPTERS for link in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", CHAPTERS[file])]
    assert len(found) > 20
    for file, path, anchor in found:
        target = (file.parent / path).resolve() if path else file
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        places = ["", *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)]
        assert target.exists() and anchor in places, (file, path, anchor)


def test_every_command_names_files_and_options_that_exist():
    launcher = {option for action in get_args_parser()._actions for option in action.option_strings}

    @functools.cache
    def options(file):
        found = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", train(file, "--help", processes=0, device=None).stdout)
        return {*found, *(launcher if file == "tools/check_cluster.py" else [])}  # which takes them too

    found = commands()
    assert len(found) > 20
    for line in found:
        line = re.sub(r" recipes\.(\w+)", r" recipes/\1.py", line)
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


def test_what_is_skipped_for_want_of_a_package_is_the_last_line_with_how_to_install_it():
    bare = Job([sys.executable, "-m", "pytest", ROOT / "tests/docs/test_page.py", "-n0", "-k", "fold"], PATH="/nowhere")
    assert bare.wait() == 0
    assert bare.stdout.splitlines()[-1] == "skipped for want of chromium: 1; apt-get install chromium"


def test_importing_utils_leaves_ctrl_c_to_a_notebook_and_works_in_a_thread():
    Path("notebook.py").write_text("""import signal, threading
thread = threading.Thread(target=__import__, args=["utils"])
thread.start()
thread.join()
print(signal.getsignal(signal.SIGINT).__name__)
""")
    job = Job([sys.executable, "notebook.py"], PYTHONPATH=str(ROOT))
    assert job.wait() == 0 and (job.stdout, job.stderr) == ("default_int_handler\n", "")


PARTS = """import copy
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
criterion, net = nn.MSELoss(), nn.Linear(4, 1, dtype=torch.float64)
for samples in (6, 5, 1):  # the last part is empty
    batch, target = (torch.randn(samples, size, dtype=torch.float64) for size in (4, 1))
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters())
    whole = criterion(alone(batch), target)
    whole.backward()
    {block}
    torch.testing.assert_close([*(one.grad for one in alone.parameters()), whole.detach()],
                               [*(one.grad for one in model.parameters()), shown])
    del model
dist.destroy_process_group()
"""


def test_the_block_for_unequal_and_empty_parts_gives_gradients_and_loss_of_the_whole_batch():
    block, = (block for block in blocks("python") if "mine = len(range" in block)
    Path("parts.py").write_text(PARTS.replace("{block}", block.replace("\n", "\n    ")))
    train(Path("parts.py").resolve(), processes=2, device=None)


def test_saved_weights_work_elsewhere_as_readme_shows():
    snippet, = (block for block in blocks("python") if "load_state_dict" in block)
    train("single_gpu.py", 1, "--checkpoint", "multigpu_spawn.pt")
    Path("snippet.py").write_text(snippet)
    done = train(Path("snippet.py").resolve(), processes=0, device=None)
    assert re.fullmatch(r"predicted: \d label: \d\n", done.stdout)


@pytest.mark.parametrize("files, old, new, says", [
    ("*.py", r"model\.eval\(\)", "model.train(False)", "docs/index.html is behind: run python tools/render.py"),
    ("docs/diffs.md", "<!-- diff single_gpu.py dp.py 3 -->", "", "shows 2 hunks of single_gpu.py -> dp.py, which has 3"),
    ("docs/diffs.md", "(?s)(dp.py 3 -->\n).*?(<!-- end)", r"\1+another\n\2", "hunk 3 of single_gpu.py -> dp.py is not what")],
    ids=["a line changed", "a hunk more", "another hunk"])
def test_render_says_what_is_behind_and_puts_no_other_hunk_over_a_reason(files, old, new, says):
    shutil.copytree(ROOT, "copy", ignore=NOT_COPIED)
    for file in Path("copy").rglob(files):
        file.write_text(re.sub(old, new, file.read_text()))
    done = subprocess.run([sys.executable, "copy/tools/render.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr


def test_waves_resumes_what_waves_ddp_has_saved():
    def losses(script, epochs, *more, processes=0):
        job = train(f"examples/{script}.py", "--epochs", epochs, *more, processes=processes, device=None, CUDA_VISIBLE_DEVICES="")
        return re.findall(r"epoch (\d+) \| loss (\S+) \| test loss (\S+)", job.stdout)

    alone = losses("waves", 6)
    assert [int(epoch) for epoch, _, _ in alone] == [1, 2, 3, 4, 5, 6]
    assert losses("waves_ddp", 4, processes=2) == alone[:4]
    assert losses("waves", 6, "--checkpoint", "waves_ddp.pt") == alone[4:]


def test_fifty_epochs_print_the_same_losses_and_accuracies_with_one_process_and_two():
    one, two = (figures(train(script, 50, 10).stdout) for script in ("single_gpu.py", "multigpu_torchrun.py"))
    assert list(one) == list(two) == list(range(1, 51))
    assert one[1][1] < 20 and one[5][1] < 60 and one[50][1] > 95  # it learns, and not at once
    check_close(two, one)


def test_a_round_gives_table_and_record_and_a_script_that_fails_is_shown_with_its_own_line():
    job = Job([sys.executable, BENCHMARK, "--gpus", "2", "--rounds", "1", "--epochs", "3", "--output", "figures.json"],
              CUDA_VISIBLE_DEVICES="")
    assert job.wait() == 0, job.stderr
    rows = re.findall(r"^\| (\w+\.py[^|]*) \| (\d+) \|.* (\d\.\d{4}) \|$", job.stdout, re.MULTILINE)
    losses = {f"{style} {processes}": loss for style, processes, loss in rows}
    same_training = {f"{script} {1 if script in ('single_gpu.py', 'dp.py') else 2}" for script in SCRIPTS}
    assert losses.keys() == same_training | {f"single_gpu.py --batch-size 240 {n}" for n in (1, 2)}
    assert len({losses[row] for row in same_training}) == 1, "nobody wins by doing less"
    assert "round 1 of 1: multinode.py, processes: 2\n" in job.stderr

    record = json.loads(Path("figures.json").read_text())
    assert record["command"].startswith("python tools/benchmark.py --gpus 2")
    assert {"torch", "torchvision", "python", "cpu", "cores", "gpus"} <= record.keys()
    for row in record["rows"]:
        assert row["runs"][0]["samples/s"] > 0 and 100 < row["runs"][0]["memory, MB"] < 10_000

    job = Job([sys.executable, BENCHMARK, "--model", "no_such_model", "--output", "none.json"])
    assert job.wait() == 1 and not Path("none.json").exists()
    assert "argument --model: invalid choice: 'no_such_model'" in job.stderr


def test_the_chapter_shows_the_figures_of_the_record():
    figures = runpy.run_path(str(BENCHMARK))["figures"]
    chapter = (ROOT / "docs/measured.md").read_text()
    record = json.loads((ROOT / "docs/benchmark.json").read_text())
    assert record["command"] in " ".join(chapter.split())
    for row in record["rows"]:
        assert f"| {' | '.join(map(str, figures(row)))} |\n" in chapter


@pytest.mark.parametrize("model", ["resnet50", "convnext_tiny", "vgg11"])
def test_the_models_without_a_test_of_their_own_train_too(model, fashion_mnist):
    job = train("multigpu_torchrun.py", 1, "--model", model, "--batch-size", 8, *fashion_mnist(16, 8), processes=1)
    assert 0 < figures(job.stdout)[1][0] < 10 and "saved" in job.stdout
