"""recipes/accumulate.py: gradients are sent once a step."""
import re
from pathlib import Path

from launch import IN_FLOAT64, ROOT, after, check_equal, figures, train

PADDED = """import copy
import itertools
from contextlib import nullcontext
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
texts, answers = torch.randint(9, (48, 5)), torch.randint(9, (48, 5))
lengths = torch.randint(1, 6, (48,))
answers[torch.arange(5) >= lengths[:, None]] = -100
answers[:12] = -100  # of each rank's first micro-batch: nothing but padding
alone = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
model = DDP(copy.deepcopy(alone))
optimizer = torch.optim.SGD(model.parameters())
F.cross_entropy(alone(texts).flatten(0, 1), answers.flatten()).backward()
mine = texts[rank::world_size], answers[rank::world_size]
batches = zip(*(tensor.split(len(tensor) // 4) for tensor in mine))
{block}
assert len(parts) == 4
for one, whole in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(one.grad, whole.grad, rtol=0, atol=1e-12)
del model
dist.destroy_process_group()
"""


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step(fashion_mnist):
    options = 1, *fashion_mnist(760, 10), "--batch-size", 250
    without = train("multigpu_torchrun.py", *options, processes=1, before=IN_FLOAT64)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward",
                  "given[0].training, given[0].require_backward_grad_sync")
    for processes, parts in ((1, 9), (2, 5)):  # eight parts of 30 samples and one of 10; half of them: four and one of 5
        job = train("recipes/accumulate.py", *options, "--checkpoint", f"{processes}.pt", processes=processes,
                    before=IN_FLOAT64 + sends)
        assert figures(job.stdout) == figures(without.stdout)
        check_equal(f"{processes}.pt", "multigpu_torchrun.pt")
        for log in (Path(f"log.{rank}") for rank in range(processes)):
            assert log.read_text().splitlines() == ([*["True False"] * (parts - 1), "True True"]) * 3
            log.unlink()


def test_the_block_for_padding_gives_the_gradients_of_the_whole_batch():
    block = re.search(r"```python\n(parts = list.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)[1]
    Path("padded.py").write_text(PADDED.replace("{block}", block))
    train(Path("padded.py").resolve(), processes=3, device=False)
