"""recipes/accumulate.py: gradients are sent once a step."""
from pathlib import Path

from launch import IN_FLOAT64, after, check_equal, figures, little_data, train


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step():
    options, few = (1, "--batch-size", 250), IN_FLOAT64 + little_data(760)
    without = train("multigpu_torchrun.py", *options, processes=1, before=few)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward",
                  "given[0].training, given[0].require_backward_grad_sync")
    job = train("recipes/accumulate.py", *options, before=few + sends)
    assert figures(job.stdout) == figures(without.stdout)
    check_equal("accumulate.pt", "multigpu_torchrun.pt")
    for log in ("log.0", "log.1"):  # four parts of 30 samples, and one of 5
        assert Path(log).read_text().splitlines() == [*["True False"] * 4, "True True"] * 3
