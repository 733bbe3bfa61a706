"""Engines over other streams than those of their device: simulated ones, or a real thread that begins late."""

import contextlib
import random
import threading
import time
import weakref
from unittest import mock

import torch
from support.buffers import told_of_buffers
from support.race_detector import SimulatedDriver

from hf_patrickstar.memory import disk, streams
from hf_patrickstar.memory.driver import HostThread
from hf_patrickstar.memory.streams import DeviceStreams, Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import storage_key
from hf_patrickstar.optim import elementwise, workers
from hf_patrickstar.units import ALIGNMENT_NUMEL


class HandingStreams(Streams):
    """Those of the CPU tier, whose thread is handed all copies that are started ahead."""

    def __init__(self, device, copy=streams.copy_bytes, at_once_nbytes=0):
        super().__init__(device)
        self._changed = {"copy_bytes": copy, "_AT_ONCE_NBYTES": at_once_nbytes}

    def fetch(self, source, target, after=()):
        with mock.patch.multiple(streams, **self._changed):
            return super().fetch(source, target, after)


TILE_NUMEL = 4 * ALIGNMENT_NUMEL
"""Updates of the tests' chunks, of some 700 elements, are several pieces of work, but few enough for fast tests."""


def streams_of(text):
    """What the option ``--streams`` says, as a context; ``None`` in it where it is that of the engine."""
    kind, _, seed = text.partition(":")
    kinds = {
        "threads": lambda _: contextlib.nullcontext(),
        "simulated": simulated_streams,
        "delayed": delayed_streams,
        "pooled": pooled_streams,
    }
    if kind not in kinds:
        raise ValueError(f"--streams: '{kind}' is none of {', '.join(kinds)}")
    return kinds[kind](int(seed) if seed else None)


@contextlib.contextmanager
def simulated_streams(seed=None):
    """Inside, engines of the CPU tier copy over simulated streams, and races are errors; gives the driver of all."""
    driver = SimulatedDriver(seed)
    at_once = mock.patch.object(disk, "ThreadPoolExecutor", AtOnceExecutor)  # operators of other threads are not seen
    with _engines_over(lambda: driver), driver.watching(), at_once:
        yield driver


class AtOnceExecutor:
    """A pool of threads that does all in that of the caller."""

    def __init__(self, *args):
        pass

    def submit(self, work):
        work()

    def shutdown(self):
        pass


@contextlib.contextmanager
def delayed_streams(seed=None, tile_numel=TILE_NUMEL):
    """Inside, engines of the CPU tier have a thread of the host that works late; gives the drivers of all."""
    drivers = []
    with buffers_on_host() as on_host:

        def make():
            drivers.append(DelayedDriver(0 if seed is None else seed, on_host))
            return drivers[-1]

        with _engines_over(make, tile_numel):
            yield drivers


@contextlib.contextmanager
def pooled_streams(seed=None):
    """As ``delayed_streams``, with updates in tiles so small that workers compute them, each after a delay.

    Gives the name of the thread that computed each tile.
    """
    delays, names = random.Random(0 if seed is None else seed), []
    update_share = elementwise.ElementwiseKernel._update_share

    def update_late(*args, **settings):
        names.append(threading.current_thread().name)
        time.sleep(delays.random() * MOST_S)
        update_share(*args, **settings)

    with (
        delayed_streams(seed, tile_numel=3 * ALIGNMENT_NUMEL),
        mock.patch.object(elementwise, "SMALL_NUMEL", ALIGNMENT_NUMEL),
        mock.patch.object(workers, "SMALL_NUMEL", ALIGNMENT_NUMEL),
        mock.patch.object(elementwise.ElementwiseKernel, "_update_share", update_late),
    ):
        yield names


@contextlib.contextmanager
def _engines_over(make_driver, tile_numel=TILE_NUMEL):
    def make(device):
        return DeviceStreams(device, make_driver())

    with (
        mock.patch("hf_patrickstar.setup.resources.make_streams", make),
        mock.patch.multiple(elementwise, TILE_NUMEL=tile_numel, SHARE_NUMEL=tile_numel),
    ):
        yield


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

    launching_in = inside

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
