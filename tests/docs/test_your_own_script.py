"""The lines to copy do what the chapters say, in a script of one's own."""
import ast
import re
from pathlib import Path

from chapters import blocks
from launch import ROOT, train

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
    train(Path("parts.py").resolve(), processes=2, device=False)


def test_saved_weights_work_elsewhere_as_readme_shows():
    snippet, = (block for block in blocks("python") if "load_state_dict" in block)
    train("single_gpu.py", 1, "--checkpoint", "multigpu_spawn.pt")
    Path("snippet.py").write_text(snippet)
    done = train(Path("snippet.py").resolve(), processes=0, device=False)
    assert re.fullmatch(r"predicted: \d label: \d\n", done.stdout)


# Rank 1 works where no file is, as on a machine of its own.
APART = """import os
if os.environ["RANK"] == "1":
    os.makedirs("another", exist_ok=True)
    os.chdir("another")
"""


def test_waves_and_waves_ddp_resume_what_either_has_saved_also_where_rank_0_alone_has_the_file():
    def losses(script, epochs, *more, processes=0, before=""):
        job = train(f"examples/{script}.py", "--epochs", epochs, *more, processes=processes, device=False,
                    before=before, CUDA_VISIBLE_DEVICES="")
        return re.findall(r"epoch (\d+) \| loss (\S+) \| test loss (\S+)", job.stdout)

    alone = losses("waves", 6)
    assert [int(epoch) for epoch, _, _ in alone] == [1, 2, 3, 4, 5, 6]
    assert losses("waves_ddp", 2, processes=2, before=APART) == alone[:2]
    assert losses("waves_ddp", 4, processes=2, before=APART) == alone[2:4]
    assert losses("waves", 6, "--checkpoint", "waves_ddp.pt") == alone[4:]


COMMON = """import copy
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

def check(model, alone, *factors):
    for one, whole, factor in zip(model.parameters(), alone.parameters(), factors or [1] * 99):
        torch.testing.assert_close(one.grad, whole.grad * factor, rtol=0, atol=1e-12)

def main():
    {code}

{definitions}
main()
dist.destroy_process_group()
"""
OF_THE_PAIR = ast.parse((ROOT / "examples/contrastive_ddp.py").read_text())


def block(text, indent):
    """The one block of the chapters that has this text, so far to the right that it continues a function."""
    found, = (block for block in blocks("python") if text in block)
    return found.rstrip().replace("\n", "\n" + " " * indent)


def in_ranks(code, processes):
    definitions = [ast.unparse(part) for part in OF_THE_PAIR.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
    Path("ranks.py").write_text(COMMON.format(code=code.strip().replace("\n", "\n    "), definitions="\n\n".join(definitions)))
    train(Path("ranks.py").resolve(), processes=processes, device=False)


def test_losses_over_pairs_have_the_gradients_of_one_process_and_the_wrong_ways_have_not():
    in_ranks(f"""
waves, words = torch.randn(12, 64), torch.randint(30, (12, 3))
alone = Matcher()
loss_function(*alone(waves, words)).backward()

def whole(heard, told, scale):
    loss_function(Gather.apply(heard), Gather.apply(told), scale).backward()

def own_rows(heard, told, scale):
    {block("pairs = rank * len(heard)", 4)}

def own_part_put_back(heard, told, scale):
    def gather(mine):
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(parts, mine.detach())
        return torch.cat([*parts[:rank], mine, *parts[rank + 1:]])
    (world_size * loss_function(gather(heard), gather(told), scale)).backward()

def views_as_one(heard, told, scale):
    loss_function(*Gather.apply(torch.cat([heard, told])).chunk(2), scale).backward()

def gathered(way):
    model = DDP(copy.deepcopy(alone))
    model.zero_grad()
    way(*model(waves[rank::world_size], words[rank::world_size]))
    return model

assert [*dict(alone.named_parameters())][0] == "log_scale"
for way in (whole, own_rows):
    check(gathered(way), alone)
check(gathered(own_part_put_back), alone, world_size, *[1] * 99)
views = gathered(views_as_one).module.log_scale.grad
assert abs(views / alone.log_scale.grad - 1) > 0.1
""", 3)


def test_ratios_of_sums_top_k_and_a_gradient_penalty_have_the_gradients_of_one_process():
    in_ranks(f"""
inputs, masks, k = torch.randn(13, 4), torch.randint(2, (13, 1)).double(), 5
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def dice(model, batch, target):
    scores = model(batch).sigmoid()
    return 1 - 2 * (scores * target).sum() / (scores + target).sum()

def gathered_dice(model, batch, target):
    scores = model(batch).sigmoid()
    {block("overlap, area = Gather", 4)}

def hardest(model, batch, target):
    return (model(batch) - target).flatten().abs().topk(k).values.mean()

def gathered_hardest(model, batch, target):
    losses = (model(batch) - target).flatten().abs()
    {re.search("`(Gather.apply.losses.[^`]*)`", (ROOT / "docs/your_own_script.md").read_text())[1]}.backward()

def parts_of_penalised(model, batch):
    batch = batch.clone().requires_grad_()
    slope, = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return model(batch).square().mean(), (slope.norm(dim=1) - 1).square().mean()

def penalised(model, batch, target):
    return sum(parts_of_penalised(model, batch))

def penalised_at_once(model, batch, target):
    penalised(model, batch, target).backward()

for one, many, samples in [(dice, gathered_dice, 13), (hardest, gathered_hardest, 12), (penalised, penalised_at_once, 12)]:
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    alone.zero_grad(), model.zero_grad()
    one(alone, inputs[:samples], masks[:samples]).backward()
    many(model, inputs[rank:samples:world_size], masks[rank:samples:world_size])
    check(model, alone)
model.zero_grad()
for loss in parts_of_penalised(model, inputs[rank:12:world_size]):
    loss.backward(retain_graph=True)  # by itself the penalty does not reach the last bias, for which DDP waits
assert not torch.allclose(model.module[0].weight.grad, alone[0].weight.grad, rtol=0.01)
""", 3)


def test_environments_split_among_ranks_play_and_train_as_in_one_process():
    in_ranks(f"""
class Game:
    def __init__(self, number):
        self.state = torch.randn(2, generator=torch.Generator().manual_seed(number))

    def play(self, noise):
        self.state = self.state + noise
        return self.state

alone = nn.Linear(2, 1)
model, envs, games, actions = DDP(copy.deepcopy(alone)), *([Game(i) for i in range(6)] for _ in "ab"), 2
for epoch in range(2):
    model.zero_grad(), alone.zero_grad()
    torch.manual_seed(epoch)
    whole = torch.stack([game.play(noise) for game, noise in zip(games, torch.randn(len(games), actions))])
    torch.manual_seed(epoch)
    {block("envs[i].play", 4)}
    assert torch.equal(batch, whole)
    alone(whole).square().mean().backward()
    model(batch[rank::world_size]).square().mean().backward()
    check(model, alone)
""", 3)


def test_ranks_seeded_apart_shuffle_alike_and_noise_is_a_part_of_what_one_process_draws():
    in_ranks(f"""
def of_all(values):
    parts = [None] * world_size
    dist.all_gather_object(parts, values)
    return parts

batch_size, data, batch, part = 4, range(20), torch.zeros(7, 3), slice(rank, None, world_size)
torch.manual_seed(rank)
{block("generator=torch.Generator().manual_seed(0)", 0)}
first, *others = of_all([row.tolist() for _ in range(2) for row in loader])
assert others == [first] * (world_size - 1)
torch.manual_seed(1)
whole = torch.randn(7, 3)
torch.manual_seed(1)
{block("noise = torch.randn(batch.shape)", 0)}
assert torch.equal(noise, whole[rank::world_size])
""", 2)
