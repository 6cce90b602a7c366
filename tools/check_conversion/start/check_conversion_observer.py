"""In each process of a run: notes the optimizer's steps, forces them to be those of the original's first run, and removes what
makes right conversions differ, such as dropout. What is hooked stands at the end."""
import faulthandler
import functools
import json
import os
import random
import signal
import sys
import time
import traceback
import weakref
import zlib
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

settings = json.loads(os.environ["CHECK_CONVERSION"])
ROLE, FORCE = settings["role"], settings["force"]  # "first" or "second" run of the original, or "other"
HOME, NOTES, COPY = (Path(settings[name]) for name in ("home", "notes", "copy"))
MOST = 4 * 2**30  # bytes of recorded steps
CHANGES = {"os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,), **dict.fromkeys((  # which arguments of an event are paths
    "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"), (0,))}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FREE = [os.path.realpath(os.path.expanduser(path)) for path in (  # and what packages keep to be faster the next time
    HOME, "/dev", "/proc", "~/.cache", "~/.triton", "~/.nv", "~/.config/matplotlib",
    *filter(None, map(os.environ.get, ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "MPLCONFIGDIR"))))]
# Names that torch does not document, and what is wrong without them. If torch has them no longer, the run ends and says so.
PRIVATE = {(DistributedDataParallel, "_passing_sync_batchnorm_handle"): "DDP refuses SyncBatchNorm on CPUs",
           (dist.Reducer, "_rebuild_buckets"): "a restarted run adds up gradients in another order than the unbroken one"}
CHANGED = set()  # what of a run is not as without the check
rank, count = int(os.environ.get("RANK", 0)), 0  # of steps; the rank is the last known: a script may leave its group


def note(kind, **values):
    global rank
    if dist.is_initialized():
        rank = dist.get_rank()
    with open(NOTES / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"kind": kind, "rank": rank, "steps": count, "time": time.time_ns(), **values}) + "\n")
    if kind == "stop":
        os._exit(1)


def guarded(function):
    """A failure of the check itself is not the script's: it ends the run, and there is no verdict."""
    @functools.wraps(function)
    def call(*given, **named):
        try:
            return function(*given, **named)
        except Exception:
            note("stop", text=f"the check itself failed: {traceback.format_exc()}")
    return call


def replace(owner, name, replacement):
    """Calls the replacement instead, with the function and with what that is given."""
    if not hasattr(owner, name):
        note("stop", text=f"torch {torch.__version__} has no {owner.__name__}.{name}: {PRIVATE.get((owner, name))}")
    usual = getattr(owner, name)
    setattr(owner, name, functools.wraps(usual)(lambda *given, **named: replacement(usual, *given, **named)))


def on_call(owner, name, after):
    """Calls `after` with the result of each call, and with what was given."""
    def call(usual, *given, **named):
        result = usual(*given, **named)
        guarded(after)(result, *given, **named)
        return result
    replace(owner, name, call)


def fingerprint(rows):
    """A number for each row. Zeros at its end do not change it: they may be padding."""
    rows = rows.reshape(len(rows), -1)
    return (rows @ torch.arange(1, rows.shape[1] + 1, device=rows.device).double().sin()).tolist()


def fingerprints(value, place=""):
    """Of each tensor that a model is given, and its place: by samples, in dimension 0, or in 1, as RNNs have them."""
    if isinstance(value, torch.Tensor) and value.dim() and value.numel() and not value.is_complex():
        value = value.detach().to_dense().double()
        yield place, (fingerprint(value), fingerprint(value.transpose(0, 1)) if value.dim() > 1 else [])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from fingerprints(part, place)
    elif hasattr(value, "items"):
        for name, part in value.items():
            yield from fingerprints(part, f"{place}.{name}")


def random_state():
    """A number that changes when a random number is drawn, of the generators that all code shares."""
    _, keys, *position = numpy.random.get_state()
    states = [torch.get_rng_state().numpy(), keys, repr((position, random.getstate())).encode()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy())
    return functools.reduce(lambda found, state: zlib.crc32(state, found), states, 0)


def distances(mine, reference):
    """For each tensor: the reference's norm, the distance from it, and the product of both."""
    pairs = [(one.double(), other.double()) for one, other in zip(mine, reference)]
    return [torch.stack([b.norm(), (a - b).norm(), (a * b).sum()]).tolist() for a, b in pairs]


class Steps:
    """Compares each step with that of the original's first run, and goes on from that one's gradients and
    weights. So rounding does not add up, and each step is judged for itself."""

    def __init__(self):
        self.names, self.inside, self.places, self.inner = {}, [], {}, set()
        self.stepping, self.recorded, self.workers = [], 0, False
        self.models = weakref.WeakSet()  # weak: with torch 2.11, DDP hangs if it outlives its process group
        self.alive, self.noise = (NOTES / "alive").open("ab", 0), torch.Generator().manual_seed(0)
        self.begin()

    def begin(self):
        self.now = {"samples": {}, "losses": [], "norms": [], "clips": [], "shuffles": [], "switches": {}}
        self.parameters = self.mine = self.reference = ()
        self.state = random_state()

    def switch(self, name, value):
        """What is on in a step. None: the script has it on, but it works on GPUs only."""
        if torch.is_grad_enabled():
            self.now["switches"][name] = value

    def enter(self, module, given):
        """The outermost of modules that train is the one that is given the samples."""
        self.alive.write(b".")
        if FORCE and isinstance(getattr(module, "dropout", None), float) and module.dropout:
            CHANGED.add("dropout was 0")
            module.dropout = 0.0  # RNNs hand it on to C++
        if self.inside or (torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())):
            self.inside.append(module)
        if len(self.inside) == 1 and id(module) not in self.inner:
            self.models.add(module)
            self.places.setdefault(id(module), f"{len(self.places)}.")
            self.inner |= {id(one) for one in module.modules() if one is not module}
            new = {name: one for name, one in module.named_parameters() if id(one) not in self.names}
            self.names.update({id(one): name.removeprefix("module.") for name, one in new.items()})
            if ROLE == "second" and not count:
                self.nudge(new.values())

    def leave(self, module, given, *rest):
        named = rest[0] if len(rest) == 2 else {}  # torch leaves them out where forward has raised
        if self.inside and self.inside.pop() and not self.inside and id(module) in self.places:  # checkpoints call inner ones
            for place, found in fingerprints(dict(enumerate(given)) | named, self.places[id(module)]):
                for rows, more in zip(self.now["samples"].setdefault(place, ([], [])), found):
                    rows += more

    def before(self, optimizer, given, named):
        self.stepping.append(optimizer)
        if len(self.stepping) > 1:  # one optimizer calls another
            return
        if not count:
            output.note_figures()
        groups = {one: group for group in optimizer.param_groups for one in group["params"]}
        found, self.parameters = self.recorded_step([*groups])
        if any(hasattr(one, "to_local") for one in self.parameters):
            note("stop", text="FSDP and tensor parallelism are not supported")
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        self.mine = {"before": [one.detach().clone() for one in self.parameters],
                     "gradients": [one.to_dense().clone() for one in gradients]}
        self.reference = found or self.mine
        self.now |= {
            "names": [self.names.get(id(one)) for one in self.parameters], "workers": self.workers, "changed": [*CHANGED],
            "known": self.reference is not self.mine,  # else it is another optimizer's
            "drawn": FORCE and (random_state() != self.state) * random_state(),
            "weights": [] if FORCE else [sum(fingerprint(one.double()[None])) for one in self.mine["before"]],
            "buffers": {name.removeprefix("module."): fingerprint(one.detach().double()[None])[0] for model in self.models
                        for name, one in model.named_buffers() if one.is_floating_point() and one.numel()},
            "options": [{name: float(value) if name == "lr" else value for name, value in groups[one].items()
                         if name == "lr" or (name != "initial_lr" and isinstance(value, (float, tuple)))}
                        for one in self.parameters]}
        for one, gradient in zip(self.parameters, self.reference["gradients"] if FORCE else ()):
            if gradient.any() and one.grad is None:
                one.grad = gradient.clone()
            elif gradient.any() and not one.grad.is_sparse:
                one.grad.copy_(gradient)

    def recorded_step(self, parameters):
        """That of the original, and the parameters in its order; None if it is of others."""
        file = HOME / f"step{settings['offset'] + count + 1}.pt"
        if ROLE == "first" or not file.exists():
            return None, parameters
        found = torch.load(file, weights_only=True, map_location=parameters[0].device)
        named = {self.names.get(id(one)): one for one in parameters}
        if len(named) == len(parameters) and {*named} == {*found["names"]}:
            parameters = [named[name] for name in found["names"]]
        same = [one.shape for one in found["before"]] == [one.shape for one in parameters]
        return found if same else None, parameters

    def after(self, optimizer, given, named):
        global count
        if self.stepping.pop() and self.stepping:
            return
        count += 1
        self.mine["after"] = [one.detach().clone() for one in self.parameters]
        if ROLE == "first" and rank == 0:
            torch_save({**self.mine, "names": self.now["names"]}, file := HOME / f"step{count}.pt")
            self.recorded += file.stat().st_size
            if self.recorded > MOST:
                note("stop", text=f"{count} steps fill {MOST / 1e9:.0f} GB: let it take fewer")
        update = [distance for _, distance, _ in distances(self.reference["before"], self.reference["after"])]
        note("step", update=update, **{kind: distances(self.mine[kind], self.reference[kind]) for kind in self.mine}, **self.now)
        for one, weights in zip(self.parameters, self.reference["after"] if FORCE else ()):
            one.data.copy_(weights)
        if ROLE == "second":
            self.nudge(self.parameters)
        self.begin()
        if count == settings["kill"]:
            (NOTES / "kill").touch()  # for all processes, or a launcher would start them again
            os.kill(os.getpid(), signal.SIGSTOP)

    def nudge(self, parameters):
        """By a rounding error, in the original's second run: so that it shows how far rounding goes."""
        for one in parameters:
            if one.is_floating_point() and not torch.nn.parameter.is_lazy(one):
                move = torch.randn(one.shape, generator=self.noise, device="cpu").to(one.device, one.dtype)
                one.data.mul_(1 + torch.finfo(one.dtype).eps * move)


class Equal:
    """What right conversions differ by is done alike, or taken away."""

    def __init__(self):
        self.epochs = {}  # by dataset: for each what its sampler was asked for, and the steps before it

    @guarded
    def number(self, dataset, asked, drawn):
        """Of the epoch, a pass over a dataset, with gradients on, that steps came of. Whoever asks for an earlier one, without
        set_epoch, gets that one's order again."""
        _, epochs = self.epochs.setdefault(id(dataset), (dataset, {}))
        if count in [*epochs.values()][-1:]:
            epochs.popitem()  # no step came of it
        steps.state = random_state()  # seeds, and what a loader draws for its workers, are no random numbers of a step
        asked = asked or count
        number = [*epochs, asked].index(asked)
        if torch.is_grad_enabled():
            CHANGED.add("both scripts shuffled as DistributedSampler does")
            epochs.setdefault(asked, count)
            steps.now["shuffles"].append(drawn)
        return number

    def draw(self, usual, sampler):
        """RandomSampler draws what DistributedSampler does, and takes nothing from the default generator, as that."""
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            return usual(sampler)
        generator = sampler.generator or torch.default_generator
        state, drawn = generator.get_state(), hash((*usual(sampler),))
        generator.set_state(state)
        seeded = torch.Generator().manual_seed(self.number(sampler.data_source, None, drawn))
        return iter(torch.randperm(sampler.num_samples, generator=seeded, device="cpu").tolist())

    def share_out(self, usual, sampler):
        asked = sampler.seed, sampler.epoch
        if sampler.shuffle:
            sampler.seed, sampler.epoch = 0, self.number(sampler.dataset, asked, sampler.seed)
        order = [*usual(sampler)]
        sampler.seed, sampler.epoch = asked
        return iter(order)

    def drop_nothing(self, usual, input, p=0.5, training=True, inplace=False):
        if training and p:
            CHANGED.add("dropout was 0")
            steps.switch("dropout", p)
        return input if inplace or not training else input.clone()

    def no_autocast(self, _, context):
        on, here = torch.is_autocast_enabled(context.device), context.device == "cpu" or torch.accelerator.is_available()
        steps.switch("autocast", on or (False if here else None))
        if on:
            CHANGED.add("autocast was off")
            torch.set_autocast_enabled(context.device, False)  # until its end

    def synchronise(self, usual, module, input):
        settings["batchnorm"] = settings["batchnorm"] or "sync"
        return torch.nn.BatchNorm1d.forward(module, input)  # SyncBatchNorm's own refuses CPUs

    def normalise(self, usual, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        """BatchNorm over the whole batch, on CPUs too; or by its statistics so far, which stand still."""
        if training and settings["batchnorm"] == "rank" and running_mean is not None:
            CHANGED.add("BatchNorm's statistics stood still")
            training, momentum = False, 0.0
        if not (training and dist.is_initialized() and dist.get_world_size() > 1):
            return usual(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if settings["batchnorm"] != "sync":
            note("stop", text="plain BatchNorm trains on several ranks: --sync-batchnorm compares it as "
                 "SyncBatchNorm, if your script converts it on GPUs; --rank-batchnorm leaves it out")
        if input.device.type == "cpu":
            CHANGED.add("BatchNorm was SyncBatchNorm, on CPUs too, where your own run differs")
        sizes = input.new_zeros(dist.get_world_size())
        sizes[dist.get_rank()] = len(input)
        dist.all_reduce(sizes)
        before, behind = int(sizes[:dist.get_rank()].sum()), int(sizes[dist.get_rank() + 1:].sum())
        whole = F.pad(input.movedim(0, -1), (before, behind)).movedim(-1, 0)  # zeros where others have samples
        whole = dist.nn.functional.all_reduce(whole.contiguous())
        return usual(whole, running_mean, running_var, weight, bias, True, momentum, eps)[before:][:len(input)]

    def note_losses(self, _, tensors, *given, **named):
        for one in [tensors] if torch.is_tensor(tensors) else tensors:
            steps.now["losses"] += [one.item()] * (one.numel() == 1)

    def note_clip(self, norm, parameters, max_norm, *given, **named):
        if max_norm < float("inf"):
            steps.now["norms"].append(float(norm))
            steps.now["clips"].append(float(max_norm))

    def note_workers(self, _, loader):
        steps.workers |= loader.num_workers > 0

    def hook(self):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        steps.begin()
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
            replace(F, name, self.drop_nothing)
        replace(F, "scaled_dot_product_attention", lambda usual, query, key, value, mask=None, dropout_p=0.0, *given, **named: (
            usual(query, key, value, named.pop("attn_mask", mask), 0.0, *given, **named)))
        replace(RandomSampler, "__iter__", self.draw)  # in both scripts the same order
        replace(DistributedSampler, "__iter__", self.share_out)
        replace(F, "batch_norm", self.normalise)  # plain BatchNorm as SyncBatchNorm
        replace(torch.nn.SyncBatchNorm, "forward", self.synchronise)  # on CPUs too
        replace(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
        on_call(DataLoader, "__iter__", self.note_workers)  # which may draw random numbers, unseen
        on_call(torch.autocast, "__enter__", self.no_autocast)  # it rounds too much
        on_call(torch.amp.GradScaler, "scale", lambda _, scaler, *__: steps.switch("GradScaler", scaler.is_enabled() or None))
        on_call(torch.autograd, "backward", self.note_losses)
        on_call(torch.nn.utils, "clip_grad_norm_", self.note_clip)  # norms before and after averaging differ
        on_call(torch.nn.utils, "clip_grad_value_", lambda _, __, most, **___: steps.now["clips"].append(float(most)))
        on_call(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", lambda _, schedule, metrics, *__, **___: steps.switch(
            "ReduceLROnPlateau is given a different value:", float(metrics)))
        for name in ("time", "perf_counter", "monotonic", "process_time") if ROLE == "second" else ():
            setattr(time, name, functools.partial(output.run_faster, getattr(time, name), getattr(time, name)()))


class Output:
    """Writes only into the copy, and notes of which rank; what else the script says, and how it ends."""

    def watch(self, event, given):
        opened = event == "open" and (given[2] or 0) & WRITES
        for place in (0,) if opened else CHANGES.get(event, ()):
            if event != "os.mkdir" or not os.path.isdir(given[place]):  # which is an error of its own
                self.change(given[place], event == "os.rename" or (opened and not given[2] & os.O_APPEND),
                            event in ("open", "os.truncate", "os.chmod", "os.chown", "os.utime"))

    def change(self, path, whole=True, behind_link=True):
        folder, name = os.path.split("/dev/null" if isinstance(path, int) else os.path.abspath(os.fsdecode(path)))
        real = Path(os.path.realpath(folder), name)
        real = real.resolve() if behind_link else real
        if real.is_relative_to(COPY) and whole:
            note("wrote", file=str(real.relative_to(COPY)))
        if not any(real.is_relative_to(free) for free in FREE) and "__pycache__" not in real.parts:
            note("stop", text=f"the script writes to {real}, which is not in its copy of this folder; "
                 "a large file is linked there, to be read alone: --without leaves it out")

    def save(self, usual, obj, f, *given, **named):
        if isinstance(f, (str, os.PathLike)):  # which torch opens in C++
            self.change(f)
        usual(obj, f, *given, **named)
        note("saved")

    def say(self, usual, text):
        """To stderr: what lines of the script write, perhaps by a logger, and what sys.exit is given."""
        frame = sys._getframe(1).f_back  # None where Python itself writes, as the script exits
        while frame and Path(frame.f_code.co_filename).parent.name in ("logging", "loguru"):
            frame = frame.f_back
        if not frame or self.of_script(frame):
            note("line" if frame else "error", text=text)
        return usual(text)

    def of_script(self, frame):
        """A virtual environment may lie in the folder."""
        file = frame.f_code.co_filename
        return file.startswith(settings["copy"]) and "/lib/python" not in file[len(settings["copy"]):]

    def note_error(self, usual, *error):
        note("error", text="".join(traceback.format_exception(*error)))
        usual(*error)

    def note_figures(self):
        """At the first step, when the script has imported what it needs."""
        for name in {"torch.utils.tensorboard.writer", "tensorboardX.writer"} & set(sys.modules):
            on_call(sys.modules[name].SummaryWriter, "add_scalar", lambda _, writer, tag, value, global_step=None, *__, **___: (
                note("line", text=f"{tag} [{global_step}]: {float(value)!r}\n")))

    def run_faster(self, clock, began):
        """In the original's second run, for lines of the script: so that whatever is a time differs."""
        now = clock()
        return now + 1000 * (now - began) * self.of_script(sys._getframe(1))


torch_save, output, steps = torch.save, Output(), Steps()
faulthandler.register(signal.SIGUSR2, open(NOTES / f"{os.getpid()}.stack", "w"), all_threads=False)
if "RANK" in os.environ:
    note("rank")
    if os.path.samestat(os.fstat(1), os.stat(NOTES / "stdout")):  # each its own file: lines do not mix
        os.dup2(os.open(NOTES / f"stdout.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
sys.addaudithook(output.watch)  # what is written
replace(sys, "excepthook", output.note_error)  # the first error, which led to those of other ranks
replace(sys.stderr, "write", output.say)  # what a logger prints
replace(torch, "save", output.save)  # when a run can be killed; and its files, which Python does not see
modules.register_module_forward_pre_hook(guarded(steps.enter))  # torch's public hooks, for all modules and optimizers
modules.register_module_forward_hook(guarded(steps.leave), with_kwargs=True, always_call=True)
optimizers.register_optimizer_step_pre_hook(guarded(steps.before))
optimizers.register_optimizer_step_post_hook(guarded(steps.after))
if FORCE:
    Equal().hook()
else:
    replace(dist.Reducer, "_rebuild_buckets", lambda *_: False)
