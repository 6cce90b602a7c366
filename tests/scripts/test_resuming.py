"""What is saved can be continued by any script; what is not of them is refused and left as it was."""
from pathlib import Path

import pytest
import torch
from launch import IN_FLOAT64, SCRIPTS, figures, load, train


def test_each_script_goes_on_where_another_stopped(small):
    def leg(script, epochs, path="relay.pt", lr=0.009):
        return train(script, epochs, "--checkpoint", path, "--lr", lr, *small, before=IN_FLOAT64).stdout

    unbroken, printed = leg("single_gpu.py", 6, "unbroken.pt"), {}
    for epochs, script in enumerate([*SCRIPTS, "single_gpu.py"], start=1):
        said = leg(script, epochs)
        assert epochs == 1 or f"relay.pt: {epochs - 1} of {epochs} epochs are done" in said
        printed |= figures(said)
    assert printed == figures(unbroken)
    one, other = load("unbroken.pt"), load("relay.pt")
    assert one["epoch"] == other["epoch"] == 6
    torch.testing.assert_close(other["model"], one["model"], rtol=1e-9, atol=1e-9)

    before = Path("relay.pt").read_bytes()
    assert "relay.pt: 6 of 3 epochs are done; to start afresh, delete it or change" in leg("dp.py", 3, lr=0.001)
    assert Path("relay.pt").read_bytes() == before
    leg("single_gpu.py", 7, lr=0.001)
    assert load("relay.pt")["optimizer"]["param_groups"][0]["lr"] == 0.001  # not the file's
    assert not list(Path().glob("*.tmp"))


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


def test_the_learning_rate_of_the_command_line_counts_in_all_groups_of_the_optimizer(small):
    groups = """import torch
init = torch.optim.SGD.__init__
torch.optim.SGD.__init__ = lambda self, params, **options: init(self, [{"params": [one]} for one in params], **options)
"""
    for epochs, rate in ((1, 0.003), (2, 0.001)):
        train("multigpu_torchrun.py", epochs, "--lr", rate, "--checkpoint", "run.pt", *small, before=groups)
    rates = [group["lr"] for group in load("run.pt")["optimizer"]["param_groups"]]
    assert len(rates) > 1 and {*rates} == {0.001}
