"""Engines over simulated streams."""

import contextlib
from unittest import mock

from hf_patrickstar.memory.simulation import SimulatedDriver
from hf_patrickstar.memory.streams import DeviceStreams


def streams_of(text):
    """What the option ``--streams`` says, as a context; ``None`` in it where it is that of the engine."""
    kind, _, seed = text.partition(":")
    if kind not in ("threads", "simulated"):
        raise ValueError(f"--streams: '{kind}' is neither 'threads' nor 'simulated'")
    return simulated_streams(int(seed) if seed else None) if kind == "simulated" else contextlib.nullcontext()


@contextlib.contextmanager
def simulated_streams(seed=None):
    """Inside, engines of the CPU tier copy over simulated streams, and races are errors; gives the driver of all."""
    driver = SimulatedDriver(seed)
    make = lambda device: DeviceStreams(device, driver)  # noqa: E731
    with mock.patch("hf_patrickstar.resources.make_streams", make), driver.watching():
        yield driver
