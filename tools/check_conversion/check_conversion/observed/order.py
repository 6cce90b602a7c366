"""One order of the samples: each shuffle draws what DistributedSampler draws, by the number of epochs before it, so
that set_epoch may begin with 1, and RandomSampler with any seed.

A pass over a dataset counts as an epoch if it began with gradients on and steps were taken since. For example:
    a first look         RandomSampler draws order 0; no step comes of it, so it does not count
    epoch 0, training    draws order 0, as DistributedSampler does in its epoch 0; steps come of it
    evaluation           is without gradients, and does not count
    epoch 1, training    one pass has led to steps: it draws order 1
    set_epoch(7)         in the converted script counts as the next epoch, not as 7: order 1 too
    set_epoch(7) again   was asked for before: order 1 once more, and it is noted as `again`
"""
import zlib

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

from check_conversion.observed import process
from check_conversion.observed.process import on_call, replace
from check_conversion.records import Shuffle


class Epochs:
    """Those over one dataset, which is kept, so that no other gets its id."""

    def __init__(self, samples):
        self.samples = samples
        self.asked = []  # for each that led to steps: what its sampler was asked for
        self.last = None  # the pass that may turn out to be one: the steps before it, and what it was asked for


epochs_over = {}  # by the id of the dataset


def begin(samples, sampler, shuffles=True, asked=(), drawn=0):
    """Notes that a sampler begins. Returned is the number of its epoch, which decides the order."""
    epochs = epochs_over.setdefault(id(samples), Epochs(samples))
    if epochs.last and process.steps > epochs.last[0]:
        epochs.asked.append(epochs.last[1])
        epochs.last = None
    again = shuffles and asked != () and asked in epochs.asked
    if torch.is_grad_enabled():
        epochs.last = process.steps, asked
        process.note("shuffle", "", Shuffle(type(sampler).__name__, len(samples), shuffles, asked, again, drawn))
    return epochs.asked.index(asked) if again else len(epochs.asked)


def shuffle(draw, sampler):
    """The order that a sampler draws is noted by its checksum. DistributedSampler takes nothing from its generator: so
    it does neither here."""
    samples = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler.data_source
    generator, count = sampler.generator or torch.default_generator, len(samples)
    state = generator.get_state()
    if getattr(sampler, "replacement", False) or getattr(sampler, "num_samples", count) != count:
        begin(samples, sampler, drawn=zlib.crc32(bytes(state.tolist())))
        return draw(sampler)  # perhaps without an end
    drawn = zlib.crc32(repr([*draw(sampler)]).encode())
    generator.set_state(state)
    number = begin(samples, sampler, drawn=drawn)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(number), device="cpu").tolist()
    return iter([samples[i] for i in order] if isinstance(sampler, SubsetRandomSampler) else order)


def share_out(share, sampler):
    asked = sampler.seed, sampler.epoch
    number = begin(sampler.dataset, sampler, sampler.shuffle, asked)
    sampler.seed, sampler.epoch = 0, number
    order = list(share(sampler))
    sampler.seed, sampler.epoch = asked
    return iter(order)


def note_loader(loader):
    """And the class that was told to leave out a last batch that is not whole, or samples."""
    if torch.is_grad_enabled():
        batches = loader.batch_sampler
        sampler = type(loader.sampler if type(batches) in (BatchSampler, type(None)) else batches).__name__
        dropping = sampler if getattr(loader.sampler, "drop_last", False) else ""
        process.note("loader", sampler, "DataLoader" if getattr(batches, "drop_last", False) else dropping)


def install():
    on_call(DataLoader, "__iter__", note_loader)
    replace(RandomSampler, "__iter__", shuffle)
    replace(SubsetRandomSampler, "__iter__", shuffle)
    replace(DistributedSampler, "__iter__", share_out)
