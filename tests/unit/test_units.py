import pytest

from hf_patrickstar import units
from hf_patrickstar.common.shortage import Limit, Shortage
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.units import format_count, format_nbytes, parse_nbytes


@pytest.mark.parametrize(
    ("number", "text"),
    [(92, "92"), (999, "999"), (1000, "1.0 K"), (36_736, "36.7 K"), (99_949, "99.9 K"), (100_000, "0.1 M")]
    + [(25_460_000, "25.5 M"), (999_900_000, "999.9 M"), (1_560_000_000, "1.56 B")],
)
def test_counts(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("much", "'much' is not a size"),
        ("-1", "is not a size"),
        ("8 parsecs", "unknown unit in '8 parsecs'; the units are B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"),
        (0, "must be positive"),
        (True, "expected a number of bytes"),
        (None, "expected a number of bytes"),
    ],
)
def test_parse_refuses(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_nbytes(value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2**10, "1.00 KiB"), (2**40, "1.00 TiB"), (-(2**20), "-1.00 MiB")],
)
def test_format(nbytes, text):
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(("nbytes", "text"), [(66560, "66560B"), (2**20, "1.00MiB"), (2**20 + 1, "1.01MiB")])
def test_a_budget_that_is_advised_is_taken(nbytes, text, monkeypatch):
    monkeypatch.setattr(units, "LEAST_BUDGET_NBYTES", 2**20)
    shortage = Shortage([(Limit("chunk_budget", 1), nbytes)])
    assert shortage.advise("use less") == f"Raise chunk_budget to at least {text}, or use less."
    assert 0 <= units.parse_budget(text, "chunk_budget") - nbytes < 0.01 * units.MIB


@pytest.mark.parametrize(("number", "meant"), [("24", "did you mean '24GiB'"), ("66560", "MiB: write '66560B'")])
def test_a_number_below_1_mib_needs_a_unit(number, meant, monkeypatch):
    monkeypatch.setattr(units, "LEAST_BUDGET_NBYTES", 2**20)
    with pytest.raises(ConfigError, match=meant):
        units.parse_budget(number, "chunk_budget")
