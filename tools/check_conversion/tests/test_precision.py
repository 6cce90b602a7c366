"""Autocast and GradScaler are off under the check, and it says where one script has them on and the other off."""
import multiprocessing

import pytest
import torch
from check_conversion import precision
from check_conversion.protocol import Step
from check_conversion.running import Process, Run

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
CONTEXTS = {"torch.autocast('cpu', torch.bfloat16)": {"autocast in bfloat16"},
            "torch.autocast('cpu', torch.bfloat16, enabled=False)": set(),
            "torch.autocast('cuda')": {"autocast in float16"},
            "torch.cuda.amp.autocast()": {"autocast in float16"},
            "torch.no_grad(), torch.autocast('cpu')": set()}
SCALERS = {"torch.amp.GradScaler('cpu')": {"GradScaler"}, "torch.amp.GradScaler('cuda')": {"GradScaler"},
           "torch.cuda.amp.GradScaler(enabled=False)": set()}


def note(lines, result):
    from check_conversion.observed import precision
    precision.install(None)
    names = {"torch": torch}
    exec(lines, names)
    torch.save((precision.of_this_step(), precision.of_this_step(), names.get("dtype")), result)


def noted(lines):
    process = forks.Process(target=note, args=(lines, "result"))
    process.start()
    process.join(60)
    process.kill()
    return torch.load("result", weights_only=False)


@pytest.mark.parametrize("context", CONTEXTS)
def test_autocast_is_noted_and_off(context):
    assert noted(f"with {context}:\n    dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype") == (
        CONTEXTS[context], set(), torch.float32)


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scaler_is_noted_where_it_would_scale(scaler):
    assert noted(f"{scaler}.scale(torch.ones(1))") == (SCALERS[scaler], set(), None)


def run(name, *ranks):
    return Run(name, 0, "", "", [Process(rank, 0, [Step(precision=on) for on in steps]) for rank, steps in enumerate(ranks)])


AUTOCAST, OFF = {"autocast in bfloat16"}, set()


@pytest.mark.parametrize("ranks, text", [
    ([[AUTOCAST, AUTOCAST]] * 2, None),
    ([[AUTOCAST, OFF]] * 2, "autocast in bfloat16 is on in train.py and off in train_ddp.py"),
    ([[AUTOCAST, AUTOCAST], [AUTOCAST, OFF]], "autocast in bfloat16 is on in train.py and off in train_ddp.py on rank 1"),
    ([[AUTOCAST, AUTOCAST | {"GradScaler"}]] * 2, "GradScaler is off in train.py and on in train_ddp.py")])
def test_the_first_step_in_which_it_is_otherwise_is_named(ranks, text):
    fault = precision.compare_precision(run("train.py", [AUTOCAST, AUTOCAST]), run("train_ddp.py", *ranks))
    assert (fault.text, fault.step) == (text, 2) if text else fault is None
