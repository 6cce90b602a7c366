"""recipes/large.py: no process holds the whole model, or writes it, alone."""
import re
import subprocess
import sys
from pathlib import Path

from launch import ADAMW, IN_FLOAT64, ROOT, SMALL, after, check_equal, figures, little_data, load, train, with_optimizer

LITTLE_DATA = little_data(96, 21)
VIT = "--model", "vit", "--lr", 0.002
LOGS_MODELS = after("utils.build_model", "next(result.parameters()).device")


def test_it_trains_what_fsdp_trains_resumes_on_another_number_of_processes_and_becomes_a_plain_file():
    def leg(script, epochs, *more, processes=2):
        copy = with_optimizer(script, ADAMW)
        return figures(train(copy, epochs, *VIT, *SMALL, *more, processes=processes, before=IN_FLOAT64 + LITTLE_DATA).stdout)

    whole = leg("recipes/fsdp.py", 3)
    printed = leg("recipes/large.py", 1) | leg("recipes/large.py", 2, processes=3)
    command, = re.findall(r"^python (-m torch.distributed.checkpoint.*)", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    subprocess.run([sys.executable, *command.replace("shards/50", "shards/2").split()], check=True, capture_output=True)
    assert printed | leg("single_gpu.py", 3, "--checkpoint", command.split()[-1]) == whole
    check_equal(command.split()[-1], "fsdp.pt")


def test_rank_0_alone_makes_the_weights():
    train("recipes/large.py", 1, *VIT, *SMALL, before=LITTLE_DATA + LOGS_MODELS)
    assert Path("log.0").read_text().split() == ["cpu", "meta"] and Path("log.1").read_text().split() == ["meta"]


def test_a_kill_while_saving_leaves_the_checkpoint_before_whole():
    options = 3, 1, *SMALL
    dies_at_the_second = "import torch.distributed.checkpoint" + after(
        "torch.distributed.checkpoint.FileSystemWriter.write_data", "os.path.exists('large.pt') and os.kill(os.getpid(), 9)")
    train("recipes/large.py", *options, status=-9, before=LITTLE_DATA + dies_at_the_second)
    assert load("large.pt")["epoch"] == 1 and {file.name for file in Path("large.pt.shards").iterdir()} == {"1", "2"}
    resumed = train("recipes/large.py", *options, before=LITTLE_DATA)
    assert "large.pt: 1 of 3 epochs are done" in resumed.stdout
    assert [file.name for file in Path("large.pt.shards").iterdir()] == ["3"]  # one checkpoint is kept


def test_a_checkpoint_of_which_a_file_is_cut_and_another_scripts_are_refused():
    for script in ("recipes/large.py", "single_gpu.py"):
        train(script, 1, *SMALL, before=LITTLE_DATA)
    shard = Path("large.pt.shards/1/__1_0.distcp")
    shard.write_bytes(shard.read_bytes()[:-100])
    for script, file, says in (("recipes/large.py", "large.pt", "CheckpointException"),
                               ("single_gpu.py", "large.pt", "only recipes.large can resume it"),
                               ("recipes/large.py", "single_gpu.pt", "only another script can resume it")):
        job = train(script, 2, *SMALL, "--checkpoint", file, processes=1, status=1, before=LITTLE_DATA)
        assert re.search(says, job.stderr) and "epoch 2" not in job.stdout


def test_what_would_train_on_garbage_or_lose_its_checkpoint_stops_before_training():
    """A buffer that no file holds, as rotary tables are; a folder that one machine alone sees."""
    tables = after("utils.build_model", "result.register_buffer('table', torch.ones(2), persistent=False)")
    apart = "import os; os.makedirs(os.environ['RANK'], exist_ok=True); os.chdir(os.environ['RANK'])"
    for before, says in ((tables, "recompute them after to_empty\\(\\): {'table'}"),
                         (apart, "large.pt is not on storage that all")):
        job = train("recipes/large.py", 1, *SMALL, status=1, before=LITTLE_DATA + before)
        assert re.search(f"^large.py: .*{says}", job.stderr, re.MULTILINE) and "epoch" not in job.stdout
