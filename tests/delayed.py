"""Engines over CPU memory with a real thread of the host that begins late: what does not wait for it is wrong."""

import contextlib
import random
import time
import weakref

import torch
from buffers import told_of_buffers

from hf_patrickstar.memory.driver import HostThread
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.tracing.operands import storage_key

MOST_S = 0.002
"""The longest time after which a piece of work begins."""


class Done:
    """A point in a stream that has been reached."""

    def query(self):
        return True

    def synchronize(self):
        pass


class AtOnce:
    """A stream that does what it is told at once."""

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        event.synchronize()

    def record_event(self):
        return Done()

    def synchronize(self):
        pass


class DelayedDriver(HostThread):
    """See ``Driver``; copies are made at once, by the thread that starts them."""

    def __init__(self, seed, on_host):
        super().__init__()
        self._random = random.Random(seed)
        self._stream = AtOnce()
        self._on_host = on_host
        self.num_works = 0
        self.num_late = 0  # copies that the thread has made

    def new_stream(self):
        return self._stream

    current_stream = new_stream

    def inside(self, stream):
        return contextlib.nullcontext()

    def is_on_device(self, tensor):
        try:
            return storage_key(tensor) not in self._on_host
        except (NotImplementedError, RuntimeError):  # a kind of tensor that has no storage
            return True

    def is_pinned(self, tensor):
        return not self.is_on_device(tensor)

    def copy(self, source, target, stream):
        with torch.no_grad():
            target.copy_(source)

    def on_host(self, work, after, otherwise=None):
        delay_s = self._random.random() * MOST_S
        self.num_works += 1

        def work_late():
            time.sleep(delay_s)
            return work()

        return super().on_host(work_late, after, otherwise)

    def begin_after(self, work, stream, begin):
        self.num_late += not work.query()
        return super().begin_after(work, stream, begin)


@contextlib.contextmanager
def buffers_on_host():
    """Inside, gives the keys of the storages of all buffers on the host."""
    keys = set()

    def take(buffer, tier, owner):
        key = storage_key(buffer)
        if tier is Tier.HOST and key not in keys:
            keys.add(key)
            weakref.finalize(buffer.untyped_storage(), keys.discard, key)
        elif tier is not Tier.HOST:
            keys.discard(key)

    with told_of_buffers(take, lambda buffer: keys.discard(storage_key(buffer))):
        yield keys
