"""tools/check_conversion.py names each fault of the training with its step, and the cause that it saw."""
import re

import pytest
from pairs import AFTER, BEFORE, LOSS, MODEL, NORM, PART, REDUCE, STEP, WHOLE, changed, judge

SUM = (LOSS, 'nn.functional.mse_loss(model(x), y, reduction="sum") / 50')
ADAM = ("SGD(model.parameters(), lr=0.05)", "Adam(model.parameters(), lr=0.01)")
NOISE = (LOSS, "nn.functional.mse_loss(model(x + torch.randn_like(x)), y)")
NUMPY = ("import torch\n", "import numpy\nimport torch\n")
AUGMENTED = (LOSS, "nn.functional.mse_loss(model(x * torch.tensor(numpy.random.rand(len(x), 1)).float()), y)")
HIDDEN = (LOSS, "nn.functional.mse_loss(model(x) + torch.rand(len(x), 1), y)")  # not seen in what the model is fed
PAIRS = (LOSS, "(model(x) - model(x).mean()).square().mean()")
LESS = ("randn(144", "randn(133")  # the last batch has 13 samples
TWO_MODELS = [("model = ", "other = nn.Linear(1, 1)\nmodel = "), ("mse_loss(model(x)", "mse_loss(other(model(x))"),
              ("(model.parameters()", "([*model.parameters(), *other.parameters()]")]
AVERAGE = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
"""
CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
NO_DDP = [("DDP(nn", "(nn"), ("model.module", "model")]
APART = ("optimizer = ", "torch.manual_seed(rank)\noptimizer = ")
PLATEAU = ("for epoch", "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)\nfor epoch")
SCORE = ("loss.item() * len(x)\n", "loss.item() * len(x)\n    plateau.step(total)\n")
DRAW = "if rank == 0:\n        torch.rand(1)\n    dist.all_reduce"

# A fault: what is changed in both scripts, what in the converted one alone, and what is said.
FAULTS = {
    "a loss that is a sum": ([SUM], [],
                             r"step 1: all gradients are 0.\d+ times those of train.py = 1/<N>,.*Sums and unequal parts"),
    "a loss that is a sum, which Adam hides": ([ADAM, SUM], [], r"step 1: all gradients are 0.\d+ times .* = 1/<N>,"),
    "weighted, and not multiplied": ([], [(LOSS, f"{LOSS} / world_size")],
                                     "step 1: all gradients are .* = 1/<N>.*the sum of the ranks' losses is the loss before"),
    "a mean multiplied": ([], [(LOSS, f"world_size * {LOSS}")], "step 1: all gradients are <N> times .*Sums and unequal parts"),
    "a mean divided": ([], [(LOSS, f"{LOSS} / 4")], "step 1: all gradients are 0.25 times"),
    "a loss that goes wrong slowly": ([("lr=0.05", "lr=0.05, momentum=0.1")], [
        (LOSS, f"{LOSS} + 1e-3 * model.module[2].bias.sum() * bool(optimizer.state)")],
                                      "step 2: the same samples, and a loss of .*No common factor"),
    "a loss over the batch": ([PAIRS], [], "step 1: the same samples, and a loss of .* neither their mean nor their sum"),
    "unequal parts": ([LESS], [WHOLE, PART], "step 6: a mean over parts that are not equal.*Sums and unequal parts"),
    "the batch not divided": ([], [("24 // world_size", "24")], "step 1: each rank takes a whole batch.*Two routes"),
    "the batch divided twice": ([], [("24 //", "24 // world_size //")], "step 1: the batch is divided twice"),
    "no sampler": ([], [("sampler=sampler", "shuffle=True")], "step 1: .*each rank goes through all samples"),
    "no sampler, whole batches": ([], [WHOLE], "step 1: each rank takes the whole batch"),
    "a shuffle by each rank": ([], [APART, ("24 // world_size, sampler=sampler", "24, shuffle=True"), PART],
                               "step 1: ranks 0 and 1 shuffle differently, each by random numbers.*Random numbers"),
    "a sampler's seed by rank": ([], [("Sampler(data)", "Sampler(data, seed=rank)")],
                                 r"step 1: ranks 0 and 1 shuffle differently, by .* \(0, 0\) and \(1, 0\)"),
    "rank 0 alone draws": ([], [("24 // world_size, sampler=sampler", "24, shuffle=True"), PART,
                                ("dist.all_reduce", DRAW)], "step 7: ranks 0 and 1 shuffle differently"),
    "no set_epoch": ([], [("    sampler.set_epoch(epoch)\n", "")], "step 7: .*no set_epoch"),
    "a shuffle where was none": ([], [("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)")],
                                 "step 1: one of the two shuffles"),
    "another sampler": ([("24, shuffle=True", "24, sampler=torch.utils.data.WeightedRandomSampler(1 + torch.arange(144), 144)")
                         ], [], "step 1: the samples are drawn by WeightedRandomSampler in train.py, by DistributedSampler now"),
    "repeated samples": ([LESS], [], r"step 6: samples are repeated.*\[13, 4\].*Two routes"),
    "left out samples": ([LESS], [("Sampler(data)", "Sampler(data, drop_last=True)")],
                         r"step 6: samples are left out.*\[13, 4\].*Two routes"),
    "drop_last": ([LESS], [("sampler=sampler", "sampler=sampler, drop_last=True")], "step 6: an epoch had 6 steps and has 5"),
    "forward through module": ([], [("model(x)", "model.module(x)")],
                               "step 1: ranks 0 and 1 have different gradients: 0.weight.*Training goes through DDP"),
    "no DDP": ([], NO_DDP, "step 1: ranks 0 and 1 .*in no DDP.*Training goes through"),
    "one of two models": (TWO_MODELS, [], "step 1: ranks 0 and 1 have different gradients: .*in no DDP"),
    "weights of one rank": ([], [("optimizer = ", "if rank == 0:\n    nn.init.ones_(model.module[0].weight)\noptimizer = ")],
                            "step 1: ranks 0 and 1 have different weights: 0.weight.*See \"Load first, then DDP"),
    "weights of one rank later": ([], [(REDUCE, REDUCE + "    model.module[2].bias.data += rank\n")],
                                  "step 7: ranks 0 and 1 have different weights: 2.bias"),
    "other weights later": ([], [(REDUCE, REDUCE + "    model.module[2].bias.data += 1\n")], "step 7: the weights differ before"),
    "another seed": ([], [("model = ", "torch.manual_seed(7)\nmodel = ")], "step 1: it begins with different weights"),
    "a rate by rank": ([], [(REDUCE, "    optimizer.param_groups[0]['lr'] *= 0.5 if rank else 1\n" + REDUCE)],
                       r"step 7: ranks 0 and 1 have different optimizer options: lr 0.025 instead of 0.05. See \"Decisions"),
    "another rate": ([], [("lr=0.05", "lr=0.05 * world_size")], r"step 1: different optimizer options: lr 0.\d+ instead of 0.05"),
    "a score by rank": ([PLATEAU], [(REDUCE, REDUCE + "    plateau.step(total + rank)\n")],
                        "step 6: ReduceLROnPlateau is given a different figure on each rank: .*Decisions"),
    "a score of rank 0": ([PLATEAU], [(REDUCE, "    dist.broadcast(total, 0)\n    plateau.step(total)\n")],
                          "step 6: ReduceLROnPlateau is given .* instead of .*Decisions"),
    "a model that is not trained": ([], [("optimizer = ", "other = nn.Linear(1, 1)\noptimizer = "),
                                         ("SGD(model", "SGD(other")], "step 1: it begins with different weights"),
    "an optimizer made before": ([], [("optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n", ""), (
        "model = DDP(" + MODEL, "model = DDP(old := " + MODEL), ("for epoch", "import copy\nmodel = DDP(copy.deepcopy(old))\n"
        "optimizer = torch.optim.SGD(old.parameters(), lr=0.05)\nfor epoch")], "step 1: there are no gradients"),
    "noise, the same in all ranks": ([NOISE], [], "step 1: both draw random numbers in each step, by torch, .*the same.*Random"),
    "noise within the loss": ([HIDDEN], [], "step 1: both draw random numbers in each step, by torch, .*the same"),
    "augmentation by numpy": ([NUMPY, AUGMENTED, ("manual_seed(0)\n", "manual_seed(0)\nnumpy.random.seed(0)\n")], [],
                              "step 1: both draw random numbers in each step, by numpy, .*the same"),
    "clipped before averaged": ([(STEP, CLIP + STEP)], [*NO_DDP, (STEP, AVERAGE + STEP)],
                                "step 1: gradients are clipped before they are averaged, at norms of"),
    "a part of one sample under BatchNorm": ([("randn(144", "randn(122"), NORM], [WHOLE, PART],
                                             "a part of one sample under BatchNorm"),
    "an early stop by a rank's own figure": ([], [(REDUCE, "    if rank == 1:\n        break\n" + REDUCE)],
                                            r"it fails after \d+, .* steps of the ranks: .*Connection.*Hangs"),
    "an abort at exit": ([], [("destroy_process_group()\n", "destroy_process_group()\nimport ctypes\n"
                               "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()\n")],
                         "it aborts when it ends.*The end of a run"),
    "an error": ([], [(STEP, STEP + "        if rank == 1 and epoch == 1:\n            raise ValueError('my own')\n")],
                 r"it fails after \d, .* steps of the ranks: .*train_ddp.py:\d+: ValueError: my own. See \"Errors")}


AT_THREE_TOO = {  # verdicts that were once false, and what depends on the number of parts
    "a loss that goes wrong slowly", "a sampler's seed by rank", "a score by rank", "a score of rank 0",
    "a part of one sample under BatchNorm", "weighted, and not multiplied", "a mean multiplied", "unequal parts",
    "repeated samples", "left out samples", "drop_last", "noise, the same in all ranks", "augmentation by numpy"}


@pytest.mark.parametrize("fault, processes", [*((fault, 2) for fault in FAULTS), *((fault, 3) for fault in sorted(AT_THREE_TOO))])
def test_a_fault_is_named_with_its_step_and_its_cause(fault, processes):
    both, converted, says = FAULTS[fault]
    before = changed(BEFORE, *both, *[SCORE] * (PLATEAU in both))
    status, said = judge(before, changed(AFTER, *[one for one in both if one[0] in AFTER], *converted), processes)
    assert status == 1 and said.startswith("NOT THE SAME TRAINING")
    assert re.search(says.replace("<N>", str(processes)), said), said


UNSEEN = {  # what the converted script has of its own, and what is said
    "noise": ([NOISE], "both draw random numbers in each step, by torch, each rank its own"),
    "noise within the loss": ([HIDDEN], "both draw random numbers in each step, by torch, each rank its own")}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("what", UNSEEN)
def test_random_numbers_that_each_rank_draws_for_itself_keep_the_check_from_seeing_more(what, processes):
    both, says = UNSEEN[what]
    status, said = judge(changed(BEFORE, *both), changed(AFTER, *both, APART), processes)
    assert status == 2 and says in said
