"""recipes/profiler.py: each rank leaves a trace."""
import json
from pathlib import Path

from launch import train
from observe import spans


def test_each_rank_leaves_a_trace_of_three_steps_with_what_they_computed_and_sent():
    train("recipes/profiler.py", 2, "--checkpoint", "run.pt")
    assert sorted(map(str, Path().glob("*.json"))) == ["run.pt.rank0.json", "run.pt.rank1.json"]
    for rank in (0, 1):
        trace = json.loads(Path(f"run.pt.rank{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        steps = spans(trace, "ProfilerStep#")
        for name in ("enumerate(DataLoader)", "DistributedDataParallel.forward", "NllLossBackward0", "gloo:all_reduce",
                     "Optimizer.step"):
            assert len(steps) == len(spans(trace, name)) == 3, name
        for name in ("aten::convolution", "aten::convolution_backward"):
            inside = [span for span in spans(trace, name) if any(start <= span[0] < end for start, end in steps)]
            assert inside == spans(trace, name) != [], name
    train("recipes/profiler.py", 2, "--batch-size", 1920, "--checkpoint", "short.pt", processes=1)  # ends before those steps
    assert not list(Path().glob("short*.json"))
