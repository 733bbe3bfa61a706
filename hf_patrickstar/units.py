"""Bytes for people: parsing and printing of sizes; and what elements are counted by.

The only module that knows how many bytes a KiB has.
"""

import decimal
import math
import re

from hf_patrickstar.errors import ConfigError

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

KIB = 1024
MIB = 1024**2
GIB = 1024**3
_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

LEAST_BUDGET_NBYTES = MIB
"""A smaller budget needs a unit, since whoever writes a small number means GiB."""
_MOST_GIB = 1024
"""A larger number than that was not meant to be GiB."""
ALIGNMENT_NUMEL = 64
"""Offsets in chunks are multiples of this many elements: 128 bytes in 16-bit, 256 in fp32."""


def align(numel: int, unit: int = ALIGNMENT_NUMEL) -> int:
    """The smallest multiple of the alignment, or of another unit, that holds ``numel`` elements."""
    return -(-numel // unit) * unit


def parse_nbytes(value: int | str, name: str = "size") -> int:
    """Turns a size into a number of bytes.

    Args:
        value: A number of bytes, or text such as ``"8GiB"`` (binary units: KiB, MiB, GiB, TiB), ``"8GB"`` (decimal
            units: powers of 1000) or ``"4096"`` (bytes).
        name: What the size is for; it appears in the error message.

    Returns:
        The size in bytes, at least 1.

    Raises:
        ConfigError: If the text is not a size, or the size is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{name}: expected a number of bytes or text such as '8GiB', got {value!r}")
    if isinstance(value, int):
        nbytes = value
    else:
        match = _PATTERN.fullmatch(value)
        if match is None:
            raise ConfigError(f"{name}: {value!r} is not a size; write a number of bytes, or for example '8GiB'")
        number, unit = decimal.Decimal(match[1]), match[2].upper() or "B"
        factor = next((factor for known, factor in _UNITS.items() if known.upper() == unit), None)
        if factor is None:
            raise ConfigError(f"{name}: unknown unit in {value!r}; the units are {', '.join(_UNITS)}")
        with decimal.localcontext() as context:
            context.prec = len(match[1]) + 16
            nbytes = int(number * factor)
    if nbytes <= 0:
        raise ConfigError(f"{name}: must be positive, got {value!r}; give a number of bytes above 0")
    return nbytes


def parse_budget(value: int | str, name: str) -> int:
    """Turns a budget of memory into a number of bytes, as ``parse_nbytes`` does.

    Args:
        value: A number of bytes, 1 MiB or more, or text.
        name: What the budget is for.

    Raises:
        ConfigError: If it is no size, or a number below 1 MiB without a unit.
    """
    nbytes = parse_nbytes(value, name)
    given = str(value).strip()
    if nbytes < LEAST_BUDGET_NBYTES and given.replace(".", "").isdigit():
        meant = f"; did you mean '{given}GiB'? Write" if nbytes <= _MOST_GIB else ": write"
        raise ConfigError(f"{name}: {given} is a number of bytes, less than 1 MiB{meant} '{given}B' if you mean bytes")
    return nbytes


def format_budget(nbytes: int) -> int | str:
    """A budget as ``parse_budget`` takes it back."""
    return nbytes if nbytes >= LEAST_BUDGET_NBYTES else f"{nbytes}B"


def name_budget(nbytes: int) -> str:
    """A budget in an error message: at least so many bytes, in words that ``parse_budget`` takes back."""
    if nbytes >= MIB:
        return f"{math.ceil(100 * nbytes / MIB) / 100:.2f}MiB"
    budget = format_budget(nbytes)
    return f"{budget} bytes" if isinstance(budget, int) else budget


def format_nbytes(nbytes: int) -> str:
    """Prints a number of bytes with a binary unit, for example ``1.50 GiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def describe_disk(nbytes: int, bandwidth: float, seconds: float) -> str:
    """What states on a drive would cost, in words.

    Args:
        nbytes: Bytes of masters and optimizer states there.
        bandwidth: Bytes per second that it reads and writes.
        seconds: What a step would take.
    """
    where = f"{format_nbytes(nbytes)} of masters and states on a drive at {bandwidth / 1e9:.3g} GB/s"
    return f"it fits with {where}: {format_seconds(seconds)} a step"


def describe_wear(nbytes: int, seconds: float) -> str:
    """What a drive has to bear, in words.

    Args:
        nbytes: Bytes of masters and optimizer states that a step writes there.
        seconds: What a step takes.
    """
    per_day = format_nbytes(round(nbytes / max(seconds, 1e-9) * 86400))
    return f"{format_nbytes(nbytes)} of masters and states read from the disk and written per step, {per_day} per day"


def format_count(number: int) -> str:
    """Prints how many parameters or elements there are with a decimal unit, for example ``1.56 B`` or ``0.3 M``."""
    if number < 1000:
        return str(number)
    if number < 100_000:
        return f"{number / 1e3:.1f} K"
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def format_need(nbytes: int) -> str:
    """Prints a number of bytes both ways, for error messages: ``1.50 GiB (1610612736 bytes)``."""
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"


def format_seconds(seconds: float) -> str:
    """Prints a duration with three digits, for example ``1.27 s``."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
