"""Each converted example trains as its original does; two hold the lines to copy. The chapter's other lines do what it says."""
import re
from pathlib import Path
from textwrap import indent

import pytest
import torch
from chapters import block, in_ranks
from launch import ROOT, after, load, train
from runs import check

PAIRS = {"waves": ("--epochs", "2", "--batch-size", "48"),
         "steps": ("--max-steps", "30"),  # in epochs of 25
         "language_model": ("--epochs", "5"),  # after the third its learning rate falls
         "autoencoder": ("--epochs", "2"),
         "stream": ("--samples", "961"),
         "contrastive": ("--epochs", "2")}
# Each rank works in a folder of its own, as on a machine of its own, and keeps what is saved first.
APART = after("torch.nn.Module.eval", "[buffer.sum().item() for buffer in given[0].buffers()]") + after(
    "torch.nn.Module.train", "'seed', torch.initial_seed()") + after(
    "os.replace", "os.path.exists('first.pt') or os.link(given[1], 'first.pt')") + """import sys
os.makedirs(os.environ["RANK"], exist_ok=True)
os.chdir(os.environ["RANK"])
sys.modules.pop("torch.distributed.nn")  # with which ranks of tests begin
"""
END = """
import sys
assert sampler.drop_last and sampler.seed == args.seed and "torch.distributed.nn" in sys.modules
assert not {"model", "checkpoint"} & globals().keys() and not dist.is_initialized()
"""


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_three_processes(pair):
    original, converted = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    status, said = check(original, converted, 3, PAIRS[pair], name=f"{pair}_ddp.py", batchnorm="sync")
    assert status == 0 and re.search(r"lines the same .*written: (\d) of \1 files? the same", said)
    assert "not compared: BatchNorm" not in said  # all ranks' is compared, as on GPUs
    assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


def test_waves_ddp_and_steps_ddp_have_the_lines_to_copy():
    readme, chapter = (re.split(r"\n\n(?=# [123]\.|def batch_on)", block(text))[1:] for text in (
        "totals = torch.tensor([loss_sum", "epoch_steps = len(sampler)"))
    for script, parts in (("waves_ddp", readme), ("steps_ddp", [readme[0], *chapter])):
        assert len(parts) >= 3 and all(part in (ROOT / f"examples/{script}.py").read_text() for part in parts)


@pytest.mark.parametrize("pair, done, lines", [("waves", "1/2 epochs", 1), ("steps", "10/30 steps", 3)])
def test_they_resume_where_rank_0_alone_has_the_checkpoint(pair, done, lines):
    """Within an epoch too, with what dropout would have drawn."""
    Path("script.py").write_text((ROOT / f"examples/{pair}_ddp.py").read_text() + END)
    ran = Path("script.py").resolve(), *PAIRS[pair]
    printed = train(*ran, device=False, before=APART, CUDA_VISIBLE_DEVICES="").stdout.splitlines()
    whole = load("0/run.pt")
    Path("0/first.pt").replace("0/run.pt")
    Path("1/run.pt").write_text("of another run")
    resumed = train(*ran, device=False, before=APART, CUDA_VISIBLE_DEVICES="").stdout.splitlines()
    assert resumed == [f"run.pt: {done} done", *printed[lines:]]
    torch.testing.assert_close(load("0/run.pt"), whole, rtol=0, atol=0)
    one, other = (Path(f"{rank}/log.{rank}").read_text() for rank in (0, 1))
    assert re.findall(r"\[.*", one) == re.findall(r"\[.*", other) != []  # evaluated with the same statistics of BatchNorm
    assert not {*re.findall("seed .*", one)} & {*re.findall("seed .*", other)}  # of dropout


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
"""}


def test_the_lines_to_copy_do_in_three_ranks_what_one_process_does():
    in_ranks("\n".join(f"def {name}():{indent(code, '    ')}\ntorch.manual_seed(0)\n{name}()" for name, code in PARTS.items()))
