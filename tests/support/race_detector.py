"""Streams of a device that is not there: what the engine puts into lanes, checked and carried out over CPU memory.

[Note: simulated streams]
``SimulatedDriver`` takes the place of an accelerator's driver below ``DeviceStreams``, so every wait of the engine is
what it would be on a device. The compute stream runs at once, as the program does; a copy, and work of the host's
thread, runs at the latest moment that the engine's own waits allow, or, with a seed, at a random one before. Until then
the target of a copy is full of NaN.

Each lane, and the host, has a vector clock: how much of every other lane is known to come before what the lane does
next. A wait takes over the clock of what is waited for. What touches a buffer is compared with everything that touched
the same bytes before: where neither only reads, and the clocks do not order both, ``RaceError`` names them. A dispatch
mode sees the operators; an operator on a buffer of the device belongs to the compute stream, one on a buffer of the
host to the host, and one on both must be a copy. The mode stays where the engine takes others off (``as_it_is`` in
``memory/operators.py``). What other threads do, and what goes around operators (``numpy``), is not seen; there a copy
that is not waited for leaves its NaN.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from support.buffers import told_of_buffers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_patrickstar.errors import PatrickStarError
from hf_patrickstar.memory.driver import Series
from hf_patrickstar.memory.operators import OperatorMode
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.live_parameter import storage_key
from hf_patrickstar.tracing.costs import read_operands, touches_nothing, written_operands


class RaceError(PatrickStarError, RuntimeError):
    """Nothing orders two uses of the same memory; the message names both, their lanes and the memory."""


_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::clone", "aten::_foreach_copy_"})
"""Operators that may have operands on both tiers: on a device they are copies that block the host."""
_LIKELIHOOD = 0.2
"""How likely it is that the next copy of a lane runs at an operator, where a seed chooses."""
_POISON = 0xFF
"""A byte that makes NaN of every floating type."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Access:
    """Something that touched some bytes of a buffer."""

    begin: int
    end: int
    is_write: bool
    lane: "SimulatedStream"
    number: int
    what: str
    after: "Mapping[SimulatedStream, int]"

    def comes_after(self, other: "_Access") -> bool:
        """Whether something orders it after another access."""
        return other.lane is self.lane or self.after.get(other.lane, 0) >= other.number

    def __str__(self) -> str:
        verb = "writes" if self.is_write else "reads"
        return f"'{self.what}' ({self.lane.name}, number {self.number}) {verb} bytes {self.begin} to {self.end}"


@dataclasses.dataclass(slots=True)
class _Buffer:
    """What is known of some memory."""

    name: str
    tier: Tier | None
    accesses: list[_Access]


class _Work(NamedTuple):
    """A copy that has not run yet."""

    number: int
    after: dict["SimulatedStream", int]
    run: Callable[[], None]


class _Held(NamedTuple):
    """A tensor of a copy that is no buffer: its memory must not be used for anything else before the copy has run."""

    alias: torch.Tensor
    storage: torch.UntypedStorage
    lane: "SimulatedStream"
    number: int
    what: str


class SimulatedEvent:
    """A point in a lane; see ``torch.Event``."""

    def __init__(self, driver: "SimulatedDriver", clock: dict["SimulatedStream", int]) -> None:
        self.clock = clock
        self._driver = driver

    def query(self) -> bool:
        """Whether all that comes before has run."""
        return all(lane.num_done >= number for lane, number in self.clock.items())

    def synchronize(self) -> None:
        """Runs all that comes before the event; what the host does next comes after that."""
        self._driver.host.follow(self.clock)


class SimulatedMoment(SimulatedEvent):
    """A moment of a lane: an event that has a time."""

    def __init__(self, driver: "SimulatedDriver") -> None:
        super().__init__(driver, {})
        self._time_s = 0.0

    def come(self) -> None:
        """The lane has come to it."""
        self._time_s = time.perf_counter()

    def elapsed_time(self, end: "SimulatedMoment", /) -> float:
        """Milliseconds from this moment to another one; both have come."""
        return (end._time_s - self._time_s) * 1000


class _WorkEvent(SimulatedEvent):
    """A point in the host's thread."""

    def __init__(self, driver: "SimulatedDriver", clock: dict["SimulatedStream", int], failures: list[Series]) -> None:
        super().__init__(driver, clock)
        self._failures = failures

    def synchronize(self) -> None:
        """See ``SimulatedEvent``; raises what the work raised."""
        super().synchronize()
        for series in self._failures:
            series.report()


class SimulatedStream:
    """A lane; see ``torch.Stream``."""

    def __init__(self, driver: "SimulatedDriver", name: str, *, is_eager: bool) -> None:
        self.name = name
        self.clock: dict[SimulatedStream, int] = {}
        self.num_told = self.num_done = 0
        self._driver = driver
        self._is_eager = is_eager
        self._pending: collections.deque[_Work] = collections.deque()

    def access(self, extent: tuple[int, int], number: int, what: str, *, is_write: bool) -> _Access:
        """What a piece of its work does with some bytes of a buffer."""
        return _Access(*extent, is_write, self, number, what, dict(self.clock))

    @property
    def is_busy(self) -> bool:
        """Whether it was told what it has not done."""
        return bool(self._pending)

    def wait_stream(self, other: "SimulatedStream", /) -> None:
        """Makes the next work of this lane wait for all that another lane was told."""
        self.follow({**other.clock, other: other.num_told})

    def wait_event(self, event: SimulatedEvent, /) -> None:
        """Makes the next work of this lane wait for an event."""
        self.follow(event.clock)

    def record_event(self) -> SimulatedEvent:
        """An event after all that the lane was told."""
        return SimulatedEvent(self._driver, {**self.clock, self: self.num_told})

    def synchronize(self) -> None:
        """Blocks the host."""
        self.record_event().synchronize()

    def follow(self, clock: dict["SimulatedStream", int]) -> None:
        """Makes the next work of this lane wait for what a clock names; a lane that is eager has that run now."""
        with self._driver.lock:
            for lane, number in clock.items():
                self.clock[lane] = max(self.clock.get(lane, 0), number)
                if self._is_eager:
                    lane.run(number)
            if self is self._driver.compute:
                self._driver.find_lost()

    def tell(self, run: Callable[[], None]) -> int:
        """Takes work, which waits for all that the host has done so far; returns the number of the work."""
        host = self._driver.host
        if self is not host:
            self.follow({**host.clock, host: host.num_told})
        self.num_told += 1
        if self._is_eager:
            self.num_done = self.num_told
            run()
        else:
            self._pending.append(_Work(self.num_told, dict(self.clock), run))
        return self.num_told

    def run(self, number: int) -> None:
        """Runs the work of this lane up to a number; before each piece, the work of other lanes that it waits for."""
        while self._pending and self._pending[0].number <= number:
            work = self._pending.popleft()
            for lane, other in work.after.items():
                lane.run(other)
            work.run()
            self.num_done = work.number


class SimulatedDriver:
    """The driver of a device that is not there; see [Note: simulated streams] and ``Driver``."""

    def __init__(self, seed: int | None = None) -> None:
        self.lock = threading.RLock()
        self.host = SimulatedStream(self, "host", is_eager=True)
        self.compute = SimulatedStream(self, "compute stream", is_eager=True)
        self._current = self.compute  # where operators on the device belong
        self.num_copies = self.num_checked = 0
        self._thread = SimulatedStream(self, "host thread", is_eager=False)
        self._lanes: list[SimulatedStream] = [self._thread]
        self._series = Series()
        self._late: list[SimulatedStream] = []
        self._at_work: tuple[SimulatedStream, int] | None = None  # the lane and number of work that runs now
        self._random = None if seed is None else random.Random(seed)
        self._buffers: dict[int, _Buffer] = {}
        self._held: list[_Held] = []

    # What ``DeviceStreams`` asks for

    def new_stream(self) -> SimulatedStream:
        self._lanes.append(SimulatedStream(self, f"copy stream {len(self._lanes) - 1}", is_eager=False))
        return self._lanes[-1]

    def current_stream(self) -> SimulatedStream:
        return self._current

    def inside(self, stream: SimulatedStream) -> contextlib.AbstractContextManager[Any]:
        """Runs what the stream was told: inside are collectives of the CPU, which the host runs."""
        stream.synchronize()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def launching_in(self, stream: SimulatedStream) -> Iterator[None]:
        """Runs what the stream was told; operators inside belong to it, and run at once."""
        stream.run(stream.num_told)
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record_moment(self, stream: SimulatedStream) -> SimulatedMoment:
        """See ``Driver``: the time at which the stream comes to it here."""
        with self.lock:
            moment = SimulatedMoment(self)
            stream.tell(moment.come)
            moment.clock = stream.record_event().clock
            return moment

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``: all but buffers of the host."""
        return not self._knows(tensor) or self._tier_of(tensor) is not Tier.HOST

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """See ``Driver``: all buffers of the host are."""
        return not self.is_on_device(tensor)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: SimulatedStream) -> None:
        with self.lock, _unseen():
            self.num_copies += 1
            what = f"copy of {source.nbytes} bytes"
            source, target = source.detach(), target.detach()
            for tensor in (source, target):
                if not self._knows(tensor):  # it was computed just now
                    compute = self.compute
                    computed = compute.access(_extent(tensor), compute.num_told, "its computation", is_write=True)
                    self._buffers[storage_key(tensor)] = _Buffer("a tensor that is no buffer", None, [computed])
            for access in self._buffers[storage_key(target)].accesses:
                access.lane.run(access.number)  # else the poison below would change what it copies
            number = stream.tell(_copier(self._kept(source), self._kept(target)))
            self._touch(stream, number, what, [(source, False), (target, True)])
            self._held += [
                _Held(t, t.untyped_storage(), stream, number, what)
                for t in (source, target)
                if self._tier_of(t) is None
            ]
            if target.is_contiguous():
                target.view(-1).view(torch.uint8).fill_(_POISON)
            self.run_some()

    def on_host(
        self, work: Callable[[], None], after: Iterable[Any], otherwise: Callable[[], None] | None = None
    ) -> SimulatedEvent:
        with self.lock:
            for event in after:
                self._thread.wait_event(event)
            if self._series.is_reported:
                self._series = Series()
            series, failures = self._series, list[Series]()
            number = self._thread.tell(lambda: self._do((work, otherwise), number, known, series, failures))
            known = dict(self._thread.clock)
            self.run_some()
            return _WorkEvent(self, {**known, self._thread: number}, failures)

    def begin_after(
        self, work: SimulatedEvent, stream: SimulatedStream, begin: Callable[[SimulatedStream], SimulatedEvent]
    ) -> "concurrent.futures.Future[SimulatedEvent]":
        """See ``Driver``. Nothing orders it after, or before, other copies of the lane, so it gets one of its own."""
        with self.lock:
            lane = next((late for late in self._late if not late.is_busy), None)
            if lane is None:
                lane = SimulatedStream(self, f"late copies {len(self._late)}", is_eager=False)
                self._late.append(lane)
            lane.wait_event(work)
            begun: concurrent.futures.Future[SimulatedEvent] = concurrent.futures.Future()
            begun.set_result(begin(lane))
            return begun

    def finish(self) -> None:
        self._thread.synchronize()

    close = finish

    # What pools tell

    def take(self, buffer: torch.Tensor, tier: Tier, owner: str) -> None:
        """A buffer was allocated, or is used again for something else."""
        with self.lock:
            key = storage_key(buffer)
            known = self._buffers.get(key)
            if known is None or known.tier is None:
                known = self._buffers[key] = _Buffer(owner, tier, [])
                weakref.finalize(buffer, self._forget, key, known)  # of an engine that nobody has detached
            known.name, known.tier = f"{owner} on the {tier.value}", tier

    def free(self, buffer: torch.Tensor) -> None:
        """The memory of a buffer is given back: the compute stream may use it for anything next, the host too."""
        with self.lock:
            known = self._buffers.pop(storage_key(buffer), None)
            if known is not None:
                lane = self.host if known.tier is Tier.HOST else self.compute
                freed = lane.access(_extent(buffer), lane.num_told + 1, "freeing the memory", is_write=True)
                self._check(known, freed)

    # What operators do

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block operators are checked; at its end all copies have run, and modes put on since are off."""
        mode = _Operators(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mode)
            stack.callback(_take_off_those_above, mode)
            stack.enter_context(told_of_buffers(self.take, self.free))
            yield
        for lane in (*self._lanes, *self._late):
            lane.synchronize()

    def note_operator(self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """An operator is about to run."""
        with self.lock:  # work that runs here takes modes off itself, and nothing else here is an operator
            self.find_lost()
            touched = [(t, False) for t in read if self._knows(t)] + [(t, True) for t in written if self._knows(t)]
            tiers = {self._tier_of(tensor) for tensor, _ in touched} - {None}
            is_mixed = len(tiers) > 1
            if is_mixed and name not in _COPIES:
                raise RaceError(f"operator '{name}' has operands on the host and on the device; copy one of them first")
            if self._at_work is not None:
                if Tier.DEVICE in tiers:
                    raise RaceError(f"operator '{name}' of the host's thread has operands on the device; copy them")
                self._touch(*self._at_work, name, touched)
                return
            lane = self.host if tiers == {Tier.HOST} else self._current
            number = lane.tell(lambda: None)
            self._touch(lane, number, name, touched)
            lane.run(number)
            if is_mixed:  # such a copy blocks the host until the compute stream has made it
                self.compute.synchronize()
            self.run_some()

    def run_some(self) -> None:
        """With a seed: runs some of the copies that may run."""
        if self._random is not None:
            for lane in (*self._lanes, *self._late):
                if lane.is_busy and self._random.random() < _LIKELIHOOD:
                    lane.run(lane.num_done + 1)

    # Inside

    def _do(
        self,
        work: tuple[Callable[[], None], Callable[[], None] | None],
        number: int,
        known: dict[SimulatedStream, int],
        series: Series,
        failures: list[Series],
    ) -> None:
        """Does work of the host's thread: what it touches is compared with what it knew when it was given."""
        before, self._thread.clock = self._thread.clock, known
        self._at_work = (self._thread, number)
        try:
            with _unseen(), _Operators(self):
                if (pending := series.run(*work)) is not None:
                    pending.wait()
        except RaceError:
            raise
        except BaseException:
            failures.append(series)
        finally:
            self._at_work, self._thread.clock = None, before

    def _forget(self, key: int, buffer: _Buffer) -> None:
        if self._buffers.get(key) is buffer:
            del self._buffers[key]

    def _knows(self, tensor: torch.Tensor) -> bool:
        try:
            return storage_key(tensor) in self._buffers
        except (NotImplementedError, RuntimeError):  # a kind of tensor that has no storage
            return False

    def _tier_of(self, tensor: torch.Tensor) -> Tier | None:
        return self._buffers[storage_key(tensor)].tier

    def _kept(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        """What gives a tensor when its copy runs. A buffer is not held: the engine counts who uses its memory."""
        return _found_again(tensor) if self._tier_of(tensor) is not None else lambda: tensor

    def _touch(
        self, lane: SimulatedStream, number: int, what: str, touched: Sequence[tuple[torch.Tensor, bool]]
    ) -> None:
        for tensor, is_write in touched:
            begin, end = extent = _extent(tensor)
            known = self._buffers.get(storage_key(tensor))  # none: the compute stream has just come to know its copy
            if begin == end or known is None:
                continue
            access = lane.access(extent, number, what, is_write=is_write)
            self._check(known, access)
            known.accesses = [
                before
                for before in known.accesses
                if before.end <= begin or end <= before.begin or not self._is_covered(before, access)
            ]
            known.accesses.append(access)

    def _is_covered(self, before: _Access, access: _Access) -> bool:
        """Whether later accesses need to be compared only with ``access``, and not with ``before``, which it overlaps.

        Work of the host's thread is compared after it was given, with what was touched meanwhile: there an access that
        comes after the work must not hide one that does not.
        """
        if before.after.get(self._thread) != access.after.get(self._thread) and self._thread.is_busy:
            return False
        if (before.lane, before.begin, before.end, before.is_write) == (
            *(access.lane, access.begin, access.end),
            access.is_write,
        ):
            return True
        is_inside = access.begin <= before.begin and before.end <= access.end
        return access.is_write and is_inside and access.comes_after(before)

    def _check(self, known: _Buffer, access: _Access) -> None:
        self.num_checked += 1
        for before in known.accesses:
            is_same = before.begin < access.end and access.begin < before.end and (before.is_write or access.is_write)
            # A copy that the host's thread will put into its lane is noted before what that thread does till then.
            if is_same and not (access.comes_after(before) or before.comes_after(access)):
                raise RaceError(
                    f"race on '{known.name}': {access}, and nothing orders it after {before}. Let the later one wait "
                    "for the ticket of the earlier one"
                )

    def find_lost(self) -> None:
        """Looks for tensors of copies that nobody holds any more, while the compute stream may use their memory."""
        still = []
        for held in self._held:
            if self.compute.clock.get(held.lane, 0) >= held.number:
                self._buffers.pop(storage_key(held.alias), None)
            elif torch._C._storage_Use_Count(storage_key(held.alias)) <= 2:  # the alias, and the storage here
                raise RaceError(
                    f"a tensor of '{held.what}' ({held.lane.name}, number {held.number}) was freed, and the compute "
                    "stream does not wait for the copy before it uses the memory again; hold the tensor until the "
                    "compute stream has joined the copy"
                )
            else:
                still.append(held)
        self._held = still


class _Operators(OperatorMode):
    """Tells a driver of every operator."""

    sees_all = True

    def __init__(self, driver: SimulatedDriver) -> None:
        super().__init__()
        self._driver = driver

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None:
            written = written_operands(func, args, kwargs)
            if not touches_nothing(func):
                self._driver.note_operator(schema.name, read_operands(written, args, kwargs), written)
        return func(*args, **kwargs)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and one after the last."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    last = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return begin, begin + (last + 1) * tensor.element_size()


def _copier(source: Callable[[], torch.Tensor | None], target: Callable[[], torch.Tensor | None]) -> Callable[[], None]:
    def copy() -> None:
        with _unseen():
            read, written = source(), target()
            if read is None or written is None:
                return  # an engine was dropped, and its memory with it
            if not (read.is_meta or written.is_meta):  # fake tensors have no bytes
                written.copy_(read)

    return copy


def _found_again(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """What gives a tensor over the same memory as long as there is that memory, and is no user of it meanwhile."""
    storage, dtype = StorageWeakRef(tensor.untyped_storage()), tensor.dtype
    offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()

    def find() -> torch.Tensor | None:
        found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
        if found is None:
            return None
        return torch.empty(0, dtype=dtype, device=found.device).set_(found, offset, shape, stride)

    return find


def _take_off_those_above(mode: _Operators) -> None:
    """Takes off the modes that engines have left on top of one: those of engines dropped between backward and step."""
    stack = _get_current_dispatch_mode_stack()
    while mode in stack and stack[-1] is not mode:
        stack.pop().__exit__(None, None, None)


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """What is done here is no operator of the program."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
    stack.enter_context(torch.no_grad())
    return stack
