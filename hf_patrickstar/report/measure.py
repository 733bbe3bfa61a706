"""Measures a machine and the links between processes that train together on it, as rates for the virtual clock.

[Note: cold caches]
Where the device is the CPU, its cores compute for a millisecond between two modules, and go through more memory than
the caches of a core hold. Python, the engine and torch's dispatch then run from memory that is far away, and take two
to three times as long as in a loop of their own. Therefore what they cost is measured between sweeps of a large buffer,
whose own time is left out. The thread that runs Python sweeps all of it, without those of torch: it is the caches of
its core that count. A host with an accelerator computes little itself, and needs no sweeps.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_patrickstar.common.cores import own_cores
from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.machine import Machine, name_of_products
from hf_patrickstar.memory.compute_device import can_pin_memory, device_name, find_device, is_accelerator, memory_info
from hf_patrickstar.memory.disk import NUM_BUFFERS, Disk, Tile
from hf_patrickstar.memory.driver import Pending
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pinning import make_pinning
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Copy, make_streams, seconds_of, synchronize
from hf_patrickstar.memory.tiers import Tier, available_host_nbytes, total_host_nbytes
from hf_patrickstar.optim.adam_script import Range, adam_script, rule_of
from hf_patrickstar.optim.workers import HostWorkers
from hf_patrickstar.schedule.bounds import ADAM_NBYTES
from hf_patrickstar.schedule.script import TILE_NUMEL
from hf_patrickstar.units import ALIGNMENT_NUMEL, KIB, MIB, align

DTYPES = ("float32", "bfloat16", "float16")
"""Types whose matrix products are measured."""
KINDS = ("", "NT", "TN", "attention")
"""Kinds of products that are measured, with the names that ``Machine.kernel_ns`` has for them."""
SWEPT_NBYTES = 32 * MIB
"""More than what the private caches of a core hold, and as much as many cores share."""

_CPU = torch.device("cpu")
_CPU_FILE = pathlib.Path("/proc/cpuinfo")
_LEAST_ROWS = 128
_LEAST_S = 1e-9
_HEAD_NUMEL = 128
_BLOCKS = 16
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
_Work = Callable[[torch.Tensor, torch.Tensor], object]
_Start = Callable[[], Copy | None]
_Progress = Callable[[list[str]], Iterable[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much work goes into a measurement.

    Attributes:
        nbytes: Size of the buffers that are copied and added; it should be more than any cache holds. At most an
            eighth of the free memory is taken for one.
        most_rows: Tokens of the largest layer whose products are measured.
        calls: Operators on one element, small gathers, or messages that are timed together.
        repetitions: How often each figure is measured; the median counts.
        seconds: When this time has passed, a figure is not measured once more.
    """

    nbytes: int = 256 * MIB
    most_rows: int = 8192
    calls: int = 200
    repetitions: int = 7
    seconds: float = 1.0


def cpu_name() -> str:
    """What the CPU is called."""
    with contextlib.suppress(OSError, IndexError):
        return re.findall(r"^model name\s*:\s*(\S.*)$", _CPU_FILE.read_text(encoding="utf-8"), re.MULTILINE)[0].strip()
    return platform.processor() or platform.machine()


class Sweeps(torch.nn.Module):
    """Sweeps of one buffer through the caches; see [Note: cold caches]. As a module it sweeps, and returns its input.

    Args:
        device: The device of the model. There are no sweeps on an accelerator.
        nbytes: Bytes of the buffer.

    Attributes:
        seconds: What sweeps have taken since it was set to zero.
    """

    def __init__(self, device: torch.device, nbytes: int = SWEPT_NBYTES) -> None:
        super().__init__()
        self.seconds, self._device = 0.0, device
        self._swept = None if is_accelerator(device) else numpy.zeros(nbytes // 4, numpy.float32)

    def sweep(self) -> None:
        """Reads and writes all of the buffer."""
        if self._swept is not None:
            begin = time.perf_counter()
            self._swept += 1.0
            self.seconds += time.perf_counter() - begin

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Seconds of the host for work, which begins on an idle device, without the sweeps in it."""
        if is_accelerator(self._device):
            synchronize(self._device)
        self.seconds = 0.0
        return seconds_of(_CPU, work) - self.seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sweeps in forward, and once more in backward."""
        return _Sweep.apply(inputs, self)  # type: ignore[no-any-return]

    def between(self, modules: Iterable[torch.nn.Module]) -> torch.nn.Sequential:
        """A model of modules with a sweep after each, in forward and in backward.

        Args:
            modules: The modules.
        """
        swept = [] if self._swept is None else [self]
        return torch.nn.Sequential(*(part for module in modules for part in (module, *swept)))


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, sweeps: Sweeps) -> torch.Tensor:
        ctx.sweeps = sweeps
        sweeps.sweep()
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.sweeps.sweep()
        return gradients[0], None


def measure_machine(
    effort: Effort | None = None, progress: _Progress = iter, visit: Callable[[], float] | None = None
) -> Machine:
    """Measures the compute device of this machine, its host, and the bus between them.

    The host is what this process computes with: as many cores as torch uses threads (``OMP_NUM_THREADS``), but no more
    than the process gets, and all of the memory. Links between devices are not measured: it is a machine of one device.

    Without an accelerator both ends are CPU memory. ``to_device_bandwidth`` is then that of the copy thread, which
    brings chunks in ahead; ``pageable_bandwidth`` that of copies on demand; ``device_nbytes`` all memory.

    A type in which matrices cannot be multiplied is missing in ``flops``, and so is a kind of product.

    Args:
        effort: How much work goes into it.
        progress: Gets the names of all figures and gives them one after another, as a progress bar does.
        visit: Measures ``visit_s``, which takes an engine; without it that figure is the usual one.
    """
    device, found = find_device(None), dict[str, float]()
    measurement = _Measurement(device, effort or Effort())
    keys = [f"{dtype} {kind}".rstrip() for dtype in DTYPES for kind in KINDS]
    products = {name_of_products(key): key for key in keys}
    measures: dict[str, Callable[[], float]] = {
        **{name: functools.partial(measurement.flops, device, *key.split()) for name, key in products.items()},
        **measurement.figures(),
        **({} if visit is None else {"visit_s": visit}),
    }
    with contextlib.closing(measurement.streams):
        for name in progress([*measures]):
            try:
                found[name] = measures[name]()
            except RuntimeError:
                if products.get(name, "float32") == "float32":
                    raise
    flops = {key: found.pop(name) for name, key in products.items() if name in found}
    num_cores = min(torch.get_num_threads(), own_cores(1))
    return Machine(
        name=device_name(device) if is_accelerator(device) else cpu_name(),
        flops=flops,
        device_nbytes=memory_info(device)[1] if is_accelerator(device) else total_host_nbytes(),
        host_nbytes=total_host_nbytes(),
        has_accelerator=is_accelerator(device),
        num_cores=num_cores,
        core_bandwidth=found["host_bandwidth"] / num_cores,
        **{"host_flops": flops["float32"], **found},  # type: ignore[arg-type]
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
        self._device, self._effort = device, effort
        self.streams = make_streams(device)
        pinning = make_pinning(device)[0] if is_accelerator(device) and can_pin_memory() else None
        self._pool = PayloadPool(Ledger(dict.fromkeys(Tier, 2**62)), device, pinning)
        self._occupy: Callable[[], object] = lambda: None
        free = available_host_nbytes()
        if is_accelerator(device):
            # Gives the device enough to do for the host to run ahead of it.
            self._occupy = _product(device, effort.most_rows, "float32")[0]
            free = min(free, memory_info(device)[0])
        self._numel = max(min(effort.nbytes, free // 8) // 4, 1)

    def figures(self) -> dict[str, Callable[[], float]]:
        """What measures each figure but products, by its name in ``Machine``."""
        host, device, streams, rate = Tier.HOST, Tier.DEVICE, self.streams, self._rate
        figures: dict[str, Callable[[], float]] = {
            "device_bandwidth": lambda: rate(2, (device, device), lambda one, other: other.copy_(one)),
            "to_device_bandwidth": lambda: rate(1, (host, device), lambda one, other: _join(streams.fetch(one, other))),
            "to_host_bandwidth": lambda: rate(1, (device, host), lambda one, other: _join(streams.to_host(one, other))),
            "pageable_bandwidth": lambda: rate(1, (host, device), lambda one, other: other.copy_(one), pinned=False),
            "duplex_share": self._duplex_share,
            "copy_latency_s": self._copy_latency,
            "disk_bandwidth": self._disk,
            "host_bandwidth": self._adam,
            "memory_bandwidth": self._all_of_memory,
            "operator_s": self._operator,
            "kernel_s": self._kernel,
        }
        if is_accelerator(self._device):
            figures["host_flops"] = lambda: self.flops(_CPU, "float32")
        return figures

    def flops(self, device: torch.device, dtype: str, kind: str = "") -> float:
        """Products of the largest size that the time suffices for; small ones already show that one is slow.

        Fast ones are called often: a device that computes all the time lowers its clocks after some milliseconds.
        """
        rows, effort = _LEAST_ROWS, self._effort
        while True:
            multiply, flops = _product(device, rows, dtype, kind)
            multiply()
            share = effort.seconds / (8 * effort.repetitions * max(seconds_of(device, multiply), _LEAST_S))
            if 2 * rows > effort.most_rows or share < 1:
                break
            rows *= 2
        num = min(max(int(share), 1), effort.calls)
        return num * flops / self._median(device, lambda: [multiply() for _ in range(num)])

    def _rate(self, times: int, tiers: tuple[Tier, Tier], work: _Work, *, pinned: bool = True) -> float:
        """Bytes per second of work on two buffers that reads and writes so many times the bytes of one."""
        one, other = (self._buffer(tier, self._numel, pinned=pinned) for tier in tiers)
        seconds = self._median(self._device if Tier.DEVICE in tiers else _CPU, lambda: work(one, other))
        self.streams.release_in_flight()
        return times * 4 * self._numel / seconds

    def _ways(self, numel: int) -> tuple[_Start, _Start]:
        """Starts a copy of so many elements to the device, and one to the host."""
        tiers = Tier.HOST, Tier.DEVICE
        there, back = ([self._buffer(tier, numel) for tier in order] for order in (tiers, tiers[::-1]))
        return functools.partial(self.streams.fetch, *there), functools.partial(self.streams.to_host, *back)

    def _duplex_share(self) -> float:
        """What copies in both directions at once reach of the rate of the slower direction."""
        ways = self._ways(self._numel // 2)
        seconds = [self._median(self._device, functools.partial(_cross, s)) for s in (ways[:1], ways[1:], ways)]
        self.streams.release_in_flight()
        return min(max(seconds[:2]) / seconds[2], 1.0)

    def _disk(self) -> float:
        """Bytes per second of the ring in this directory, which reads and writes tiles and changes nothing in them."""
        place = "." if os.access(".", os.W_OK) else tempfile.gettempdir()
        disk, numel = Disk([place], Counts()), align(min(self._numel // 4, NUM_BUFFERS * TILE_NUMEL), KIB)
        regions = {name: (disk.allocate(numel, torch.float32), 1) for name in ("master", "exp_avg", "exp_avg_sq")}
        tiles = [Tile(regions, begin, min(begin + TILE_NUMEL, numel)) for begin in range(0, numel, TILE_NUMEL)]
        disk.ring.lend(self._buffer(Tier.HOST, disk.ring.nbytes_of(12 * tiles[0].stop) // 4).view(torch.uint8))
        with contextlib.closing(disk.ring):
            works = [(tile, lambda lists: None) for tile in tiles]
            disk.ring.submit(works).wait()  # to read what was never written takes no time
            return 24 * numel / self._median(_CPU, lambda: disk.ring.submit(works).wait())

    def _adam(self) -> float:
        """Bytes per second of Adam on all cores; where it is called from Python, those of an addition."""
        with self._adam_updates() as (update, numel):
            if update is None:
                return self._rate(3, (Tier.HOST, Tier.HOST), lambda one, other: one.add_(other), pinned=False)
            return ADAM_NBYTES * numel / self._median(_CPU, lambda: update().wait())

    def _all_of_memory(self) -> float:
        """Bytes per second of Adam on all cores and of copies in both directions beside it; 0 where it is no script."""
        served, crossing = list[int](), max(self._numel // 16, 1)
        with self._adam_updates() as (update, numel):
            if update is None:
                return 0.0
            ways = self._ways(crossing)

            def work() -> None:
                ticket, num = update(), 0
                while not ticket.future.done():
                    _cross(ways)
                    num += 1
                ticket.wait()
                served.append(ADAM_NBYTES * numel + 8 * crossing * num)

            seconds = self._median(self._device, work)
            self.streams.release_in_flight()
            return statistics.median(served) / seconds

    @contextlib.contextmanager
    def _adam_updates(self) -> Iterator[tuple[Callable[[], Pending] | None, int]]:
        """Starts Adam on all cores, and how many elements it updates; nothing starts where it is no script."""
        numel, script = max(self._numel // 4, 1), adam_script()
        if script is None:
            yield None, numel
            return
        workers, rule = HostWorkers(), rule_of(_ADAMW, 0, decoupled=True)
        assert rule is not None
        master, first, second = (self._buffer(Tier.HOST, numel, pinned=False) for _ in range(3))
        value, share = master.bfloat16(), align(-(-numel // workers.num))

        def update(start: int) -> None:
            part = Range(master, first, second, value, value, start, start, min(share, numel - start), rule, True)
            script([part], fused=True, factor=None)

        with contextlib.closing(workers):
            yield lambda: workers.submit(update, range(0, numel, share)), numel

    def _copy_latency(self) -> float:
        host, device = (self._buffer(tier, KIB) for tier in (Tier.HOST, Tier.DEVICE))
        return self._median(self._device, lambda: _join(self.streams.fetch(host, device)), self._occupy)

    def _operator(self) -> float:
        """As models call operators: by modules, and by autograd; see [Note: cold caches]."""
        sweeps = Sweeps(self._device, min(SWEPT_NBYTES, 4 * self._numel))
        inputs = torch.zeros(1, 1, device=self._device, requires_grad=True)
        passes, counts = [], []
        for make in (torch.nn.Identity, _make_block):
            model = sweeps.between(make() for _ in range(_BLOCKS)).to(self._device)
            of = [inputs, *model.parameters()]
            passes.append(lambda model=model, of=of: torch.autograd.grad(model(inputs).sum(), of))
            with _Counting() as counting:
                passes[-1]()
            counts.append(counting.num_operators)
        # A pass without blocks is measured in turns with one of blocks, and subtracted. It brings code that both share
        # back to the caches, so the figure is rather too low than too high.
        seconds = self._repeated(lambda: sweeps.host_seconds(passes[1]) - sweeps.host_seconds(passes[0]))
        return max(seconds / (counts[1] - counts[0]), _LEAST_S)

    def _kernel(self) -> float:
        def seconds(numel: int) -> float:
            tensor, calls = torch.zeros(numel, device=self._device), range(self._effort.calls)
            return self._median(self._device, lambda: [tensor.add_(1.0) for _ in calls], self._occupy) / len(calls)

        # On a CPU there is no kernel beside the call: what one element takes more than none.
        return max(seconds(1) - (0.0 if is_accelerator(self._device) else seconds(0)), _LEAST_S)

    def _buffer(self, tier: Tier, numel: int, *, pinned: bool = True) -> torch.Tensor:
        """Elements with memory behind them: pages that nobody wrote to are all one page of zeros."""
        is_pinned = pinned and tier is Tier.HOST
        return self._pool.allocate(tier, numel, torch.float32, "measure", pinned=is_pinned).fill_(1.0)

    def _median(
        self, device: torch.device, work: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> float:
        """Seconds of work, after it was done once."""
        work()
        median = self._repeated(lambda: seconds_of(device, work, before))
        return median if math.isfinite(median) and median > 0 else _LEAST_S

    def _repeated(self, measure: Callable[[], float]) -> float:
        return median_of(measure, self._effort.repetitions, self._effort.seconds)


def median_of(measure: Callable[[], float], repetitions: int, seconds: float) -> float:
    """The median of what is measured so often, or until so much time has passed, but at least once.

    Args:
        measure: Measures once.
        repetitions: How often at most.
        seconds: When this time has passed, it is not measured once more.
    """
    since, found = time.perf_counter(), [measure()]
    while len(found) < repetitions and time.perf_counter() - since < seconds:
        found.append(measure())
    return statistics.median(found)


def _make_block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.GELU(), torch.nn.LayerNorm(1))


def _product(device: torch.device, rows: int, dtype: str, kind: str = "") -> tuple[Callable[[], object], int]:
    """A product of a model's layer for so many tokens, and its operations.

    Of a linear layer with four times as many outputs as inputs this is the forward (``NT``), or in backward the
    gradient of the inputs, which has no transposed operand, or that of the weight (``TN``). Attention is causal, over
    half of the tokens, with forward and backward.
    """
    inputs, half = rows // 4, rows // 2
    heads: list[tuple[int, ...]] = [(1, -(-half // _HEAD_NUMEL), half, _HEAD_NUMEL)] * 3
    shapes = heads if kind == "attention" else [(rows, rows), (rows, inputs)]
    operands = [torch.rand(shape, device=device).to(getattr(torch, dtype)) for shape in shapes]
    if kind == "attention":
        attend = functools.partial(_attend, *(operand.requires_grad_() for operand in operands))
        return attend, 7 * operands[0].numel() * (half + 1)
    outer, inner = operands
    left, right = {"": (outer, inner), "NT": (inner, inner.t()), "TN": (outer.t(), inner)}[kind]
    out = left.new_zeros(rows, right.shape[1])
    return functools.partial(torch.mm, left, right, out=out), 2 * rows * rows * inputs


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> object:
    made = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return torch.autograd.grad(made, (query, key, value), value)


def _cross(starts: Iterable[_Start]) -> None:
    """Makes copies at once, and waits for them."""
    for ticket in filter(None, [start() for start in starts]):
        ticket.wait()


def _join(ticket: Copy | None) -> None:
    if ticket is not None:
        ticket.join()


def measure_together(
    effort: Effort | None = None, progress: _Progress = iter, visit: Callable[[], float] | None = None
) -> Machine:
    """Measures the machine as each of several processes has it while all of them work, and their links.

    All processes of the default group call it, and measure each figure at the same time: cores, memory and buses that
    they share are then shared as in training. The figures are medians over the processes. Gathers and reductions take
    turns, with the sizes of large chunks, and of the smallest one; messages are those with which the processes agree on
    what they do. Each process takes the mean of many; see [Note: cold caches].

    Args:
        effort: How much work goes into it.
        progress: As for ``measure_machine``.
        visit: As for ``measure_machine``; each process has an engine of its own in it.

    Returns:
        A machine with a device for each process, the same in all processes.

    Raises:
        CollectiveError: If a process is missing.
    """
    effort, device = effort or Effort(), find_device(None)
    with contextlib.closing(Collectives.connect(None, device)) as collectives:
        size, links = collectives.world_size, dict[str, float]()
        numel = align(max(effort.nbytes // (4 * size), 1))

        sweeps = Sweeps(device, min(SWEPT_NBYTES, effort.nbytes))

        def collective_s(numel: int, calls: int) -> float:
            """Seconds of a gather or a reduction of so many elements of each process."""
            numels = size * numel, *collectives.staging_numel(numel, torch.float32)
            buffer, *staging = (torch.ones(each, device=device) for each in numels)

            def both() -> None:
                collectives.all_gather(buffer, what).join()
                collectives.reduce_scatter(buffer, (staging[0], staging[1]), what).join()

            what = "what is measured"
            return _mean(device, both, calls, sweeps) / 2

        measures: dict[str, Callable[[], float]] = {
            "link_bandwidth": lambda: (size - 1) * numel * 4 / collective_s(numel, effort.repetitions),
            "link_latency_s": lambda: collective_s(ALIGNMENT_NUMEL, effort.calls),
            "message_s": lambda: _mean(_CPU, lambda: collectives.exchange([0], "measures"), effort.calls, sweeps),
        }

        def at_once(names: Sequence[str]) -> Iterator[str]:
            for name in progress([*names, *measures]):
                collectives.exchange([0], f"measures {name}")
                if name in measures:
                    links[name] = measures[name]()
                else:
                    yield name

        machine = measure_machine(effort, at_once, visit)
        host_nbytes = machine.host_nbytes // collectives.local_world_size
        machine = dataclasses.replace(machine, num_devices=size, host_nbytes=host_nbytes, **links)  # type: ignore[arg-type]
        return _median_of(collectives.exchange(machine, "compares what was measured"))


def _mean(device: torch.device, work: Callable[[], object], calls: int, sweeps: Sweeps) -> float:
    """Seconds of work that a step does often, the mean of so many calls; in all processes equally often.

    Now and then one process waits long for another. A step contains such waits, and a median leaves them out.
    """

    def repeat() -> None:
        for _ in range(calls):
            sweeps.sweep()
            work()

    work()
    sweeps.seconds = 0.0
    return max((seconds_of(device, repeat) - sweeps.seconds) / calls, _LEAST_S)


def _median_of(machines: Sequence[Machine]) -> Machine:
    """A machine whose rates are in the middle of those of several processes; names and sizes are those of the first."""
    names = [field.name for field in dataclasses.fields(Machine) if isinstance(getattr(machines[0], field.name), float)]
    rates: dict[str, Any] = {name: statistics.median(getattr(machine, name) for machine in machines) for name in names}
    common = [name for name in machines[0].flops if all(name in machine.flops for machine in machines)]
    flops = {name: statistics.median([machine.flops[name] for machine in machines]) for name in common}
    return dataclasses.replace(machines[0], flops=flops, **rates)
