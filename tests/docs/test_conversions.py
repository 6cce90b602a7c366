"""README's lines, put into a classifier that has BatchNorm and a schedule and resumes, and the pairs of examples, train and
resume as one device does."""
import re
import shutil
from pathlib import Path

import pytest
import torch
from chapters import block
from launch import ROOT, after, load, train
from runs import check

SCRIPT = """import os
import types
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args, epochs, batch_size, device = types.SimpleNamespace(seed=5), 2, 24, torch.device("cpu")
torch.manual_seed(args.seed)
targets = torch.randint(4, (253,))
images = torch.randn(253, 3, 8, 8) + torch.nn.functional.one_hot(targets, 8)[:, None, None] / 2
train_set, val_set = (TensorDataset(images[part], targets[part]) for part in (slice(204), slice(204, None)))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(288, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

def train(model, loader):
    model.train()
    loss_sum = trained = 0
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum, trained = loss_sum + loss.item() * len(targets), trained + len(targets)
    return loss_sum, trained

@torch.no_grad()
def evaluate(model, loader):
    assert isinstance(model, nn.Sequential) and len(loader.dataset) < 49 / int(os.environ.get("WORLD_SIZE", 1)) + 1
    model.eval()
    return sum((model(images).argmax(dim=1) == targets).sum().item() for images, targets in loader), len(loader.dataset)

"""
ALONE = """train_loader = DataLoader(train_set, batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size)
best = 0.0
for epoch in range(epochs):
    loss_sum, trained = train(model, train_loader)
    correct, tested = evaluate(model, val_loader)
    schedule.step()
    accuracy = correct / tested
    print(f"loss {loss_sum / trained:.4f} | accuracy {accuracy:.2%}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(), "epoch": epoch + 1, "best": best}, "run.pt.tmp")
    os.replace("run.pt.tmp", "run.pt")
"""
LINES = block("totals = torch.tensor([loss_sum")
KEEP = after("os.replace", "os.path.exists('first.pt') or os.link(given[1], 'first.pt')")  # what is saved first is kept too
# Each rank works in a folder of its own, as on a machine of its own.
APART = KEEP + after("torch.nn.Module.eval", "given[0][1].running_mean.tolist()") + """import sys
os.makedirs(os.environ["RANK"], exist_ok=True)
os.chdir(os.environ["RANK"])
sys.modules.pop("torch.distributed.nn")  # with which ranks of tests begin
"""
END = """
import sys
assert sampler.drop_last and sampler.seed == args.seed and "torch.distributed.nn" in sys.modules
assert not {"model", "checkpoint"} & globals().keys() and not dist.is_initialized()
"""


def test_readmes_lines_are_the_same_training_batchnorm_included():
    status, said = check(SCRIPT + ALONE, SCRIPT + LINES, processes=3)
    assert status == 0 and "not BatchNorm" not in said and "kept its statistics" not in said  # but over all ranks, as on GPUs
    assert "printed: 2 of 2 lines the same" in said and "saved: 4 files the same" in said


def test_readmes_lines_resume_where_rank_0_alone_has_the_checkpoint():
    Path("many.py").write_text(SCRIPT + LINES + END)
    printed = train(Path("many.py").resolve(), device=False, before=APART).stdout.splitlines()
    whole = load("0/run.pt")
    Path("0/first.pt").replace("0/run.pt")
    Path("1/run.pt").write_text("of another run")
    resumed = train(Path("many.py").resolve(), device=False, before=APART).stdout.splitlines()
    assert len(printed) == 2 and resumed == ["run.pt: 1/2 epochs done", *printed[1:]]
    torch.testing.assert_close(load("0/run.pt"), whole, rtol=0, atol=0)
    tested = [re.findall(r"\[.*", Path(f"{rank}/log.{rank}").read_text()) for rank in (0, 1)]
    assert tested[0] == tested[1] != []  # with the same statistics of BatchNorm


PAIRS = {"waves": ("--epochs", "2", "--batch-size", "48"),
         "language_model": ("--epochs", "5"),  # after the third its learning rate falls
         "autoencoder": ("--epochs", "2"),
         "stream": ("--samples", "961"),
         "contrastive": ("--epochs", "2")}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_pairs_train_print_and_save_the_same_with_three_processes(pair):
    before, after = ((ROOT / f"examples/{name}.py").read_text() for name in (pair, f"{pair}_ddp"))
    status, said = check(before, after, 3, PAIRS[pair], name=f"{pair}_ddp.py")
    assert status == 0 and re.search(r"lines the same .*saved: \d files? the same", said)
    assert all(float(figure) < 1e-9 for figure in re.findall(r"(?:within|by) (\de-\d+)", said)), said


def test_waves_and_waves_ddp_resume_what_the_other_has_saved_also_where_rank_0_alone_has_the_file():
    def losses(script, epochs, *more, **options):
        job = train(f"examples/{script}.py", "--epochs", epochs, *more, device=False, CUDA_VISIBLE_DEVICES="", **options)
        return re.findall(r"epoch (\d+) \| loss (\S+) \| test loss (\S+)", job.stdout)

    alone = losses("waves", 3, processes=0, before=KEEP)
    shutil.copy("first.pt", "waves_ddp.pt")
    apart = "import os\nif os.environ['RANK'] == '1':\n    os.mkdir('another')\n    os.chdir('another')\n"
    assert losses("waves_ddp", 2, before=apart) == alone[1:2] != []
    assert losses("waves", 3, "--checkpoint", "waves_ddp.pt", processes=0) == alone[2:] != []
