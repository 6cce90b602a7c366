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
""",}


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    in_ranks("\n".join(f"def {name}():{indent(code, '    ')}\ntorch.manual_seed(0)\n{name}()" for name, code in PARTS.items()))
