"""One order of the samples: each shuffle draws what DistributedSampler draws, by the number of
passes before it that led to steps.

For example, two epochs of a script that looks at one batch first and evaluates after each epoch:
    a first look         RandomSampler draws order 0; no step comes of it, so it does not count
    epoch 0, training    draws order 0, as DistributedSampler does in its epoch 0; steps come of it
    evaluation           a dataset of its own has a count of its own
    epoch 1, training    one pass has led to steps: it draws order 1
    set_epoch(7)         in the converted script counts as the next epoch, not as 7: order 1 too
    set_epoch(7) again   was asked for before: order 1 once more, and the pass is noted as `again`
"""
import collections
import contextlib
import weakref
import zlib

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from check_conversion.observed import generators
from check_conversion.protocol import Pass

go_through, go_on = DataLoader.__iter__, _BaseDataLoaderIter.__next__
shuffle, shuffle_some = RandomSampler.__iter__, SubsetRandomSampler.__iter__
share = DistributedSampler.__iter__


class Route:
    """A way through a loader, which may turn out to be for training."""

    def __init__(self):
        self.taken, self.finished = -1, False  # the step after which its last batch was taken
        self.samples, self.noted = None, Pass("no sampler", shuffles=False)
        self.drop_last = ""


routes, current, last_finished = weakref.WeakSet(), [None], None
by_hand = None  # a route of a sampler that the script itself went through, for a list perhaps
passes = collections.defaultdict(list)  # over each dataset: what led to steps, as it was asked
lists = []
steps = 0


@contextlib.contextmanager
def on(route):
    current.append(route)
    try:
        yield route
    finally:
        current.pop()


def told_to_drop(loader):
    """The class that leaves out a last batch that is not whole."""
    if getattr(loader.batch_sampler, "drop_last", False):  # which the loader makes of its own drop_last
        return "DataLoader"
    return type(loader.sampler).__name__ if getattr(loader.sampler, "drop_last", False) else ""


def begin_pass(loader):
    with on(Route()) as route:
        route.noted.sampler = type(loader.sampler).__name__
        iterator = go_through(loader)
    route.drop_last = told_to_drop(loader)
    iterator.check_conversion = route
    routes.add(route)
    generators.look()  # the loader drew a seed for its workers
    return iterator


def next_batch(iterator):
    global last_finished
    route = vars(iterator).get("check_conversion") or Route()
    try:
        with on(route):
            batch = go_on(iterator)
    except StopIteration:
        route.finished, last_finished = True, route
        if torch.is_grad_enabled():
            route.taken = steps  # a loader may be asked a batch ahead
        raise
    if torch.is_grad_enabled():
        route.taken = steps
    return batch


def begin(samples, sampler, **noted):
    """A sampler begins: the passes over its samples before that led to steps."""
    global last_finished, by_hand
    route = current[-1] or Route()
    if current[-1] is None:  # no loader has it
        route.taken, last_finished, by_hand = steps, route, route
    if id(samples) not in passes:
        try:
            weakref.finalize(samples, passes.pop, id(samples), None)
        except TypeError:  # a list: kept, so that no other gets its id
            lists.append(samples)
    before = passes[id(samples)]
    route.samples, route.noted = id(samples), Pass(type(sampler).__name__, **noted)
    return before, route.noted


def order_of(count, number):
    return torch.randperm(count, generator=torch.Generator().manual_seed(number)).tolist()


def drawn_by(draw, sampler):
    """The order that a sampler draws, of which DistributedSampler takes nothing from its
    generator: so it does neither here."""
    generator = sampler.generator or torch.default_generator
    before = generator.get_state()
    drawn = list(draw(sampler))
    generator.set_state(before)
    return zlib.crc32(repr(drawn).encode())


def shuffle_all(sampler):
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        state = (sampler.generator or torch.default_generator).get_state()
        begin(sampler.data_source, sampler, shuffles=True, length=len(sampler.data_source),
              drawn=zlib.crc32(bytes(state.tolist())))
        return shuffle(sampler)  # perhaps without an end
    drawn, count = drawn_by(shuffle, sampler), len(sampler.data_source)
    before, _ = begin(sampler.data_source, sampler, shuffles=True, length=count, drawn=drawn)
    return iter(order_of(count, len(before)))


def shuffle_indices(sampler):
    drawn, count = drawn_by(shuffle_some, sampler), len(sampler.indices)
    before, _ = begin(sampler.indices, sampler, shuffles=True, length=count, drawn=drawn)
    return iter([sampler.indices[i] for i in order_of(count, len(before))])


def share_out(sampler):
    """The epoch counts as it came: set_epoch may begin with 1."""
    asked = sampler.seed, sampler.epoch
    before, noted = begin(sampler.dataset, sampler, shuffles=sampler.shuffle, asked=asked,
                          length=len(sampler.dataset))
    noted.again = sampler.shuffle and asked in before
    number = before.index(asked) if asked in before else len(before)
    sampler.seed, sampler.epoch = 0, number
    try:
        return iter(list(share(sampler)))
    finally:
        sampler.seed, sampler.epoch = asked


def lead_to_a_step():
    """The passes of whose batches a step is made; those over before are for evaluation."""
    global steps
    found = [route for route in routes if route.taken == steps and not route.finished]
    if not found and last_finished and last_finished.taken == steps:
        found = [last_finished]
    if by_hand and by_hand.taken == steps and all(route.samples is None for route in found):
        found.append(by_hand)
    for route in found:
        if not route.noted.steps and route.samples is not None:
            passes[route.samples].append(route.noted.asked)
        route.noted.steps += 1
        route.noted.drop_last = route.drop_last
    steps += 1
    return [Pass(**vars(route.noted)) for route in found]


def install(settings):
    DataLoader.__iter__, _BaseDataLoaderIter.__next__ = begin_pass, next_batch
    RandomSampler.__iter__, SubsetRandomSampler.__iter__ = shuffle_all, shuffle_indices
    DistributedSampler.__iter__ = share_out
