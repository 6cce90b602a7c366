"""The same command trains the same model in every script, at every world size."""
import itertools
import re
from pathlib import Path

import torch
from launch import IN_FLOAT64, SCRIPTS, after, check_close, check_equal, figures, fits, little_data, load, start, train


def test_every_script_and_recipe_that_computes_the_same_trains_the_same_weights_with_one_to_six_processes():
    """Where nothing comes out even: one sample is missing for a fourth batch of 60, so that a repeated one would be seen."""
    ways = [("single_gpu.py", 1), ("dp.py", 1), *itertools.product(["multigpu_torchrun.py"], range(1, 7)),
            *itertools.product(["multigpu_spawn.py", "multinode.py"], [1, 3]),
            *itertools.product([f"recipes/{name}.py" for name in ("accumulate", "preempt", "profiler", "fsdp")], [2])]
    for number, (script, processes) in enumerate(way for way in ways if fits(way[1])):
        job = train(script, 2, "--batch-size", 60, "--checkpoint", f"{number}.pt", processes=processes,
                    before=IN_FLOAT64 + little_data(239, 101))
        begin, *lines = job.stdout.splitlines()
        assert begin.startswith(f"processes: {processes}, device: ")  # rank 0 alone prints
        assert [line.split()[0] for line in lines] == ["epoch", "epoch", "saved"]
        assert job.stderr == "" or script == "recipes/profiler.py"  # torch warns of nothing; Kineto says that it profiles
        check_equal(f"{number}.pt", "0.pt")
        if number == 0:
            printed = figures(job.stdout)
        assert figures(job.stdout) == printed


def test_started_side_by_side_by_the_commands_of_a_user_all_scripts_learn_alike_and_end_well_without_gloos_threads():
    """A thread of gloo that outlives its group may abort a process at its exit, after good training."""
    threads = "cat /proc/{0}/task/*/comm > {0}.threads"
    at_exit = f"import atexit, os\natexit.register(os.system, '{threads}'.format(os.getpid()))"
    jobs = [start(script, 8 if script == "single_gpu.py" else 2, before=at_exit) for script in SCRIPTS]
    assert [job.wait() for job in jobs] == [0] * len(jobs), "\n".join(job.stderr for job in jobs)
    one, *others = (figures(job.stdout) for job in jobs)
    assert one[1][1] < 20 and one[8][1] > 30  # it learns, and not at once
    for printed in others:
        check_close(printed, {epoch: one[epoch] for epoch in (1, 2)})
    assert not any(job.stderr for job in jobs)  # torch warns of nothing
    found = [file.read_text() for file in Path().glob("*.threads")]
    assert len(found) > 10 and "gloo" not in "".join(found)


AUGMENTED = little_data(120, 11) + """
import random, torch
plain = torch.utils.data.TensorDataset.__getitem__
def augmented(self, index):
    assert torch.utils.data.get_worker_info()
    image, label = plain(self, index)
    return image + random.gauss(0, 1) + torch.randn(image.shape), label
torch.utils.data.TensorDataset.__getitem__ = augmented
"""


def test_dropout_differs_by_rank_statistics_do_not_and_a_resumed_run_draws_what_an_unbroken_one_does_in_workers_too():
    def part(epochs, checkpoint, before=""):
        train("multigpu_torchrun.py", epochs, "--model", "mobilenet_v3_small", "--batch-size", 60,
              "--checkpoint", checkpoint, "--workers", 1, before=AUGMENTED + before)

    masks = after("torch.nn.Dropout.forward", "given[0].training and hash(bytes(result.eq(0).flatten().tolist()))")
    statistics = after("torch.nn.Module.eval", "'evaluates with', *(buffer.sum().item() for buffer in given[0].buffers())")
    part(2, "unbroken.pt", masks + statistics)
    part(1, "resumed.pt")
    part(2, "resumed.pt")
    torch.testing.assert_close(load("resumed.pt"), load("unbroken.pt"), rtol=0, atol=0)
    one, other = (Path(log).read_text().splitlines() for log in ("log.0", "log.1"))
    drawn = [line for line in one + other if re.fullmatch(r"-?\d+", line)]
    assert len(drawn) == len({*drawn}) == 2 * 2 * 2  # ranks, epochs, steps
    evaluated = [[line for line in rank if "with" in line] for rank in (one, other)]
    assert evaluated[0] == evaluated[1] and len({*evaluated[0]}) == 2  # of both epochs
