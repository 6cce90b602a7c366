"""recipes/compile.py: all is compiled in the first epoch."""
from launch import check_close, figures, start, train
from observe import formats, needs_compilation


def test_compilation_takes_place_in_the_first_epoch_alone_and_trains_the_same(small):
    needs_compilation()
    job = start("recipes/compile.py", 3, *small, processes=1, TORCH_LOGS="graph_code,recompiles")
    job.wait_for("epoch 1/")
    compiled = job.stderr.count("TRACED GRAPH")
    assert compiled > 1  # for training, and for evaluation
    assert job.wait() == 0, job.stderr
    assert job.stderr.count("TRACED GRAPH") == compiled
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", 3, *small, processes=1).stdout))
    assert formats("compile.pt") == formats("multigpu_torchrun.pt")
    without = train("recipes/compile.py", 1, processes=1, status=2, CXX="no-such-compiler")
    assert without.stderr == "compile.py: compiling for the CPU needs g++, or another C++ compiler named by CXX\n"


def test_a_transformer_compiles_and_trains_the_same_in_two_ranks(fashion_mnist):
    needs_compilation()
    options = 1, "--model", "vit", "--batch-size", 20, *fashion_mnist(40, 20)
    base = figures(train("multigpu_torchrun.py", *options).stdout)
    check_close(figures(train("recipes/compile.py", *options).stdout), base, accuracy=5)
