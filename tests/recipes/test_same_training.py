"""A recipe is the same training as its base, or in its precision nearly so."""
from launch import EXACT, SMALL, check_close, check_equal, figures, train


def both_legs(script, *options, before=""):
    """Two epochs, of which the second is a resumed run's."""
    return figures("".join(train(script, epochs, *options, before=before).stdout for epochs in (1, 2)))


# accumulate, compile, fsdp, large and loop have tests of their own: they need parts of a batch, a compiler, another optimizer.
def test_a_recipe_is_the_same_training_as_its_base_also_when_it_is_resumed():
    base = figures(train("multigpu_torchrun.py", 2, *SMALL, before=EXACT).stdout)
    for recipe in ("preempt", "profiler"):
        assert both_legs(f"recipes/{recipe}.py", *SMALL, before=EXACT) == base
        check_equal(f"{recipe}.pt", "multigpu_torchrun.pt")


def test_recipes_with_fewer_digits_learn_as_fast_also_when_they_are_resumed():
    calm = "--batch-size", 240, "--lr", 0.009
    base = both_legs("multigpu_torchrun.py", *calm)
    assert base[1][0] - base[2][0] > 0.1  # twenty times the bound, which a recipe that does not train misses
    for recipe in ("bf16", "compress"):
        check_close(both_legs(f"recipes/{recipe}.py", *calm), base, loss=0.005, accuracy=2)
