"""What is saved can be continued by any script, as it was; what is not of them is refused and left as it was."""
from pathlib import Path

import pytest
import torch
from launch import IN_FLOAT64, SCRIPTS, SGD, TWO_RATES, figures, load, train, with_optimizer

FROZEN = "torch.optim.SGD(model.requires_grad_(False)[-1].requires_grad_().parameters(), lr=args.lr)"  # all but the last layer


@pytest.mark.parametrize("optimizer, rates", [(SGD, [0.009]), (TWO_RATES, [0.0045, 0.009]), (FROZEN, [0.009])],
                         ids=["one rate", "two rates", "frozen layers"])
def test_each_script_goes_on_where_another_stopped_with_the_rates_of_the_file(optimizer, rates, small):
    def leg(script, epochs, lr, path="relay.pt"):
        copy = with_optimizer(script, optimizer)
        return train(copy, epochs, "--checkpoint", path, "--lr", lr, *small, before=IN_FLOAT64).stdout

    unbroken, printed = leg("single_gpu.py", 6, 0.009, "unbroken.pt"), figures(leg("single_gpu.py", 1, 0.009))
    for epochs, script in enumerate(SCRIPTS, start=2):
        said = leg(script, epochs, 0.5)
        saved = ", ".join(map(str, rates))
        assert (f"relay.pt: {epochs - 1} of {epochs} epochs are done; the saved learning rate, {saved}, goes on, "
                "not --lr 0.5\n") in said
        printed |= figures(said)
    assert printed == figures(unbroken)
    one, other = load("unbroken.pt"), load("relay.pt")
    assert one["epoch"] == other["epoch"] == 6
    torch.testing.assert_close(other["model"], one["model"], rtol=1e-9, atol=1e-9)
    assert [group["lr"] for group in other["optimizer"]["param_groups"]] == rates

    before = Path("relay.pt").read_bytes()
    assert "relay.pt: 6 of 3 epochs are done; to start afresh, delete it or change" in leg("dp.py", 3, 0.009)
    assert Path("relay.pt").read_bytes() == before and not list(Path().glob("*.tmp"))


class Hostile:
    def __reduce__(self):
        return open, ("executed", "w")


@pytest.mark.parametrize("what", ["foreign", "hostile", "cut", "text", "list", "flipped", "epoch"])
def test_a_file_that_is_no_checkpoint_of_this_model_ends_the_run_in_one_line(what):
    path = Path("run.pt")
    foreign = {"model": torch.nn.Linear(2, 2).state_dict(), "optimizer": {"state": {}, "param_groups": []}, "epoch": 1}
    torch.save({"list": [1, 2], "hostile": foreign | {"model": Hostile()}}.get(what, foreign), path)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "text":
        path.write_text("epoch 3\n")
    elif what == "flipped":
        path.unlink()
        train("single_gpu.py", 1, "--checkpoint", path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif what == "epoch":
        path.unlink()
        train("single_gpu.py", 1, "--checkpoint", path)
        torch.save(load(path) | {"epoch": "1"}, path)
    content = path.read_bytes()
    for script, processes in (("single_gpu.py", 1), ("multigpu_spawn.py", 2), ("multigpu_torchrun.py", 1)):
        job = train(script, 2, "--checkpoint", path, processes=processes, status=1)
        assert "run.pt cannot be resumed and is left as it was" in job.stderr and job.stderr.count("\n") == 1
        assert "epoch" not in job.stdout and path.read_bytes() == content
    assert not Path("executed").exists()


def test_each_process_holds_what_it_resumed_from_once():
    """What was read is let go of before training."""
    counts = """
import gc, torch
step = torch.optim.SGD.step
def counted(*given, **options):
    torch.optim.SGD.step = step
    held = [one for one in gc.get_objects() if isinstance(one, dict) and {"model", "optimizer", "epoch"} <= {*map(str, one)}]
    assert not held
    return step(*given, **options)
torch.optim.SGD.step = counted
"""
    for epochs, before in ((1, ""), (2, counts)):
        for script in ("single_gpu.py", "multigpu_spawn.py", "multigpu_torchrun.py"):
            train(script, epochs, before=before)
