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
from launch import (
    IN_FLOAT64,
    ROOT,
    TORCHRUN,
    Job,
    after,
    check_close,
    check_equal,
    figures,
    hold_for_a_signal,
    load,
    needs,
    run,
    start,
    train,
)


def formats(path):
    saved = load(path)
    return [tensor.dtype for part in (saved["model"], *saved["optimizer"]["state"].values()) for tensor in part.values()]


SGD = "torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=args.lr)"


def with_optimizer(script, optimizer):
    """A copy in which the line is another one, as a user would write it."""
    copy = Path("copies", Path(script).name)
    copy.parent.mkdir(exist_ok=True)
    copy.write_text((ROOT / script).read_text().replace(SGD, optimizer))
    return copy.resolve()


SMALL_WITH_BATCHNORM = """
import torchvision
torchvision.models._api.BUILTIN_MODELS["resnet18"] = torchvision.models.shufflenet_v2_x0_5
"""


@pytest.mark.parametrize("model", ["cnn", "vit", "resnet18"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["SGD", "AdamW"])
def test_recipes_are_the_same_training_with_any_optimizer_and_model_also_when_they_are_resumed(optimizer, model, fashion_mnist):
    options = "--model", model, *fashion_mnist(96, 21), "--batch-size", 48, "--lr", 0.001
    sharp = IN_FLOAT64 + SMALL_WITH_BATCHNORM
    whole = figures(train(with_optimizer("multigpu_torchrun.py", optimizer), 2, *options, before=sharp).stdout)
    for recipe in ("accumulate", "fsdp", "preempt", "profiler", "bf16", "compress"):
        script, rounds = with_optimizer(f"recipes/{recipe}.py", optimizer), recipe in ("bf16", "compress")
        before = SMALL_WITH_BATCHNORM if rounds else sharp
        printed = figures("".join(train(script, epochs, *options, before=before).stdout for epochs in (1, 2)))
        if rounds:
            check_close(printed, whole, loss=0.1, accuracy=100)
        else:
            assert printed == whole, recipe
            check_equal(f"{recipe}.pt", "multigpu_torchrun.pt")


def test_a_recipe_may_be_started_by_its_path():
    job = Job([*TORCHRUN, "--standalone", "--nproc_per_node=2", ROOT / "recipes/compress.py", 1, "--device", "cpu"])
    assert job.wait() == 0 and "saved compress.pt after epoch 1" in job.stdout, job.stderr


KEEPS_EACH_SAVE = after("os.replace", "__import__('shutil').copy(given[1], f'{given[1]}.{time.monotonic_ns()}')")


def test_the_loop_is_the_same_training_with_any_number_of_processes_and_when_it_is_resumed(small):
    options = 4, 1, *small, "--model", "vit", "--lr", 0.002
    whole = train("recipes/loop.py", *options, processes=1, before=IN_FLOAT64 + KEEPS_EACH_SAVE)
    saved = sorted(Path().glob("loop.pt.[0-9]*"))
    for processes in (2, 3):
        shutil.copy(saved[1], "resumed.pt")
        for file, done in (("more.pt", 0), ("resumed.pt", 2)):
            job = train("recipes/loop.py", *options, "--checkpoint", file, processes=processes, before=IN_FLOAT64)
            assert figures(job.stdout) == {epoch: seen for epoch, seen in figures(whole.stdout).items() if epoch > done}
            check_equal(file, "loop.pt")
            ours, others = load(file), load("loop.pt")
            assert (ours["best"], ours["schedule"]) == (others["best"], others["schedule"])
            torch.testing.assert_close(ours["ema"], others["ema"], rtol=1e-9, atol=1e-12)
            Path(file).unlink()
        check_equal("more.pt.best", "loop.pt.best")
    decayed, plain = load("loop.pt")["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0) and decayed["lr"] == plain["lr"] == 0
    assert not any(name.startswith("module.") for name in load("loop.pt.best")["model"])


def test_the_loop_keeps_its_best_model_and_stops_in_all_ranks_where_nothing_gets_better(small):
    options = 50, 50, *small, "--lr", 1e-9
    stopped = train("recipes/loop.py", *options)
    best = max(figures(stopped.stdout), key=lambda epoch: (figures(stopped.stdout)[epoch][1], -epoch))
    assert f"saved loop.pt.best after epoch {best}\n" in stopped.stdout and len(figures(stopped.stdout)) == best + 10
    assert stopped.stdout.endswith(f"saved loop.pt after epoch {best + 10}\nstopped: no better accuracy since epoch {best}\n")
    assert train("recipes/loop.py", *options).stdout.endswith(f"stopped: no better accuracy since epoch {best}\n")
    train("multigpu_torchrun.py", 1, *small)
    for script, other in (("single_gpu.py", "loop.pt"), ("recipes/loop.py", "multigpu_torchrun.pt")):
        refused = train(script, *options, "--checkpoint", other, status=1, processes=1)
        assert re.search(f": {other} cannot be resumed .*its optimizer is another one", refused.stderr)


def test_gradients_cross_the_network_in_half_the_bytes():
    sent = after("torch.distributed.all_reduce", "given[0].dtype, given[0].numel()")
    train("recipes/compress.py", 1, before=sent)
    weights = sum(weight.numel() for weight in load("compress.pt")["model"].values())
    for log in ("log.0", "log.1"):
        lines = [line.split() for line in Path(log).read_text().splitlines()]
        compressed = [int(count) for dtype, count in lines if dtype == "torch.bfloat16"]
        assert sum(compressed) == 8 * weights  # each step, all of them
        assert len(lines) - len(compressed) == 2  # loss and accuracy
    assert formats("compress.pt") == [torch.float32] * len(formats("compress.pt"))


def test_accumulation_is_the_same_training_and_sends_gradients_once_a_step(fashion_mnist):
    options = 1, *fashion_mnist(760, 10), "--batch-size", 250
    without = train("multigpu_torchrun.py", *options, processes=1, before=IN_FLOAT64)
    sends = after("torch.nn.parallel.DistributedDataParallel.forward",
                  "given[0].training, given[0].require_backward_grad_sync")
    for processes, parts in ((1, 9), (2, 5)):  # eight parts of 30 samples and one of 10; half of them: four and one of 5
        job = train("recipes/accumulate.py", *options, "--checkpoint", f"{processes}.pt", processes=processes,
                    before=IN_FLOAT64 + sends)
        assert figures(job.stdout) == figures(without.stdout)
        check_equal(f"{processes}.pt", "multigpu_torchrun.pt")
        for log in (Path(f"log.{rank}") for rank in range(processes)):
            assert log.read_text().splitlines() == ([*["True False"] * (parts - 1), "True True"]) * 3
            log.unlink()


LOGS_FORMATS = (after("torch.nn.Linear.forward", "'training' if given[0].training else 'evaluation', result.dtype") +
                after("torch.nn.functional.cross_entropy", "'loss', result.dtype") +
                after("torch.optim.SGD.step", "'gradient', *{share.grad.dtype for share in given[0].param_groups[0]['params']}"))


def test_bfloat16_trains_and_evaluates_as_well_as_float32_which_keeps_weights_and_loss():
    plain = figures(train("multigpu_torchrun.py", 20).stdout)
    found = figures(train("recipes/bf16.py", 20, before=LOGS_FORMATS).stdout)
    for log in ("log.0", "log.1"):
        assert {*Path(log).read_text().splitlines()} == {
            "evaluation torch.bfloat16", "gradient torch.float32", "loss torch.float32", "training torch.bfloat16"}
    check_close(found, plain, loss=5e-3, accuracy=100)
    assert found[20][1] == pytest.approx(plain[20][1], abs=1) and found[20][1] > 90
    assert formats("bf16.pt") == formats("multigpu_torchrun.pt")


def needs_compilation():
    needs("g++")
    graphs, model = [], torch.nn.Sequential(torch.nn.ReLU())
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    model(torch.ones(1))
    if not graphs:
        pytest.skip("for want of a torch that compiles a bare nn.Sequential")  # as cnn is; 2.13 does not, 2.15 does


def test_compilation_takes_place_in_the_first_epoch_alone_and_trains_the_same():
    needs_compilation()
    job = start("recipes/compile.py", 4, TORCH_LOGS="graph_code,recompiles")
    job.wait_for("epoch 1/")
    compiled = job.stderr.count("TRACED GRAPH")
    assert compiled > 2  # in each rank for training, and for evaluation
    assert job.wait() == 0, job.stderr
    assert job.stderr.count("TRACED GRAPH") == compiled
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", 4).stdout))
    assert formats("compile.pt") == formats("multigpu_torchrun.pt")
    without = train("recipes/compile.py", 1, processes=1, status=2, CXX="no-such-compiler")
    assert without.stderr == "compile.py: compiling for the CPU needs g++, or another C++ compiler named by CXX\n"


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


def test_fsdp_and_single_gpu_go_on_from_each_other_as_if_one_had_trained_alone(small):
    whole = figures(train("single_gpu.py", 3, *small, before=IN_FLOAT64).stdout)
    printed = {}
    for epochs, script in enumerate(("recipes/fsdp.py", "single_gpu.py", "recipes/fsdp.py"), start=1):
        printed |= figures(train(script, epochs, "--checkpoint", "run.pt", *small, before=IN_FLOAT64).stdout)
    assert printed == whole
    check_equal("run.pt", "single_gpu.pt")
    run("recipes/fsdp.py", 4, "--checkpoint", "run.pt")  # and it ends well as it is started


def test_a_preempted_run_goes_on_at_the_same_step_and_ends_with_the_bits_of_the_undisturbed_one(fashion_mnist):
    """With dropout and BatchNorm; whether the launcher or one process gets the signal."""
    options = 3, "--model", "mobilenet_v3_small", "--batch-size", 240, *fashion_mnist(1440, 100)
    whole = train("recipes/preempt.py", *options, "--checkpoint", "whole.pt")
    printed, stopped = {}, []
    for number, to_launcher, step in ((signal.SIGUSR1, True, 8), (signal.SIGTERM, False, 6)):
        job = start("recipes/preempt.py", *options, torchrun=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"],
                    before=hold_for_a_signal(step))
        job.wait_for("epoch ")
        os.kill(job.process.pid if to_launcher else job.workers()[1], number)
        if not to_launcher:
            Path("go").touch()  # for the other
        assert job.wait() == (1 if to_launcher else 0), job.stderr  # 1: torchrun's own after a signal
        printed |= figures(job.stdout)
        stopped.append(load("preempt.pt"))
    assert [saved["epoch"] for saved in stopped] == [1, 2] and all(0 < saved["total"][1] < 1440 for saved in stopped)
    refused = train("single_gpu.py", *options, "--checkpoint", "preempt.pt", status=1)
    assert refused.stderr == "single_gpu.py: preempt.pt was saved inside epoch 3, where only recipes.preempt goes on\n"
    printed |= figures(train("recipes/preempt.py", *options).stdout)
    assert printed == figures(whole.stdout)
    torch.testing.assert_close(load("preempt.pt"), load("whole.pt"), rtol=0, atol=0)


def spans(trace, name):
    """(start, end) of each event of this name, in microseconds."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in trace["traceEvents"]
            if event.get("ph") == "X" and event["name"].startswith(name)]


def test_each_rank_leaves_a_trace_of_three_steps_with_what_they_computed_and_sent():
    train("recipes/profiler.py", 1, "--checkpoint", "run.pt")
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


def merged(*recipes):
    """One script with the diffs of several recipes, which touch no line twice but the one that names the recipe."""
    base = (ROOT / "multigpu_torchrun.py").read_text().splitlines(keepends=True)
    together, added = Path(f"recipes/{'_'.join(recipes)}.py"), Counter()
    together.parent.mkdir()
    for file in (Path("base.py"), together):
        file.write_text("".join(base))
    for recipe in recipes:
        lines = (ROOT / f"recipes/{recipe}.py").read_text().splitlines(keepends=True)
        lines[2] = base[2]  # which command starts it
        added += Counter(lines) - Counter(base)
        Path("recipe.py").write_text("".join(lines))
        subprocess.run(["git", "merge-file", together, "base.py", "recipe.py"], check=True)
    assert Counter(together.read_text().splitlines(keepends=True)) - Counter(base) == added
    return together


def test_an_ema_under_bfloat16_is_evaluated_by_its_own_weights():
    """Which lag behind so early: the live model is far better."""
    averaged = figures(train("recipes/loop.py", 8).stdout)
    found = figures(train(merged("loop", "bf16").resolve(), 8).stdout)
    check_close(found, averaged, loss=0.02, accuracy=5)


def test_a_profile_of_fsdp_has_what_it_gathers():
    train(merged("profiler", "fsdp").resolve(), 1)
    for rank in (0, 1):
        trace = json.loads(Path(f"profiler_fsdp.pt.rank{rank}.json").read_text())
        assert len(spans(trace, "ProfilerStep#")) == 3 and spans(trace, "FSDP::all_gather")


def test_accumulation_bfloat16_compilation_and_a_profile_go_together():
    """The first two both change the line of the loss; docs/recipes.md has what it becomes."""
    needs_compilation()
    together = merged("accumulate", "compile", "profiler")
    lines = re.search(r"```python\n( +with nullcontext.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)[1]
    text, count = re.subn(r" +with nullcontext.*?\.backward\(\)\n", lines, together.read_text(), flags=re.DOTALL)
    assert count == 1 and "torch.autocast" in lines
    together.write_text(text)

    job = run(str(together), 3, TORCH_LOGS="aot_graphs")
    check_close(figures(job.stdout), figures(train("multigpu_torchrun.py", 3).stdout), loss=5e-3, accuracy=100)
    assert formats(f"{together.stem}.pt") == formats("multigpu_torchrun.pt")
    forward = re.search(r"Forward graph.*?return", job.stderr, re.DOTALL)[0]
    assert '"f32[30, 3, 32, 32]' in forward and '"bf16[30, 10]' in forward  # 30 of the 240 samples, in bfloat16
    trace = json.loads(Path(f"{together.stem}.pt.rank1.json").read_text())
    assert len(spans(trace, "DistributedDataParallel.forward")) == 3 * 8
    assert len(spans(trace, "gloo:all_reduce")) == 3
