"""recipes/fsdp.py: each rank holds its share, and a file is like any other script's."""
import re
from pathlib import Path

import pytest
from chapters import CHAPTERS, in_ranks
from launch import IN_FLOAT64, ROOT, TWO_RATES, after, check_close, check_equal, figures, little_data, load, train, with_optimizer

# Bytes that an optimizer step works on. Gradients of one block share a store.
LOGS_BYTES = after("torch.optim.SGD.step", """sum({
    store.data_ptr(): store.nbytes() for share, state in given[0].state.items()
    for tensor in (share, share.grad, state["momentum_buffer"]) if hasattr(tensor, "to_local")
    for store in [tensor.to_local().untyped_storage()]}.values())""")


def test_fsdp_and_single_gpu_go_on_from_each_other_with_the_rates_of_the_file_as_if_one_had_trained_alone():
    fsdp, single_gpu = (with_optimizer(script, TWO_RATES) for script in ("recipes/fsdp.py", "single_gpu.py"))
    options, exact = ("--batch-size", 48), IN_FLOAT64 + little_data()
    whole = figures(train(single_gpu, 3, *options, before=exact).stdout)
    printed = {}
    for script, epochs, rate in ((fsdp, 1, ()), (single_gpu, 2, ("--lr", 0.5)), (fsdp, 3, ("--lr", 0.5))):
        printed |= figures(train(script, epochs, *rate, "--checkpoint", "run.pt", *options, before=exact).stdout)
    assert printed == whole
    check_equal("run.pt", "single_gpu.pt")


def test_bfloat16_as_the_chapter_has_it_changes_the_losses_by_no_more_than_its_digits():
    precision, = re.findall(r", (mp_policy=MixedPrecisionPolicy\([^`]*\))\)`", CHAPTERS[ROOT / "docs/recipes.md"])
    text = (ROOT / "recipes/fsdp.py").read_text()
    for line, changed in (("import fully_shard", "import MixedPrecisionPolicy, fully_shard"),
                          ("mesh=mesh)", f"mesh=mesh, {precision})"), ("(images), labels", "(images).float(), labels")):
        assert text.count(line) == 1
        text = text.replace(line, changed)
    Path("bfloat16.py").write_text(text)
    options = 2, "--model", "vit", "--lr", 0.002, "--batch-size", 48
    found, whole = (train(script, *options, before=little_data(96, 21)).stdout
                    for script in (Path("bfloat16.py").resolve(), "recipes/fsdp.py"))
    check_close(figures(found), figures(whole), loss=0.01, accuracy=5)
    assert found != whole


@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_layers_train_as_they_do_whole_and_each_rank_holds_its_share_of_weights_gradients_and_momentum(model):
    """11 and 10 held-out samples in batches of 5: rank 0 has a batch more, whose forward rank 1 must attend."""
    options, few = (1, "--model", model, "--batch-size", 10), IN_FLOAT64 + little_data(20, 21)
    whole = train("multigpu_torchrun.py", *options, before=few)
    assert figures(train("recipes/fsdp.py", *options, before=few + LOGS_BYTES).stdout) == figures(whole.stdout)
    check_equal("fsdp.pt", "multigpu_torchrun.pt")
    size = 3 * sum(weight.nbytes for name, weight in load("fsdp.pt")["model"].items()
                   if "running" not in name and "num_batches" not in name)
    for log in ("log.0", "log.1"):
        assert int(Path(log).read_text().split()[-1]) == pytest.approx(size / 2, rel=0.03)


LINES = """
from types import SimpleNamespace
from torch.distributed.checkpoint import state_dict as state
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn
import utils
device, gpus, args, BLOCKS = torch.device("cpu"), 2, SimpleNamespace(model="vit"), ("EncoderBlock",)
{mesh}
model = utils.build_model(args.model)
alone, slow = copy.deepcopy(model), copy.deepcopy(model)
weights = model.state_dict()
full = state.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
{shards}
{weights}
state.set_model_state_dict(model, weights, options=full)
pair = [(each, torch.optim.AdamW(each.parameters(), lr=0.01)) for each in (model, alone)]
schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)) for _, optimizer in pair]
for step in range(3):
    images, answers = torch.randn(24, 3, 32, 32), torch.randint(10, (24,))
    alone.zero_grad()
    model.zero_grad()
    F.cross_entropy(alone(images), answers).backward()
    images, labels = images[rank::world_size], answers[rank::world_size]
    for part in (slice(0, 4), slice(4, len(labels))):
        {sync}
        loss = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
        (loss / len(labels)).backward()
    one, norm = (torch.nn.utils.clip_grad_norm_(each.parameters(), max_norm=0.5) for each in (alone, model))
    torch.testing.assert_close({norm}, one, rtol=1e-9, atol=0)
    for (_, optimizer), schedule in zip(pair, schedules):
        optimizer.step()
        schedule.step()
    {average}
    average([*slow.parameters()], [*alone.parameters()], None)
{best}
assert len(best) == (len(weights) if rank == 0 else 0)
for name, tensor in best.items():
    torch.testing.assert_close(tensor, slow.state_dict()[name], rtol=1e-9, atol=1e-12)
"""


def test_the_chapters_lines_accumulate_clip_average_and_copy_shards_as_one_process_does():
    """On two machines of two processes, as the chapter's mesh has it."""
    chapter = CHAPTERS[ROOT / "docs/recipes.md"].partition("## Under FSDP2")[2].partition("\n## ")[0]
    found = re.findall(r"```python\n(.*?)\n```", chapter, re.DOTALL)
    lines = dict(zip(("shards", "weights", "average", "best"), found, strict=True))
    for name, begins in (("sync", r"model\.set_requires"), ("mesh", "mesh = "), ("norm", r"norm\.")):
        lines[name], = re.findall(f"`({begins}[^`]*)`", chapter)
    in_ranks(re.sub(r"\{(\w+)\}", lambda place: lines[place[1]], LINES), processes=4)
