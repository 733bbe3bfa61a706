"""The base of kernels that update elements, or blocks of them, without looking at the rest of their parameter.

[Note: same bits as torch]
torch's element-wise functions compute the last few elements of a tensor, which do not fill a vector register, with
other instructions than the rest, and may round them differently. So a kernel joins and cuts tensors only at multiples
of ``ALIGNMENT_NUMEL`` elements, or of its blocks. Every element is then computed by the same instructions as in an
optimizer that sees the parameters one by one, and the results are the same bit for bit. On the host a tile is computed
in one thread, so how many workers there are, and which of them has a tile, changes nothing.
"""

import abc
import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.layout.specs import GRADIENT, MASTER
from hf_patrickstar.memory.driver import Pending
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import SAVED_MASTER, Factors, Kernel, Means, settings_of
from hf_patrickstar.optim.workers import SMALL_NUMEL
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.parameter import AT_HOME, GradientPlace, ManagedParameter, round_masters
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

SHARE_NUMEL = 2**21
"""The most elements that a worker of the host updates in one call: some milliseconds of work."""
TILE_NUMEL = 2**19
"""The same where an optimizer's own functions are called from Python."""
_DEVICE_TILE_NUMEL = 2**24
"""The same on a device, which only pays for launching kernels; its 16-bit gradients are widened in scratch space."""
_MANY_WORKERS = 16
"""Shares are longer by their own length for each further 16 workers, so that they still end half a millisecond after
each other: a worker that ends one needs the interpreter's lock."""
_LEFT = GradientPlace.LEFT
_SHORT_SHARES = 8
"""The first and the last shares of a step are that part as long as others; see ``_rooms``."""


@dataclasses.dataclass(slots=True)
class Segment:
    """A range of a chunk whose elements are updated alike.

    Attributes:
        chunk: The chunk.
        payloads: The chunk's payloads at home.
        start: The first element.
        stop: One after the last.
        rule: Which settings hold for it, as a number.
        step: How many steps have updated it.
        place: Where its gradient is.
        fresh: The lists that are used for the first time; see [Note: lists of zeros].
        left: The gradient of its parameter, flat, if that is in no list; see [Note: rest].
        first: The first element of the parameter.
    """

    chunk: Chunk
    payloads: Mapping[str, torch.Tensor]
    start: int
    stop: int
    rule: int
    step: int
    place: GradientPlace
    fresh: Sequence[str] = ()
    left: torch.Tensor | None = None
    first: int = 0

    def part(self, name: str) -> torch.Tensor:
        """The range of a list, by the list's name."""
        block_numel = self.chunk.spec.types.of_list(name)[1] if name != "param" else 1
        start = self.start // block_numel
        return self.payloads[name].narrow(0, start, -(-self.stop // block_numel) - start)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the range."""
        if self.left is not None:
            return self.left.narrow(0, self.start - self.first, self.stop - self.start)
        return self.part(GRADIENT if self.place is GradientPlace.LIST else "param")


@dataclasses.dataclass(slots=True)
class _Part:
    """Chunks that are updated together, with the ranges and the parameters that are updated of them."""

    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    indices: list[int] = dataclasses.field(default_factory=list)
    numel: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """How ranges that have the same home are updated, as settings were when the optimizer's step began.

    Attributes:
        settings: The settings, by the numbers of rules.
        factor: Gradients are multiplied with it, unless it is ``None``.
        keeps: Whether gradients in the accumulation list stay there, multiplied.
        numbers: What a script needs that updates many tiles in one call; ``None`` if a kernel has no such script.
    """

    settings: Sequence[Mapping[str, Any]]
    factor: torch.Tensor | None
    keeps: bool
    numbers: Any


class ElementwiseKernel(Kernel):
    """Updates the lists of chunks range by range.

    On the host each worker updates a share of the elements; see [Note: same bits as torch]. The optimizers have no
    method beside ``step`` that uses parameters, so ``lent`` does nothing.

    Args:
        optimizer: See ``Kernel``. Every step reads its ``param_groups``.
        means: See ``Kernel``.
    """

    splits_tensors = True
    updates_at_once = False
    runs_beside = True
    cut_numel = ALIGNMENT_NUMEL
    """Ranges are cut at multiples of so many elements."""
    num_states = 2
    """Lists beside the master, scales left out."""
    num_narrow_states = 0
    """How many of its states are in fewer bits than the master, so that a device needs room for wide copies of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, means: Means) -> None:
        super().__init__(optimizer, means)
        self._has_lanes = means.has_lanes
        self._workers = means.workers
        self._steps: dict[int, int | torch.Tensor] = {}  # tensors once somebody has seen them, and may write to them
        self._steps_lock = threading.Lock()

    def workspace_numel(self, tier: Tier, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. A device widens a tile at a time; the host does so in its caches."""
        num = (int(widens) + self.num_narrow_states) if tier is Tier.DEVICE and self._has_lanes else 0
        return min(_DEVICE_TILE_NUMEL, num * align(capacity_numel, self.cut_numel))

    def prepare(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int], factors: Factors, *, keeps: bool
    ) -> list[Update]:
        """See ``Kernel``. Updates on the host, which computes beside the device, come first."""
        rules, settings = self._rules(chunks, groups)
        places: dict[Tier, list[_Part]] = {Tier.HOST: [], Tier.DEVICE: []}
        # Whoever needs a chunk waits for its part alone; on a device large calls are the fastest.
        most = {Tier.HOST: SHARE_NUMEL, Tier.DEVICE: sys.maxsize if self._has_lanes else SHARE_NUMEL}
        steps = self._steps
        for chunk in chunks:
            fresh, parts, last = tuple(chunk.home_lists.fresh), places[chunk.home], None
            # ``payloads`` takes lists out of those that are fresh.
            payloads = chunk.payloads if fresh else {"param": chunk.home_param, **chunk.home_lists}
            if not parts or parts[-1].numel >= most[chunk.home]:
                parts.append(_Part())
            part = parts[-1]
            part.chunks.append(chunk)
            for tensor in chunk.owned:  # the loop calls nothing of this package: a step comes by every parameter
                index, place = tensor.spec.index, tensor.gradient
                if index not in groups or (place is not _LEFT and place not in AT_HOME):
                    continue
                part.indices.append(index)
                rule, step, start = rules[index], int(steps.get(index, 0)), tensor.home_offset_numel
                stop = start + tensor.part[1] - tensor.part[0]
                part.numel += stop - start
                # Places begin at multiples of the alignment (``layout/packing.py``).
                if last is not None and (last.stop, last.rule, last.step, last.place) == (start, rule, step, place):
                    last.stop = stop
                elif stop > start:
                    last = Segment(chunk, payloads, start, stop, rule, step, place, fresh)
                    part.segments.append(last)
                    if place is _LEFT and tensor.kept is not None:
                        last.left, last.first, last = tensor.kept.view(-1), start, None
        updates = []
        for parts in filter(None, places.values()):
            segments = [segment for part in parts for segment in part.segments]
            factor = factors.get(segments[0].chunk.home_device) if segments else None
            job = Job(settings, None if factor is None else factor.clone(), keeps, self._numbers(segments, settings))
            done, left = 0, sum([part.numel for part in parts])
            for part in parts:
                run = functools.partial(self._run, job, part.segments, done, left)
                take_back = functools.partial(self._count, part.indices, -1)
                updates.append(Update(part.chunks, run, take_back, functools.partial(_round, part.segments)))
                done, left = done + part.numel, left - part.numel
        for part in itertools.chain(*places.values()):  # when nothing can fail any more
            self._count(part.indices, 1)
        return updates

    def _rules(
        self, chunks: Sequence[Chunk], groups: Mapping[int, int]
    ) -> tuple[Mapping[int, int], Sequence[Mapping[str, Any]]]:
        """The rule of each tensor index, as a number, and the settings of each rule; by default, those of its group."""
        return groups, [settings_of(group) for group in self._optimizer.param_groups]

    def _numbers(self, segments: Sequence[Segment], settings: Sequence[Mapping[str, Any]]) -> Any:
        """See ``Job``."""
        return None

    def _count(self, indices: Iterable[int], num: int) -> None:
        """Adds to the numbers of steps of parameters; an update that fails in a thread takes its own back."""
        with self._steps_lock:
            for index in indices:
                before = self._steps.get(index, 0)
                self._steps[index] = before.add_(num) if isinstance(before, torch.Tensor) else before + num

    @torch.no_grad()
    def _run(self, job: Job, segments: Sequence[Segment], done: int, left: int) -> Pending | None:
        """Updates ranges, or has workers do so.

        Args:
            job: How.
            segments: The ranges; all have the same home.
            done: Elements that the step updates there before these.
            left: Elements that it updates there from these on.
        """
        if not segments:
            return None
        param, update = segments[0].payloads["param"], functools.partial(self._update_share, job)
        if self._is_on_device(segments[0].chunk):
            scratch = self._scratch.get(Tier.DEVICE)
            room = _DEVICE_TILE_NUMEL if scratch is None else scratch.numel() // (1 + self.num_narrow_states)
            most = room // self.cut_numel * self.cut_numel
        else:
            most = max(TILE_NUMEL if job.numbers is None else SHARE_NUMEL, self.cut_numel)
            numel = sum([segment.stop - segment.start for segment in segments])
            if self._workers.suits(param, numel):
                most *= max(self._workers.num // _MANY_WORKERS, 1)
                least, most = max(most // _SHORT_SHARES, SMALL_NUMEL), -(-numel // -(-numel // most))
                rooms = _rooms(done, left, 2 * self._workers.num, least, most)
                return self._workers.submit(update, _cut(segments, rooms, self.cut_numel))
        for share in _cut(segments, itertools.repeat(most), self.cut_numel):
            update(share)
        return None

    def _is_on_device(self, chunk: Chunk) -> bool:
        return chunk.home is Tier.DEVICE and self._has_lanes

    def _update_share(self, job: Job, share: Sequence[Segment]) -> None:
        """Updates ranges in the thread of one worker."""
        try:
            if fresh := [segment.part(name) for segment in share for name in segment.fresh]:
                torch._foreach_zero_(fresh)  # the system gives huge pages here, and small ones to who reads first
            self._update(job, share)
        except Exception as error:
            error.add_note(f"while the optimizer updated {_named(share)}")
            raise

    @abc.abstractmethod
    def _update(self, job: Job, share: Sequence[Segment]) -> None:
        """Updates ranges that have the same home."""

    def _widened(self, chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients or states in the type of the master: copies of those that are narrow."""
        scratch, dtype = self._scratch.get(chunk.home), chunk.state_dtype
        narrow = [tensor for tensor in tensors if tensor.dtype != dtype]
        if not narrow or scratch is None or scratch.dtype is not dtype:
            return [tensor.to(dtype) for tensor in tensors]
        numels = [tensor.numel() for tensor in narrow]
        copies = scratch[: sum(numels)].split(numels)
        torch._foreach_copy_(copies, narrow)
        made = iter(copies)
        return [tensor if tensor.dtype == dtype else next(made) for tensor in tensors]

    # States

    def check_own_state(self, tensor: ManagedParameter, state: Mapping[str, Any]) -> None:
        """See ``Kernel``."""
        super().check_own_state(tensor, state)
        if state.keys() - {SAVED_MASTER}:
            step = state.get("step")
            is_count = isinstance(step, (int, float, torch.Tensor)) and 0 <= float(step) < float("inf")
            if not is_count or "max_exp_avg_sq" in state:
                what = "'max_exp_avg_sq' of amsgrad" if is_count else f"the step {step!r}"
                raise ValueError(
                    f"optimizer state of parameter '{tensor.spec.name}' has {what}: it was saved by another optimizer, "
                    "or with other options"
                )

    def load_own_state(self, tensor: ManagedParameter, state: dict[str, Any]) -> None:
        """See ``Kernel``."""
        if state:
            self._steps[tensor.spec.index] = int(state["step"])
            return
        self._steps.pop(tensor.spec.index, None)
        if not tensor.chunk.home_lists.keys().isdisjoint(self.list_names[1:]):  # else they are zeros already
            for place in self.state_places(tensor).values():
                place.zero_()


def _round(segments: Iterable[Segment]) -> None:
    """Writes values from their masters."""
    for segment in segments:
        round_masters([segment.part(MASTER)], [segment.part("param")])


def _rooms(done: int, left: int, num: int, least: int, most: int) -> Iterator[int]:
    """The sizes of shares, between ``least`` and ``most``.

    They are short at the beginning of a step, so that the first chunk is there soon, and at its end, so that all end
    together: a share has no more than one of ``num`` parts of the elements before it, or of those from it on.
    """
    while True:
        room = max(min(done // num, left // num, most), least)
        yield room
        done, left = done + room, left - room


def _cut(segments: Iterable[Segment], rooms: Iterator[int], cut_numel: int) -> Iterator[list[Segment]]:
    """Cuts ranges into shares.

    Args:
        segments: The ranges.
        rooms: The elements of each share, which are rounded up to multiples of ``cut_numel``.
        cut_numel: Where ranges may be cut.
    """
    share: list[Segment] = []
    room = 0
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            if room <= 0:
                if share:
                    yield share
                share, room = [], -(-next(rooms) // cut_numel) * cut_numel
            stop = min(start + room, segment.stop)
            is_whole = (start, stop) == (segment.start, segment.stop)
            share.append(segment if is_whole else dataclasses.replace(segment, start=start, stop=stop))
            room -= -((start - stop) // cut_numel) * cut_numel  # what is left is a multiple, too
            start = stop
    if share:
        yield share


def _named(share: Sequence[Segment]) -> str:
    """The first and the last parameter of a share, for errors."""
    ends = []
    for segment in (share[0], share[-1]):
        inside = [
            tensor.spec.name
            for tensor in segment.chunk.owned
            if tensor.home_offset_numel < segment.stop and segment.start < tensor.home_offset_numel + tensor.own_numel
        ]
        ends.append([f"'{name}' (chunk {segment.chunk.spec.index})" for name in inside])
    return " to ".join(dict.fromkeys((ends[0][0], ends[1][-1])))
