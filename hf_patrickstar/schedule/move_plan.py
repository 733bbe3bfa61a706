"""Trace + budgets -> for every moment of a step what to evict, load and prefetch. Pure data from pure numbers.

[Note: planning in passes]
The first pass lets the policy decide which chunk leaves, at the moment when room is needed; this fixes how many bytes
move. The second pass moves loads to earlier moments, each with the evictions that make room for it, as long as every
moment in between has room and uses none of the evicted chunks. Then copies run while earlier chunks compute, and no
more bytes move than before.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.eviction import Chooser, EvictionQueue
from hf_patrickstar.schedule.trace import Cursor, Trace
from hf_patrickstar.units import format_need


@dataclasses.dataclass(frozen=True, slots=True)
class Actions:
    """What happens at one moment, before the visited chunk is computed with.

    Attributes:
        evict: Chunks that leave, first.
        load: Chunks whose copies are started, in this order; one that is not the visited one is a prefetch.
        reduce: Groups whose gradients are reduced, in this order, after the visited chunk has been computed with.
    """

    evict: tuple[int, ...] = ()
    load: tuple[int, ...] = ()
    reduce: tuple[int, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether any copy comes or goes."""
        return bool(self.evict or self.load)


@dataclasses.dataclass(frozen=True, slots=True)
class MovePlan:
    """What moves when in one step.

    Attributes:
        moments: One entry per visit of the trace.
        resident: Chunks on the device after the step, with the moment of their last visit.
        chunk_nbytes: Bytes of moving chunks on the device after the actions of each moment.
        offloaded: Bytes of each activation that leaves the device, in order.
        quiet: Chunks that never move, and at whose visits nothing else moves either: these visits need not be noted.
        reserved_nbytes: Most non-model bytes from each moment to the next visit that is noted.
    """

    moments: tuple[Actions, ...]
    resident: Mapping[int, int]
    chunk_nbytes: tuple[int, ...]
    offloaded: tuple[int, ...] = ()
    quiet: frozenset[int] = frozenset()
    reserved_nbytes: tuple[int, ...] = ()

    @property
    def num_loads(self) -> int:
        """Copies host -> device."""
        return sum(len(actions.load) for actions in self.moments)

    @property
    def num_evictions(self) -> int:
        """Copies that are dropped: for want of room, after forward, or because an update voids them."""
        return sum(len(actions.evict) for actions in self.moments)


def chunkable_nbytes(
    trace: Trace, device_nbytes: int, chunk_nbytes: int | None = None, floor_nbytes: int = 0
) -> tuple[int, ...]:
    """Bytes that chunks may take at each moment: the tide (PatrickStar section 8.1).

    Args:
        trace: The trace of the step.
        device_nbytes: Bytes for moving chunks and non-model data together.
        chunk_nbytes: Bytes for moving chunks at most, or ``None``.
        floor_nbytes: Non-model bytes that are there at every moment, whatever the trace says.
    """
    free = (device_nbytes - max(visit.non_model_nbytes, floor_nbytes) for visit in trace.visits)
    chunks = (nbytes if chunk_nbytes is None else min(nbytes, chunk_nbytes) for nbytes in free)
    return tuple(nbytes - visit.gradient_nbytes for nbytes, visit in zip(chunks, trace.visits, strict=True))


def make_plan(
    trace: Trace,
    capacities: Sequence[int],
    chooser: Chooser,
    resident: Mapping[int, int],
    *,
    dropped_after: frozenset[int] = frozenset(),
    static: frozenset[int] = frozenset(),
    prefetch_depth: int = 0,
    reshard_after_forward: bool = False,
) -> MovePlan:
    """Plans a step; see [Note: planning in passes].

    Args:
        trace: The visits of the step.
        capacities: Bytes for moving chunks at each moment.
        chooser: Chooses victims.
        resident: Chunks on the device when the step begins, each with a negative number that orders the last visits;
            none of ``static``.
        dropped_after: Chunks whose device copies are void after the step.
        static: Chunks that are computed with where they are at home, and never move.
        prefetch_depth: The most loads that may be started before the chunk of the first of them is visited.
        reshard_after_forward: Chunks leave after their last visit in forward, as soon as they are not in use, whether
            or not there is room.

    Raises:
        BudgetError: If the chunks in use at one moment do not fit; it names the moment.
    """
    draft = _Draft(trace, capacities, resident, static)
    moving = sum(nbytes for index, nbytes in enumerate(trace.chunk_nbytes) if index not in static)
    # Where there is too little room, what is done makes some for loads ahead. A group is in use until it is reduced.
    makes_room = prefetch_depth and moving > min(capacities, default=0) and not any(v.reduced for v in trace.visits)
    void = dropped_after if makes_room else frozenset()
    leaving = _leaving(trace, trace.forward_ends if reshard_after_forward else (), void)
    draft.load_on_demand(chooser, dropped_after, leaving)
    if prefetch_depth:
        draft.load_ahead(prefetch_depth)
    moments = tuple(
        Actions((*leave, *evict), tuple(load), visit.reduced)
        for leave, evict, load, visit in zip(draft.leave, draft.evict, draft.load, trace.visits, strict=True)
    )
    offloaded = tuple(activation.nbytes for activation in trace.offloaded)
    quiet = static - {visit.chunk_index for visit, actions in zip(trace.visits, moments, strict=True) if actions.moves}
    reserved, ahead = [], 0
    for visit in reversed(trace.visits):
        reserved.append(max(visit.non_model_nbytes, ahead))
        ahead = reserved[-1] if visit.chunk_index in quiet else 0
    return MovePlan(moments, draft.resident, tuple(draft.used), offloaded, quiet, tuple(reserved[::-1]))


def repeated_plans(
    traces: Sequence[Trace],
    capacities: Sequence[Sequence[int]],
    policy: str,
    *,
    dropped_after: frozenset[int] = frozenset(),
    static: frozenset[int] = frozenset(),
    prefetch_depth: int = 0,
    reshard_after_forward: bool = False,
    repetitions: int = 3,
) -> list[MovePlan]:
    """The plans of a step's micro-batches when the step was repeated, from an empty device.

    Args:
        traces: The visits of every micro-batch.
        capacities: Bytes for moving chunks at each moment of every micro-batch.
        policy: ``"belady"``, ``"lru"`` or ``"list_order"``.
        dropped_after: Chunks whose device copies are void after the last micro-batch.
        static: As for ``make_plan``; so are ``prefetch_depth`` and ``reshard_after_forward``.
        prefetch_depth: See there.
        reshard_after_forward: See there.
        repetitions: How often, at most: a step that begins with what it leaves repeats itself. The plans of the last
            repetition are returned.

    Raises:
        BudgetError: If the chunks in use at one moment do not fit.
    """
    chooser = Chooser(policy)
    resident: dict[int, int] = {}
    plans: list[MovePlan] = []
    last = len(traces) - 1
    begin: list[int] | None = None
    for _ in range(repetitions):
        if begin == list(resident):
            break  # from here on it repeats itself
        begin = list(resident)
        plans.clear()
        for number, trace in enumerate(traces):
            dropped = dropped_after if number == last else frozenset()
            plan = make_plan(
                trace,
                capacities[number],
                chooser,
                {index: place - len(resident) for place, index in enumerate(resident)},
                dropped_after=dropped,
                static=static,
                prefetch_depth=prefetch_depth,
                reshard_after_forward=reshard_after_forward,
            )
            plans.append(plan)
            by_age = sorted(plan.resident.items(), key=lambda item: item[1])
            resident = {index: moment for index, moment in by_age if index not in dropped}
    return plans


def _leaving(trace: Trace, forward_ends: Sequence[int], void: Collection[int]) -> dict[int, list[int]]:
    """Chunks visited for the last time in one of these forwards, or, of ``void``, in the step, by the next moment."""
    leaving: dict[int, list[int]] = {}
    begin = 0
    for end in (*forward_ends, len(trace.visits)):
        last = {visit.chunk_index: moment for moment, visit in enumerate(trace.visits[begin:end], begin)}
        for index, moment in last.items():
            if end in forward_ends or index in void:
                leaving.setdefault(moment + 1, []).append(index)
        begin = end
    return leaving


class _Draft:
    """A plan while it is made: one entry per moment in each list."""

    def __init__(
        self, trace: Trace, capacities: Sequence[int], resident: Mapping[int, int], static: frozenset[int]
    ) -> None:
        self.trace = trace
        self.capacities = capacities
        self.resident = dict(resident)
        self.static = static
        self.leave: list[list[int]] = [[] for _ in trace.visits]  # whether or not there is room
        self.evict: list[list[int]] = [[] for _ in trace.visits]
        self.load: list[list[int]] = [[] for _ in trace.visits]
        self.used: list[int] = []

    def load_on_demand(
        self, chooser: Chooser, dropped_after: frozenset[int], done_before: Mapping[int, Sequence[int]]
    ) -> None:
        """The first pass. ``done_before`` has, by moment, chunks that leave even if there is room."""
        trace, sizes = self.trace, self.trace.chunk_nbytes
        cursor = Cursor(trace, dropped_after)
        queue = EvictionQueue(chooser, cursor)
        for index, last in self.resident.items():
            queue.visit(index, last)
        used = sum(sizes[index] for index in self.resident)
        held: list[int] = []  # done, but a module around the visited one still computes with them
        for moment, visit in enumerate(trace.visits):
            index = visit.chunk_index
            cursor.advance(index)
            moves = index not in self.static
            finished = [done for done in held if done != index] + [*done_before.get(moment, ())]
            held = [done for done in finished if done in visit.pinned]
            for done in finished:
                if done in self.resident and done not in held:
                    del self.resident[done]
                    queue.remove(done)
                    used -= sizes[done]
                    self.leave[moment].append(done)
            need = sizes[index] if moves and index not in self.resident else 0
            while used + need > self.capacities[moment]:
                victim = queue.pop((index, *visit.pinned))
                if victim is None:
                    raise BudgetError(
                        f"moment {moment} of trace '{trace.key}': chunk {index} and the chunks in use "
                        f"({list(visit.pinned)}) need {format_need(used + need)}, "
                        f"{format_need(max(self.capacities[moment], 0))} are there beside non-model data of "
                        f"{format_need(visit.non_model_nbytes)}; raise the budget or use smaller chunks"
                    )
                del self.resident[victim]
                used -= sizes[victim]
                self.evict[moment].append(victim)
            if need:
                self.load[moment].append(index)
                used += need
            if moves:
                self.resident[index] = moment
                queue.visit(index, moment)
            self.used.append(used)

    def load_ahead(self, depth: int) -> None:
        """The second pass. Loads keep their order, so that the first one needed is the first to arrive."""
        demands = [moment for moment, load in enumerate(self.load) if load]
        issued = 0
        for place, demand in enumerate(demands):
            moment = self._earliest(demand, max(issued, demands[place - depth] if place >= depth else 0))
            if moment < demand:
                self._move(demand, moment)
            issued = moment

    def _earliest(self, demand: int, earliest: int) -> int:
        index, victims = self.load[demand][0], self.evict[demand]
        sizes, visits = self.trace.chunk_nbytes, self.trace.visits
        growth = sizes[index] - sum(sizes[victim] for victim in victims)
        used, capacities, leave, evict = self.used, self.capacities, self.leave, self.evict
        moment = demand
        while moment > earliest:
            before = moment - 1
            if used[before] + growth > capacities[before] or index in leave[moment] or index in evict[before]:
                break
            visit = visits[before]
            if victims and any(victim == visit.chunk_index or victim in visit.pinned for victim in victims):
                break
            moment = before
        return moment

    def _move(self, demand: int, moment: int) -> None:
        """Moves the load of a moment, with the evictions that make room for it, to an earlier one."""
        sizes = self.trace.chunk_nbytes
        index, victims = self.load[demand].pop(0), self.evict[demand]
        growth = sizes[index] - sum(sizes[victim] for victim in victims)
        for between in range(moment, demand):
            self.used[between] += growth
        self.load[moment].append(index)
        self.evict[moment].extend(victims)
        self.evict[demand] = []
