"""What a script has beside its losses is compared too: BatchNorm, precision, buffers, progress bars, files."""
import copy
import functools
import re

import pytest
from check_conversion.protocol import About, Bar, Remark
from runs import AFTER, BEFORE, LOSS, MODEL, changed, record, record_once, verdict

EACH = """
    model.eval()
    held_out = nn.functional.mse_loss({model}(data.tensors[0]), data.tensors[1]).item()
    model.train()
    if {rank} == 0:
        open("log.csv", "a").write(f"{{epoch}},{{held_out:.6f}}\\n")
"""
START = """
import tqdm
scaler, memory = torch.amp.GradScaler("cpu"), nn.Module()
memory.register_buffer("keys", torch.zeros(24, 4))
torch.manual_seed(0)"""
GATHER = """in tqdm.tqdm(loader, disable=rank != 0):
        parts = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(parts, x)
        memory.keys[:] = torch.cat(parts)
"""
BOTH = [(MODEL, "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))"),
        ("\ntorch.manual_seed(0)", START), ("loss.backward()", "scaler.scale(loss).backward()"),
        ("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()"),
        (f"        loss = {LOSS}", f"        with torch.autocast('cpu', torch.bfloat16):\n            loss = {LOSS}")]
SAVE = "torch.save([{}.state_dict(), memory.state_dict()]"
BEFORE = changed(BEFORE, *BOTH, ("in loader:\n", "in tqdm.tqdm(loader):\n        memory.keys[:] = x\n"),
                 ("torch.save(model.state_dict()", EACH.format(model="model", rank="0") + SAVE.format("model")))
AFTER = changed(AFTER, *BOTH, ("in loader:\n", GATHER), ("torch.save(model.module.state_dict()", SAVE.format("model.module")),
                ("if rank == 0:\n    torch", EACH.format(model="model.module", rank="rank") + "if rank == 0:\n    torch"))
SYNC = "nn.SyncBatchNorm.convert_sync_batchnorm(process_group={}, module=nn.Sequential"
ALONE = "[dist.new_group([r]) for r in range(2)][rank]"
ON_GPUS = ("optimizer =", "if torch.cuda.is_available():\n    nn.SyncBatchNorm.convert_sync_batchnorm(model)\noptimizer =")


@functools.cache
def recorded(*changes):
    converted = record(changed(AFTER, *changes), 2, "train_ddp.py")
    kept = "kept" in converted.batchnorm
    return *(record_once(BEFORE, nudged=nudged, batchnorm_kept=kept) for nudged in (False, True)), converted


def synchronised(group=None):
    start = SYNC.format(group)
    return recorded(("DDP(nn.Sequential", f"DDP({start}"), ("nn.Linear(8, 1))", "nn.Linear(8, 1)))"))


def test_all_of_it_is_compared_also_batchnorm_where_it_is_over_all_ranks():
    status, said = verdict(*synchronised())
    assert status == 0 and re.match("the same training: 12 steps with 2 processes, SyncBatchNorm; compared: training, 2 lines, 2 "
                                    "progress bars, 1 save, 1 csv; not autocast weights within", said), said
    assert "the same rows or columns in another order: keys" in said


def test_batchnorm_of_each_rank_is_not_compared_and_the_first_line_says_so():
    status, said = verdict(*recorded())
    assert status == 0 and "1 csv; not BatchNorm, autocast weights within" in said and "BatchNorm kept its statistics" in said


def test_what_is_synchronised_on_gpus_alone_is_compared_as_there():
    status, said = verdict(*recorded(ON_GPUS))
    assert status == 0 and re.search(
        r"BatchNorm as SyncBatchNorm, which train_ddp.py:\d+ does not call here; .* csv; not autocast weights", said)


def test_statistics_of_each_rank_are_not_those_of_the_batch():
    assert verdict(*synchronised(ALONE))[0] == 1


# Changed by hand: what the converted run noted.

def autocast_off(converted):
    for rank in converted.ranks:
        rank.steps[3].precision.remove("autocast in bfloat16")


def scaler_off_on_a_rank(converted):
    converted.ranks[1].steps[0].precision.remove("GradScaler")


def another_bar(converted):
    next(note for note in converted.ranks[0].notes if isinstance(note, Bar)).state = "5/6"


def more_bars(converted):
    converted.ranks[1].notes += converted.ranks[0].of(Bar)


def another_figure(converted):
    converted.files["log.csv"].text = re.sub(r"1,\d", "1,8", converted.files["log.csv"].text)


def a_file_of_both_ranks(converted):
    for rank in converted.ranks:
        rank.notes.append(Remark(About.WRITTEN, "log.csv"))


def no_file(converted):
    del converted.files["log.csv"]


FAULTS = {
    autocast_off: "NOT THE SAME TRAINING step 4: autocast in bfloat16 is on in train.py and off in train_ddp.py.",
    scaler_off_on_a_rank: "NOT THE SAME TRAINING step 1: GradScaler is on in train.py and off in train_ddp.py on rank 1.",
    another_bar: "shown in a progress bar differently: train.py: 6/6 train_ddp.py: 5/6",
    more_bars: "shown in a progress bar 4 times instead of 2: 6/6",
    another_figure: "log.csv: written differently: train.py: 1,",
    a_file_of_both_ranks: "log.csv is written by ranks 0 and 1", no_file: "train_ddp.py does not write log.csv"}


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_what_is_left_otherwise_is_named(change):
    original, nudged, converted = copy.deepcopy(synchronised())
    change(converted)
    status, said = verdict(original, nudged, converted)
    assert status == 1 and FAULTS[change] in said


@pytest.mark.parametrize("ranks, said", [
    ([1], "memory.keys differs between ranks 0 and 1 in step 2: DDP averages only gradients"),
    ([0, 1], "memory.keys differs from that of train.py in step 2")])
def test_a_buffer_is_named_as_the_cause_where_it_has_just_parted(ranks, said):
    original, nudged, converted = copy.deepcopy(synchronised())
    for rank in converted.ranks:
        rank.steps[2].gradients = rank.steps[2].after = rank.steps[3].gradients  # training goes otherwise
    for rank in ranks:
        one = converted.ranks[rank].steps[1].beside["memory.keys"]
        for numbers in one.sketch, one.rows, one.columns:
            numbers[0] += 1
    assert said in verdict(original, nudged, converted)[1]
