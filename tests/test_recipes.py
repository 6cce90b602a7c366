"""The recipes: each is the training that it says it is, shows what it promises, and goes together with others."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import IN_FLOAT64
from launch import RECIPES, ROOT, Job, figures, load, run, start, weights

compiles = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which compiles for the CPU")

STARTS_WITHOUT_LAUNCHER = """
import runpy
import sys
for name in sys.argv[1:]:
    sys.argv = [f"recipes/{name}.py"]
    try:
        runpy.run_module(f"recipes.{name}", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 2
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What multigpu_torchrun.py prints and saves without any recipe."""
    job = run("multigpu_torchrun.py", 30, cwd=tmp_path_factory.mktemp("plain"))
    job.saved = load(job.errors.parent / "multigpu_torchrun.pt")
    return job


def names_and_formats(checkpoint):
    return {name: tensor.dtype for name, tensor in checkpoint["model"].items()}


def test_started_without_a_launcher_a_recipe_says_which_command_starts_it(recipes):
    names = [recipe[len("recipes/"):-len(".py")] for recipe in RECIPES]
    job = Job([sys.executable, "-c", STARTS_WITHOUT_LAUNCHER, *names], recipes)
    assert job.wait() == 0, job.stderr
    for name, line in zip(names, job.stderr.splitlines(), strict=True):
        assert line.startswith(f"{name}.py: a launcher has to start it: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ")
        assert f"-m recipes.{name} 50 10" in line


# accumulate.py

COUNT_ALL_REDUCES = IN_FLOAT64 + """
import os
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
make = DDP.__init__
def reduce(state, bucket):
    with open(f"{os.environ['REDUCED']}.{os.environ['RANK']}", "a") as file:
        print(bucket.buffer().numel(), file=file)
    return allreduce_hook(None, bucket)
def make_and_count(self, *arguments, **options):
    make(self, *arguments, **options)
    self.register_comm_hook(None, reduce)
DDP.__init__ = make_and_count
"""


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step(recipes, float64, customize):
    batch, epochs = 250, 1  # 250 samples are eight parts of 30 and one of 10; 125 are four and one of 5
    without = run("multigpu_torchrun.py", epochs, "--batch-size", batch, processes=1, cwd=recipes, **float64)
    expected = weights(recipes / "multigpu_torchrun.pt")
    counted = customize(COUNT_ALL_REDUCES)
    for processes in (1, 2):
        job = run("recipes.accumulate", epochs, "--batch-size", batch, "--checkpoint", f"{processes}.pt", cwd=recipes,
                  processes=processes, REDUCED=f"{recipes}/{processes}.reduced", **counted)
        assert figures(job) == figures(without)
        assert (weights(recipes / f"{processes}.pt") - expected).norm() <= 1e-9 * expected.norm()
        for rank in range(processes):
            sent = [int(size) for size in (recipes / f"{processes}.reduced.{rank}").read_text().split()]
            assert sent == [len(expected)] * epochs * (3840 // batch)


# bf16.py

LOG_FORMATS = """
import atexit
import os
import torch
import torch.nn.functional as F
linear, cross_entropy, step, seen = torch.nn.Linear.forward, F.cross_entropy, torch.optim.SGD.step, set()
def logged_linear(self, images):
    output = linear(self, images)
    seen.add(f"{'training' if self.training else 'evaluation'} {output.dtype}")
    return output
def logged_cross_entropy(logits, labels):
    seen.add(f"loss {logits.dtype}")
    return cross_entropy(logits, labels)
def logged_step(self):
    seen.update(f"gradient {weight.grad.dtype}" for weight in self.param_groups[0]["params"])
    return step(self)
def save():
    if "RANK" in os.environ:
        open(f"formats.{os.environ['RANK']}", "w").write("\\n".join(sorted(seen)))
torch.nn.Linear.forward, F.cross_entropy, torch.optim.SGD.step = logged_linear, logged_cross_entropy, logged_step
atexit.register(save)
"""


def test_bfloat16_trains_and_evaluates_as_well_as_float32_which_keeps_weights_and_loss(recipes, plain, customize):
    job = run("recipes.bf16", 30, cwd=recipes, timeout=300, **customize(LOG_FORMATS))
    for rank in (0, 1):
        assert (recipes / f"formats.{rank}").read_text().splitlines() == [
            "evaluation torch.bfloat16", "gradient torch.float32", "loss torch.float32", "training torch.bfloat16"]
    found, expected = figures(job), figures(plain)
    assert [loss for loss, _ in found.values()] == pytest.approx([loss for loss, _ in expected.values()], abs=5e-3)
    assert found[30][1] == pytest.approx(expected[30][1], abs=1)
    saved = load(recipes / "bf16.pt")
    assert names_and_formats(saved) == names_and_formats(plain.saved)
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in saved["optimizer"]["state"].values())


# compile.py

@compiles
def test_compilation_takes_place_in_the_first_epoch_alone_and_trains_the_same(recipes, plain):
    job = start("recipes.compile", 4, cwd=recipes, TORCH_LOGS="graph_code,recompiles")
    job.wait_for("epoch 1/", timeout=400)
    compiled = job.stderr.count("TRACED GRAPH")
    assert compiled > 2  # in each rank for training, and for evaluation
    assert job.wait() == 0, job.stderr
    assert job.stderr.count("TRACED GRAPH") == compiled
    for epoch, (loss, accuracy) in figures(job).items():
        assert loss == pytest.approx(figures(plain)[epoch][0], abs=1e-3)
        assert accuracy == pytest.approx(figures(plain)[epoch][1], abs=100 / 509 + 0.01)  # one sample, rounded
    assert names_and_formats(load(recipes / "compile.pt")) == names_and_formats(plain.saved)


def test_without_a_compiler_one_line_says_so(recipes):
    job = run("recipes.compile", 1, cwd=recipes, processes=1, status=1, CXX="no-such-compiler")  # 1 is torchrun's own
    assert job.stderr.startswith("compile.py: compiling for the CPU needs g++, or another C++ compiler named by CXX\n")
    assert not job.stdout


# fsdp.py

LOG_BYTES = """
import os
import torch
step = torch.optim.SGD.step
def logged_step(self, closure=None):
    step(self)
    held = [tensor for share, state in self.state.items() for tensor in (share, share.grad, state["momentum_buffer"])]
    if hasattr(held[0], "to_local"):  # a step of the training, not the one that loading takes on the plain model
        stores = [tensor.to_local().untyped_storage() for tensor in held]  # gradients of one block share theirs
        with open(f"bytes.{os.environ['RANK']}", "w") as file:
            print(sum({store.data_ptr(): store.nbytes() for store in stores}.values()), file=file)
torch.optim.SGD.step = logged_step
"""


def test_each_rank_holds_its_share_of_weights_gradients_and_momentum(recipes, customize):
    """255 and 254 held-out samples in batches of 254: rank 0 has a batch more, whose forward rank 1 must attend."""
    run("recipes.fsdp", 1, "--model", "resnet18", "--batch-size", 508, cwd=recipes, **customize(LOG_BYTES))
    whole = 3 * sum(weight.nbytes for name, weight in load(recipes / "fsdp.pt")["model"].items()
                    if "running" not in name and "num_batches" not in name)
    for rank in (0, 1):
        assert int((recipes / f"bytes.{rank}").read_text()) == pytest.approx(whole / 2, rel=0.01)


def test_fsdp_and_single_gpu_go_on_from_each_other_as_if_one_had_trained_alone(recipes, float64):
    common = dict(cwd=recipes, **float64)
    whole = figures(run("single_gpu.py", 3, **common))
    printed = {}
    for script, epochs in (("recipes.fsdp", 1), ("single_gpu.py", 2), ("recipes.fsdp", 3)):
        printed |= figures(run(script, epochs, "--checkpoint", "run.pt", **common))
    assert printed == whole
    expected = weights(recipes / "single_gpu.pt")
    assert (weights(recipes / "run.pt") - expected).norm() <= 1e-9 * expected.norm()


# preempt.py

def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one(recipes, fashion_mnist):
    """With dropout and BatchNorm; whether the launcher or one process gets the signal."""
    options = ("--model", "mobilenet_v3_small", "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(1440, 100))
    whole = run("recipes.preempt", 3, *options, "--checkpoint", "whole.pt", cwd=recipes)
    printed, stopped = {}, []
    handled = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    for number, to_launcher in ((signal.SIGUSR1, True), (signal.SIGTERM, False)):
        job = start("recipes.preempt", 3, *options, cwd=recipes, torchrun=handled)
        job.wait_for("epoch ")
        os.kill(job.process.pid if to_launcher else job.workers()[1], number)
        assert job.wait(20) == (1 if to_launcher else 0), job.stderr  # 1: torchrun's own after a signal
        printed |= figures(job)
        stopped.append(load(recipes / "preempt.pt"))
    assert [saved["epoch"] for saved in stopped] == [1, 2] and all(0 < saved["total"][1] < 1440 for saved in stopped)
    refused = run("single_gpu.py", 3, *options, "--checkpoint", "preempt.pt", cwd=recipes, status=1)
    assert refused.stderr == "single_gpu.py: preempt.pt was saved inside epoch 3, where only recipes.preempt goes on\n"
    printed |= figures(run("recipes.preempt", 3, *options, cwd=recipes))
    assert printed == figures(whole)
    ended, expected = load(recipes / "preempt.pt"), load(recipes / "whole.pt")
    torch.testing.assert_close(ended, expected, rtol=0, atol=0)


# profiler.py

def spans(trace, name):
    """(start, end) of each event of this name, in microseconds."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in trace["traceEvents"]
            if event.get("ph") == "X" and event["name"].startswith(name)]


def test_each_rank_leaves_a_trace_of_three_steps_with_what_they_computed_and_sent(recipes):
    run("recipes.profiler", 1, "--checkpoint", "run.pt", cwd=recipes)
    assert sorted(path.name for path in recipes.glob("*.json")) == ["run.pt.rank0.json", "run.pt.rank1.json"]
    for rank in (0, 1):
        trace = json.loads((recipes / f"run.pt.rank{rank}.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
        steps = spans(trace, "ProfilerStep#")
        for name in ("enumerate(DataLoader)", "DistributedDataParallel.forward", "NllLossBackward0", "gloo:all_reduce",
                     "Optimizer.step"):
            assert len(steps) == len(spans(trace, name)) == 3, name
        for name in ("aten::convolution", "aten::convolution_backward"):
            assert {span for step in steps for span in spans(trace, name) if step[0] <= span[0] < step[1]} == set(
                spans(trace, name)) != set(), name


def test_a_run_that_ends_before_the_profiled_steps_ends_well(recipes):
    run("recipes.profiler", 3, "--batch-size", 1920, cwd=recipes, processes=1)  # six steps
    assert not list(recipes.glob("*.json"))


# Together

@compiles
def test_accumulation_bfloat16_compilation_and_a_profile_go_together(recipes, plain):
    """The diffs, applied one after the other, touch no line twice but the one that names the recipe."""
    base = (ROOT / "multigpu_torchrun.py").read_text().splitlines(keepends=True)
    (recipes / "base.py").write_text("".join(base))
    together = recipes / "recipes" / "together.py"
    together.write_text("".join(base))
    added = Counter()
    for recipe in ("accumulate", "bf16", "compile", "profiler"):
        lines = (ROOT / "recipes" / f"{recipe}.py").read_text().splitlines(keepends=True)
        lines[2] = base[2]  # which command starts it
        added += Counter(lines) - Counter(base)
        (recipes / "recipe.py").write_text("".join(lines))
        subprocess.run(["git", "merge-file", together, "base.py", "recipe.py"], cwd=recipes, timeout=60, check=True)
    assert Counter(together.read_text().splitlines(keepends=True)) - Counter(base) == added

    job = run("recipes.together", 3, cwd=recipes, timeout=500, TORCH_LOGS="aot_graphs")
    for epoch, (loss, _) in figures(job).items():
        assert loss == pytest.approx(figures(plain)[epoch][0], abs=5e-3)
    assert names_and_formats(load(recipes / "together.pt")) == names_and_formats(plain.saved)
    forward = re.search(r"Forward graph.*?return", job.stderr, re.DOTALL)[0]
    assert '"f32[30, 3, 32, 32]' in forward and '"bf16[30, 10]' in forward  # 30 of the 120 samples, in bfloat16
    trace = json.loads((recipes / "together.pt.rank1.json").read_text())
    assert len(spans(trace, "DistributedDataParallel.forward")) == 3 * 4
    assert len(spans(trace, "gloo:all_reduce")) == 3
