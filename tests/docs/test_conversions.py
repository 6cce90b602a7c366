"""Each converted example trains as its original does, and the lines of code of docs/your_own_script.md do what it says."""
import collections
import re
from pathlib import Path
from textwrap import indent

import pytest
from chapters import EXAMPLES, block, in_ranks
from launch import ROOT, after, train
from runs import check, check_resuming

LOGGED = after("torch.nn.Module.eval", "[buffer.sum().item() for buffer in given[0].buffers()]") + after(
    "torch.nn.Module.train", "'seed', torch.initial_seed()")
OWN_REASONS = {  # of lines that the scripts have too
    "stream": {"sums = torch.zeros(2, device=device)"}, "contrastive": {"model = DDP(model)", "sampler.set_epoch(epoch)"}}


def read(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_converted_example_trains_prints_and_saves_the_same_with_three_processes(name):
    original, converted = read(f"examples/{name}.py"), read(f"examples/{name}_ddp.py")
    status, said = check(original, converted, 3, EXAMPLES[name], name=f"{name}_ddp.py", batchnorm="sync")
    assert status == 0 and re.search(r"lines? the same .*written: (\d) of \1 files? the same", said)
    assert "not compared: BatchNorm" not in said  # all ranks' is compared, as on GPUs
    assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


@pytest.mark.parametrize("name, arguments", [("waves", ["--epochs", 4]), ("steps", ["--max-steps", 40])])
def test_a_killed_example_goes_on_as_if_it_had_never_stopped(name, arguments):
    status, said = check_resuming(read(f"examples/{name}_ddp.py"), *arguments)
    assert status == 0, said


@pytest.mark.parametrize("name", ["waves", "steps"])
def test_ranks_evaluate_with_the_same_statistics_and_draw_dropout_masks_of_their_own(name):
    train(f"examples/{name}_ddp.py", *EXAMPLES[name], device=False, before=LOGGED)
    one, other = (Path(f"log.{rank}").read_text() for rank in (0, 1))
    assert re.findall(r"\[.*", one) == re.findall(r"\[.*", other) != []
    assert not {*re.findall("seed .*", one)} & {*re.findall("seed .*", other)}


def test_the_examples_have_the_lines_and_comments_of_the_scripts():
    def comments(*names):
        found = collections.defaultdict(set)  # of each line of code
        for line in "\n".join(map(read, names)).splitlines():
            code, _, comment = line.strip().partition("  # ")
            found[code].add(comment)
        return found

    scripts = comments("multinode.py", "utils.py", "recipes/accumulate.py")
    setups = {read(f"examples/{name}_ddp.py").split("def ddp_setup")[1].split("\n\n\n")[0] for name in EXAMPLES}
    assert len(setups) == 1
    for name in EXAMPLES:
        example = comments(f"examples/{name}_ddp.py")
        both = example.keys() & scripts.keys()
        assert len(both) > 20
        others = {code for code in both if not example[code] <= scripts[code]}
        assert others == OWN_REASONS.get(name, set()), name


PARTS = {  # what three ranks do one after the other
    "unequal_and_empty_parts_and_what_is_done_with_ddps_result": f"""
net = nn.Linear(4, 4)
net.head = nn.Linear(4, 1)
for samples in (9, 8, 2):  # the last part is empty
    batch, target = torch.randn(samples, 4), torch.randn(samples, 1)
    alone, model = copy.deepcopy(net), DDP(copy.deepcopy(net))
    optimizer = torch.optim.SGD(model.parameters())
    criterion = lambda result, y, reduction: F.mse_loss(model.module.head(result), y, reduction=reduction)
    whole = F.mse_loss(alone.head(alone(batch)), target)
    whole.backward()
    {block("perhaps none", 4)}
    check(model, alone)
    torch.testing.assert_close(shown, whole.detach())
""",
    "a_mean_with_class_weights_and_padding": f"""
alone, inputs, labels, weight = nn.Linear(4, 5), torch.randn(12, 4), torch.randint(5, (12,)), torch.rand(5)
labels[5:8] = -100
model = DDP(copy.deepcopy(alone))
F.cross_entropy(alone(inputs), labels, weight).backward()
scores, labels = model(inputs[rank::world_size]), labels[rank::world_size]
{block("count = weight")}
check(model, alone)
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
    "a_weighted_sampler_gives_each_rank_its_share_of_one_order": f"""
from torch.utils.data import DistributedSampler
weights = torch.rand(30)
{block("class WeightedSampler")}
for epoch in range(2):
    order = torch.multinomial(weights, 30, replacement=True, generator=torch.Generator().manual_seed(epoch)).tolist()
    sampler = WeightedSampler(range(30), drop_last=True)
    sampler.set_epoch(epoch)
    assert [*sampler] == order[rank::world_size]
""",
    "predictions_gathered_are_those_of_all_samples": f"""
predictions = torch.arange(7)[rank::world_size]
{block("all_gather_object(gathered, predictions.cpu())")}
assert all(gathered[i % world_size][i // world_size] == i for i in range(7))
"""}


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    in_ranks("\n".join(f"def {name}():{indent(code, '    ')}\ntorch.manual_seed(0)\n{name}()" for name, code in PARTS.items()))
