"""Engines over other streams than those of their device."""

import contextlib
import random
import threading
import time
from unittest import mock

from delayed import MOST_S, DelayedDriver, buffers_on_host
from race_detector import SimulatedDriver

from hf_patrickstar.memory import streams
from hf_patrickstar.memory.streams import DeviceStreams, Streams
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
    with _engines_over(lambda: driver), driver.watching():
        yield driver


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
        mock.patch("hf_patrickstar.resources.make_streams", make),
        mock.patch.multiple(elementwise, TILE_NUMEL=tile_numel, SHARE_NUMEL=tile_numel),
    ):
        yield
