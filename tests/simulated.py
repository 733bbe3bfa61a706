"""Engines over other streams than those of their device."""

import contextlib
from unittest import mock

from delayed import DelayedDriver

from hf_patrickstar.memory.simulation import SimulatedDriver
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.optim import adam_kernel
from hf_patrickstar.units import ALIGNMENT_NUMEL


def streams_of(text):
    """What the option ``--streams`` says, as a context; ``None`` in it where it is that of the engine."""
    kind, _, seed = text.partition(":")
    kinds = {"threads": lambda _: contextlib.nullcontext(), "simulated": simulated_streams, "delayed": delayed_streams}
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
def delayed_streams(seed=None):
    """Inside, engines of the CPU tier have a thread of the host that works late; gives the drivers of all."""
    drivers = []

    def make():
        drivers.append(DelayedDriver(0 if seed is None else seed))
        return drivers[-1]

    with _engines_over(make):
        yield drivers


@contextlib.contextmanager
def _engines_over(make_driver):
    def make(device):
        return DeviceStreams(device, make_driver())

    with (
        mock.patch("hf_patrickstar.resources.make_streams", make),
        mock.patch.object(adam_kernel, "TILE_NUMEL", ALIGNMENT_NUMEL),  # else all chunks are one piece of work
    ):
        yield
