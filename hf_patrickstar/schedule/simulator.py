"""Replays a trace under any budget and policy, with the decision code of the runtime."""

import dataclasses

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.trace import Cursor, Trace
from hf_patrickstar.units import format_need


@dataclasses.dataclass(frozen=True, slots=True)
class Movement:
    """What moved in one step.

    Attributes:
        loads: Chunks brought to the device.
        evictions: Chunks dropped for want of room.
        host_to_device_nbytes: Bytes brought to the device.
        device_peak_nbytes: The most bytes of chunks on the device at once.
    """

    loads: int
    evictions: int
    host_to_device_nbytes: int
    device_peak_nbytes: int


def simulate(
    trace: Trace,
    device_nbytes: int,
    policy: str,
    *,
    dropped_after: frozenset[int] = frozenset(),
    repetitions: int = 3,
) -> Movement:
    """Replays a step until it repeats itself.

    Args:
        trace: The visits of the step.
        device_nbytes: Bytes for chunks on the device, the same at every moment.
        policy: ``"belady"``, ``"lru"`` or ``"list_order"``.
        dropped_after: Chunks whose device copies are void after the step: those that the optimizer updates.
        repetitions: How often the step is replayed; the last one counts.

    Returns:
        What moved in the last repetition.

    Raises:
        BudgetError: If the chunks in use at one moment do not fit.
    """
    chooser = Chooser(policy)
    resident: dict[int, int] = {}  # chunk index -> last access
    used, tick = 0, 0
    movement = Movement(0, 0, 0, 0)
    for _ in range(repetitions):
        cursor = Cursor(trace)
        loads = evictions = nbytes = peak = 0
        for moment, visit in enumerate(trace.visits):
            tick += 1
            size = trace.chunk_nbytes[visit.chunk_index]
            cursor.advance(visit.chunk_index)
            if visit.chunk_index not in resident and size:
                while used + size > device_nbytes:
                    leaving = [item for item in resident.items() if item[0] not in visit.pinned]
                    if not leaving:
                        raise BudgetError(
                            f"moment {moment} of trace '{trace.key}': chunk {visit.chunk_index} and the chunks in use "
                            f"({list(visit.pinned)}) need {format_need(used + size)}, {format_need(device_nbytes)} are "
                            "there; raise the budget or use smaller chunks"
                        )
                    victim = chooser.choose(sorted(leaving), cursor)
                    del resident[victim]
                    used -= trace.chunk_nbytes[victim]
                    evictions += 1
                used += size
                loads += 1
                nbytes += size
                peak = max(peak, used)
            if size:
                resident[visit.chunk_index] = tick
        for index in dropped_after & resident.keys():
            del resident[index]
            used -= trace.chunk_nbytes[index]
        movement = Movement(loads, evictions, nbytes, max(peak, used))
    return movement
