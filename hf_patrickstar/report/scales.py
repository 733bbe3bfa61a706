"""Axes: where a value is, and which round values are marked."""

import dataclasses
import math

from hf_patrickstar.report.blocks import Tick
from hf_patrickstar.units import GIB, KIB, MIB

_STEPS = (1, 2, 2.5, 5, 10)
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """An axis.

    Attributes:
        low: The value at its beginning.
        high: The value at its end, larger than ``low``.
        factor: What one unit of its marks is.
        unit: The name of the unit, or an empty string.
        is_whole: Whether only whole values are marked.
    """

    low: float
    high: float
    factor: float = 1.0
    unit: str = ""
    is_whole: bool = False

    def at(self, value: float, length: float) -> float:
        """Where a value is on an axis of a length, from its beginning."""
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low) * length

    def ticks(self, most: int = 5) -> tuple[Tick, ...]:
        """Marks at round values.

        Args:
            most: How many there may be, about.
        """
        step = _round_step((self.high - self.low) / self.factor / most)
        step = max(math.ceil(step), 1) if self.is_whole else step
        first = math.ceil(self.low / self.factor / step - 1e-9)
        last = math.floor(self.high / self.factor / step + 1e-9)
        return tuple(
            Tick(self.at(number * step * self.factor, 100.0), f"{number * step:.6g} {self.unit}".rstrip())
            for number in range(first, last + 1)
        )


def of_bytes(high: float) -> Scale:
    """An axis of bytes from zero."""
    if high <= 0:
        return Scale(0, MIB, MIB, "MiB")
    factor, unit = next(item for item in _UNITS if high >= item[0] or item[0] == 1)
    return Scale(0, high, factor, unit)


def of_seconds(high: float) -> Scale:
    """An axis of time from zero."""
    if high <= 0:
        return Scale(0, 1, 1, "s")
    factor, unit = next((item for item in _TIMES if high >= item[0]), _TIMES[-1])
    return Scale(0, high, factor, unit)


def of_numbers(low: float, high: float) -> Scale:
    """An axis of numbers, with some room where all of them are the same."""
    return Scale(low, high) if high > low else Scale(low - abs(low) / 2 - 0.5, high + abs(high) / 2 + 0.5)


def of_steps(low: int, high: int) -> Scale:
    """An axis of whole numbers."""
    return Scale(low, high if high > low else low + 1, is_whole=True)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in _STEPS if step * power >= least * (1 - 1e-9))
