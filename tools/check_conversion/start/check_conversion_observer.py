"""In each process of a run: notes the optimizer's steps, forces them to be the original's, and removes what makes them differ."""
import contextlib
import faulthandler
import functools
import json
import logging
import os
import random
import re
import signal
import sys
import time
import timeit
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

settings = json.loads(os.environ["CHECK_CONVERSION"])
FORCE, RECORD, NUDGE = map(settings.get, ("force", "record", "nudge"))
HOME, NOTES, COPY = (Path(settings[name]) for name in ("home", "notes", "copy"))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"}
FREE = [os.path.realpath(os.path.expanduser(path)) for path in (  # and what packages keep to be faster the next time
    NOTES, COPY, "/dev", "/proc", "~/.cache", "~/.triton", "~/.config",
    *filter(None, map(os.environ.get, ("TMPDIR", "TORCH_HOME", "HF_HOME"))))]
rank, count = int(os.environ.get("RANK", 0)), 0  # of steps; the rank is the last known: a script may leave its group


def note(kind, **values):
    global rank
    if dist.is_initialized():
        rank = dist.get_rank()
    with open(NOTES / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"kind": kind, "rank": rank, "steps": count, "time": time.time_ns(), **values}) + "\n")
    if kind == "stop":
        os._exit(1)


def replace(owner, name, replacement):
    """Calls the replacement instead, with the function and with what that is given."""
    usual = getattr(owner, name)
    setattr(owner, name, functools.wraps(usual)(lambda *given, **named: replacement(usual, *given, **named)))


def on_call(owner, name, after):
    """Calls `after` with the result of each call, and with what was given."""
    def call(usual, *given, **named):
        result = usual(*given, **named)
        after(result, *given, **named)
        return result
    replace(owner, name, call)


def tensors(value):
    """All that are in what a model is given, but numbers, such as a loss."""
    if isinstance(value, torch.Tensor):
        return [value.detach().to_dense()] if value.dim() and value.numel() and not value.is_complex() else []
    value = value.to_dict() if hasattr(value, "to_dict") else value  # torch_geometric's graphs
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def fingerprint(rows):
    """A number for each row. Zeros at its end do not change it, nor -100: they may be padding."""
    rows = rows.double().masked_fill(rows == -100, 0).reshape(len(rows), -1)
    return (rows @ torch.arange(1, rows.shape[1] + 1, device=rows.device).double().sin()).tolist()


def is_own(file):
    """Of the script, not of libraries or of this check."""
    return not re.search(settings["library"], file)


def checksum(state):
    """Of a generator: it changes when a random number is drawn."""
    return zlib.crc32(repr(state).encode())


def random_states():
    """Checksums of the generators that all code shares."""
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []
    return [*map(checksum, (torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate(), cuda))]


def distances(mine, reference):
    """For each tensor: the reference's norm, the distance from it, and the product of both."""
    pairs = [(one.double(), other.double()) for one, other in zip(mine, reference)]
    return [torch.stack([b.norm(), (a - b).norm(), (a * b).sum()]).tolist() for a, b in pairs]


class Steps:
    """Compares each with the original's, and goes on from that one's gradients and weights: so rounding does not add up."""

    def __init__(self):
        self.names, self.inner, self.inside, self.stepping, self.workers = {}, WeakSet(), [], [], False
        self.noise, self.shuffled = torch.Generator().manual_seed(0), {}
        self.begin()

    def begin(self):
        self.now = {"samples": ([], []), "norms": [], "shuffles": {}, "again": False, "switches": {}}
        self.forget_draws()

    def forget_draws(self, *_, **__):
        """What has been drawn until now is no random number of a step."""
        self.states, self.drew = random_states(), [0, 0, 0, 0]

    def drawn(self):
        """The states of the generators that have drawn, and 0 for the others."""
        return [state if drew or state != before else 0
                for state, before, drew in zip(random_states(), self.states, self.drew)]

    def seed(self, usual, *given, **named):
        """A seed changes a generator, but draws nothing."""
        self.drew = self.drawn()
        result = usual(*given, **named)
        self.states = random_states()
        return result

    def switch(self, name, value):
        """What is on in a step. None: the script has it on, but it works on GPUs only."""
        if torch.is_grad_enabled() and (value or name not in self.now["switches"]):  # on anywhere in the step
            self.now["switches"][name] = value

    def enter(self, module, given):
        """The outermost of modules that train is the one that is given the samples."""
        if FORCE and isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0  # it hands it on to C++
        if not self.inside:  # what is evaluated with gradients off may be shuffled by each rank as it likes
            self.now["shuffles"] |= self.shuffled if torch.is_grad_enabled() else {}
            self.shuffled = {}
        if self.inside or (torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())):
            self.inside.append(module)
        if len(self.inside) == 1 and module not in self.inner:
            self.inner.update(one for one in module.modules() if one is not module)
            self.names |= {id(one): name.removeprefix("module.") for name, one in module.named_parameters()}

    def leave(self, module, given, *rest):  # rest: named ones and the result; after an exception, the result alone
        if not self.inside:
            return
        self.inside.pop()
        if self.inside or module in self.inner:  # activation checkpointing calls inner ones
            return
        with contextlib.suppress(RuntimeError):  # torch.func.vmap's tensors show no values
            self.note_samples(tensors([given, *rest[:-1]]))

    def note_samples(self, found):
        for one in found:  # samples are in dimension 0, or in 1, as RNNs have them
            if one.dim() == 1 and not one.is_floating_point() and one[0] == 0 and (one.diff() >= 0).all():
                continue  # offsets, as of an EmbeddingBag: they begin with 0 on each rank
            self.now["samples"][0].extend(fingerprint(one))
            self.now["samples"][1].extend(fingerprint(one.transpose(0, 1)) if one.dim() > 1 else [])

    def before(self, optimizer, given, named):
        self.stepping.append(optimizer)
        if len(self.stepping) > 1:  # one optimizer calls another
            return
        groups = {one: group for group in optimizer.param_groups for one in group["params"]}
        self.parameters, file = [*groups], HOME / f"step{settings.get('offset', 0) + count + 1}.pt"
        found = torch.load(file, map_location=self.parameters[0].device) if file.exists() and not RECORD else None
        known = found is not None and [one.shape for one in found["before"]] == [one.shape for one in self.parameters]
        self.mine = {"before": [one.detach().clone() for one in self.parameters], "gradients": [
            torch.zeros_like(one) if one.grad is None else one.grad.to_dense().clone() for one in self.parameters]}
        self.reference = found if known else self.mine
        self.now |= {
            "workers": self.workers, "known": known, "drawn": self.drawn() if FORCE else [],
            "options": [{name: value for name, value in groups[one].items() if isinstance(value, (float, tuple))}
                        | {"initial_lr": 0.0, "lr": float(groups[one].get("lr", 0))} for one in self.parameters]}
        for one, gradient in zip(self.parameters, self.reference["gradients"] if FORCE else ()):
            none = one.grad is None and not gradient.any()  # as in the original, where it may have been zeros
            sparse = one.grad is not None and one.grad.is_sparse
            if not (none or sparse):
                one.grad = gradient.clone()

    def after(self, optimizer, given, named):
        global count
        self.stepping.pop()
        if self.stepping:
            return
        count += 1
        self.mine["after"] = [one.detach().clone() for one in self.parameters]
        if RECORD and rank == 0:
            torch_save(self.mine, HOME / f"step{count}.pt")
        self.now["names"] = [self.names.get(id(one), "a parameter of no model (has it a DDP?)") for one in self.parameters]
        update = [distance for _, distance, _ in distances(self.reference["before"], self.reference["after"])]
        note("step", update=update, **{kind: distances(self.mine[kind], self.reference[kind]) for kind in self.mine}, **self.now)
        for one, weights in zip(self.parameters, self.reference["after"] if FORCE else ()):
            one.data.copy_(weights)
        for one in self.parameters if NUDGE and FORCE else ():  # by a rounding error, which shows how far rounding goes
            one.data *= 1 + torch.finfo(one.dtype).eps * torch.randn(one.shape, generator=self.noise, device="cpu").to(one)
        self.begin()
        if count == settings.get("kill"):
            (NOTES / "kill").touch()  # for all processes, or a launcher would start them again
            os.kill(os.getpid(), signal.SIGSTOP)


class Equal:
    """What right conversions differ by is done alike, or taken away."""

    def __init__(self):
        self.epochs = {}  # by dataset: for each what its sampler was asked for, and the steps before it
        self.seeds, self.unseeded = ((torch, "manual_seed"), (random, "seed"), (numpy.random, "seed")), random_states()[:3]
        self.seed_by_rank()
        on_call(dist, "init_process_group", self.seed_by_rank)  # multiprocessing's processes have no rank before
        for owner, name in self.seeds:
            replace(owner, name, steps.seed)
        on_call(torch.optim.Optimizer, "__init__", steps.forget_draws)  # initial weights
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
            replace(F, name, self.drop_nothing)
        replace(F, "scaled_dot_product_attention", self.attend)
        replace(F, "batch_norm", self.normalise)  # plain BatchNorm as SyncBatchNorm
        replace(RandomSampler, "__iter__", self.draw)  # in both scripts the same order
        replace(SubsetRandomSampler, "__iter__", self.draw_subset)
        replace(DistributedSampler, "__iter__", self.share_out)
        on_call(DataLoader, "__iter__", self.begin_loading)
        on_call(torch.autocast, "__enter__", self.no_autocast)  # it rounds too much
        on_call(torch.nn.utils, "clip_grad_norm_", self.note_clip)  # norms before and after averaging differ
        on_call(torch.amp.GradScaler, "scale", lambda _, one, *__, **___: steps.switch("GradScaler", one.is_enabled() or None))

    def seed_by_rank(self, *_, **__):
        """As processes differ whose script does not seed them."""
        if random_states()[:3] == self.unseeded:  # a GPU's may be there only now
            for owner, name in self.seeds:
                getattr(owner, name)(dist.get_rank() if dist.is_initialized() else rank)
            self.unseeded = random_states()[:3]

    def begin_loading(self, _, loader):
        steps.workers |= torch.is_grad_enabled() and loader.num_workers > 0  # they draw, unseen
        steps.forget_draws()  # what the loader has just drawn for them

    def epoch_number(self, sampler, dataset, asked, seed):
        """Counts a dataset's epochs. One that is asked for again, as without set_epoch, has its former number."""
        _, epochs = self.epochs.setdefault(id(dataset), (dataset, {}))
        if count in [*epochs.values()][-1:]:
            epochs.popitem()  # no step was taken in it: the script looked at a batch
        steps.forget_draws()  # seeds
        number = [*epochs, asked].index(asked)
        if torch.is_grad_enabled():
            steps.now["again"] |= asked in epochs
            epochs.setdefault(asked, count)
            steps.shuffled[f"{type(sampler).__name__} of {len(dataset)}"] = seed
        return number

    def draw(self, usual, sampler):
        """RandomSampler draws what DistributedSampler does, and takes nothing from the default generator, as that."""
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            return usual(sampler)
        drawn = checksum((sampler.generator or torch.default_generator).get_state().tolist())
        seeded = torch.Generator().manual_seed(self.epoch_number(sampler, sampler.data_source, count, drawn))
        return iter(torch.randperm(sampler.num_samples, generator=seeded, device="cpu").tolist())

    def draw_subset(self, usual, sampler):
        return (sampler.indices[one] for one in RandomSampler(sampler.indices, generator=sampler.generator))

    def share_out(self, usual, sampler):
        asked = sampler.seed, sampler.epoch
        if sampler.shuffle:
            sampler.seed, sampler.epoch = 0, self.epoch_number(sampler, sampler.dataset, asked, sum(asked))
        order = usual(sampler)
        sampler.seed, sampler.epoch = asked
        return order

    def drop_nothing(self, usual, input, p=0.5, training=True, inplace=False):
        steps.switch(f"dropout {p:g}", training and p > 0)  # each rate is one
        return input if inplace or not training else input.clone()

    def attend(self, usual, query, key, value, attn_mask=None, dropout_p=0.0, *given, **named):
        steps.switch(f"dropout {dropout_p:g}", dropout_p > 0)
        return usual(query, key, value, attn_mask, 0.0, *given, **named)

    def no_autocast(self, _, context):
        on = torch.is_autocast_enabled(context.device)
        off = False if context.device == "cpu" or torch.accelerator.is_available() else None
        steps.switch("autocast", str(torch.get_autocast_dtype(context.device)) if on else off)
        if on:
            torch.set_autocast_enabled(context.device, False)  # until its end

    def normalise(self, usual, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        """BatchNorm over the whole batch, on CPUs too; or by its statistics so far, which stand still."""
        if training and settings["batchnorm"] == "rank" and running_mean is not None:
            refused = input.numel() == input.shape[1]  # one value per channel is an error in training, but not otherwise
            return usual(input, running_mean, running_var, weight, bias, refused, 0.0, eps)
        if not (training and dist.is_initialized() and dist.get_world_size() > 1):
            return usual(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if settings["batchnorm"] != "sync":
            note("stop", text="plain BatchNorm trains on several ranks: is it to be --sync-batchnorm, or --rank-batchnorm?")
        plain = input.as_subclass(torch.Tensor).transpose(0, 1)  # a slice of MONAI's MetaTensor fails
        values = plain.flatten(1)  # of each channel: other ranks' inputs may have other lengths
        sizes = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, values.shape[1])
        before, behind = sum(sizes[:dist.get_rank()]), sum(sizes[dist.get_rank() + 1:])
        whole = dist.nn.functional.all_reduce(F.pad(values, (before, behind)))  # zeros where others have values
        whole = usual(whole[None], running_mean, running_var, weight, bias, True, momentum, eps)[0]
        return whole[:, before:][:, :values.shape[1]].reshape(plain.shape).transpose(0, 1).contiguous()  # for a view

    def note_clip(self, norm, parameters, max_norm, *given, **named):
        if max_norm < float("inf"):
            steps.now["norms"].append(float(norm))
            steps.switch("clip_grad_norm_", float(max_norm))


class Output:
    """Writes only into the copy, and notes of which rank; what else the script says, and how it ends."""

    def watch(self, event, given):
        flags = (given[2] or 0) & WRITES if event == "open" else 0
        paths = given if event in CHANGES else given[:1] if flags else ()
        for path in paths:
            if not isinstance(path, (str, bytes, os.PathLike)) or (event == "os.mkdir" and os.path.isdir(path)):
                continue  # to make a folder that exists is an error of its own
            real = Path(os.path.realpath(os.fsdecode(path)))
            if real.is_relative_to(COPY) and (event == "os.rename" or (flags and not flags & os.O_APPEND)):
                moved = event == "os.rename" and path is paths[0]  # as a temporary file is
                note("moved" if moved else "wrote", file=str(real.relative_to(COPY)))
            if not any(real.is_relative_to(free) for free in FREE) and "__pycache__" not in real.parts:
                note("stop", text=f"the script writes to {real}, outside its copy of this folder, where large files are linked")

    def save(self, usual, obj, f, *given, **named):
        if isinstance(f, (str, os.PathLike)):
            self.watch("open", (f, "wb", os.O_WRONLY))  # torch opens it in C++, which Python does not see
        usual(obj, f, *given, **named)
        note("saved", file=str(f), wrapped=isinstance(obj, torch.nn.parallel.DistributedDataParallel))

    def note_log(self, _, handler, record):
        """Of the script's own loggers, what goes to stderr."""
        if handler.stream is sys.stderr and is_own(record.pathname):
            os.write(1, f"{handler.format(record)}\n".encode())

    def note_error(self, _, *error):
        note("error", text="".join(traceback.format_exception(*error)))

    def run_faster(self, clock, began):
        """For lines of the script itself: what then differs from its first run is a time."""
        now = clock()
        return now + 1000 * (now - began) if is_own(sys._getframe(1).f_code.co_filename) else now


torch_save, output, steps = torch.save, Output(), Steps()
faulthandler.register(signal.SIGUSR2, open(NOTES / f"{os.getpid()}.stack", "w"), all_threads=False)
note("rank")
if "RANK" in os.environ and os.path.samestat(os.fstat(1), os.stat(NOTES / "stdout")):  # each its own file: lines do not mix
    os.dup2(os.open(NOTES / f"stdout.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
sys.addaudithook(output.watch)  # what is written
on_call(sys, "excepthook", output.note_error)  # the first error, which led to those of other ranks
on_call(logging.StreamHandler, "emit", output.note_log)
torch.jit.script = lambda given, *_, **__: given  # it would compile what is replaced here
torch.nn.Module.save = lambda module, file, **_: torch.save(module.state_dict(), file)  # as a module that is compiled has it
replace(torch, "save", output.save)  # when a run can be killed; and its files, which Python does not see
torch.nn.modules.module.register_module_forward_pre_hook(steps.enter)  # torch's public hooks, of all modules and optimizers
torch.nn.modules.module.register_module_forward_hook(  # activation checkpointing ends a forward by an exception
    steps.leave, with_kwargs=True, always_call=True)
register_optimizer_step_pre_hook(steps.before)
register_optimizer_step_post_hook(steps.after)
# A thread of gloo that is in Python at a fork may stop an older Python's child (python/cpython issue 112275): let it leave.
os.register_at_fork(before=lambda: time.sleep(0.01))
for name in ("time", "perf_counter", "monotonic", "process_time") if NUDGE else ():
    for clock in (name, f"{name}_ns"):
        setattr(time, clock, functools.partial(output.run_faster, getattr(time, clock), getattr(time, clock)()))
timeit.default_timer = time.perf_counter  # it took the one from before
if FORCE:
    Equal()
else:  # The one private name: without it, a restarted run adds up gradients in another order than the unbroken one.
    replace(dist.Reducer, "_rebuild_buckets", lambda *_: False)
