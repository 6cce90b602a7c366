"""Each converted example trains as its original does; two hold the lines to copy. The chapter's other lines do what it says."""
import re
from pathlib import Path
from textwrap import indent

import pytest
from chapters import CHAPTERS, block, in_ranks
from launch import EXAMPLES, ROOT, after, train
from runs import check, check_resuming

LOGGED = after("torch.nn.Module.eval", "[buffer.sum().item() for buffer in given[0].buffers()]") + after(
    "torch.nn.Module.train", "'seed', torch.initial_seed()") + """import sys
sys.modules.pop("torch.distributed.nn")  # with which ranks of tests begin
"""
END = """
import sys
assert sampler.drop_last and sampler.seed == args.seed and "torch.distributed.nn" in sys.modules
assert not {"model", "checkpoint"} & globals().keys() and not dist.is_initialized()
"""


@pytest.mark.parametrize("pair", EXAMPLES)
def test_the_pairs_train_print_and_save_the_same_with_three_processes(pair):
    original, converted = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    status, said = check(original, converted, 3, EXAMPLES[pair], name=f"{pair}_ddp.py", batchnorm="sync")
    assert status == 0 and re.search(r"lines the same .*written: (\d) of \1 files? the same", said)
    assert "not compared: BatchNorm" not in said  # all ranks' is compared, as on GPUs
    assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


def test_waves_ddp_and_steps_ddp_have_the_lines_to_copy():
    readme, chapter = (re.split(r"\n\n(?=# [123]\.|def batch_on)", block(text))[1:] for text in (
        "totals = torch.tensor([loss_sum", "epoch_steps = len(sampler)"))
    for script, parts in (("waves_ddp", readme), ("steps_ddp", [readme[0], *chapter])):
        assert len(parts) >= 3 and all(part in (ROOT / f"examples/{script}.py").read_text() for part in parts)


@pytest.mark.parametrize("pair", ["waves", "steps"])
def test_they_evaluate_with_the_same_statistics_draw_dropout_of_their_own_and_let_go_of_what_they_no_longer_need(pair):
    Path("script.py").write_text((ROOT / f"examples/{pair}_ddp.py").read_text() + END)
    train(Path("script.py").resolve(), *EXAMPLES[pair], device=False, before=LOGGED, CUDA_VISIBLE_DEVICES="")
    one, other = (Path(f"log.{rank}").read_text() for rank in (0, 1))
    assert re.findall(r"\[.*", one) == re.findall(r"\[.*", other) != []
    assert not {*re.findall("seed .*", one)} & {*re.findall("seed .*", other)}


def test_each_process_can_read_a_large_checkpoint_itself_by_the_line_that_readme_has_for_it():
    line = re.search(r"`(checkpoint = \[torch\.load.*?)`", CHAPTERS[ROOT / "README.md"], re.DOTALL)[1].replace("\n  ", " ")
    text = (ROOT / "examples/waves_ddp.py").read_text()
    text, count = re.subn(r"checkpoint = \[torch\.load\(.*\n.*\n.*broadcast_object_list.*", line, text)
    assert count == 1
    assert check_resuming(text, *EXAMPLES["waves"])[0] == 0


@pytest.mark.parametrize("given, says", [
    (("--accumulation", "7"), "batch_size x accumulation = 28 must be divisible by 3"),
    (("--batch-size", "200"), "600 samples are too few: one step takes 1200")])
def test_a_loop_of_steps_says_which_step_cannot_be_split_between_ranks(given, says):
    assert f"AssertionError: {says}\n" in train("examples/steps_ddp.py", *given, processes=3, device=False, status=1).stderr


RESUMABLE = re.search(r"class ResumableSampler.*?None\)", block("epoch_steps = len(sampler)"), re.DOTALL)[0]
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
    "a_weighted_sampler_gives_each_rank_its_share_of_one_order_and_continues_it": f"""
import itertools
from torch.utils.data import DistributedSampler
{RESUMABLE}
weights = torch.rand(30)
order = torch.multinomial(weights, 30, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
{block("class WeightedSampler")}
sampler = WeightedSampler(range(30), drop_last=True)
assert [*sampler] == order[rank::world_size]
sampler.done = 4
assert [*sampler] == order[rank::world_size][4:]
""",
    "predictions_gathered_are_those_of_all_samples": f"""
predictions = torch.arange(7)[rank::world_size]
{block("all_gather_object(gathered, predictions.cpu())")}
assert all(gathered[i % world_size][i // world_size] == i for i in range(7))
"""}


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    in_ranks("\n".join(f"def {name}():{indent(code, '    ')}\ntorch.manual_seed(0)\n{name}()" for name, code in PARTS.items()))
