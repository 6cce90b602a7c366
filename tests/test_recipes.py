"""The recipes: each is the training that it says it is, shows what it promises, and goes together with others."""
import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from forked import train
from launch import IN_FLOAT64, RECIPES, ROOT, figures, load, logs, run, start, weights

compiles = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which compiles for the CPU")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What multigpu_torchrun.py prints and saves without any recipe."""
    folder = tmp_path_factory.mktemp("plain")
    job = train("multigpu_torchrun.py", 20, cwd=folder)
    return figures(job.stdout), formats(folder / "multigpu_torchrun.pt")


def formats(path):
    return {name: tensor.dtype for name, tensor in load(path)["model"].items()}


@pytest.mark.parametrize("recipe", [Path(recipe).stem for recipe in RECIPES])
def test_started_without_a_launcher_a_recipe_says_which_command_starts_it(recipe, recipes):
    job = train(f"recipes.{recipe}", cwd=recipes, processes=0, status=2)
    assert job.stderr.startswith(f"{recipe}.py: a launcher has to start it: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ")
    assert f"-m recipes.{recipe} 50 10" in job.stderr and job.stderr.count("\n") == 1


COUNTS_ALL_REDUCES = IN_FLOAT64 + logs("hooks.allreduce_hook", "given[1].buffer().numel()") + """
from torch.nn.parallel import DistributedDataParallel as DDP
make = DDP.__init__
def make_with_hook(self, *arguments, **options):
    make(self, *arguments, **options)
    self.register_comm_hook(None, hooks.allreduce_hook)
DDP.__init__ = make_with_hook
"""


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step(recipes, fashion_mnist):
    # 250 samples are eight parts of 30 and one of 10; half of them four and one of 5.
    options = 1, "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(760, 10), "--batch-size", 250
    without = train("multigpu_torchrun.py", *options, cwd=recipes, processes=1, before=IN_FLOAT64)
    expected = weights(recipes / "multigpu_torchrun.pt")
    for processes in (1, 2):
        job = train("recipes.accumulate", *options, "--checkpoint", f"{processes}.pt", cwd=recipes, processes=processes,
                    before=COUNTS_ALL_REDUCES)
        assert figures(job.stdout) == figures(without.stdout)
        assert (weights(recipes / f"{processes}.pt") - expected).norm() <= 1e-9 * expected.norm()
        for rank in range(processes):
            log = recipes / f"log.{rank}"
            assert log.read_text().split() == [str(len(expected))] * 3
            log.unlink()


LOGS_FORMATS = (logs("torch.nn.Linear.forward", "'training' if given[0].training else 'evaluation', result.dtype") +
                logs("torch.nn.functional.cross_entropy", "'loss', given[0].dtype") +
                logs("torch.optim.SGD.step", "'gradient', *{weight.grad.dtype for weight in given[0].param_groups[0]['params']}"))


@pytest.mark.xdist_group("plain")
def test_bfloat16_trains_and_evaluates_as_well_as_float32_which_keeps_weights_and_loss(recipes, plain):
    found = figures(train("recipes.bf16", 20, cwd=recipes, timeout=300, before=LOGS_FORMATS).stdout)
    for rank in (0, 1):
        assert {*(recipes / f"log.{rank}").read_text().splitlines()} == {
            "evaluation torch.bfloat16", "gradient torch.float32", "loss torch.float32", "training torch.bfloat16"}
    assert [loss for loss, _ in found.values()] == pytest.approx([loss for loss, _ in plain[0].values()], abs=5e-3)
    assert found[20][1] == pytest.approx(plain[0][20][1], abs=1) and found[20][1] > 90
    assert formats(recipes / "bf16.pt") == plain[1]
    saved = load(recipes / "bf16.pt")["optimizer"]["state"]
    assert all(state["momentum_buffer"].dtype == torch.float32 for state in saved.values())


@pytest.mark.xdist_group("plain")
@compiles
def test_compilation_takes_place_in_the_first_epoch_alone_and_trains_the_same(recipes, plain):
    job = start("recipes.compile", 4, cwd=recipes, TORCH_LOGS="graph_code,recompiles")
    job.wait_for("epoch 1/", timeout=400)
    compiled = job.stderr.count("TRACED GRAPH")
    assert compiled > 2  # in each rank for training, and for evaluation
    assert job.wait() == 0, job.stderr
    assert job.stderr.count("TRACED GRAPH") == compiled
    for epoch, (loss, accuracy) in figures(job.stdout).items():
        assert loss == pytest.approx(plain[0][epoch][0], abs=1e-3)
        assert accuracy == pytest.approx(plain[0][epoch][1], abs=100 / 509 + 0.01)  # one sample, rounded
    assert formats(recipes / "compile.pt") == plain[1]


def test_without_a_compiler_one_line_says_so(recipes):
    job = train("recipes.compile", 1, cwd=recipes, processes=1, status=2, CXX="no-such-compiler")
    assert job.stderr == "compile.py: compiling for the CPU needs g++, or another C++ compiler named by CXX\n"
    assert not job.stdout


# Bytes that an optimizer step works on. Gradients of one block share a store.
LOGS_BYTES = logs("torch.optim.SGD.step", """sum({
    store.data_ptr(): store.nbytes() for share, state in given[0].state.items()
    for tensor in (share, share.grad, state["momentum_buffer"]) if hasattr(tensor, "to_local")
    for store in [tensor.to_local().untyped_storage()]}.values())""")


def test_each_rank_holds_its_share_of_weights_gradients_and_momentum(recipes):
    """255 and 254 held-out samples in batches of 254: rank 0 has a batch more, whose forward rank 1 must attend."""
    train("recipes.fsdp", 1, "--model", "resnet18", "--batch-size", 508, cwd=recipes, before=LOGS_BYTES)
    whole = 3 * sum(weight.nbytes for name, weight in load(recipes / "fsdp.pt")["model"].items()
                    if "running" not in name and "num_batches" not in name)
    for rank in (0, 1):
        assert int((recipes / f"log.{rank}").read_text().split()[-1]) == pytest.approx(whole / 2, rel=0.01)


def test_fsdp_and_single_gpu_go_on_from_each_other_as_if_one_had_trained_alone(recipes, small):
    whole = figures(train("single_gpu.py", 3, *small, cwd=recipes, processes=0, before=IN_FLOAT64).stdout)
    printed = {}
    for script, epochs, processes in (("recipes.fsdp", 1, 2), ("single_gpu.py", 2, 0), ("recipes.fsdp", 3, 2)):
        job = train(script, epochs, "--checkpoint", "run.pt", *small, cwd=recipes, processes=processes, before=IN_FLOAT64)
        printed |= figures(job.stdout)
    assert printed == whole
    expected = weights(recipes / "single_gpu.pt")
    assert (weights(recipes / "run.pt") - expected).norm() <= 1e-9 * expected.norm()
    run("recipes.fsdp", 4, "--checkpoint", "run.pt", cwd=recipes)  # and it ends well as it is started


def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one(recipes, fashion_mnist):
    """With dropout and BatchNorm; whether the launcher or one process gets the signal."""
    options = ("--model", "mobilenet_v3_small", "--dataset", "FashionMNIST", "--data-dir", fashion_mnist(1440, 100))
    whole = train("recipes.preempt", 3, *options, "--checkpoint", "whole.pt", cwd=recipes)
    printed, stopped = {}, []
    handled = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    for number, to_launcher in ((signal.SIGUSR1, True), (signal.SIGTERM, False)):
        job = start("recipes.preempt", 3, *options, cwd=recipes, torchrun=handled)
        job.wait_for("epoch ")
        os.kill(job.process.pid if to_launcher else job.workers()[1], number)
        assert job.wait(30) == (1 if to_launcher else 0), job.stderr  # 1: torchrun's own after a signal
        printed |= figures(job.stdout)
        stopped.append(load(recipes / "preempt.pt"))
    assert [saved["epoch"] for saved in stopped] == [1, 2] and all(0 < saved["total"][1] < 1440 for saved in stopped)
    refused = train("single_gpu.py", 3, *options, "--checkpoint", "preempt.pt", cwd=recipes, processes=0, status=1)
    assert refused.stderr == "single_gpu.py: preempt.pt was saved inside epoch 3, where only recipes.preempt goes on\n"
    printed |= figures(train("recipes.preempt", 3, *options, cwd=recipes).stdout)
    assert printed == figures(whole.stdout)
    torch.testing.assert_close(load(recipes / "preempt.pt"), load(recipes / "whole.pt"), rtol=0, atol=0)


def spans(trace, name):
    """(start, end) of each event of this name, in microseconds."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in trace["traceEvents"]
            if event.get("ph") == "X" and event["name"].startswith(name)]


def test_each_rank_leaves_a_trace_of_three_steps_with_what_they_computed_and_sent(recipes):
    train("recipes.profiler", 1, "--checkpoint", "run.pt", cwd=recipes)
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
    train("recipes.profiler", 3, "--batch-size", 1920, cwd=recipes, processes=1)  # six steps
    assert not list(recipes.glob("*.json"))


@pytest.mark.xdist_group("plain")
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
    for epoch, (loss, _) in figures(job.stdout).items():
        assert loss == pytest.approx(plain[0][epoch][0], abs=5e-3)
    assert formats(recipes / "together.pt") == plain[1]
    forward = re.search(r"Forward graph.*?return", job.stderr, re.DOTALL)[0]
    assert '"f32[30, 3, 32, 32]' in forward and '"bf16[30, 10]' in forward  # 30 of the 120 samples, in bfloat16
    trace = json.loads((recipes / "together.pt.rank1.json").read_text())
    assert len(spans(trace, "DistributedDataParallel.forward")) == 3 * 4
    assert len(spans(trace, "gloo:all_reduce")) == 3
