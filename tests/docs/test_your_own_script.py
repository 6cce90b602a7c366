"""The lines to copy do what the chapters say, in a script of one's own."""
import re
from pathlib import Path

from chapters import blocks
from launch import train

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


def test_waves_resumes_what_waves_ddp_has_saved():
    def losses(script, epochs, *more, processes=0):
        job = train(f"examples/{script}.py", "--epochs", epochs, *more, processes=processes, device=None, CUDA_VISIBLE_DEVICES="")
        return re.findall(r"epoch (\d+) \| loss (\S+) \| test loss (\S+)", job.stdout)

    alone = losses("waves", 6)
    assert [int(epoch) for epoch, _, _ in alone] == [1, 2, 3, 4, 5, 6]
    assert losses("waves_ddp", 4, processes=2) == alone[:4]
    assert losses("waves", 6, "--checkpoint", "waves_ddp.pt") == alone[4:]
