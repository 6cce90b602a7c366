"""What passes between the check and the processes that it observes.

The check starts each command with `start/` on PYTHONPATH, so that each Python process of it installs
`observed/`, and with one environment variable, CHECK_CONVERSION: the file of the Settings, as JSON, in
the folder of records. There each process writes, under its process id,

    PID.notes    pairs of its rank and a record (the dataclasses below), pickled one after the other
    PID.alive    touched while it computes
    PID.stdout   what a rank prints, so that lines of two ranks do not mix
    PID.errors   what its own lines write to stderr, beside what packages write there
    PID.stack    where it is, on SIGUSR2
    PID.rank     the rank that a launcher started it as

and the check has stdout and stderr of the command itself written there.
"""
import dataclasses
import json
import os
import pickle
from array import array
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

VARIABLE = "CHECK_CONVERSION"
BUCKETS = 32  # numbers in the sketch of a tensor


@dataclass
class Settings:
    """What an observed process is told."""
    records: str  # the folder of records
    home: str  # all that the check makes lies below: it may be written
    temporary: str  # below it too: where tempfile writes
    root: str  # of the copy: beside the copy it links to what lies around the user's folder
    copy: str  # of the user's folder: where the script works
    protected: list  # the user's own folders, which nothing may change
    nudged: bool = False  # the original's second run: weights moved by one rounding, other clocks
    float64: bool = False
    batchnorm_frozen: bool = False  # wherever it is, synchronised or not

    @classmethod
    def given(cls):
        return cls(**json.loads(Path(os.environ[VARIABLE]).read_text()))

    def as_environment(self):
        """What a process needs to find them; the folder is also how its processes are found."""
        file = Path(self.records, "settings")
        file.write_text(json.dumps(dataclasses.asdict(self)))
        return {VARIABLE: str(file), "TMPDIR": self.temporary}

    def file(self, ending):
        """Of this process."""
        return Path(self.records, f"{os.getpid()}.{ending}")


@dataclass
class Fed:
    """One tensor that a call of a model in training was given."""
    name: str  # the model's class, and which of its arguments: "Net 0", "Net images[]"
    shape: list
    whole_numbers: bool = False  # tokens, classes: no noise
    one: list = field(default_factory=list)  # of an element of a list: its checksum
    rows: list = field(default_factory=list)  # a checksum of each row, and of each column,
    columns: list = field(default_factory=list)  # for samples may lie along either


@dataclass
class Untrained:
    """A tensor of a module that no optimizer holds: of a momentum encoder, or a buffer."""
    sketch: array
    rows: list = field(default_factory=list)  # sorted checksums: the keys in a queue may lie in
    columns: list = field(default_factory=list)  # another order


@dataclass
class Pass:
    """Once through the samples, by a sampler that optimizer steps come of."""
    sampler: str  # its class
    shuffles: bool
    length: int = 0  # samples that it chooses from
    asked: tuple = ()  # seed and epoch of a DistributedSampler
    again: bool = False  # it was asked for these before
    drawn: int = 0  # a checksum of the order that it would have had
    steps: int = 0  # that it has led to so far
    drop_last: str = ""  # the class that was told so, the loader's or the sampler's


class BatchNorm(Enum):
    """How it was computed in training."""
    FROZEN = "with statistics that stand still, for those of a rank are not those of the batch"
    SYNCHRONISED = "over all ranks"


@dataclass
class Step:
    """One optimizer step of one process, and what led to it since the step before."""
    optimizer: int = 0  # which: they count from their first steps
    options: list = field(default_factory=list)  # of each group of parameters
    before: array = None  # a sketch of the weights
    after: array = None
    gradients: array = None
    fed: list = field(default_factory=list)
    losses: list = field(default_factory=list)  # that backward was called on
    norms: list = field(default_factory=list)  # of gradients, before they were clipped
    passes: list = field(default_factory=list)  # over the samples, those that this step comes of
    states: dict = field(default_factory=dict)  # a checksum of each generator's
    after_model: dict = field(default_factory=dict)  # the same, when the model was last called
    draws: list = field(default_factory=list)  # generators that moved since the step before
    drawn_at: dict = field(default_factory=dict)  # the user's line that moved each, once a run
    untrained: dict = field(default_factory=dict)  # Untrained by names, before the step
    batchnorm: set = field(default_factory=set)  # of BatchNorm, so far
    synchronised_at: str = ""  # the user's line that has BatchNorm synchronised on GPUs alone
    on: set = field(default_factory=set)  # but for the check: "autocast in bfloat16", "GradScaler", "dropout of 0.5"


@dataclass
class Began:
    """The first step of an optimizer."""
    optimizer: int
    names: list  # of its parameters
    without: list  # those that nothing averages over the ranks
    eps: float  # of the weights' type


@dataclass
class Numbers:
    """A tensor in a file, in several sketches, for large numbers would hide small ones, or NaN all."""
    shape: list
    sketches: list
    whole: bool = False  # counts, which are never rounded


@dataclass
class Saved:
    """One torch.save: of each tensor its Numbers, of each plain value itself."""
    path: str
    tensors: dict
    values: dict
    strings: dict = field(default_factory=dict)
    unknown: dict = field(default_factory=dict)  # of all else its type, which is all that is said of it


@dataclass
class Logged:
    """One figure for TensorBoard or wandb."""
    to: str
    name: str
    value: float
    step: int = None  # that it was logged for, if that was said


@dataclass
class Bar:
    """A progress bar that is over."""
    state: str  # its last one: "epoch 1: 6/6, loss=0.5"


@dataclass
class Score:
    """What ReduceLROnPlateau was given."""
    value: float
    steps: int  # taken so far


class About(Enum):
    """What a remark is about."""
    FLOAT32 = "where something is computed in less than float64, though asked for it"
    GROUP = "the process joins its group"
    LOADED = "a file was read by torch.load"
    WRITE = "a file outside the copy would have been written"
    DREW = "a generator moved in a loader worker"
    WRITTEN = "a file of the copy was opened to be written anew"
    UNSUPPORTED = "something that the check cannot follow"


@dataclass
class Remark:
    about: About
    name: str = ""  # of a file or class


def write(path, rank, record):
    with open(path, "ab") as file:  # opened each time: a process may fork
        pickle.dump((rank, record), file)


def read(path):
    """All that was written, in its order; a process may have been killed while it wrote."""
    found = []
    with open(path, "rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found
