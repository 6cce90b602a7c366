"""What passes between the check and the processes that it observes: the settings, and a stream of records.

The check starts each command with `start/` on PYTHONPATH, so that each Python process of it installs `observed/`, and
with one environment variable, CHECK_CONVERSION: the file of the Settings, as JSON, in the folder of records. There each
process writes, under its process id,

    PID.notes    its records, pickled one after the other
    PID.alive    touched while it computes
    PID.stack    where it is, on SIGUSR2
    PID.stdout, PID.errors, PID.bars, PID.logged
                 its text, see STREAMS

and the check has stdout and stderr of the command itself written there.
"""
import collections
import contextlib
import dataclasses
import json
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

VARIABLE = "CHECK_CONVERSION"
STREAMS = {  # of text: what is done with it, and what its lines are
    "stdout": ("printed", "line"),  # of each rank by itself, so that lines of two do not mix
    "errors": ("written to stderr", "line"),  # by lines of the script, beside what packages write there
    "bars": ("shown in progress bars", "bar"),  # the last state of each of tqdm's: epoch 1: 6/6, loss=0.5
    "logged": ("logged", "figure"),  # for TensorBoard and wandb: wandb: loss 0.5 for step 1
}


@dataclass
class Settings:
    """What an observed process is told."""
    records: str  # the folder of records; all that the check makes lies beside it: it may be written
    root: str  # of the copy: beside the copy it links to what lies around the user's folder
    copy: str  # of the user's folder: where the script works
    protected: list  # the user's own folders, which nothing may change
    intervene: bool = True  # what makes two scripts comparable: no dropout, one order of the samples, …
    nudged: bool = False  # the original's second run: weights moved by one rounding, other clocks
    float64: bool = True
    killed_at: int = 0  # the step at which the run is killed
    killer: int = 0  # the rank that kills it
    batchnorm: str = ""  # what plain BatchNorm is on several ranks: "sync", "rank", or not known yet

    @classmethod
    def given(cls):
        return cls(**json.loads(Path(os.environ[VARIABLE]).read_text()))

    def as_environment(self):
        """What a process needs to find them; the folder is also how its processes are found."""
        file = Path(self.records, "settings")
        file.write_text(json.dumps(dataclasses.asdict(self)))
        return {VARIABLE: str(file)}

    def file(self, ending):
        """Of this process."""
        return Path(self.records, f"{os.getpid()}.{ending}")


class Record(NamedTuple):
    rank: int
    step: int  # how many optimizer steps the process had taken
    kind: str  # a row of KINDS
    name: str = ""
    value: object = None


# What is recorded, by its kind.
KINDS = {
    # Of a step, in the order in which it is made.
    "loader": "a DataLoader began; name: its sampler's class, value: the class that drops an incomplete batch, or ''",
    "shuffle": "a sampler began; value: Shuffle",
    "score": "that ReduceLROnPlateau was given",
    "fed": "a tensor that the model was given in training; name: 'Net 0', value: Fed",
    "loss": "that backward was called on, without a scaler's scale",
    "scale": "a GradScaler's",
    "norm": "of the gradients, before they were clipped",
    "switch": "name: 'autocast in bfloat16', 'GradScaler', 'dropout of 0.5'; value: on only with a GPU",
    "optimizer": "which one takes the step: they count from their first steps",
    "options": "of each group of its parameters: a dictionary",
    "drew": "name: a generator; value: a checksum of its state, and whether it has moved since the step before",
    "buffer": "a tensor that no optimizer holds: a sketch",
    "gradients": "of all its parameters: a sketch",
    "old_weights": "the weights: a sketch",
    "new_weights": "the weights: the last record of the step",
    # Of an optimizer, before its first step, and when it has more of them.
    "seed": "torch's, when the optimizer is made",
    "parameters": "name: which optimizer, value: Parameters",
    # Of files.
    "wrote": "name: a file of the copy that was begun anew or renamed",
    "read": "name: a file that torch.load has read",
    "saved": "a checkpoint, by torch.save or safetensors",
    # At any time.
    "refused": "name: a file outside the copy that would have been written",
    "worker drew": "name: a generator that moved in a loader worker",
    "group": "the process joins its group",
    "float32": "name: what computes in less than float64, though that was asked for",
    "batchnorm": "name: 'plain' (on several ranks), 'synchronised' or 'frozen'",
    "unsupported": "name: something that the check cannot follow",
}
# How far what is measured may always part, as a share of the largest of its group, however little rounding moves it.
FLOORS = {
    "fed": 1e-5, "loss": 1e-9, "score": 1e-5, "options": 1e-6, "buffer": 1e-6,
    "weights": 1e-8,  # of the way that training has moved them: no fault is smaller
    "figure": 5e-7, "tensor": 5e-7,  # printed and logged, and saved: scripts may count in float32
    "state": 0.01,  # an optimizer's, in a file: a tie in a pooling layer parts it
}


@dataclass
class Fed:
    """A tensor by which the same samples are known again."""
    shape: list
    whole_numbers: bool  # tokens, classes: no noise
    one: list = field(default_factory=list)  # of an element of a list: its checksum
    rows: list = field(default_factory=list)  # a checksum of each row, and of each column,
    columns: list = field(default_factory=list)  # for samples may lie along either


@dataclass
class Shuffle:
    """One pass of a sampler over its samples."""
    sampler: str
    length: int  # samples that it chooses from
    shuffles: bool
    asked: tuple  # seed and epoch of a DistributedSampler, or ()
    again: bool = field(compare=False)  # an earlier epoch asked for the same
    drawn: int  # a checksum of the order that it would have had


@dataclass
class Parameters:
    """Of an optimizer."""
    names: list
    without: list  # those that nothing averages over the ranks
    eps: float  # of the weights' type


class Step(dict):
    """What a process noted from the end of the step before to the end of this one: pairs of name and value, by kind."""

    def all(self, kind):
        return [value for _, value in self.get(kind, [])]

    def last(self, kind):
        """The one that counts, or None: an optimizer's step may have been broken off before."""
        return self[kind][-1][1] if kind in self else None

    def named(self, kind):
        return dict(self.get(kind, []))

    def put(self, kind, value):
        """Instead of all of this kind."""
        self[kind] = [("", value)]
        return self


class Process:
    """What one process noted."""

    def __init__(self, pid, records):
        self.pid, self.records, self.rank = pid, records, records[-1].rank if records else 0
        steps, self.by_kind = collections.defaultdict(Step), collections.defaultdict(list)
        for record in records:
            self.by_kind[record.kind].append(record)
            steps[record.step].setdefault(record.kind, []).append((record.name, record.value))
        self.steps = [steps[number] for number in sorted(steps) if "new_weights" in steps[number]]
        self.tail = steps[len(self.steps)]  # what came after the last step

    def since(self, step):
        """The process as if it had begun when so many steps were taken: its optimizers count from their first steps."""
        later = [record._replace(step=record.step - step) for record in self.records
                 if record.step >= step and record.kind != "parameters"]
        order = [*dict.fromkeys(record.value for record in later if record.kind == "optimizer")]
        parameters = [Record(self.rank, 0, "parameters", k, self.parameters(which)) for k, which in enumerate(order)]
        return Process(self.pid, parameters + [
            record._replace(value=order.index(record.value)) if record.kind == "optimizer" else record
            for record in later])

    def of(self, kind):
        return self.by_kind[kind]

    def parameters(self, optimizer):
        return {record.name: record.value for record in self.of("parameters")}.get(optimizer)

    def latest(self, kind, step):
        """The last of this kind before the end of a step, which counts from 1."""
        return next((record for record in reversed(self.of(kind)) if record.step < step), None)


def write(path, record):
    with open(path, "ab") as file:  # opened each time: a process may fork
        file.write(pickle.dumps(tuple(record)))  # at once: a thread may write too


def read(path):
    """All that was written, in its order; a process may have been killed while it wrote."""
    found = []
    with open(path, "rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            found.append(Record(*pickle.load(file)))
    return Process(int(Path(path).stem), found)
