"""The kernel for Adam, which works in tiles over the chunk lists.

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
from torch.optim.adam import adam

from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import Kernel, settings_of
from hf_patrickstar.optim.workers import SMALL_NUMEL, HostWorkers
from hf_patrickstar.runtime.chunk import AT_HOME, GRADIENT, MASTER, Chunk, GradientPlace, ManagedTensor, round_masters
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.units import ALIGNMENT_NUMEL, align

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
TILE_NUMEL = 2**19
"""The most elements of a tile, a multiple of the alignment.

The tile's lists are in the cache of common CPUs when its gradient was widened, and smaller ones pay for more calls.
"""
_MANY_WORKERS = 8
"""More workers than this have tiles of twice the size while an accelerator computes the next forward.

An update of a tile holds Python's lock for some 20 us. Sixteen workers that share 192 GB/s would hold it for a quarter
of the time, in which forward launches no kernel; with tiles of twice the size, for an eighth. The four fp32 lists of
such a tile take 16 MiB; tiles of four times the size would need more cache than many cores have.
"""
_BATCH_TILES = 16
"""Small chunks are updated together until they have so many tiles, or each worker has one.

Workers wait for each other at the end of a batch, and Python takes 0.3 ms for it, as long as a tile takes.
"""
_DEVICE_TILE_NUMEL = 2**24


@dataclasses.dataclass(slots=True)
class _Segment:
    """A segment is a range of a chunk whose elements are updated alike.

    Attributes:
        chunk: The chunk.
        payloads: The chunk's payloads at home.
        start: The first element.
        stop: One after the last.
        options: The settings of its param group when the optimizer's step began.
        step: How many steps have updated it, a scalar tensor where torch's kernel reads it.
        place: Where its gradient is.
    """

    chunk: Chunk
    payloads: Mapping[str, torch.Tensor]
    start: int
    stop: int
    options: Mapping[str, Any]
    step: torch.Tensor
    place: GradientPlace

    @property
    def numel(self) -> int:
        """The number of elements in the range."""
        return self.stop - self.start

    def of(self, name: str) -> torch.Tensor:
        """Returns the range of one of the chunk's lists at home."""
        payload = self.payloads[name]
        return payload if self.numel == payload.numel() else payload[self.start : self.stop]


def _named(segments: Sequence[_Segment]) -> str:
    """The first and the last parameter of a tile, for errors."""
    ends = []
    for segment in (segments[0], segments[-1]):
        inside = [
            tensor.spec.name
            for tensor in segment.chunk.owned
            if tensor.home_offset_numel < segment.stop and segment.start < tensor.home_offset_numel + tensor.own_numel
        ]
        ends.append((inside, segment.chunk.spec.index))
    (first, chunk), (last, last_chunk) = (ends[0][0][0], ends[0][1]), (ends[1][0][-1], ends[1][1])
    same = (first, chunk) == (last, last_chunk)
    return f"'{first}' (chunk {chunk})" + ("" if same else f" to '{last}' (chunk {last_chunk})")


def _restore(segments: Iterable[_Segment]) -> None:
    for segment in segments:
        round_masters([segment.of(MASTER)], [segment.of("param")])


def is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is torch's Adam or AdamW with options that the chunk lists can hold."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("amsgrad") or group.get("capturable") or group.get("differentiable")
        for group in optimizer.param_groups
    )


class AdamKernel(Kernel):
    """This kernel runs Adam or AdamW over the lists ``master``, ``exp_avg`` and ``exp_avg_sq``, tile by tile.

    It widens a tile's gradient to fp32 in scratch space, multiplies it with the coefficient, calls torch's own Adam,
    and rounds the new master into ``param``, all while the tile is in the cache. On the host each worker does so with
    its own tiles and its own part of the scratch space. torch's Adam has no method beside ``step`` that uses
    parameters, so ``lent`` does nothing.

    Args:
        optimizer: See ``Kernel``. Every step reads its ``param_groups``.
        pool: See ``Kernel``.
        prefer_fused: Whether to use torch's fused kernel where the optimizer leaves the choice open.
        workers: The threads that compute updates on the host; by default as many as torch has.
        has_lanes: Whether a device computes beside the host, which only pays for launching tiles there.
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
        self._tile_numel = TILE_NUMEL
        self._worker_tile_numel = TILE_NUMEL * (2 if has_lanes and self._workers.num > _MANY_WORKERS else 1)
        self.batch_numel = max(self._workers.num, _BATCH_TILES) * self._tile_numel
        self._prefer_fused = prefer_fused
        self._steps: dict[int, int | torch.Tensor] = {}  # tensors once somebody has seen them, and may write to them
        self._steps_lock = threading.Lock()

    def _is_fused(self, group: Mapping[str, Any]) -> bool:
        fused, foreach = group.get("fused"), group.get("foreach")
        return bool(fused) or (fused is None and foreach is None and self._prefer_fused)

    def workspace_numel(self, capacity_numel: int, *, widens: bool = True) -> int:
        """See ``Kernel``. The scratch space has one tile of each worker, of a GPU's size if the device is one.

        Where gradients are wide, only the host needs it: a tile is multiplied there in the caches.
        """
        num = self._workers.num
        on_host = num * min(self._worker_tile_numel, align(-(-capacity_numel // num)))
        on_device = min(max(self._tile_numel, _DEVICE_TILE_NUMEL), capacity_numel) if self._has_lanes and widens else 0
        return max(on_host, on_device)

    def prepare(
        self,
        chunks: Sequence[Chunk],
        groups: Mapping[int, int],
        coefficient: torch.Tensor | None,
        *,
        keeps: bool = True,
    ) -> Update:
        """See ``Kernel``."""
        options = [settings_of(group) for group in self._optimizer.param_groups]
        steps: dict[tuple[int, int], torch.Tensor] = {}
        joined = [segment for chunk in chunks for segment in self._joined(chunk, groups, options, steps)]
        owned = (tensor for chunk in chunks for tensor in chunk.owned)
        indices = [t.spec.index for t in owned if t.gradient in AT_HOME and t.spec.index in groups]
        self._count(indices, 1)
        coefficient = None if coefficient is None else coefficient.clone()
        return Update(
            functools.partial(self._update_all, joined, coefficient, keeps),
            functools.partial(self._count, indices, -1),
            functools.partial(_restore, joined),
        )

    def _count(self, indices: Iterable[int], num: int) -> None:
        """Adds to the numbers of steps of parameters; an update that fails in a thread takes its own back."""
        with self._steps_lock:
            for index in indices:
                before = self._steps.get(index, 0)
                self._steps[index] = before.add_(num) if isinstance(before, torch.Tensor) else before + num

    def _update_all(self, joined: Sequence[_Segment], coefficient: torch.Tensor | None, keeps: bool) -> None:
        numel = sum(segment.numel for segment in joined)
        if joined and self._is_on_host(joined[0]) and self._workers.suits(joined[0].payloads["param"], numel):
            num = self._workers.num
            tile_numel = min(self._worker_tile_numel, max(align(-(-numel // num)), SMALL_NUMEL))
            work = functools.partial(self._update_tile, num=num, coefficient=coefficient, keeps=keeps)
            self._workers.submit(work, self._tiles(joined, tile_numel, num)).wait()
        else:
            for tile in self._tiles(joined, self._tile_numel, 1):
                self._update_tile(0, tile, num=1, coefficient=coefficient, keeps=keeps)

    def _update_tile(
        self,
        number: int,
        segments: Sequence[_Segment],
        *,
        num: int,
        coefficient: torch.Tensor | None,
        keeps: bool,
    ) -> None:
        """Updates ranges of one param group and step in one call, because many small calls are slow.

        Args:
            number: The number of the worker.
            segments: The ranges.
            num: How many workers share the scratch space.
            coefficient: See ``prepare``.
            keeps: See ``prepare``.
        """
        try:
            gradients = self._gradients(segments, number, num, coefficient, keeps)
            masters, exp_avgs, exp_avg_sqs = ([segment.of(name) for segment in segments] for name in self.list_names)
            self._adam(masters, gradients, exp_avgs, exp_avg_sqs, segments[0])
            round_masters(masters, [segment.of("param") for segment in segments])
        except Exception as error:
            error.add_note(f"while the optimizer updated {_named(segments)}")
            raise

    def own_state(self, tensor: ManagedTensor) -> dict[str, Any]:
        """See ``Kernel``. The state is ``step`` and ``state_places``."""
        places = self.state_places(tensor)  # an update that fails changes the number before this returns
        step = self._steps.get(tensor.spec.index)
        if step is None:
            return {}
        if not isinstance(step, torch.Tensor):
            step = self._steps[tensor.spec.index] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        return {"step": step, **places}

    def state_places(self, tensor: ManagedTensor) -> dict[str, torch.Tensor]:
        """See ``Kernel``. They are ``exp_avg`` and ``exp_avg_sq``, in the chunk lists."""
        lists = tensor.chunk.lists
        return {EXP_AVG: tensor.view(lists[EXP_AVG]), EXP_AVG_SQ: tensor.view(lists[EXP_AVG_SQ])}

    def load_own_state(self, tensor: ManagedTensor, state: dict[str, Any]) -> None:
        """See ``Kernel``."""
        if state:
            self._steps[tensor.spec.index] = int(state["step"])
            return
        self._steps.pop(tensor.spec.index, None)
        for place in self.state_places(tensor).values():
            place.zero_()

    def _tiles(self, joined: Iterable[_Segment], most_numel: int, num: int) -> Iterator[list[_Segment]]:
        """Yields ranges to update together. They are alike and have no more elements than a tile.

        Args:
            joined: The ranges, as long as they may be.
            most_numel: The most elements of a tile on the host.
            num: How many workers share the scratch space.
        """
        tiles: dict[tuple[Any, ...], list[_Segment]] = {}
        numels: dict[tuple[Any, ...], int] = {}
        for whole in joined:
            chunk = whole.chunk
            tile_numel = self._tile_numel_of(whole, most_numel, num)
            for start in range(whole.start, whole.stop, tile_numel):
                segment = dataclasses.replace(whole, start=start, stop=min(start + tile_numel, whole.stop))
                key = (id(segment.options), id(segment.step), chunk.state_dtype, chunk.is_mixed)
                numels[key] = numels.get(key, 0) + segment.numel
                if numels[key] > tile_numel and key in tiles:
                    yield tiles.pop(key)
                    numels[key] = segment.numel
                tiles.setdefault(key, []).append(segment)
        yield from tiles.values()

    def _tile_numel_of(self, segment: _Segment, most_numel: int, num: int) -> int:
        # Tiles are for the caches of CPUs; a GPU only pays for launching them.
        chunk = segment.chunk
        on_host = self._is_on_host(segment)
        numel = most_numel if on_host else max(_DEVICE_TILE_NUMEL, self._tile_numel)
        may_need_scratch = chunk.is_mixed and (chunk.home is Tier.HOST or segment.place is not GradientPlace.LIST)
        if may_need_scratch and chunk.home in self._scratch:
            numel = min(numel, self._scratch_numel(chunk.home, num))
        return numel

    def _is_on_host(self, segment: _Segment) -> bool:
        return segment.chunk.home is Tier.HOST or not self._has_lanes

    def _scratch_numel(self, tier: Tier, num: int) -> int:
        """The elements of the part of a worker, if so many share the scratch space of a tier."""
        return self._scratch[tier].numel() // num // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL

    def _joined(
        self,
        chunk: Chunk,
        groups: Mapping[int, int],
        options: Sequence[Mapping[str, Any]],
        steps: dict[tuple[int, int], torch.Tensor],
    ) -> list[_Segment]:
        """The ranges of one chunk, joined as [Note: same bits as torch] allows.

        Args:
            chunk: The chunk.
            groups: See ``prepare``.
            options: The settings of each param group.
            steps: How many steps have updated a range, as tensors by param group and number; it grows.
        """
        joined: list[_Segment] = []
        payloads = chunk.payloads
        for tensor in chunk.owned:
            group = groups.get(tensor.spec.index)
            if group is None or tensor.gradient not in AT_HOME or not tensor.own_numel:
                continue
            chosen, num = options[group], int(self._steps.get(tensor.spec.index, 0))
            if (group, num) not in steps:
                steps[group, num] = self._make_step(chosen, num, payloads[MASTER].device)
            step = steps[group, num]
            start = tensor.home_offset_numel
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.stop == start
                and last.stop % ALIGNMENT_NUMEL == 0
                and last.options is chosen
                and last.step is step
                and last.place is tensor.gradient
            ):
                last.stop = start + tensor.own_numel
            else:
                stop = start + tensor.own_numel
                joined.append(_Segment(chunk, payloads, start, stop, chosen, step, tensor.gradient))
        return joined

    def _make_step(self, options: Mapping[str, Any], num: int, device: torch.device) -> torch.Tensor:
        fused = self._is_fused(options) or options.get("fused")
        # Made by a kernel: torch.tensor would copy from the host, and wait for it.
        return torch.full((), float(num), dtype=torch.float32, device=device if fused else "cpu")

    def _gradients(
        self, segments: Sequence[_Segment], number: int, num: int, coefficient: torch.Tensor | None, keeps: bool
    ) -> list[torch.Tensor]:
        """The gradients of a tile in fp32, multiplied with the coefficient; see ``_update_tile``.

        A gradient in the accumulation list that nobody reads again is multiplied in the scratch space: in its place it
        would have to be written to memory, 4 bytes beside the 30 that the update moves for each parameter.
        """
        gradients, in_place, used = [], [], 0
        narrow, widened = [], []
        scales_apart = coefficient is not None and not keeps and segments[0].chunk.home is Tier.HOST
        for segment in segments:
            chunk, is_listed = segment.chunk, segment.place is GradientPlace.LIST
            gradient = segment.of(GRADIENT if is_listed else "param")
            if chunk.is_mixed and (scales_apart or not is_listed):
                start = number * self._scratch_numel(chunk.home, num) + used
                wide = self._scratch[chunk.home][start : start + segment.numel]
                used += segment.numel
                if is_listed and coefficient is not None:
                    gradients.append(torch.mul(gradient, coefficient, out=wide))
                    continue
                narrow.append(gradient)
                widened.append(wide)
                gradient = wide
            gradients.append(gradient)
            in_place.append(gradient)
        if widened:
            torch._foreach_copy_(widened, narrow)
        if coefficient is not None and in_place:
            torch._foreach_mul_(in_place, coefficient)
        return gradients

    def _adam(
        self,
        masters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
        segment: _Segment,
    ) -> None:
        group = segment.options
        foreach, fused = group.get("foreach"), self._is_fused(group) or group.get("fused")
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW))
        if fused and isinstance(group["lr"], float) and isinstance(beta1, float) and isinstance(beta2, float):
            # What adam() comes to, without sorting tensors by device and type.
            (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
                masters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                [segment.step + 1] * len(masters),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
            )
            return
        adam(
            masters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [segment.step.clone() for _ in masters],
            foreach=foreach,
            fused=fused,
            decoupled_weight_decay=decoupled,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
