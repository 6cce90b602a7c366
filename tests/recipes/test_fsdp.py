"""recipes/fsdp.py: each rank holds its share, and trains what a whole model does."""
import re
from pathlib import Path

import pytest
from chapters import CHAPTERS, in_ranks
from launch import IN_FLOAT64, ROOT, after, check_equal, figures, little_data, load, train

# Bytes that an optimizer step works on. Gradients of one block share a store.
LOGS_BYTES = after("torch.optim.SGD.step", """sum({
    store.data_ptr(): store.nbytes() for share, state in given[0].state.items()
    for tensor in (share, share.grad, state["momentum_buffer"]) if hasattr(tensor, "to_local")
    for store in [tensor.to_local().untyped_storage()]}.values())""")


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
    for place, begins in (("mesh", "mesh = "), ("sync", r"model\.set_requires"), ("norm", r"norm\."),
                          ("precision", r"fully_shard\(…, ")):
        line, = re.findall(f"`({begins}[^`]*)`", table)
        code = code.replace(f"{{{place}}}", line)
    in_ranks(code.replace("fully_shard(…, ", "dict("), processes=4)
