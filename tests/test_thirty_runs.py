"""Named to be collected last: it makes up what the session lacks of thirty runs."""
import launch
from launch import figures, run_all


def test_thirty_runs_of_several_processes_side_by_side_all_end_well(tmp_path):
    """Two jobs at once find ports of their own, and none of thirty exits aborts.

    Those that ran before in this session, which also had to end with 0, are counted in.
    """
    missing = max(4, 30 - len(launch.ended_well_with_several_processes))
    for job in run_all(*[(("multigpu_spawn.py", "multigpu_torchrun.py")[number % 2], 1, "--checkpoint",
                          f"{number}.pt", dict(cwd=tmp_path)) for number in range(missing)]):
        assert list(figures(job)) == [1] and job.stderr == ""
    assert len(launch.ended_well_with_several_processes) >= 30
