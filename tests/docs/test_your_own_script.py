"""The lines to copy do what the chapters say, in a script of one's own."""
from textwrap import indent

from chapters import block, in_ranks

PARTS = {  # what three ranks do one after the other
    "unequal_and_empty_parts_and_what_is_done_with_ddps_result": f"""
net = nn.Linear(4, 4)
net.head = nn.Linear(4, 1)
for samples in (9, 8, 2):  # the last part is empty
    batch, target = torch.randn(samples, 4), torch.randn(samples, 1)
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer, criterion = torch.optim.SGD(model.parameters()), lambda result, y: F.mse_loss(model.module.head(result), y)
    whole = F.mse_loss(alone.head(alone(batch)), target)
    whole.backward()
    {block("mine = len(range", 4)}
    check(model, alone)
    torch.testing.assert_close(shown, whole.detach())
""",
    "a_ratio_of_sums_and_a_gradient_penalty": f"""
inputs, masks = torch.randn(13, 4, requires_grad=True), torch.randint(2, (13, 1)).double()
alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
model, scores = DDP(copy.deepcopy(alone)), alone(inputs)
(1 - 2 * (scores * masks).sum() / (scores + masks).sum()).backward()
scores, target = model(inputs[rank::world_size]), masks[rank::world_size]
{block("overlap, area = Gather")}
check(model, alone)
for net, rows in ((alone, slice(12)), (model, slice(rank, 12, world_size))):
    net.zero_grad()
    slope, = torch.autograd.grad(net(inputs[rows]).sum(), inputs, create_graph=True)
    (net(inputs[rows]).square().mean() + (slope[rows].norm(dim=1) - 1).square().mean()).backward()
check(model, alone)
""",
    "predictions_gathered_are_those_of_all_samples": f"""
predictions = [torch.arange(7)[i] for i in range(rank, 7, world_size)]
{block("all_gather_object(parts, predictions)")}
assert all(parts[i % world_size][i // world_size] == i for i in range(7))
""",
    "ranks_seeded_apart_shuffle_alike": f"""
batch_size, data, drawn = 4, range(20), [None] * world_size
torch.manual_seed(rank)
{block("generator=torch.Generator().manual_seed(0)")}
dist.all_gather_object(drawn, [row.tolist() for _ in range(2) for row in loader])
assert drawn == [drawn[0]] * world_size
""",
    "a_loop_of_steps_trains_prints_and_resumes_within_an_epoch": f"""
import pathlib, pytest, shutil, types
from torch.utils.data import DistributedSampler, Subset, default_collate
args, device, printed, seeds = types.SimpleNamespace(seed=3), torch.device("cpu"), [], set()
print = printed.append
os = types.SimpleNamespace(path=pathlib.os.path, replace=lambda new, old: shutil.copy(new, f"{{torch.load(new)['step']}}.pt"))
tokens, lengths = torch.randint(10, (94, 6)), torch.arange(6) < torch.randint(1, 7, (94, 1))  # some have no target
rows = [dict(zip(("input_ids", "attention_mask", "labels"), row)) for row in zip(tokens, lengths, tokens.where(lengths, -100))]
train_set, val_set = rows[:75], rows[75:]
class Causal(nn.Sequential):
    def forward(self, input_ids, attention_mask):
        assert self.training == torch.is_grad_enabled()
        self.training and seeds.add(torch.initial_seed())
        return types.SimpleNamespace(logits=super().forward(input_ids))
net = Causal(nn.Embedding(10, 4), nn.Linear(4, 10)).eval()  # as from_pretrained gives it
def start():
    model = copy.deepcopy(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
def run(batch_size, accumulation, max_steps=17):
    model, optimizer, schedule = start()
    log_steps, eval_steps, save_steps = 1, 5, 4
    {block("epoch_steps = len(sampler)", 4)}
    return [weight.detach() for weight in model.parameters()]
def loss(model, batch):
    scores = model(batch["input_ids"], batch["attention_mask"]).logits
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
def alone(samples):
    (model, optimizer, schedule), epoch_steps = start(), 75 // samples
    for step in range(17):
        epoch, done = divmod(step, epoch_steps)
        order = torch.randperm(75, generator=torch.Generator().manual_seed(3 + epoch))[done * samples:][:samples]
        one = loss(model.train(), default_collate([train_set[index] for index in order]))
        optimizer.zero_grad()
        one.backward()
        optimizer.step()
        schedule.step()
        yield f"step {{step + 1}} | loss {{one.item():.4f}}"
        if step % 5 == 4:
            with torch.no_grad():
                yield f"step {{step + 1}} | held-out loss {{loss(model.eval(), default_collate(val_set)).item():.4f}}"
    yield [weight.detach() for weight in model.parameters()]

with pytest.raises(AssertionError, match="change batch_size"):
    run(2, 4)  # eight samples in three ranks
for whole in ((2, 6), (6, 1)):  # of which each process takes two batches of two, and one of two
    *said, weights = alone(whole[0] * whole[1])
    for done in (0, 4, 8, 12, 16, 17):  # in epochs of 6 and of 12 steps
        if rank == 0:
            shutil.copy(f"{{done}}.pt", "run.pt") if done else pathlib.Path("run.pt").unlink(missing_ok=True)
        printed.clear()
        seeds.clear()
        for found, wanted in zip(run(*(whole, (whole[0] * whole[1], 1))[done > 0]), weights):  # however it is divided
            torch.testing.assert_close(found, wanted)
        rest = [*[f"run.pt: {{done}}/17 steps done"] * (done > 0), *(line for line in said if int(line.split()[1]) > done)]
        assert printed == (rest if rank == 0 else [])
        assert seeds == {{3 + step * world_size + rank for step in range(done + 1, 18)}}
"""}


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    in_ranks("\n".join(f"def {name}():{indent(code, '    ')}\ntorch.manual_seed(0)\n{name}()" for name, code in PARTS.items()))
