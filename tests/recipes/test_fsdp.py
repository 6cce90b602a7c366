"""recipes/fsdp.py: each rank holds its share, and a file is like any other script's."""
from pathlib import Path

import pytest
from launch import IN_FLOAT64, TWO_RATES, after, check_equal, figures, load, run, train, with_optimizer

# Bytes that an optimizer step works on. Gradients of one block share a store.
LOGS_BYTES = after("torch.optim.SGD.step", """sum({
    store.data_ptr(): store.nbytes() for share, state in given[0].state.items()
    for tensor in (share, share.grad, state["momentum_buffer"]) if hasattr(tensor, "to_local")
    for store in [tensor.to_local().untyped_storage()]}.values())""")


def test_each_rank_holds_its_share_of_weights_gradients_and_momentum():
    """255 and 254 held-out samples in batches of 254: rank 0 has a batch more, whose forward rank 1 must attend."""
    train("recipes/fsdp.py", 1, "--model", "resnet18", "--batch-size", 508, before=LOGS_BYTES)
    whole = 3 * sum(weight.nbytes for name, weight in load("fsdp.pt")["model"].items()
                    if "running" not in name and "num_batches" not in name)
    for log in ("log.0", "log.1"):
        assert int(Path(log).read_text().split()[-1]) == pytest.approx(whole / 2, rel=0.01)


def test_fsdp_and_single_gpu_go_on_from_each_other_with_the_rates_of_the_file_as_if_one_had_trained_alone(small):
    fsdp, single_gpu = (with_optimizer(script, TWO_RATES) for script in ("recipes/fsdp.py", "single_gpu.py"))
    whole = figures(train(single_gpu, 3, *small, before=IN_FLOAT64).stdout)
    printed = {}
    for script, epochs, rate in ((fsdp, 1, ()), (single_gpu, 2, ("--lr", 0.5)), (fsdp, 3, ("--lr", 0.5))):
        printed |= figures(train(script, epochs, *rate, "--checkpoint", "run.pt", *small, before=IN_FLOAT64).stdout)
    assert printed == whole
    check_equal("run.pt", "single_gpu.pt")


def test_it_ends_well_as_it_is_started():
    run("recipes/fsdp.py", 1)
