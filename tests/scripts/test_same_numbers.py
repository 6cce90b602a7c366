"""The same command trains the same model in every script, at every world size."""
from pathlib import Path

import pytest
from launch import IN_FLOAT64, MASKS, SCRIPTS, STATISTICS, after, little_data, start, train
from results import check_close, check_equal, check_same_bits, figures, logs


@pytest.mark.parametrize("script, processes", [
    ("dp.py", 1), *(("multigpu_torchrun.py", processes) for processes in range(1, 7)),
    ("multigpu_spawn.py", 2), ("multinode.py", 3), ("recipes/preempt.py", 4), ("recipes/fsdp.py", 3)])
def test_any_number_of_processes_trains_the_weights_of_one(script, processes):
    """Where nothing comes out even: one sample is missing for a fourth batch of 60, so that a repeated one would be seen."""
    each_once = after("utils.report", "assert given[3][1] == 101; log(given[4])")  # held-out samples; when the epoch began
    in_a_step = dict(SLURM_STEP_NUM_TASKS=1, SLURM_PROCID=0, SLURM_LOCALID=0)  # of Slurm, in which torchrun starts the ranks
    options, before = (2, "--batch-size", 60, "--checkpoint"), IN_FLOAT64 + little_data(239, 101)
    one = train("single_gpu.py", *options, "one.pt", before=before)
    job = train(script, *options, "run.pt", processes=processes, before=before + each_once, **in_a_step)
    assert figures(job.stdout) == figures(one.stdout)
    check_equal("run.pt", "one.pt")
    begin, *lines = job.stdout.splitlines()
    assert begin.startswith(f"processes: {processes}, device: ")  # rank 0 alone prints
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "saved"]
    assert job.stderr == ""  # torch warns of nothing
    assert len({*Path("log.0").read_text().split()}) == 2


def test_started_side_by_side_by_the_commands_of_a_user_all_scripts_learn_alike_and_end_well_without_gloos_threads():
    """A thread of gloo that outlives its group may abort a process at its exit. Loader workers start as by default."""
    at_exit = "import atexit, os; atexit.register(os.system, 'cat /proc/{0}/task/*/comm > {0}.threads'.format(os.getpid()))\n"
    starts = after("utils.report", "assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]")
    jobs = [start(script, 8 if script == "single_gpu.py" else 2, before=at_exit + starts) for script in SCRIPTS]
    assert not any(job.wait() or job.stderr for job in jobs)  # torch warns of nothing
    one, *others = (figures(job.stdout) for job in jobs)
    assert one[1][1] < 20 and one[8][1] > 30  # it learns, and not at once
    for printed in others:
        check_close(printed, {epoch: one[epoch] for epoch in (1, 2)})
    found = [file.read_text() for file in Path().glob("*.threads")]
    assert len(found) > 10 and "gloo" not in "".join(found)


AUGMENTED = little_data(120, 11) + after("torch.utils.data.TensorDataset.__getitem__", "result[0].add_(torch.randn(3, 32, 32))")


def test_dropout_differs_by_rank_statistics_do_not_and_a_resumed_run_draws_what_an_unbroken_one_does_in_workers_too():
    def part(epochs, checkpoint, before=""):
        train("multigpu_torchrun.py", epochs, "--model", "mobilenet_v3_small", "--batch-size", 60,
              "--checkpoint", checkpoint, "--workers", 1, before=AUGMENTED + before)

    part(2, "unbroken.pt", MASKS + STATISTICS)
    part(1, "resumed.pt")
    part(2, "resumed.pt")
    check_same_bits("resumed.pt", "unbroken.pt")
    one, other = logs("mask")
    assert len(one + other) == len({*one, *other}) == 2 * 2 * 2  # ranks, epochs, steps
    one, other = logs("statistics")
    assert one == other and len({*one}) == 2  # of both epochs
