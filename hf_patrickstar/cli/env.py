"""``hf-patrickstar env``: what this machine is, and how fast."""

import argparse
import contextlib
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping

import torch
from tqdm import tqdm

from hf_patrickstar.checkpoint.progress import PROGRESS_AFTER_S
from hf_patrickstar.cli.files import check_file, write_text
from hf_patrickstar.common.cores import usable_cores
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import Machine, name_of_products
from hf_patrickstar.memory.compute_device import device_name, find_device, is_accelerator, memory_info, num_accelerators
from hf_patrickstar.memory.tiers import available_host_nbytes, total_host_nbytes
from hf_patrickstar.planner.local_machine import seconds_of_a_visit
from hf_patrickstar.report.measure import cpu_name, measure_machine, measure_together
from hf_patrickstar.units import format_nbytes
from hf_patrickstar.version import __version__

HELP = (
    "print what this machine is, and measure how fast it is. Under torchrun or accelerate launch all processes "
    "measure at the same time, and their links, too."
)

_LIBRARIES = ("torch", "transformers", "accelerate")
_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command understands."""
    parser.add_argument("--measure", action="store_true", help="measure the rates of this machine, which takes seconds")
    parser.add_argument("--json", metavar="FILE", help="the file for the measured machine; an older file is replaced")


def run(options: argparse.Namespace) -> None:
    """Prints what this machine is; of several processes that a launcher has started, the first one prints.

    Raises:
        ConfigError: If the file cannot be written, or is asked for without measuring.
    """
    if options.json is not None:
        if not options.measure:
            raise ConfigError("--json writes what was measured; add --measure")
        check_file(options.json, "--json")
    with _joined() as is_first:
        if is_first:
            _print(describe())
        machine = None
        if options.measure:
            measure = measure_together if _num_launched() > 1 else measure_machine
            bar = {"desc": "measuring", "unit": "figure", "leave": False, "delay": PROGRESS_AFTER_S}
            progress = functools.partial(tqdm, disable=not is_first or None, **bar)
            machine = measure(progress=progress, visit=seconds_of_a_visit)
    if machine is None or not is_first:
        return
    print()
    _print(rates(machine))
    if options.json is not None:
        write_text(options.json, machine.to_json() + "\n", "--json")
        print(f"\n{options.json}: written")


def _num_launched() -> int:
    """How many processes ``torchrun`` or ``accelerate launch`` has started together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


@contextlib.contextmanager
def _joined() -> Iterator[bool]:
    """Inside the block the default process group is that of the launcher, if there is one.

    Yields:
        Whether this is the first process.
    """
    if _num_launched() == 1:
        yield True
        return
    from accelerate import PartialState  # not sooner: `run` puts its mixins where accelerate is imported

    state = PartialState(cpu=not num_accelerators())
    try:
        yield state.is_main_process
    finally:
        state.destroy_process_group()


def describe() -> dict[str, str]:
    """What this machine and its software are, by name."""
    device = find_device(None)
    if is_accelerator(device):
        free, total = memory_info(device)
        accelerator = f"{device_name(device)} ({device}), {format_nbytes(total)}, {format_nbytes(free)} free"
    else:
        accelerator = "none; a budgeted part of CPU memory takes its place"
    return {
        "hf_patrickstar": __version__,
        **{library: importlib.metadata.version(library) for library in _LIBRARIES},
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU": cpu_name(),
        "cores": f"{len(usable_cores())}, torch uses {torch.get_num_threads()}",
        "memory": f"{format_nbytes(total_host_nbytes())}, {format_nbytes(available_host_nbytes())} available",
        "accelerator": accelerator,
    }


def rates(machine: Machine) -> dict[str, str]:
    """The rates of a machine for people, by name."""
    bandwidths = {
        "device memory": machine.device_bandwidth,
        "host -> device": machine.to_device_bandwidth,
        "device -> host": machine.to_host_bandwidth,
        "not pinned": machine.pageable_bandwidth,
        "host memory": machine.host_bandwidth,
        "disk, both ways": machine.disk_bandwidth,
        "beside copies": max(machine.memory_bandwidth, machine.host_bandwidth),
    }
    times = {
        "operator": machine.operator_s,
        "visit to a chunk": machine.visit_s,
        "shortest kernel": machine.kernel_s,
        "latency of a copy": machine.copy_latency_s,
    }
    if machine.num_devices > 1:
        bandwidths["between processes"] = machine.link_bandwidth
        times |= {"shortest collective": machine.link_latency_s, "message": machine.message_s}
    return {
        **{name_of_products(key): f"{rate / 1e9:.4g} GFLOP/s" for key, rate in machine.flops.items()},
        "products on the host": f"{machine.host_flops / 1e9:.4g} GFLOP/s",
        **{name: f"{rate / 1e9:.4g} GB/s" for name, rate in bandwidths.items()},
        "both ways at once": f"{machine.duplex_share:.0%} of each".replace("%", " %"),
        **{name: f"{seconds * 1e6:.4g} us" for name, seconds in times.items()},
    }


def _print(rows: Mapping[str, str]) -> None:
    for name, value in rows.items():
        print(f"{name:<{_WIDTH}}{value}")
