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
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.layout.specs import GRADIENT, MASTER
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel, settings_of
from hf_patrickstar.optim.workers import SMALL_NUMEL, HostWorkers
from hf_patrickstar.runtime.chunk import AT_HOME, Chunk, GradientPlace, ManagedParameter, round_masters
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

SHARE_NUMEL = 2**21
"""The most elements that a worker of the host updates in one call: some milliseconds of work."""
TILE_NUMEL = 2**19
"""The same where an optimizer's own functions are called from Python."""
_DEVICE_TILE_NUMEL = 2**24
"""The same on a device, which only pays for launching kernels; its 16-bit gradients are widened in scratch space."""
_BATCH_SHARES = 2
"""Chunks are updated together until they have so many shares for each worker: workers wait for each other after each
batch. On a host with 16 cores each such wait took 4.5 ms, in which they would have updated 16 M elements."""
LEAST_BATCH_NUMEL = 2**23
"""Elements that are updated together however few workers there are."""


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
    """

    chunk: Chunk
    payloads: Mapping[str, torch.Tensor]
    start: int
    stop: int
    rule: int
    step: int
    place: GradientPlace

    def part(self, name: str) -> torch.Tensor:
        """The range of a list, by the list's name."""
        block_numel = self.chunk.spec.types.of_list(name)[1] if name != "param" else 1
        start = self.start // block_numel
        return self.payloads[name].narrow(0, start, -(-self.stop // block_numel) - start)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the range."""
        return self.part(GRADIENT if self.place is GradientPlace.LIST else "param")


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
        pool: See ``Kernel``.
        workers: The threads that compute updates on the host; by default as many as torch has.
        has_lanes: Whether a device computes beside the host.
    """

    follows_homes = True
    splits_tensors = True
    updates_at_once = False
    runs_beside = True
    cut_numel = ALIGNMENT_NUMEL
    """Ranges are cut at multiples of so many elements."""
    num_states = 2
    """Lists beside the master, scales left out."""
    num_narrow_states = 0
    """How many of its states are in fewer bits than the master, so that a device needs room for wide copies of them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pool: PayloadPool,
        workers: HostWorkers | None = None,
        has_lanes: bool = False,
    ) -> None:
        super().__init__(optimizer, pool)
        self._has_lanes = has_lanes
        self._workers = workers or HostWorkers()
        self.batch_numel = max(self._workers.num * _BATCH_SHARES * SHARE_NUMEL, LEAST_BATCH_NUMEL)
        self._steps: dict[int, int | torch.Tensor] = {}  # tensors once somebody has seen them, and may write to them
        self._steps_lock = threading.Lock()

    def workspace_numel(self, tier: Tier, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. A device widens a tile at a time; the host does so in its caches."""
        num = (int(widens) + self.num_narrow_states) if tier is Tier.DEVICE and self._has_lanes else 0
        return min(_DEVICE_TILE_NUMEL, num * align(capacity_numel, self.cut_numel))

    def prepare(
        self,
        chunks: Sequence[Chunk],
        groups: Mapping[int, int],
        coefficient: torch.Tensor | None,
        *,
        keeps: bool = True,
    ) -> Update:
        """See ``Kernel``."""
        segments: list[Segment] = []
        indices, steps = [], self._steps
        rules, settings = self._rules(chunks, groups)
        for chunk in chunks:
            payloads, last = chunk.payloads, None
            for tensor in chunk.owned:  # the loop calls nothing of this package: a step comes by every parameter
                index, place = tensor.spec.index, tensor.gradient
                if index not in groups or place not in AT_HOME:
                    continue
                indices.append(index)
                rule, step, start = rules[index], int(steps.get(index, 0)), tensor.home_offset_numel
                stop = start + tensor.part[1] - tensor.part[0]
                # Places begin at multiples of the alignment (``layout/packing.py``).
                if last is not None and (last.stop, last.rule, last.step, last.place) == (start, rule, step, place):
                    last.stop = stop
                elif stop > start:
                    last = Segment(chunk, payloads, start, stop, rule, step, place)
                    segments.append(last)
        factor = None if coefficient is None else coefficient.clone()
        job = Job(settings, factor, keeps, self._numbers(segments, settings))
        self._count(indices, 1)
        return Update(
            functools.partial(self._run, job, segments),
            functools.partial(self._count, indices, -1),
            functools.partial(_round, segments),
        )

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
    def _run(self, job: Job, segments: Sequence[Segment]) -> None:
        if not segments:
            return
        numel = sum([segment.stop - segment.start for segment in segments])
        param, update = segments[0].payloads["param"], functools.partial(self._update_share, job)
        if self._is_on_device(segments[0].chunk):
            scratch = self._scratch.get(Tier.DEVICE)
            room = _DEVICE_TILE_NUMEL if scratch is None else scratch.numel() // (1 + self.num_narrow_states)
            most = room // self.cut_numel * self.cut_numel
        else:
            most = max(TILE_NUMEL if job.numbers is None else SHARE_NUMEL, self.cut_numel)
            if self._workers.suits(param, numel):
                # All workers end at about the same time: the step waits for the last one.
                num_shares = self._workers.num * -(-numel // (self._workers.num * most))
                most = max(align(-(-numel // num_shares), self.cut_numel), SMALL_NUMEL)
                self._workers.submit(update, _shares(segments, most, self.cut_numel)).wait()
                return
        for share in _shares(segments, most, self.cut_numel):
            update(0, share)

    def _is_on_device(self, chunk: Chunk) -> bool:
        return chunk.home is Tier.DEVICE and self._has_lanes

    def _update_share(self, job: Job, number: int, share: Sequence[Segment]) -> None:
        """Updates ranges in the thread of one worker."""
        try:
            self._update(job, share)
        except Exception as error:
            error.add_note(f"while the optimizer updated {_named(share)}")
            raise

    @abc.abstractmethod
    def _update(self, job: Job, share: Sequence[Segment]) -> None:
        """Updates ranges that have the same home."""

    def _widened(self, chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients or states in the type of the master: copies of those that are narrow."""
        scratch = self._scratch.get(chunk.home)
        if scratch is None or scratch.dtype is not chunk.state_dtype:
            return [tensor.to(chunk.state_dtype) for tensor in tensors]
        wide, narrow, copies, start = list(tensors), [], [], 0
        for place, tensor in enumerate(tensors):
            if tensor.dtype != chunk.state_dtype:
                wide[place] = scratch[start : start + tensor.numel()]
                start += tensor.numel()
                narrow.append(tensor)
                copies.append(wide[place])
        if narrow:
            torch._foreach_copy_(copies, narrow)
        return wide

    # States

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


def _shares(segments: Iterable[Segment], most_numel: int, cut_numel: int) -> Iterator[list[Segment]]:
    """Cuts ranges into shares of at most so many elements, a multiple of ``cut_numel``."""
    share: list[Segment] = []
    room = most_numel
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(start + room, segment.stop)
            share.append(dataclasses.replace(segment, start=start, stop=stop))
            room -= -((start - stop) // cut_numel) * cut_numel  # what is left is a multiple, too
            start = stop
            if room <= 0:
                yield share
                share, room = [], most_numel
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
