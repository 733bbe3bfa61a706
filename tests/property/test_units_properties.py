from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.units import format_nbytes, format_need, parse_nbytes

FACTORS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 2**10), ("B", 1000))
}
fast = settings(deadline=None, max_examples=200, database=None, derandomize=True)


@fast
@given(st.integers(1, 4096), st.sampled_from(sorted(FACTORS)), st.booleans())
def test_whole_numbers_of_every_unit(number, unit, lower):
    text = f"{number}{unit.lower() if lower else unit}"
    assert parse_nbytes(text) == number * FACTORS[unit]


@fast
@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from(sorted(FACTORS)))
def test_decimal_fractions_are_exact_and_rounded_down(whole, thousandths, unit):
    exact = int((whole + Fraction(thousandths, 1000)) * FACTORS[unit])
    text = f"{whole}.{thousandths:03}{unit}"
    if exact < 1:
        with pytest.raises(ConfigError, match="must be positive"):
            parse_nbytes(text)
    else:
        assert parse_nbytes(text) == exact


@fast
@given(st.integers(1, 2**50))
def test_what_is_printed_can_be_read_back(nbytes):
    """Two decimals of a number of at least one: half a percent."""
    assert abs(parse_nbytes(format_nbytes(nbytes)) - nbytes) <= nbytes / 200 + 1
    assert parse_nbytes(format_need(nbytes).partition("(")[2].removesuffix("ytes)").strip()) == nbytes
