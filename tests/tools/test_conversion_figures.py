"""What a converted script prints, logs and saves is a part of the verdict of its own."""
import re
from pathlib import Path

import pytest
from pairs import AFTER, BEFORE, LOSS, REDUCE, STEP, changed, judge

BEST = """        if loss.item() < best:
            best = loss.item()
            torch.save(optimizer.state_dict(), "best.pt")
"""
LOGGED = {"tensorboardX": ("from tensorboardX import SummaryWriter", "SummaryWriter('runs').add_scalar('loss', {}, epoch)"),
          "wandb": ("import wandb", "wandb.log({{'loss': {}, 'epoch': epoch}})")}
STAND_INS = {  # packages that a test must not need: they keep what they are given to themselves
    "tensorboardX/__init__.py": "from .writer import SummaryWriter as SummaryWriter\n",
    "tensorboardX/writer.py": """class SummaryWriter:
    def __init__(self, folder): pass
    def add_scalar(self, tag, scalar_value, global_step=None): pass
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None): pass
""",
    "wandb.py": "def init(): pass\ndef log(data, step=None): pass\n"}
PRINT = '        print(f"epoch {epoch} | loss {total.item() / len(data):.4f}", flush=True)\n'

# A fault: what is changed in both scripts, what in the converted one alone, and what is said.
FAULTS = {
    "a figure not reduced": ([], [(REDUCE, "")],
                             "printed differently: train.py: epoch 0.*train_ddp.py: epoch 0.*Printed figures"),
    "a loss with all its digits": ([("{total / len(data):.4f}", "{loss.item()}")], [
        ("{total.item() / len(data):.4f}", "{loss.item()}")], "printed differently.*Printed figures"),
    "printed by all": ([], [("    if rank == 0:\n        print", "    if 1:\n        print")], r"printed \d times instead of 2"),
    "nothing printed": ([], [(PRINT, "        pass\n")], "train_ddp.py prints none of the 2 lines with figures"),
    "names": ([], [("model.module.state", "model.state")], "model.pt: the saved names begin with `module.`"),
    "saved by all": ([], [("if rank == 0:\n    torch.save", "if 1:\n    torch.save")], "model.pt is saved by more than one rank"),
    "another model saved": ([], [("    torch.save", "    model.module[0].bias.data += 1\n    torch.save")], "a different 0.bias"),
    "a little of a model lost": ([], [("    torch.save", "    model.module[0].bias.data *= 1.001\n    torch.save")],
                                 "a different 0.bias"),
    "not saved": ([], [("    torch.save(model.module.state_dict(), \"model.pt\")", "    pass")],
                  "0 files are saved instead of 1, without model.pt"),
    "the best model by a rank's own figure": ([(STEP, STEP + BEST)], [
        ("if loss.item() < best", "if rank == 0 and loss.item() < best"), ("sampler = ", "best = 100\nsampler = ")],
                                              r"best.pt is saved \d+ times instead of \d+.*Decisions")}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_printed_or_saved_otherwise_is_named_beside_the_same_training(fault, processes):
    both, converted, says = FAULTS[fault]
    after = changed(AFTER, *[one for one in both if one[0] in AFTER], *converted)
    status, said = judge(changed(BEFORE, *both), after, processes)
    assert status == 1 and said.startswith("the same training: ") and "NOT THE SAME" not in said
    assert re.search(says.replace("<N>", str(processes)), said), said


@pytest.mark.parametrize("package", LOGGED)
def test_figures_for_tensorboard_and_wandb_are_compared(package):
    for name, text in STAND_INS.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    first, log = LOGGED[package]
    before = changed(BEFORE, ("import torch\n", f"import torch\n{first}\n"),
                     ("    print(f", f"    {log.format('total / len(data)')}\n    print(f"))
    after = changed(AFTER, ("import torch\n", f"import torch\n{first}\n"),
                    (PRINT, PRINT + f"        {log.format('total.item() / len(data)')}\n"))
    status, said = judge(before, after, 2)
    assert status == 0 and ("TensorBoard: 2 figures the same" in said or "wandb: 4 figures the same" in said)
    status, said = judge(before, changed(after, (log.format("total.item() / len(data)"), log.format("loss.item()"))), 2)
    assert status == 1 and re.search(r"(TensorBoard|wandb): loss is \S+ instead of \S+. See \"Printed figures", said)
    everywhere = changed(after, (PRINT + "        ", PRINT + "    "))
    assert "loss is logged 4 times instead of 2. See \"Printed by all ranks" in judge(before, everywhere, 2)[1]


def test_the_verdict_counts_what_it_compared_and_names_what_it_did_not():
    said = judge(BEFORE, AFTER, 2)[1]
    assert "printed: 2 of 2 lines the same saved: 1 file the same: model.pt" in said
    silent = changed(BEFORE, ('    print(f"epoch {epoch} | loss {total / len(data):.4f}", flush=True)\n', ""),
                     ('torch.save(model.state_dict(), "model.pt")\n', ""))
    said = judge(silent, changed(AFTER, (PRINT, "        pass\n"), (
        'torch.save(model.module.state_dict(), "model.pt")', "pass")), 3)[1]
    assert "printed: no line was printed by either saved: nothing was saved by torch.save" in said
    before = changed(BEFORE, ("    print(f", "    print('on one device')\n    print(f"))
    status, said = judge(before, AFTER, 2)
    assert status == 0 and "2 of 4 lines the same not printed by train_ddp.py in these words: on one device" in said


def test_one_more_plain_value_in_a_file_is_a_remark_and_a_time_is_not_compared():
    save = 'torch.save({"model": model.state_dict(), "loss": loss.item(), "seconds": time.time()}, "model.pt")'
    before = changed(BEFORE, ('torch.save(model.state_dict(), "model.pt")', save), ("import torch\n", "import time, torch\n"))
    after = changed(AFTER, ('torch.save(model.module.state_dict(), "model.pt")', save.replace(
        "model.state", "model.module.state").replace("loss.item()", "total.item() / 144").replace("}", ', "world_size": 3}')),
        ("import torch\n", "import time, torch\n"), (LOSS, LOSS))
    status, said = judge(before.replace("loss.item(), ", "total / 144, "), after, 3)
    assert status == 0 and "model.pt: world_size is saved by train_ddp.py alone" in said
    status, said = judge(before.replace("loss.item(), ", "total / 144, "), after.replace('"loss": total', '"loss": 2 * total'), 3)
    assert status == 1 and "model.pt: a different loss is saved" in said
