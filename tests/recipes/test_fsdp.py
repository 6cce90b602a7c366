"""recipes/fsdp.py and recipes/large.py: each rank holds its shard, and trains what a whole model does."""
import importlib.util
import re
from pathlib import Path

import pytest
from chapters import CHAPTERS, in_ranks
from launch import IN_FLOAT64, ROOT, SMALL, after, check_equal, figures, little_data, load, train

TWO_BLOCKS = """
import torch, utils
from torchvision.models.resnet import BasicBlock
utils.build_model = lambda name: torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 4, 4), BasicBlock(8, 8), BasicBlock(8, 8), torch.nn.Flatten(), torch.nn.Linear(512, 10))
"""
LOGS_BYTES = after("torch.optim.SGD.step", "sum(each.to_local().nbytes for shard, state in given[0].state.items()"
                   "    for each in (shard, shard.grad, state['momentum_buffer']) if hasattr(each, 'to_local'))")


def test_a_model_trains_as_it_does_whole_and_each_rank_holds_its_shard_of_weights_gradients_and_momentum():
    """11 and 10 held-out samples in batches of 5: rank 0 has a batch more, whose forward rank 1 must attend."""
    options, few = (1, "--batch-size", 10), IN_FLOAT64 + little_data(20, 21) + TWO_BLOCKS
    whole = train("multigpu_torchrun.py", *options, before=few)
    assert figures(train("recipes/fsdp.py", *options, before=few + LOGS_BYTES).stdout) == figures(whole.stdout)
    check_equal("fsdp.pt", "multigpu_torchrun.pt")
    size = 3 * sum(weight.nbytes for name, weight in load("fsdp.pt")["model"].items()
                   if "running" not in name and "num_batches" not in name)
    for log in ("log.0", "log.1"):
        assert int(Path(log).read_text().split()[-1]) == pytest.approx(size / 2, rel=0.03)


LINES = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import utils
device, gpus = torch.device("cpu"), 2
{mesh}
alone = utils.build_model("vit")
model, rounded = copy.deepcopy(alone), copy.deepcopy(alone)
for whole, options in ((model, dict()), (rounded, {precision})):
    for block in [*(block for block in whole.modules() if type(block).__name__ == "EncoderBlock"), whole]:
        fully_shard(block, mesh=mesh, **options)

images, labels = torch.randn(24, 3, 32, 32), torch.randint(10, (24,))
F.cross_entropy(alone(images), labels).backward()
images, labels = images[rank::world_size], labels[rank::world_size]
for part in (slice(0, 4), slice(4, len(labels))):
    {sync}
    loss = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
    (loss / len(labels)).backward()
norm, whole_norm = (torch.nn.utils.clip_grad_norm_(each.parameters(), max_norm=0.5) for each in (model, alone))
torch.testing.assert_close({norm}, whole_norm)
for shard, whole in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(shard.grad.full_tensor(), whole.grad)
scores = rounded(images)
assert scores.dtype == torch.bfloat16
torch.testing.assert_close(scores.double(), alone(images), rtol=0, atol=0.05)
"""


def test_the_chapters_lines_shard_within_a_machine_accumulate_clip_and_round_to_bfloat16_as_it_says():
    """On two machines of two processes, as the chapter's mesh has it."""
    table = CHAPTERS[ROOT / "docs/recipes.md"].partition("## Under FSDP2")[2].partition("\n## ")[0]
    code = LINES
    places = {"mesh": "mesh = ", "sync": r"model\.set_requires", "norm": r"norm\.", "precision": r"fully_shard\(…, "}
    for place, begins in places.items():
        line, = re.findall(f"`({begins}[^`]*)`", table)
        code = code.replace(f"{{{place}}}", line)
    in_ranks(code.replace("fully_shard(…, ", "dict("), processes=4)


LITTLE_DATA = little_data(96, 21)
VIT = "--model", "vit", "--lr", 0.002
MODELS = after("utils.build_model", "next(result.parameters()).device")


def test_large_trains_what_fsdp_trains_resumes_on_another_number_of_processes_and_becomes_a_plain_file():
    """With AdamW, whose state has numbers too. Rank 0 alone makes the weights."""
    def leg(script, epochs, *more, processes=2):
        copy = Path("copies", script).resolve()
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / script).read_text().replace(
            "torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)", "torch.optim.AdamW(model.parameters(), lr=args.lr)"))
        before = IN_FLOAT64 + LITTLE_DATA + (MODELS if script == "recipes/large.py" else "")
        return figures(train(copy, epochs, *VIT, *SMALL, *more, processes=processes, before=before).stdout)

    whole = leg("recipes/fsdp.py", 1) | leg("recipes/fsdp.py", 3)
    printed = leg("recipes/large.py", 1)
    assert Path("log.0").read_text().split() == ["cpu", "meta"] and Path("log.1").read_text().split() == ["meta"]
    printed |= leg("recipes/large.py", 2, processes=3)
    command, = re.findall(r"^python -m (torch.distributed.checkpoint.*)", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    module, *words = command.replace("shards/50", "shards/2").split()
    train(importlib.util.find_spec(module).origin, *words, processes=1, device=False)
    assert printed | leg("single_gpu.py", 3, "--checkpoint", words[-1]) == whole
    check_equal(words[-1], "fsdp.pt")


def test_a_kill_while_shards_are_saved_leaves_the_checkpoint_before_whole():
    options = 3, 1, *SMALL
    dies_at_the_second = "import torch.distributed.checkpoint" + after(
        "torch.distributed.checkpoint.FileSystemWriter.write_data", "os.path.exists('large.pt') and os.kill(os.getpid(), 9)")
    train("recipes/large.py", *options, status=-9, before=LITTLE_DATA + dies_at_the_second)
    assert load("large.pt")["epoch"] == 1 and {file.name for file in Path("large.pt.shards").iterdir()} == {"1", "2"}
    resumed = train("recipes/large.py", *options, before=LITTLE_DATA)
    assert "large.pt: 1 of 3 epochs done" in resumed.stdout
    assert [file.name for file in Path("large.pt.shards").iterdir()] == ["3"]  # one checkpoint is kept


def test_what_large_cannot_resume_or_would_train_as_garbage_stops_before_training():
    def refused(says, script="recipes/large.py", checkpoint="large.pt", before="", processes=1):
        job = train(script, 2, *SMALL, "--checkpoint", checkpoint, processes=processes, status=1, before=LITTLE_DATA + before)
        assert re.search(says, job.stderr) and " | loss " not in job.stdout

    refused(r"recompute them after to_empty\(\): {'table'}",  # as rotary tables are
            before=after("utils.build_model", "result.register_buffer('table', torch.ones(2), persistent=False)"))
    refused("not on storage that all machines share", processes=2,
            before="import os; os.makedirs(os.environ['RANK'], exist_ok=True); os.chdir(os.environ['RANK'])\n")
    for script in ("recipes/large.py", "single_gpu.py"):
        train(script, 1, *SMALL, before=LITTLE_DATA)
    refused("Missing key", "single_gpu.py")
    refused("single_gpu.pt.shards/1", checkpoint="single_gpu.pt")
    shard = Path("large.pt.shards/1/__1_0.distcp")
    shard.write_bytes(shard.read_bytes()[:-100])
    refused("CheckpointException")
