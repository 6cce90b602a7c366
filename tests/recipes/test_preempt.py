"""recipes/preempt.py: a preempted run loses no step."""
import re
from signal import SIGTERM, SIGUSR1

import torch
from launch import after, figures, little_data, load, train

SIGNALS = "import multiprocessing\nsteps = []\n" + after("torch.optim.SGD.step", """
            steps.append(0) or len(steps) == {} and torch.distributed.get_rank() in {} and [
                os.kill(pid, {}) for pid in [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]]""")


def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one():
    """With dropout and BatchNorm; whether one process gets the signal or all do, loader workers too, as Slurm sends it."""
    options, few = (3, "--model", "mobilenet_v3_small", "--workers", 1, "--batch-size", 24), little_data(120)
    whole = train("recipes/preempt.py", *options, "--checkpoint", "whole.pt", before=few)
    printed = {}
    for step, ranks, number, epochs in ((8, (0, 1), SIGUSR1, 1), (4, (1,), SIGTERM, 2)):
        job = train("recipes/preempt.py", *options, before=few + SIGNALS.format(step, ranks, int(number)))
        printed |= figures(job.stdout)
        stopped = load("preempt.pt")
        assert stopped["epoch"] == epochs and 0 < stopped["total"][1] < 120
    refused = train("single_gpu.py", *options, "--checkpoint", "preempt.pt", status=1, before=few)
    assert re.search("preempt.pt cannot be resumed .*only recipes.preempt can resume it", refused.stderr)
    printed |= figures(train("recipes/preempt.py", *options, before=few).stdout)
    assert printed == figures(whole.stdout)
    torch.testing.assert_close(load("preempt.pt"), load("whole.pt"), rtol=0, atol=0)
