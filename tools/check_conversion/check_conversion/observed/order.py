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
import weakref
import zlib

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

from check_conversion.observed import process
from check_conversion.observed.process import after, before, replace
from check_conversion.observed.steps import disregard_draws
from check_conversion.records import Shuffle


class Epochs:
    """Those over one dataset."""

    def __init__(self):
        self.asked = []  # for each that led to steps: what its sampler was asked for
        self.last = None  # the pass that may turn out to be one: the steps before it, and what it was asked for

    def count(self):
        if self.last and process.steps > self.last[0]:
            self.asked.append(self.last[1])
            self.last = None


epochs_over, lists = {}, []


def epochs_of(samples):
    if id(samples) not in epochs_over:
        epochs_over[id(samples)] = Epochs()
        try:
            weakref.finalize(samples, epochs_over.pop, id(samples), None)
        except TypeError:  # a list: kept, so that no other gets its id
            lists.append(samples)
    return epochs_over[id(samples)]


def begin(samples, sampler, length, shuffles=True, asked=(), drawn=0):
    """Notes that a sampler begins: the number of its epoch, which decides the order."""
    epochs = epochs_of(samples)
    epochs.count()
    again = shuffles and asked != () and asked in epochs.asked
    number = epochs.asked.index(asked) if again else len(epochs.asked)
    if torch.is_grad_enabled():
        epochs.last = process.steps, asked
        process.note("shuffle", "", Shuffle(type(sampler).__name__, length, shuffles, asked, again, drawn))
    return number


def shuffle(draw):
    """The order that a sampler draws is noted by its checksum. DistributedSampler takes nothing from its generator: so
    it does neither here."""
    def in_one_order(sampler):
        samples = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler.data_source
        generator, count = sampler.generator or torch.default_generator, len(samples)
        state = generator.get_state()
        if getattr(sampler, "replacement", False) or getattr(sampler, "num_samples", count) != count:
            begin(samples, sampler, count, drawn=zlib.crc32(bytes(state.tolist())))
            return draw(sampler)  # perhaps without an end
        drawn = zlib.crc32(repr([*draw(sampler)]).encode())
        generator.set_state(state)
        number = begin(samples, sampler, count, drawn=drawn)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(number)).tolist()
        return iter(order if samples is not getattr(sampler, "indices", None) else [samples[i] for i in order])
    return in_one_order


def share_out(share):
    def shuffle(sampler):
        asked = sampler.seed, sampler.epoch
        number = begin(sampler.dataset, sampler, len(sampler.dataset), sampler.shuffle, asked)
        sampler.seed, sampler.epoch = 0, number
        try:
            return iter(list(share(sampler)))
        finally:
            sampler.seed, sampler.epoch = asked
    return shuffle


def note_loader(loader):
    """And the class that was told to leave out a last batch that is not whole, or samples."""
    sampler, dropping = type(loader.sampler).__name__, ""
    if getattr(loader.batch_sampler, "drop_last", False):  # which the loader makes of its own drop_last
        dropping = "DataLoader"
    elif getattr(loader.sampler, "drop_last", False):
        dropping = sampler
    if torch.is_grad_enabled():
        process.note("loader", sampler, dropping)


def install():
    before(DataLoader, "__iter__", note_loader)
    after(DataLoader, "__iter__", disregard_draws)
    replace(RandomSampler, "__iter__", shuffle)
    replace(SubsetRandomSampler, "__iter__", shuffle)
    replace(DistributedSampler, "__iter__", share_out)
