"""The lines to copy do what the chapters say, in a script of one's own."""
import re
from pathlib import Path

from chapters import CHAPTERS, block, in_ranks
from launch import ROOT, train

TEXT = CHAPTERS[ROOT / "docs/your_own_script.md"]
# Rank 1 works where no file is, as on a machine of its own.
APART = """import os
if os.environ["RANK"] == "1":
    os.makedirs("another", exist_ok=True)
    os.chdir("another")
"""


def test_saved_weights_work_elsewhere_as_the_chapter_shows():
    train("single_gpu.py", 1, "--checkpoint", "multigpu_spawn.pt")
    Path("snippet.py").write_text(block("utils.load_data("))
    done = train(Path("snippet.py").resolve(), processes=0, device=False)
    assert re.fullmatch(r"predicted: \d label: \d\n", done.stdout)


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


def test_the_block_for_unequal_and_empty_parts_gives_gradients_and_loss_of_the_whole_batch():
    in_ranks(f"""
criterion, net = nn.MSELoss(), nn.Linear(4, 1)
for samples in (6, 5, 1):  # the last part is empty
    batch, target = torch.randn(samples, 4), torch.randn(samples, 1)
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters())
    whole = criterion(alone(batch), target)
    whole.backward()
    {block("mine = len(range", 4)}
    check(model, alone)
    torch.testing.assert_close(shown, whole.detach())
""", 2)


def test_both_ways_of_a_loss_over_pairs_have_the_gradients_of_one_process():
    in_ranks(f"""
waves, words = torch.randn(12, 64), torch.randint(30, (12, 3))
alone = Matcher()
loss_function(*alone(waves, words)).backward()

def whole(heard, told, scale):
    loss_function(Gather.apply(heard), Gather.apply(told), scale).backward()

def own_rows(heard, told, scale):
    {block("pairs = rank * len(heard)", 4)}

for way in (whole, own_rows):
    model = DDP(copy.deepcopy(alone))
    model.zero_grad()
    way(*model(waves[rank::world_size], words[rank::world_size]))
    check(model, alone)
""")


def test_ratios_of_sums_top_k_and_a_gradient_penalty_have_the_gradients_of_one_process():
    in_ranks(f"""
inputs, masks, k = torch.randn(13, 4), torch.randint(2, (13, 1)).double(), 5
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def dice(model, batch, target):
    scores = model(batch).sigmoid()
    (1 - 2 * (scores * target).sum() / (scores + target).sum()).backward()

def gathered_dice(model, batch, target):
    scores = model(batch).sigmoid()
    {block("overlap, area = Gather", 4)}

def hardest(model, batch, target):
    (model(batch) - target).flatten().abs().topk(k).values.mean().backward()

def gathered_hardest(model, batch, target):
    losses = (model(batch) - target).flatten().abs()
    {re.search("`(Gather.apply.losses.[^`]*)`", TEXT)[1]}.backward()

def penalised(model, batch, target):
    batch = batch.clone().requires_grad_()
    slope, = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    (model(batch).square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()

for one, many, samples in [(dice, gathered_dice, 13), (hardest, gathered_hardest, 12), (penalised, penalised, 12)]:
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    one(alone, inputs[:samples], masks[:samples])
    many(model, inputs[rank:samples:world_size], masks[rank:samples:world_size])
    check(model, alone)
""")


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
""")


def test_ranks_seeded_apart_shuffle_alike_and_noise_is_a_part_of_what_one_process_draws():
    in_ranks(f"""
batch_size, data, batch, part = 4, range(20), torch.zeros(7, 3), slice(rank, None, world_size)
torch.manual_seed(rank)
{block("generator=torch.Generator().manual_seed(0)")}
drawn = [None] * world_size
dist.all_gather_object(drawn, [row.tolist() for _ in range(2) for row in loader])
assert drawn == [drawn[0]] * world_size
torch.manual_seed(1)
whole = torch.randn(7, 3)
torch.manual_seed(1)
{block("noise = torch.randn(batch.shape)")}
assert torch.equal(noise, whole[rank::world_size])
""")
