"""Measures the machine that this process runs on, as rates for the virtual clock."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar.cores import own_cores
from hf_patrickstar.machine import Machine
from hf_patrickstar.memory.accelerator import can_pin_memory, device_name, find_device, is_accelerator, memory_info
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pinning import make_pinning
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Copy, make_streams, seconds_of, synchronize
from hf_patrickstar.memory.tiers import Tier, available_host_nbytes, total_host_nbytes
from hf_patrickstar.report.sweeps import SWEPT_NBYTES, Sweeps
from hf_patrickstar.units import KIB, MIB

DTYPES = ("float32", "bfloat16", "float16")
"""Types whose matrix products are measured."""

CPU_FILE = pathlib.Path("/proc/cpuinfo")

_CPU = torch.device("cpu")
_OWNER = "measure"
_LEAST_ROWS = 128
_LEAST_S = 1e-9
_LATENCY_NBYTES = 4 * KIB
_PART_OF_MEMORY = 8
_BLOCKS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much work goes into a measurement.

    Attributes:
        nbytes: Size of the buffers that are copied and added; it should be more than any cache holds. At most an
            eighth of the free memory is taken for one.
        most_rows: Rows of the largest matrices that are multiplied.
        calls: Operators on one element, small gathers, or messages that are timed together.
        repetitions: How often each figure is measured; the median counts.
        seconds: When this time has passed, a figure is not measured once more.
    """

    nbytes: int = 256 * MIB
    most_rows: int = 8192
    calls: int = 200
    repetitions: int = 7
    seconds: float = 1.0


def cpu_name(file: pathlib.Path = CPU_FILE) -> str:
    """What the CPU is called.

    Args:
        file: Where Linux says it.
    """
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, name = line.partition(":")
            if key.strip() == "model name" and name.strip():
                return name.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure_machine(
    effort: Effort | None = None,
    progress: Callable[[list[str]], Iterable[str]] = lambda names: names,
    visit: Callable[[], float] | None = None,
) -> Machine:
    """Measures the compute device of this machine, its host, and the bus between them.

    The host is what this process computes with: as many cores as torch uses threads (``OMP_NUM_THREADS``), but no more
    than the process gets, and all of the memory. Links between devices are not measured: it is a machine of one device.

    Without an accelerator both ends are CPU memory. ``to_device_bandwidth`` is then that of the copy thread, which
    brings chunks in ahead; ``pageable_bandwidth`` that of copies on demand; ``device_nbytes`` all memory.

    A type in which matrices cannot be multiplied is missing in ``flops``.

    Args:
        effort: How much work goes into it.
        progress: Gets the names of all figures and gives them one after another, as a progress bar does.
        visit: Measures ``visit_s``, which takes an engine; without it that figure is the usual one.
    """
    device = find_device(None)
    flops: dict[str, float] = {}
    figures: dict[str, float] = {}
    products = {f"products in {dtype}": dtype for dtype in DTYPES}
    with contextlib.closing(_Measurement(device, effort or Effort())) as measurement:
        measures = measurement.figures if visit is None else {**measurement.figures, "visit_s": visit}
        for name in progress([*products, *measures]):
            if name in measures:
                figures[name] = measures[name]()
                continue
            try:
                flops[products[name]] = measurement.flops(device, products[name])
            except RuntimeError:
                if products[name] == "float32":
                    raise
    figures.setdefault("host_flops", flops["float32"])
    num_cores = min(torch.get_num_threads(), own_cores(1))
    return Machine(
        name=device_name(device) if is_accelerator(device) else cpu_name(),
        flops=flops,
        device_nbytes=memory_info(device)[1] if is_accelerator(device) else total_host_nbytes(),
        host_nbytes=total_host_nbytes(),
        has_accelerator=is_accelerator(device),
        num_cores=num_cores,
        core_bandwidth=figures["host_bandwidth"] / num_cores,
        **figures,  # type: ignore[arg-type]
    )


class _Counting(TorchDispatchMode):
    """Counts operators."""

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


class _Measurement:
    """Measures one figure at a time."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._device = device
        self._effort = effort
        unlimited = dict.fromkeys(Tier, 2**62)
        self._streams = make_streams(device)
        pinning = make_pinning(device)[0] if is_accelerator(device) and can_pin_memory() else None
        self._pool = PayloadPool(Ledger(unlimited), device, pinning)
        free = available_host_nbytes()
        if is_accelerator(device):
            free = min(free, memory_info(device)[0])
        # Whole float32 elements, and at least one.
        self._nbytes = max(min(effort.nbytes, free // _PART_OF_MEMORY) // 4, 1) * 4
        self.figures: dict[str, Callable[[], float]] = {
            "device_bandwidth": self._device_bandwidth,
            "to_device_bandwidth": functools.partial(self._copy_bandwidth, to_device=True),
            "to_host_bandwidth": functools.partial(self._copy_bandwidth, to_device=False),
            "pageable_bandwidth": self._pageable_bandwidth,
            "copy_latency_s": self._copy_latency,
            "host_bandwidth": self._host_bandwidth,
            "operator_s": self._operator,
            "kernel_s": self._kernel,
        }
        if is_accelerator(device):
            self.figures["host_flops"] = functools.partial(self.flops, _CPU, "float32")

    def close(self) -> None:
        """Ends the copy thread."""
        self._streams.close()

    def flops(self, device: torch.device, dtype: str) -> float:
        """Matrix products of the largest size that the time suffices for; small ones already show that one is slow."""
        rows, effort = _LEAST_ROWS, self._effort
        while True:
            multiply = _product(device, rows, dtype)
            multiply()
            seconds = seconds_of(device, multiply)
            if 2 * rows > effort.most_rows or 8 * seconds * effort.repetitions > effort.seconds:
                return 2 * rows**3 / self._median(device, multiply)
            rows *= 2

    def _device_bandwidth(self) -> float:
        source, target = self._buffer(Tier.DEVICE), self._buffer(Tier.DEVICE)
        return 2 * self._nbytes / self._median(self._device, lambda: target.copy_(source))

    def _copy_bandwidth(self, *, to_device: bool) -> float:
        host, device = self._buffer(Tier.HOST), self._buffer(Tier.DEVICE)
        if to_device:
            work = lambda: _join(self._streams.fetch(host, device))  # noqa: E731
        else:
            work = lambda: _join(self._streams.to_host(device, host))  # noqa: E731
        seconds = self._median(self._device, work)
        self._streams.release_in_flight()
        return self._nbytes / seconds

    def _pageable_bandwidth(self) -> float:
        host, device = self._buffer(Tier.HOST, pinned=False), self._buffer(Tier.DEVICE)
        return self._nbytes / self._median(self._device, lambda: device.copy_(host))

    def _copy_latency(self) -> float:
        host, device = (self._buffer(tier, nbytes=_LATENCY_NBYTES) for tier in (Tier.HOST, Tier.DEVICE))
        return self._median(self._device, lambda: _join(self._streams.fetch(host, device)), self._occupy)

    def _host_bandwidth(self) -> float:
        one, other = (self._buffer(Tier.HOST, pinned=False).view(torch.float32).fill_(1.0) for _ in range(2))
        return 3 * self._nbytes / self._median(_CPU, lambda: one.add_(other))

    def _operator(self) -> float:
        """As models call operators: by modules, and by autograd; see [Note: cold caches] in ``sweeps.py``."""
        sweeps = Sweeps(self._device, min(SWEPT_NBYTES, self._nbytes))
        inputs = torch.zeros(1, 1, device=self._device, requires_grad=True)
        passes, counts = [], []
        for make in (torch.nn.Identity, _make_block):
            model = sweeps.between(make() for _ in range(_BLOCKS)).to(self._device)
            passes.append(functools.partial(_pass_through, model, inputs))
            with _Counting() as counting:
                passes[-1]()
            counts.append(counting.num_operators)
        # A pass without blocks is measured in turns with one of blocks, and subtracted. It brings code that both share
        # back to the caches, so the figure is rather too low than too high.
        seconds = self._repeated(lambda: self._host_seconds(passes[1], sweeps) - self._host_seconds(passes[0], sweeps))
        return max(seconds / (counts[1] - counts[0]), _LEAST_S)

    def _host_seconds(self, work: Callable[[], object], sweeps: Sweeps) -> float:
        wait = functools.partial(synchronize, self._device) if is_accelerator(self._device) else (lambda: None)
        sweeps.seconds = 0.0
        return seconds_of(_CPU, work, wait) - sweeps.seconds

    def _kernel(self) -> float:
        if is_accelerator(self._device):
            return self._median(self._device, self._calls(numel=1), self._occupy) / self._effort.calls
        # There is no kernel beside the call: what one element takes more than none.
        one, none = (self._median(_CPU, self._calls(numel=numel)) for numel in (1, 0))
        return max((one - none) / self._effort.calls, _LEAST_S)

    def _calls(self, numel: int) -> Callable[[], None]:
        """The shortest operators, one after another."""
        tensor = torch.zeros(numel, device=self._device)

        def work() -> None:
            for _ in range(self._effort.calls):
                tensor.add_(1.0)

        return work

    @functools.cached_property
    def _long_product(self) -> Callable[[], object]:
        return _product(self._device, self._effort.most_rows // 2, "float32")

    def _occupy(self) -> None:
        """Gives an accelerator enough to do for the host to run ahead of it."""
        if is_accelerator(self._device):
            self._long_product()

    def _buffer(self, tier: Tier, *, pinned: bool = True, nbytes: int | None = None) -> torch.Tensor:
        """Bytes with memory behind them: pages that nobody wrote to are all one page of zeros."""
        is_pinned = pinned and tier is Tier.HOST
        buffer = self._pool.allocate(tier, nbytes or self._nbytes, torch.uint8, _OWNER, pinned=is_pinned)
        return buffer.fill_(1)

    def _median(
        self, device: torch.device, work: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> float:
        """Seconds of work, after it was done once."""
        work()
        median = self._repeated(lambda: seconds_of(device, work, before))
        return median if math.isfinite(median) and median > 0 else _LEAST_S

    def _repeated(self, measure: Callable[[], float]) -> float:
        since, found = time.perf_counter(), [measure()]
        while len(found) < self._effort.repetitions and time.perf_counter() - since < self._effort.seconds:
            found.append(measure())
        return statistics.median(found)


def _make_block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.GELU(), torch.nn.LayerNorm(1))


def _pass_through(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    torch.autograd.grad(model(inputs).sum(), [inputs, *model.parameters()])


def _product(device: torch.device, rows: int, dtype: str) -> Callable[[], object]:
    """Multiplies two square matrices."""
    left, right = (torch.rand(rows, rows, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return functools.partial(torch.mm, left, right, out=torch.zeros_like(left))


def _join(ticket: Copy | None) -> None:
    if ticket is not None:
        ticket.join()
