"""loop.py keeps its best model and stops; each rank of fsdp.py holds its shard; a preempted run of preempt.py loses no step."""
from pathlib import Path

import pytest
import torch
from launch import EXACT, IN_FLOAT64, LITTLE_DATA, MASKS, SMALL, STATISTICS, after, little_data, train
from results import check_equal, check_same_bits, figures, load, logs

import utils


def test_the_loop_is_the_same_training_with_any_number_of_processes():
    options = 3, 1, *SMALL, "--model", "vit", "--lr", 0.002
    averaged = after("torch.nn.Module.eval", "assert next(given[0].parameters()).grad is None")  # not the model that is trained
    clipped = after("torch.optim.AdamW.step", """
        log(given[0].param_groups[0]["lr"])
        gradients = [weight.grad for group in given[0].param_groups for weight in group["params"]]
        assert 0 < torch.nn.utils.get_total_norm(gradients) < 1.0001
    """)
    whole = train("recipes/loop.py", *options, processes=1, before=EXACT + averaged + clipped)
    assert float(Path("log.0").read_text().split()[0]) == pytest.approx(0.002 / 1.5)  # of a warm-up of 1.5 steps
    job = train("recipes/loop.py", *options, "--checkpoint", "more.pt", processes=3, before=EXACT)
    assert figures(job.stdout) == figures(whole.stdout)
    check_equal("more.pt", "loop.pt")
    check_equal("more.pt.best", "loop.pt.best")
    decayed, plain = load("more.pt")["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0) and decayed["lr"] == plain["lr"] == 0


def test_the_loop_averages_weights_and_rank_0s_statistics_over_all_steps_and_the_best_file_gets_that():
    for steps in (1, 2):
        train("recipes/loop.py", 1, *SMALL, "--model", "resnet18", "--checkpoint", f"{steps}.pt",
              before=little_data(48 * steps, 11) + STATISTICS)
    first, second = load("1.pt"), load("2.pt")
    average, last = ({name: each for name, each in first[key].items() if "num_batches" not in name} for key in ("ema", "model"))
    torch.testing.assert_close(average, last)
    torch.testing.assert_close(load("2.pt.best")["model"], second["ema"], rtol=0, atol=0)
    assert not torch.equal(second["ema"]["fc.weight"], second["model"]["fc.weight"])
    one, other = logs("statistics")
    assert one == other != []


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
    gathered = after("torch.distributed.fsdp.fully_shard", "log(type(given[0]).__name__)")
    sharded = train("recipes/fsdp.py", *options, before=few + gathered + after("torch.optim.SGD.step", """
        shards = [each for shard, state in given[0].state.items() for each in (shard, shard.grad, state["momentum_buffer"])]
        log(sum(each.to_local().nbytes for each in shards))
    """))
    assert figures(sharded.stdout) == figures(whole.stdout)
    check_equal("fsdp.pt", "multigpu_torchrun.pt")
    weights = sum(weight.numel() for weight in utils.build_model("resnet18").parameters())
    for lines in logs():
        assert lines[:9] == ["FSDPBasicBlock"] * 8 + ["FSDPResNet"]  # gathered one at a time
        assert int(lines[-1]) == pytest.approx(3 * 8 * weights / 2, rel=0.03)


def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one():
    """With dropout and BatchNorm; whether one process gets the signal or all do, twice in an epoch or after its last step."""
    options, few = (2, "--model", "mobilenet_v3_small", "--workers", 1, "--batch-size", 24), little_data(96)
    whole = train("recipes/preempt.py", *options, "--checkpoint", "whole.pt", before=few + MASKS)
    one, other = logs("mask")
    assert len(one + other) == len({*one, *other}) == 2 * 2 * 4  # ranks, epochs, steps
    printed = {}
    stops = (2, "SIGUSR1", (0, 1), 0, 48), (1, "SIGUSR1", (0,), 0, 72), (5, "SIGTERM", (1,), 1, 96)
    for step, name, ranks, epochs, samples in stops:
        waits = after("os.fsync", "time.sleep(1)") + after("torch.distributed.destroy_process_group", f"""
            assert torch.load("preempt.pt")["model"]["begun"][1] == {samples}  # no rank ends before it is saved
        """)
        signals = after("torch.Tensor.backward", f"""
            if call == {step} and torch.distributed.get_rank() in {ranks}:
                for process in (multiprocessing.current_process(), *multiprocessing.active_children()):  # as Slurm does it
                    os.kill(process.pid, signal.{name})
        """)
        printed |= figures(train("recipes/preempt.py", *options, before=few + signals + waits).stdout)
        stopped = load("preempt.pt")
        assert stopped["epoch"] == epochs and stopped["model"]["begun"][1] == samples
    refused = train("multigpu_torchrun.py", *options, "--checkpoint", "preempt.pt", status=1, before=few)
    assert 'Unexpected key(s) in state_dict: "begun"' in refused.stderr
    printed |= figures(train("recipes/preempt.py", *options, before=few).stdout)
    assert printed == figures(whole.stdout)
    check_same_bits("preempt.pt", "whole.pt")
