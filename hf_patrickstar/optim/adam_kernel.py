"""The kernel for Adam, which works over the chunk lists.

[Note: same bits as torch]
torch's element-wise functions compute the last few elements of a tensor, which do not fill a vector register, with
other instructions than the rest, and may round them differently. So the kernel joins and cuts tensors only at
multiples of ``ALIGNMENT_NUMEL`` elements. Every element is then computed by the same instructions as in an optimizer
that sees the parameters one by one, and the results are the same bit for bit. On the host a tile is computed in one
thread, so how many workers there are, and which of them has a tile, changes nothing.

Two roads that would be faster have other bits. torch's fused kernel rounds a few elements in ten thousand differently
from its other two, which agree, so an optimizer that has not asked for it does not get it on the host. And its
``grad_scale`` divides, where clipping multiplies; that takes longer, too.
"""

import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.adam_script import Range, adam_script, rule_of, torch_adam
from hf_patrickstar.optim.kernel import Kernel, settings_of
from hf_patrickstar.optim.workers import SMALL_NUMEL, HostWorkers
from hf_patrickstar.runtime.chunk import (
    AT_HOME,
    GRADIENT,
    MASTER,
    Chunk,
    GradientPlace,
    ManagedParameter,
    round_masters,
)
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
SHARE_NUMEL = 2**21
"""The most elements that a worker of the host updates in one call: some milliseconds of work."""
TILE_NUMEL = 2**19
"""The same where torch's Adam is called from Python."""
_DEVICE_TILE_NUMEL = 2**24
"""The same on a device, which only pays for launching kernels; its 16-bit gradients are widened in scratch space."""
_BATCH_SHARES = 2
"""Chunks are updated together until they have so many shares for each worker: workers wait for each other after each
batch. On a host with 16 cores each such wait took 4.5 ms, in which they would have updated 16 M elements."""
LEAST_BATCH_NUMEL = 2**23
"""Elements that are updated together however few workers there are."""


@dataclasses.dataclass(slots=True)
class _Segment:
    """A range of a chunk whose elements are updated alike.

    Attributes:
        chunk: The chunk.
        payloads: The chunk's payloads at home.
        start: The first element.
        stop: One after the last.
        group: The number of its param group.
        step: How many steps have updated it.
        place: Where its gradient is.
    """

    chunk: Chunk
    payloads: Mapping[str, torch.Tensor]
    start: int
    stop: int
    group: int
    step: int
    place: GradientPlace


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """How ranges that have the same home are updated, as settings were when the optimizer's step began.

    Attributes:
        settings: The settings of each param group.
        factor: Gradients are multiplied with it, unless it is ``None``.
        keeps: Whether gradients in the accumulation list stay there, multiplied.
        rules: The numbers of a step for ``adam_script``, by param group and step; ``None`` if torch's Adam is called.
    """

    settings: Sequence[Mapping[str, Any]]
    factor: torch.Tensor | None
    keeps: bool
    rules: Mapping[tuple[int, int], list[float]] | None


def is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is torch's Adam or AdamW with options that the chunk lists can hold."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("amsgrad") or group.get("capturable") or group.get("differentiable")
        for group in optimizer.param_groups
    )


class AdamKernel(Kernel):
    """Runs Adam or AdamW over the lists ``master``, ``exp_avg`` and ``exp_avg_sq``.

    Of each element the gradient is widened to fp32 and multiplied with the factor, torch's Adam computes the new master
    and states, and the new master is rounded into ``param``. On the host each worker does so with a share of the
    elements, in one call; see [Note: one call for many tiles]. torch's Adam has no method beside ``step`` that uses
    parameters, so ``lent`` does nothing.

    Args:
        optimizer: See ``Kernel``. Every step reads its ``param_groups``.
        pool: See ``Kernel``.
        prefer_fused: Whether to use torch's fused kernel where the optimizer leaves the choice open.
        workers: The threads that compute updates on the host; by default as many as torch has.
        has_lanes: Whether a device computes beside the host.
    """

    list_names = (MASTER, EXP_AVG, EXP_AVG_SQ)
    follows_homes = True
    splits_tensors = True
    updates_at_once = False
    runs_beside = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pool: PayloadPool,
        prefer_fused: bool,
        workers: HostWorkers | None = None,
        has_lanes: bool = False,
    ) -> None:
        super().__init__(optimizer, pool)
        self._has_lanes = has_lanes
        self._workers = workers or HostWorkers()
        self.batch_numel = max(self._workers.num * _BATCH_SHARES * SHARE_NUMEL, LEAST_BATCH_NUMEL)
        self._prefer_fused = prefer_fused
        self._steps: dict[int, int | torch.Tensor] = {}  # tensors once somebody has seen them, and may write to them
        self._steps_lock = threading.Lock()

    def workspace_numel(self, tier: Tier, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. A device widens a tile of gradients at a time; the host does so in its caches."""
        return min(_DEVICE_TILE_NUMEL, capacity_numel) if tier is Tier.DEVICE and self._has_lanes and widens else 0

    def prepare(
        self,
        chunks: Sequence[Chunk],
        groups: Mapping[int, int],
        coefficient: torch.Tensor | None,
        *,
        keeps: bool = True,
    ) -> Update:
        """See ``Kernel``."""
        segments: list[_Segment] = []
        indices, steps = [], self._steps
        for chunk in chunks:
            payloads, last = chunk.payloads, None
            for tensor in chunk.owned:  # the loop calls nothing of this package: a step comes by every parameter
                index, place = tensor.spec.index, tensor.gradient
                if index not in groups or place not in AT_HOME:
                    continue
                indices.append(index)
                group, step, start = groups[index], int(steps.get(index, 0)), tensor.home_offset_numel
                stop = start + tensor.part[1] - tensor.part[0]
                # Places begin at multiples of the alignment (``layout/packing.py``).
                if last is not None and (last.stop, last.group, last.step, last.place) == (start, group, step, place):
                    last.stop = stop
                elif stop > start:
                    last = _Segment(chunk, payloads, start, stop, group, step, place)
                    segments.append(last)
        settings = [settings_of(group) for group in self._optimizer.param_groups]
        rules = self._rules(segments, settings)
        job = _Job(settings, None if coefficient is None else coefficient.clone(), keeps, rules)
        self._count(indices, 1)
        return Update(
            functools.partial(self._run, job, segments),
            functools.partial(self._count, indices, -1),
            functools.partial(_round, segments),
        )

    def _count(self, indices: Iterable[int], num: int) -> None:
        """Adds to the numbers of steps of parameters; an update that fails in a thread takes its own back."""
        with self._steps_lock:
            for index in indices:
                before = self._steps.get(index, 0)
                self._steps[index] = before.add_(num) if isinstance(before, torch.Tensor) else before + num

    @torch.no_grad()
    def _run(self, job: _Job, segments: Sequence[_Segment]) -> None:
        if not segments:
            return
        numel = sum([segment.stop - segment.start for segment in segments])
        param, update = segments[0].payloads["param"], functools.partial(self._update_share, job)
        if self._is_on_device(segments[0].chunk):
            scratch = self._scratch.get(Tier.DEVICE)
            most = _DEVICE_TILE_NUMEL if scratch is None else scratch.numel() // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL
        else:
            most = TILE_NUMEL if job.rules is None else SHARE_NUMEL
            if self._workers.suits(param, numel):
                # All workers end at about the same time: the step waits for the last one.
                num_shares = self._workers.num * -(-numel // (self._workers.num * most))
                most = max(align(-(-numel // num_shares)), SMALL_NUMEL)
                self._workers.submit(update, _shares(segments, most)).wait()
                return
        for share in _shares(segments, most):
            update(0, share)

    def _is_on_device(self, chunk: Chunk) -> bool:
        return chunk.home is Tier.DEVICE and self._has_lanes

    def _rules(
        self, segments: Sequence[_Segment], settings: Sequence[Mapping[str, Any]]
    ) -> dict[tuple[int, int], list[float]] | None:
        """See ``_Job``. The script is for numbers and ordinary tensors; in 16 bits it would round numbers, too."""
        rules: dict[tuple[int, int], list[float]] = {}
        for segment in segments:
            chunk, param = segment.chunk, segment.payloads["param"]
            is_wide = chunk.state_dtype.itemsize >= torch.float32.itemsize
            if not (is_wide and type(param) is torch.Tensor and param.is_cpu) or self._is_on_device(chunk):
                return None
            key, own = (segment.group, segment.step), settings[segment.group]
            if key in rules:
                continue
            rule = rule_of(own, segment.step, self._is_decoupled(own))
            is_alike = self._is_fused(own) == self._is_fused(settings[segments[0].group])
            if rule is None or not is_alike or adam_script() is None:
                return None
            rules[key] = rule
        return rules

    def _is_fused(self, settings: Mapping[str, Any]) -> bool:
        fused, foreach = settings.get("fused"), settings.get("foreach")
        return bool(fused) or (fused is None and foreach is None and self._prefer_fused)

    def _is_decoupled(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)))

    def _update_share(self, job: _Job, number: int, share: Sequence[_Segment]) -> None:
        """Updates ranges in the thread of one worker."""
        try:
            if job.rules is not None:
                self._update_by_script(job, job.rules, share)
                return
            alike: dict[tuple[Any, ...], list[_Segment]] = {}
            for segment in share:
                chunk = segment.chunk
                alike.setdefault((segment.group, segment.step, chunk.state_dtype, chunk.dtype), []).append(segment)
            for segments in alike.values():
                self._update_alike(job, segments)
        except Exception as error:
            error.add_note(f"while the optimizer updated {_named(share)}")
            raise

    def _update_by_script(
        self, job: _Job, rules: Mapping[tuple[int, int], list[float]], share: Sequence[_Segment]
    ) -> None:
        """Updates ranges in one call; see [Note: one call for many tiles]."""
        script, fused = adam_script(), self._is_fused(job.settings[share[0].group])
        assert script is not None
        ranges = []
        for segment in share:
            payloads = segment.payloads
            gradient = payloads[GRADIENT] if segment.place is GradientPlace.LIST else payloads["param"]
            lists = payloads[MASTER], payloads[EXP_AVG], payloads[EXP_AVG_SQ], gradient, payloads["param"]
            # The value is written where its gradient is. A list would be written to memory for nothing.
            stays = job.keeps or segment.place is GradientPlace.PARAM
            rule = rules[segment.group, segment.step]
            ranges.append(Range(*lists, segment.start, segment.stop - segment.start, rule, stays))
        script(ranges, fused=fused, factor=job.factor)

    def _update_alike(self, job: _Job, segments: Sequence[_Segment]) -> None:
        """Updates ranges of one param group and step by torch's Adam, in one call, because many small ones are slow."""
        step, settings = segments[0].step, job.settings[segments[0].group]
        masters, firsts, seconds = ([_part(s, s.payloads[name]) for s in segments] for name in self.list_names)
        gradients = [_part(s, s.payloads[GRADIENT if s.place is GradientPlace.LIST else "param"]) for s in segments]
        gradients = self._widened(segments[0].chunk, gradients)
        if job.factor is not None:
            torch._foreach_mul_(gradients, job.factor)
        fused = self._is_fused(settings) or settings.get("fused")
        torch_adam(
            masters,
            gradients,
            firsts,
            seconds,
            step,
            settings,
            fused=fused,
            decoupled=self._is_decoupled(settings),
        )
        round_masters(masters, [_part(s, s.payloads["param"]) for s in segments])

    def _widened(self, chunk: Chunk, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients in the type of the states: copies of those that are narrow."""
        scratch = self._scratch.get(chunk.home)
        if scratch is None:
            return [gradient.to(chunk.state_dtype) for gradient in gradients]
        wide, narrow, copies, start = list(gradients), [], [], 0
        for place, gradient in enumerate(gradients):
            if gradient.dtype != chunk.state_dtype:
                wide[place] = scratch[start : start + gradient.numel()]
                start += gradient.numel()
                narrow.append(gradient)
                copies.append(wide[place])
        if narrow:
            torch._foreach_copy_(copies, narrow)
        return wide

    # States

    def own_state(self, tensor: ManagedParameter) -> dict[str, Any]:
        """See ``Kernel``. The state is ``step`` and ``state_places``."""
        places = self.state_places(tensor)  # an update that fails changes the number before this returns
        step = self._steps.get(tensor.spec.index)
        if step is None:
            return {}
        if not isinstance(step, torch.Tensor):
            step = self._steps[tensor.spec.index] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return {"step": step, **places}

    def state_places(self, tensor: ManagedParameter) -> dict[str, torch.Tensor]:
        """See ``Kernel``. They are ``exp_avg`` and ``exp_avg_sq``, in the chunk lists."""
        lists = tensor.chunk.lists
        return {EXP_AVG: tensor.view(lists[EXP_AVG]), EXP_AVG_SQ: tensor.view(lists[EXP_AVG_SQ])}

    def load_own_state(self, tensor: ManagedParameter, state: dict[str, Any]) -> None:
        """See ``Kernel``."""
        if state:
            self._steps[tensor.spec.index] = int(state["step"])
            return
        self._steps.pop(tensor.spec.index, None)
        for place in self.state_places(tensor).values():
            place.zero_()


def _part(segment: _Segment, payload: torch.Tensor) -> torch.Tensor:
    return payload.narrow(0, segment.start, segment.stop - segment.start)


def _round(segments: Iterable[_Segment]) -> None:
    """Writes values from their masters."""
    for segment in segments:
        round_masters([_part(segment, segment.payloads[MASTER])], [_part(segment, segment.payloads["param"])])


def _shares(segments: Iterable[_Segment], most_numel: int) -> Iterator[list[_Segment]]:
    """Cuts ranges into shares of at most so many elements, a multiple of the alignment."""
    share: list[_Segment] = []
    room = most_numel
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(start + room, segment.stop)
            share.append(dataclasses.replace(segment, start=start, stop=stop))
            room -= -((start - stop) // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL  # what is left is a multiple, too
            start = stop
            if room <= 0:
                yield share
                share, room = [], most_numel
    if share:
        yield share


def _named(share: Sequence[_Segment]) -> str:
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
