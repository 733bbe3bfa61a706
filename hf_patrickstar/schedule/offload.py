"""How many of the activations that autograd keeps leave the device between forward and backward. Pure numbers."""

from collections.abc import Callable, Iterable
from typing import Literal

from hf_patrickstar.schedule.margin import AS_FAST, StepCost
from hf_patrickstar.schedule.trace import Trace
from hf_patrickstar.units import format_nbytes

Asked = bool | Literal["auto"]
"""The setting ``activation_offload``."""
_PARTS = (1, 2, 4, 8, 16)
"""Of all that can leave these parts are tried first."""


def choose_offload(
    asked: Asked, most: int, cost_of: Callable[[int], StepCost | None], fits: Callable[[int], bool]
) -> tuple[int, str]:
    """Decides how many leave: those that are kept first, which backward needs last.

    Args:
        asked: The setting.
        most: How many can leave.
        cost_of: What a step costs if so many leave; ``None`` if it has no room.
        fits: Whether a step has room if so many leave; more may have none where the host is full.

    Returns:
        The number, and why.
    """
    if asked is False or not most:
        return 0, "as asked" if most else "there are none that can leave"
    if asked is True:
        return _most(most, fits), "as asked"
    costs = {0: cost_of(0)}
    least = 0
    if costs[0] is None:
        found = least_that_fit(most, fits)
        if found is None:
            return most, "a step has no room, however many leave"
        least = found
    elif costs[0].copying_ns + costs[0].updating_ns <= (AS_FAST - 1) * costs[0].duration_ns:
        return 0, "a step has room, and hardly waits for copies and updates"
    costs.update({num: cost_of(num) for num in (least, (least + most) // 2, most) if num not in costs})
    known = {num: cost.duration_ns for num, cost in costs.items() if cost is not None}
    if not known:
        return least, "the fewest with which a step has room"
    limit_ns = min(known.values()) * AS_FAST
    num = min(num for num, duration_ns in known.items() if duration_ns <= limit_ns)
    if num == least:
        return num, "the fewest with which a step has room" if num else "a step has room, and would not be faster"
    return num, "more of the device is left to chunks, which makes the step faster"


def describe_offload(traces: Iterable[Trace], num: int, asked: Asked, why: str) -> str:
    """How many activations leave the device between forward and backward, and why, in one line.

    Args:
        traces: The traces of steps.
        num: How many leave.
        asked: The setting.
        why: Why, as a clause.
    """
    largest = max(traces, key=lambda trace: trace.offloading(num).offloaded_nbytes)
    return (
        f"activation_offload={str(asked).lower()}: {num} of {len(largest.activations)} activations leave the device "
        f"between forward and backward ({format_nbytes(largest.offloading(num).offloaded_nbytes)}): {why}"
    )


def least_that_fit(most: int, fits: Callable[[int], bool]) -> int | None:
    """The fewest that fit; ``None`` if none was found.

    Fewer have no room on the device and more have none on the host, so those that fit may be few.

    Args:
        most: How many can leave.
        fits: See ``choose_offload``.
    """
    tried = dict.fromkeys(most * part // parts for parts in _PARTS for part in range(parts, 0, -1))
    found = next(filter(fits, filter(None, tried)), None)
    return None if found is None else _nearest(found, 0, fits)


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """As many as fit; all if nothing fits."""
    least = most if fits(most) else least_that_fit(most, fits)
    return most if least is None else _nearest(least, most + 1, fits)


def most_that_fit(num: int, most: int, fits: Callable[[int], bool]) -> int:
    """How many more than a number that was chosen may leave, of which other processes may need more.

    Args:
        num: The number.
        most: How many can leave.
        fits: See ``choose_offload``.
    """
    return _nearest(num, most + 1, fits) if fits(num) else most


def _nearest(fitting: int, beyond: int, fits: Callable[[int], bool]) -> int:
    """The number nearest to one beyond which does not fit, or does not exist, that fits."""
    while abs(beyond - fitting) > 1:
        middle = (fitting + beyond) // 2
        if fits(middle):
            fitting = middle
        else:
            beyond = middle
    return fitting
