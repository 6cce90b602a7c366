"""What a run notes of itself: written inside the user's processes, read by the check."""
import pickle
from array import array
from dataclasses import dataclass, field

BUCKETS = 32  # numbers in the sketch of a tensor


@dataclass
class Fed:
    """One tensor that a call of a model in training was given."""
    name: str  # the model's class, and which of its arguments
    shape: list
    whole_numbers: bool = False  # tokens, classes: no noise
    rows: list = field(default_factory=list)  # a checksum of each row, and of each column,
    columns: list = field(default_factory=list)  # for samples may lie along either


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
    workers: int = 0  # of its loader


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
    draws: list = field(default_factory=list)  # generators that moved since the step before
    stood_still: set = field(default_factory=set)  # of what the check keeps from changing


@dataclass
class Began:
    """The first step of an optimizer."""
    optimizer: int
    names: list  # of its parameters
    without: list  # those that nothing averages over the ranks
    eps: float  # of the weights' type


@dataclass
class Saved:
    """One torch.save: of each tensor its shape and sketch, of each plain value itself."""
    path: str
    tensors: dict
    values: dict


@dataclass
class Logged:
    """One figure for TensorBoard or wandb."""
    to: str
    name: str
    value: float


@dataclass
class Remark:
    """Anything that the verdict has to name: what it is, and of which file or class."""
    what: str
    name: str = ""


@dataclass
class Score:
    """What ReduceLROnPlateau was given."""
    value: float
    steps: int  # taken so far


def write(path, rank, one):
    with open(path, "ab") as file:  # opened each time: a process may fork
        pickle.dump((rank, one), file)


def read(path):
    """All that was written, in its order; a process may have been killed while it wrote."""
    found = []
    with open(path, "rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found
