"""A run whose worker is killed goes on to the same weights."""
import torch
from launch import LITTLE_DATA, RESTARTS, SMALL, after, figures, load, start, train

RANK_1_IS_KILLED = "steps = []\n" + after("torch.optim.SGD.step", """
            os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and
            steps.append(0) or len(steps) == 13 and os.kill(os.getpid(), signal.SIGKILL)""")


def test_a_killed_worker_costs_no_bit_under_torchrun_with_restarts():
    options = "multigpu_torchrun.py", 4, 2, *SMALL
    job = start(*options, torchrun=["--max-restarts=3"], before=LITTLE_DATA + RANK_1_IS_KILLED, **RESTARTS)
    assert job.wait() == 0, job.stderr
    assert "multigpu_torchrun.pt: 2 of 4 epochs are done" in job.stdout
    undisturbed = train(*options, "--checkpoint", "undisturbed.pt", before=LITTLE_DATA)
    assert figures(job.stdout) == figures(undisturbed.stdout)
    torch.testing.assert_close(load("multigpu_torchrun.pt"), load("undisturbed.pt"), rtol=0, atol=0)
    assert "--max-restarts is unlikely to work" not in job.stderr
