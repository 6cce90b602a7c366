"""recipes/profiler.py: each rank leaves a trace."""
import json
from pathlib import Path

from launch import train


def test_each_rank_leaves_a_trace_of_three_steps_with_what_they_computed_and_sent():
    train("recipes/profiler.py", 2, "--checkpoint", "run.pt")
    for rank in (0, 1):
        trace = json.loads(Path(f"run.pt.rank{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"].partition("#")[0] for event in trace["traceEvents"] if event.get("ph") == "X"]
        for name in ("ProfilerStep", "enumerate(DataLoader)", "DistributedDataParallel.forward", "NllLossBackward0",
                     "gloo:all_reduce", "Optimizer.step"):
            assert sum(each.startswith(name) for each in names) == 3, name
    train("recipes/profiler.py", 2, "--batch-size", 1920, "--checkpoint", "short.pt", processes=1)  # ends before those steps
    assert not list(Path().glob("short*.json"))
