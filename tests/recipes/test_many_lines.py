"""loop.py keeps its best model and stops; each rank of fsdp.py holds its shard; a preempted run of preempt.py loses no step."""
from pathlib import Path

import pytest
from launch import EXACT, IN_FLOAT64, LITTLE_DATA, SMALL, after, little_data, train
from results import check_equal, check_same_bits, figures, load

import utils


def test_the_loop_is_the_same_training_with_any_number_of_processes():
    options = 3, 1, *SMALL, "--model", "vit", "--lr", 0.002
    averaged = after("torch.nn.Module.eval", "assert next(given[0].parameters()).grad is None")  # not the model that is trained
    whole = train("recipes/loop.py", *options, processes=1, before=EXACT + averaged)
    job = train("recipes/loop.py", *options, "--checkpoint", "more.pt", processes=3, before=EXACT)
    assert figures(job.stdout) == figures(whole.stdout)
    check_equal("more.pt", "loop.pt")
    check_equal("more.pt.best", "loop.pt.best")
    decayed, plain = load("more.pt")["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0) and decayed["lr"] == plain["lr"] == 0


def test_the_loop_keeps_its_best_model_and_stops_in_all_ranks_where_nothing_gets_better():
    options = 50, 50, *SMALL, "--lr", 1e-9
    stopped, again = (train("recipes/loop.py", *options, before=LITTLE_DATA).stdout for _ in range(2))
    best = max(figures(stopped), key=lambda epoch: (figures(stopped)[epoch][1], -epoch))
    assert f"saved loop.pt.best after epoch {best}\n" in stopped and len(figures(stopped)) == best + 10
    assert stopped.endswith(f"saved loop.pt after epoch {best + 10}\nstopped: no improvement since epoch {best}\n")
    assert again.endswith(f"stopped: no improvement since epoch {best}\n") and not figures(again)


def test_a_model_trains_as_it_does_whole_and_each_rank_holds_its_shard_of_weights_gradients_and_momentum():
    """11 and 10 held-out samples in batches of 5: rank 0 has a batch more, whose forward rank 1 must attend."""
    options, few = (1, "--batch-size", 10, "--model", "resnet18"), IN_FLOAT64 + little_data(20, 21)
    whole = train("multigpu_torchrun.py", *options, before=few)
    sharded = train("recipes/fsdp.py", *options, before=few + after("torch.optim.SGD.step", """
        shards = [each for shard, state in given[0].state.items() for each in (shard, shard.grad, state["momentum_buffer"])]
        log(sum(each.to_local().nbytes for each in shards))
    """))
    assert figures(sharded.stdout) == figures(whole.stdout)
    check_equal("fsdp.pt", "multigpu_torchrun.pt")
    weights = sum(weight.numel() for weight in utils.build_model("resnet18").parameters())
    for log in ("log.0", "log.1"):
        assert int(Path(log).read_text().split()[-1]) == pytest.approx(3 * 8 * weights / 2, rel=0.03)


def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one():
    """With dropout and BatchNorm; whether one process gets the signal or all do, also after an epoch's last step."""
    options, few = (2, "--model", "mobilenet_v3_small", "--workers", 1, "--batch-size", 24), little_data(96)
    whole = train("recipes/preempt.py", *options, "--checkpoint", "whole.pt", before=few)
    printed = {}
    for step, name, ranks, epochs, samples in ((3, "SIGUSR1", (0, 1), 0, 72), (5, "SIGTERM", (1,), 1, 96)):
        signals = after("torch.optim.SGD.step", f"""
            if call == {step} and torch.distributed.get_rank() in {ranks}:
                for process in (multiprocessing.current_process(), *multiprocessing.active_children()):  # as Slurm does it
                    os.kill(process.pid, signal.{name})
        """)
        printed |= figures(train("recipes/preempt.py", *options, before=few + signals).stdout)
        stopped = load("preempt.pt")
        assert stopped["epoch"] == epochs and stopped["model"]["begun"][1] == samples
    refused = train("multigpu_torchrun.py", *options, "--checkpoint", "preempt.pt", status=1, before=few)
    assert 'Unexpected key(s) in state_dict: "begun"' in refused.stderr
    printed |= figures(train("recipes/preempt.py", *options, before=few).stdout)
    assert printed == figures(whole.stdout)
    check_same_bits("preempt.pt", "whole.pt")
