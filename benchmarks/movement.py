"""What moves in a step that is repeated by its plan, under any budget, policy and placement."""

import dataclasses
from collections.abc import Sequence

from hf_patrickstar.schedule.move_plan import MovePlan, repeated_plans
from hf_patrickstar.schedule.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Movement:
    """What moved in one step.

    Attributes:
        loads: Chunks brought to the device.
        evictions: Chunks dropped for want of room.
        prefetches: Loads that were started before the moment that needed them.
        host_to_device_nbytes: Bytes of parameters brought to the device.
        device_to_host_nbytes: Bytes of gradients taken to the host, given to ``simulate``.
        device_peak_nbytes: The most bytes of moving chunks on the device at once.
        device_total_peak_nbytes: The most bytes of moving chunks and non-model data at once.
        host_peak_nbytes: Bytes at home on the host, which do not change in a step; from ``home_nbytes``.
    """

    loads: int
    evictions: int
    prefetches: int
    host_to_device_nbytes: int
    device_to_host_nbytes: int
    device_peak_nbytes: int
    device_total_peak_nbytes: int
    host_peak_nbytes: int


def simulate(
    trace: Trace,
    capacities: int | Sequence[int],
    policy: str,
    *,
    dropped_after: frozenset[int] = frozenset(),
    static: frozenset[int] = frozenset(),
    prefetch_depth: int = 0,
    load_nbytes: Sequence[int] = (),
    gradient_nbytes: Sequence[int] = (),
    home_nbytes: Sequence[int] = (),
    repetitions: int = 3,
) -> Movement:
    """Replays a step until it repeats itself.

    Args:
        trace: The visits of the step.
        capacities: Bytes for moving chunks, at each moment or the same at all.
        policy: ``"belady"``, ``"lru"`` or ``"list_order"``.
        dropped_after: Chunks whose device copies are void after the step: those that the optimizer updates.
        static: Chunks that are computed with where they are at home.
        prefetch_depth: As for ``make_plan``.
        load_nbytes: Bytes that have to travel for a copy of each chunk, if that is not all of it.
        gradient_nbytes: Bytes of gradients per chunk that a step takes to its home, if that is on the host.
        home_nbytes: Bytes of each chunk over all lists, which it takes on the host if it is at home there.
        repetitions: How often the step is replayed; the last one counts.

    Returns:
        What moved in the last repetition.

    Raises:
        BudgetError: If the chunks in use at one moment do not fit.
    """
    per_moment = [capacities] * len(trace.visits) if isinstance(capacities, int) else capacities
    (plan,) = repeated_plans(
        [trace],
        [per_moment],
        policy,
        dropped_after=dropped_after,
        static=static,
        prefetch_depth=prefetch_depth,
        repetitions=repetitions,
    )
    on_host = [index for index in range(len(trace.chunk_nbytes)) if index not in static]
    return _sum_up(
        trace, plan, load_nbytes or trace.chunk_nbytes, _total(gradient_nbytes, on_host), _total(home_nbytes, on_host)
    )


def _sum_up(
    trace: Trace, plan: MovePlan, load_nbytes: Sequence[int], device_to_host_nbytes: int, host_peak_nbytes: int
) -> Movement:
    loaded = [index for actions in plan.moments for index in actions.load]
    visits = list(zip(plan.moments, plan.chunk_nbytes, trace.visits, strict=True))
    return Movement(
        loads=len(loaded),
        evictions=plan.num_evictions,
        prefetches=sum(index != visit.chunk_index for actions, _, visit in visits for index in actions.load),
        host_to_device_nbytes=sum(load_nbytes[index] for index in loaded),
        device_to_host_nbytes=device_to_host_nbytes,
        device_peak_nbytes=max(plan.chunk_nbytes, default=0),
        device_total_peak_nbytes=max((used + visit.non_model_nbytes for _, used, visit in visits), default=0),
        host_peak_nbytes=host_peak_nbytes,
    )


def _total(nbytes: Sequence[int], indices: Sequence[int]) -> int:
    """The bytes of some chunks, none if they are not known."""
    return sum(nbytes[index] for index in indices) if nbytes else 0
