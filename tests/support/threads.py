"""Other threads for tests, which raise what they raised, and threads in place of processes."""

import contextlib
import threading

import torch

from hf_patrickstar.dist import collectives

TIMEOUT_S = 10


def in_threads(*functions, expected=()):
    """Calls each function in a thread of its own; returns what came of them, an error of an expected type too."""
    results = [None] * len(functions)
    failed = []

    def call(place, function):
        try:
            results[place] = function()
        except expected as error:
            results[place] = error
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    assert not any(thread.is_alive() for thread in threads), "hangs"
    return results


@contextlib.contextmanager
def beside(function, *args):
    """Calls a function in a thread again and again while the block runs; raises what it raised."""
    has_ended, has_begun, errors = threading.Event(), threading.Event(), []

    def work():
        try:
            while not has_ended.is_set():
                function(*args)
                has_begun.set()
        except BaseException as error:
            errors.append(error)
        finally:
            has_begun.set()

    thread = threading.Thread(target=work, name="reader", daemon=True)
    thread.start()
    assert has_begun.wait(30)
    try:
        yield
    finally:
        has_ended.set()
        thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@torch.no_grad()
def read_parameters(model):
    for parameter in model.parameters():
        assert not parameter.norm().isnan()
        assert not parameter.data.isnan().any()


@torch.no_grad()
def read_state(model):
    assert not any(value.isnan().any() for value in model.state_dict().values())


# Threads in place of processes: they meet in memory, or at a store of torch


class Exchange:
    """Where threads that stand for processes meet; one that fails lets the others go."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.slots = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)

    def swap(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class ThreadCollectives:
    """What orders and sharing need of ``Collectives``; of one process alone if no exchange is given."""

    is_asynchronous = False

    def __init__(self, rank=0, exchange=None):
        self.place = Exchange(1) if exchange is None else exchange
        self.rank, self.world_size = rank, self.place.world_size
        self.whats, self.prompt, self.sent_numels = [], [], []

    def exchange(self, value, what, *, subject=None, is_prompt=False):
        self.whats.append(what)
        self.prompt.append(is_prompt)
        if len(set(self.place.swap(self.rank, subject or what))) > 1:
            raise self.disagreement(what)
        return self.place.swap(self.rank, value)

    def disagreement(self, what):
        return collectives._disagreement(self.place.swap(self.rank, what))

    def begin_broadcast(self, tensor, source, what):
        """Writes when it is waited for, and not before."""
        self.sent_numels.append(tensor.numel())
        found = self.place.swap(self.rank, tensor.clone())[source]
        return lambda: tensor.copy_(found)


def run_together(world_size, function, expected=()):
    """Calls a function of ``ThreadCollectives`` once for each of several processes; returns what came of it."""
    exchange = Exchange(world_size)

    def call(rank):
        try:
            return function(ThreadCollectives(rank, exchange))
        except expected:
            raise
        except BaseException:
            exchange.barrier.abort()
            raise

    return in_threads(*[lambda rank=rank: call(rank) for rank in range(world_size)], expected=expected)
