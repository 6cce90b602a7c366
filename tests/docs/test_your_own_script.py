"""The lines to copy do what the chapters say, in a script of one's own."""
import re
import shutil
from textwrap import indent

from chapters import block, in_ranks
from launch import after, train

PARTS = {  # what three ranks do one after the other
    "unequal_and_empty_parts": f"""
criterion, net = nn.MSELoss(), nn.Linear(4, 1)
for samples in (9, 8, 2):  # the last part is empty
    batch, target = torch.randn(samples, 4), torch.randn(samples, 1)
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters())
    whole = criterion(alone(batch), target)
    whole.backward()
    {block("mine = len(range", 4)}
    check(model, alone)
    torch.testing.assert_close(shown, whole.detach())
""",
    "what_is_done_with_ddps_result_is_averaged_and_what_is_done_without_ddp_is_not": """
inputs, net = torch.randn(12, 4), nn.Linear(4, 4)
net.head = nn.Linear(4, 1)
net.head(net(inputs)).square().mean().backward()
for way, averaged in ((lambda model, x: model.module.head(model(x)), True),
                      (lambda model, x: model.module.head(model.module(x)), False)):
    model = DDP(copy.deepcopy(net))
    model.zero_grad()
    way(model, inputs[rank::world_size]).square().mean().backward()
    assert averaged == all(torch.allclose(one.grad, whole.grad) for one, whole in zip(model.parameters(), net.parameters()))
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
    "a_loop_of_steps_trains_and_resumes_within_an_epoch": f"""
import contextlib, types
from torch.utils.data import DistributedSampler, TensorDataset
args, epochs = types.SimpleNamespace(seed=3), 2
inputs, targets, net, criterion = torch.randn(75, 4), torch.randn(75, 1), nn.Linear(4, 1), nn.MSELoss()
class Augmented(TensorDataset):
    def __getitem__(self, index):
        seeds.append(torch.initial_seed())  # from which loader workers would draw theirs
        return super().__getitem__(index)
train_set, saved, seeds = Augmented(inputs, targets), {{}}, []
os = types.SimpleNamespace(replace=lambda new, old: saved.update({{torch.load(new)["step"]: torch.load(new)}}))
def start(epoch_steps, checkpoint):
    model = copy.deepcopy(net).eval()  # as from_pretrained gives it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * epoch_steps)
    for part, name in zip((model, optimizer, schedule), checkpoint):
        part.load_state_dict(checkpoint[name])
    return model, optimizer, schedule
def run(size, accumulation, checkpoint, save_steps):
    {block("epoch_steps = len(sampler)", 4)}
    torch.manual_seed(0)
    seeds.clear()
    alone, optimizer, schedule = start(epoch_steps, checkpoint)
    step, model = checkpoint.get("step", 0), DDP(alone)
    {block("order[:] = [*sampler][done:", 4)}
    assert alone.training or step == checkpoint.get("step")
    every = [None] * world_size
    dist.all_gather_object(every, seeds)
    assert len({{*sum(every, [])}}) == sum(len({{*drawn}}) for drawn in every)  # no two ranks augment alike
    return alone.weight.detach(), epoch_steps, size * accumulation, every

try:
    run(2, 4, {{}}, 4)
except AssertionError as error:
    assert "change size" in str(error)  # eight samples in three ranks
else:
    raise SystemExit("unequal parts")
for whole, samples in (((2, 6), 12), ((6, 1), 6)):  # of which each process takes two steps of two, and one of two
    saved.clear()
    weight, epoch_steps, share, every = run(*whole, {{}}, 4)
    assert share * world_size == samples
    alone, optimizer, schedule = start(epoch_steps, {{}})
    for epoch in range(epochs):
        order = torch.randperm(75, generator=torch.Generator().manual_seed(3 + epoch))[:epoch_steps * samples]
        for indices in order.split(samples):
            optimizer.zero_grad()
            criterion(alone(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(weight, alone.weight.detach())
    sent = [dict(saved)]
    dist.broadcast_object_list(sent)
    assert [*sent[0]] == [*range(4, epochs * epoch_steps + 1, 4)]
    for checkpoint in sent[0].values():  # within the first epoch, within the second, at the end
        for again in (whole, (samples, 1)):  # with the same total, however it is divided
            resumed = run(*again, copy.deepcopy(checkpoint), 100)
            torch.testing.assert_close(resumed[0], weight)
            assert not resumed[3][0] or resumed[3][0][0] != every[0][0]  # other augmentation than at the start
"""}


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    in_ranks("\n".join(f"def {name}():{indent(code, '    ')}\ntorch.manual_seed(0)\n{name}()" for name, code in PARTS.items()))


def test_waves_and_waves_ddp_resume_what_the_other_has_saved_also_where_rank_0_alone_has_the_file():
    def losses(script, epochs, *more, **options):
        job = train(f"examples/{script}.py", "--epochs", epochs, *more, device=False, CUDA_VISIBLE_DEVICES="", **options)
        return re.findall(r"epoch (\d+) \| loss (\S+) \| test loss (\S+)", job.stdout)

    keep = "os.path.exists('first.pt') or os.link(given[1], 'first.pt')"
    alone = losses("waves", 3, processes=0, before=after("os.replace", keep))
    shutil.copy("first.pt", "waves_ddp.pt")
    apart = "import os\nif os.environ['RANK'] == '1':\n    os.mkdir('another')\n    os.chdir('another')\n"
    assert losses("waves_ddp", 2, before=apart) == alone[1:2] != []
    assert losses("waves", 3, "--checkpoint", "waves_ddp.pt", processes=0) == alone[2:] != []
