"""What a step will cost, and which chunks are worth a home in the device margin: from traces and numbers alone."""

import dataclasses
import operator
from collections.abc import Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import Machine
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.margin import MarginPlan, StepCost, fill_margin, in_order, needed_nbytes, plan_margin
from hf_patrickstar.schedule.offload import Asked
from hf_patrickstar.schedule.placement import ChunkBytes, Tiers, spill, too_small
from hf_patrickstar.schedule.plan import chunkable_nbytes, repeated_plans
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.schedule.script import Load, Send
from hf_patrickstar.schedule.step_estimate import ChunkWork, estimate_script, steps_of
from hf_patrickstar.schedule.trace import Trace

_COPYING = (Lane.TO_DEVICE, Lane.TO_HOST, Lane.GATHERS, Lane.REDUCTIONS)


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementRules:
    """What a placement takes into account.

    Attributes:
        workspace_nbytes: Bytes of scratch space on the device: what the optimizer needs if it updates chunks there, and
            what slices of gradients of other processes arrive in.
        host_workspace_nbytes: Bytes of it that it needs on the host.
        prefetch_depth: Chunks that are brought in ahead.
        policy: The name of the policy by which copies leave.
        machine: Its rates decide what takes the least time.
        has_lanes: Whether copies run beside computation; else the time of a step is the sum of all.
        overlaps_update: Whether the host updates chunks beside the next forward.
        offload: Which activations leave the device between forward and backward; see ``choose_offload``.
    """

    workspace_nbytes: int
    host_workspace_nbytes: int
    prefetch_depth: int
    policy: str
    machine: Machine
    has_lanes: bool
    overlaps_update: bool
    offload: Asked = "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What is known before a step: the same numbers before chunks are allocated as while they move.

    Attributes:
        traces: The traces, of training and others.
        num_micro_batches: Micro-batches of a step.
        nbytes: The bytes of each chunk, over all lists.
        works: What a step does with each chunk, as if all were at home on the host.
        updated: Chunks that the optimizer changes.
        has_groups: Whether several processes share the chunks.
        host_nbytes: Bytes of the host for chunks that are at home there, for the optimizer's scratch space for them,
            and for activations.
        device_nbytes: Bytes of the device for chunks and non-model data.
        chunk_nbytes: Bytes of it that chunks may take, or ``None`` for all.
        rules: What else is taken into account.
    """

    traces: Sequence[Trace]
    num_micro_batches: int
    nbytes: Sequence[ChunkBytes]
    works: Sequence[ChunkWork]
    updated: frozenset[int]
    has_groups: bool
    host_nbytes: int
    device_nbytes: int
    chunk_nbytes: int | None
    rules: PlacementRules

    @property
    def has_training(self) -> bool:
        """Whether a step of training is known."""
        return any(trace.kind.is_training for trace in self.traces)

    @property
    def unusable_nbytes(self) -> int:
        """Bytes of the device that chunks may not take even where non-model data leaves them."""
        return 0 if self.chunk_nbytes is None else max(self.device_nbytes - self.chunk_nbytes, 0)

    # Activations that leave

    @property
    def num_can_leave(self) -> int:
        """How many activations can leave the device between forward and backward, at most."""
        return max((len(trace.activations) for trace in self.traces), default=0)

    @property
    def host_nbytes_for_chunks(self) -> int:
        """Bytes of the host that activations leave to chunks."""
        return self.host_nbytes - max((trace.offloaded_nbytes for trace in self.traces), default=0)

    def offloading(self, num: int) -> "Estimate":
        """The same if so many activations leave the device."""
        return dataclasses.replace(self, traces=[trace.offloading(num) for trace in self.traces])

    # Homes

    def spilled(self, kept: frozenset[int]) -> frozenset[int]:
        """Decides which chunks are at home on the device because the host has no room for them.

        Args:
            kept: Chunks that are at home on the device whatever happens.

        Raises:
            BudgetError: If none were found with which the device has room for every moment of the traces.
        """
        chunks = [chunk for chunk in self.nbytes if chunk.chunk_index not in kept]
        needs = needed_nbytes(self.traces, frozenset() if self.has_groups else kept, self.unusable_nbytes)
        tiers = Tiers(
            self.host_nbytes_for_chunks,
            self.device_nbytes - sum(self.nbytes[index].device_nbytes for index in kept),
            [(nbytes, frozenset()) for nbytes, _ in needs] if self.has_groups else needs,
            self.rules.host_workspace_nbytes,
            self.rules.workspace_nbytes,
        )
        if tiers.on_host(chunks) <= tiers.host_nbytes:
            return frozenset()
        found = spill(chunks, tiers, in_order(range(len(self.nbytes)), self.traces))
        if found is None:
            raise BudgetError(too_small(chunks, tiers, self.host_nbytes - self.host_nbytes_for_chunks))
        return found

    def margin(self, kept: frozenset[int], current: frozenset[int] = frozenset()) -> MarginPlan | None:
        """Decides which chunks are to live in the margin: those that the host cannot hold, and others worth it.

        Args:
            kept: Chunks that are at home on the device whatever happens.
            current: Chunks that live there now: they stay where the host has no room for all, if they may. Full tiers
                have no room to exchange chunks.

        Returns:
            The decision, or ``None`` if no chunk may move.

        Raises:
            BudgetError: As for ``spilled``.
        """
        movable = [index for index, work in enumerate(self.works) if work.may_move and index not in kept]
        if not movable:
            return None
        for is_ahead in (True, False):  # room for what is brought in ahead is given up where the host needs it
            candidates = self._candidates(movable, kept, is_ahead=is_ahead)
            least = self._least_in_margin(candidates, kept, current)
            if least is not None:
                return self._plan_margin(movable, candidates, kept, least)
        spilled = current if self._may_stay(current, kept) else self.spilled(kept)
        movable, kept = [index for index in movable if index not in spilled], kept | spilled
        plan = self._plan_margin(movable, self._candidates(movable, kept), kept)
        reason = f"the host has no room for {len(spilled)} chunks, which live on the device; beside them {plan.reason}"
        return MarginPlan((*in_order(spilled, self.traces), *plan.chunk_indices), reason)

    def _candidates(self, movable: Sequence[int], kept: frozenset[int], *, is_ahead: bool = True) -> tuple[int, ...]:
        """What the margin has room for, beside chunks that are kept on the device; see ``fill_margin``.

        Args:
            movable: Chunks that may live there.
            kept: Chunks that are at home on the device whatever happens.
            is_ahead: Whether room is kept for a chunk that is brought in ahead.
        """
        is_ahead = is_ahead and self.rules.prefetch_depth > 0
        prefetched = [is_ahead * (work.gradient_nbytes + work.sent_nbytes) for work in self.works]
        return fill_margin(
            [self.nbytes[index] for index in movable],
            self.traces,
            self.device_nbytes - self._fixed_nbytes(kept),
            prefetched,
            kept,
            self.unusable_nbytes,
            copies_stay=self.has_groups,
        )

    def _plan_margin(
        self, movable: Sequence[int], candidates: Sequence[int], kept: frozenset[int], least: int = 0
    ) -> MarginPlan:
        chunks, name = [self.nbytes[index] for index in movable], self.rules.machine.name
        return plan_margin(chunks, candidates, lambda inside: self.cost(inside | kept), name, least)

    def _least_in_margin(self, candidates: Sequence[int], kept: frozenset[int], current: frozenset[int]) -> int | None:
        """How many candidates have to live in the margin so that the host has room for all else; ``None`` if too few.

        Chunks that live there now and are no candidates change places with others, for which some of the host is free.
        """
        exchanged = [self.nbytes[index].host_nbytes for index in current.difference(candidates)]
        need = self._on_host(kept) + self.rules.host_workspace_nbytes
        left = need - self.host_nbytes_for_chunks + 2 * max(exchanged, default=0)
        for count, index in enumerate([*candidates, None]):
            if left <= 0:
                return count
            left -= 0 if index is None else self.nbytes[index].host_nbytes
        return None

    def _may_stay(self, current: frozenset[int], kept: frozenset[int]) -> bool:
        """Whether the host needs that chunks live on the device, and those that do are enough, and have room."""
        room = self.host_nbytes_for_chunks - self.rules.host_workspace_nbytes
        return self._on_host(kept | current) <= room < self._on_host(kept) and self.room_beside(kept | current) >= 0

    def room_beside(self, at_home: frozenset[int]) -> int:
        """Bytes of the device that no moment of the traces needs, if these chunks are at home there.

        Args:
            at_home: Chunks that are at home on the device.
        """
        needs = needed_nbytes(self.traces, frozenset() if self.has_groups else at_home, self.unusable_nbytes)
        return self.device_nbytes - self._fixed_nbytes(at_home) - max((nbytes for nbytes, _ in needs), default=0)

    def fullest(self, at_home: frozenset[int]) -> tuple[int, int]:
        """Bytes of non-model data, and of chunks, on the device at the moment that needs most.

        Args:
            at_home: Chunks that are at home on the device.
        """
        nbytes, in_use = max(
            needed_nbytes(self.traces, frozenset() if self.has_groups else at_home, 0), key=operator.itemgetter(0)
        )
        chunks = sum(self.traces[0].chunk_nbytes[index] for index in in_use)
        return nbytes - chunks, chunks + self._fixed_nbytes(at_home)

    def host_room_beside(self, at_home: frozenset[int]) -> int:
        """Bytes of the host that neither activations nor chunks take, if these chunks are at home on the device.

        Args:
            at_home: Chunks that are at home on the device.
        """
        on_host = self._on_host(at_home)
        return self.host_nbytes_for_chunks - on_host - (self.rules.host_workspace_nbytes if on_host else 0)

    def _on_host(self, at_home: frozenset[int]) -> int:
        """Bytes of the host that chunks take, if these are at home on the device."""
        return sum(chunk.host_nbytes for chunk in self.nbytes if chunk.chunk_index not in at_home)

    def settled(self, homed: frozenset[int], spilled: frozenset[int]) -> tuple[frozenset[int], list[str]]:
        """Decides which chunks are at home on the device once a step is known, and why.

        Where a step has no room beside them, all leave that the host has room for, as an engine does it.

        Args:
            homed: Chunks that are at home there before the step is known.
            spilled: Those of them that the host has no room for.

        Raises:
            BudgetError: As for ``Estimate.spilled``.
        """
        reasons = []
        leaving = homed - spilled
        if leaving and self.room_beside(homed) < 0:
            reasons.append(left_device(len(leaving), "beside what else a step takes"))
            homed = spilled
        margin = self.margin(homed - spilled, current=spilled)
        if margin is None:
            return homed, reasons
        return (homed - spilled).union(margin.chunk_indices), [*reasons, margin.reason]

    def cost(self, at_home: frozenset[int]) -> StepCost | None:
        """What one step of each bucket of inputs costs.

        Args:
            at_home: Chunks that are at home on the device.

        Returns:
            The sum over all buckets, or ``None`` if a step has no room.
        """
        rules, fixed = self.rules, self._fixed_nbytes(at_home)
        free = self.device_nbytes - fixed
        most = None if self.chunk_nbytes is None else self.chunk_nbytes - fixed
        works = [dataclasses.replace(work, is_static=index in at_home) for index, work in enumerate(self.works)]
        loads = [Load(work.gradient_nbytes, work.sent_nbytes, work.is_static) for work in works]
        training = [trace for trace in self.traces if trace.kind.is_training]
        steps = steps_of(training, self.num_micro_batches)
        duration_ns = moved = copying_ns = updating_ns = 0
        for traces in steps:
            try:
                plans = repeated_plans(
                    traces,
                    [chunkable_nbytes(trace, free, most) for trace in traces],
                    rules.policy,
                    dropped_after=self.updated,
                    static=frozenset() if self.has_groups else at_home,
                    prefetch_depth=rules.prefetch_depth,
                    repetitions=1,
                )
            except BudgetError:
                return None
            script = estimate_script(traces, works, overlaps_update=rules.overlaps_update)
            timeline = replay(script, plans, loads, rules.machine)
            duration_ns += timeline.duration_ns if rules.has_lanes else sum(timeline.busy_ns().values())
            critical = timeline.critical_ns()
            copying_ns += sum(critical[lane] for lane in _COPYING)
            updating_ns += critical[Lane.HOST_WORK]
            loaded = (loads[index] for plan in plans for actions in plan.moments for index in actions.load)
            moved += sum(load.sent_nbytes + load.nbytes * (not load.is_here) for load in loaded)
            moved += sum(entry.nbytes for entry in script if isinstance(entry, Send))
            moved += 2 * sum(trace.offloaded_nbytes for trace in traces)
        return StepCost(duration_ns, moved, copying_ns, updating_ns, max(len(steps), 1))

    def _fixed_nbytes(self, at_home: frozenset[int]) -> int:
        """Bytes of the device that are no copies of chunks."""
        return self.rules.workspace_nbytes + sum(self.nbytes[index].device_nbytes for index in at_home)


def left_device(num_chunks: int, why: str) -> str:
    """What is said where chunks leave the device that were at home there from the start.

    Args:
        num_chunks: How many.
        why: Why there is no room for them, as a clause.
    """
    return f"{num_chunks} chunks left the device, where not everything fits after all: {why}"
