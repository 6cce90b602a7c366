"""recipes/compile.py: all is compiled in the first epoch."""
from pathlib import Path

from launch import LITTLE_DATA, SMALL, after, check_close, figures, train
from observe import EAGERLY, formats, needs_compilation

COUNTS_GRAPHS = "import utils, torch._dynamo" + after("utils.report", "torch._dynamo.utils.counters['stats']['unique_graphs']")


def test_compilation_takes_place_in_the_first_epoch_alone_and_trains_the_same():
    needs_compilation()
    options = 3, *SMALL
    job = train("recipes/compile.py", *options, processes=1, before=LITTLE_DATA + COUNTS_GRAPHS, TORCHINDUCTOR_COMPILE_THREADS=1,
                TORCHINDUCTOR_CACHE_DIR="compiled")  # what was compiled for one instruction set fails with another
    first, *later = map(int, Path("log.0").read_text().split())
    assert later == [first] * 2 and first > 1  # for training, and for evaluation
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", *options, processes=1, before=LITTLE_DATA).stdout))
    assert formats("compile.pt") == formats("multigpu_torchrun.pt")
    without = train("recipes/compile.py", 1, processes=1, status=2, CXX="no-such-compiler")
    assert without.stderr == "compile.py: compiling for the CPU needs g++, or another C++ compiler named by CXX\n"


def test_a_transformer_trains_the_same_whatever_its_graphs_are_compiled_to():
    needs_compilation()
    options = 1, "--model", "vit", *SMALL
    base = figures(train("multigpu_torchrun.py", *options, processes=1, before=LITTLE_DATA).stdout)
    check_close(figures(train("recipes/compile.py", *options, processes=1, before=LITTLE_DATA + EAGERLY).stdout), base)
