"""What errors and tables say, and how often memory is measured; tests/property compares the book with a plain one."""

import re

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def rows_of(ledger):
    return [tuple(re.split(r"\s{2,}", row.strip())) for row in ledger.table().splitlines()]


def test_a_table_says_who_has_what():
    ledger = Ledger({DEVICE: 1000, HOST: 5000}, device_fraction=0.8, chunk_budget=700)
    ledger.book(DEVICE, "param", 600)
    ledger.unbook(DEVICE, "param", 100)
    ledger.book(HOST, "master", 2048)
    assert rows_of(ledger) == [
        ("tier", "owner", "now", "peak"),
        ("device", "param", "500 B", "600 B"),
        ("device", "total", "500 B", "600 B"),
        ("device", "non-model data", "0 B"),
        ("device", "chunk budget", "700 B"),
        ("device", "budget", "1000 B"),
        ("device", "usable now", "800 B"),
        ("host", "master", "2.00 KiB", "2.00 KiB"),
        ("host", "total", "2.00 KiB", "2.00 KiB"),
        ("host", "budget", "4.88 KiB"),
    ]


def test_going_over_carries_what_is_needed_what_is_left_and_the_table():
    ledger = Ledger({DEVICE: 1000, HOST: 5000})
    ledger.book(HOST, "exp_avg", 4000)
    message = (
        r"^host_budget is too small: 1\.46 KiB \(1500 bytes\) more needed for 'exp_avg_sq', "
        r"1000 B \(1000 bytes\) left of 4\.88 KiB \(5000 bytes\)\. Raise host_budget to at least 5500 bytes"
    )
    with pytest.raises(BudgetError, match=message) as caught:
        ledger.book(HOST, "exp_avg_sq", 1500)
    assert isinstance(caught.value, MemoryError)
    assert str(caught.value).endswith(ledger.table())
    with pytest.raises(BudgetError, match="at least 5800 bytes"):
        ledger.book(HOST, "exp_avg_sq", 1500, ahead_nbytes=300)
    ledger.spilled_nbytes = 100
    with pytest.raises(BudgetError, match="at least 5600 bytes"):
        ledger.book(HOST, "exp_avg_sq", 1500)


@pytest.mark.parametrize(
    ("reserved", "message"),
    [
        (0, r"^chunk_budget is .*\(100 bytes\) left of 100 B"),
        (950, r"^device_budget and chunk_budget are .*\(50 bytes\) left of 1000 B"),
    ],
)
def test_the_error_names_the_setting_that_binds(reserved, message):
    ledger = Ledger({DEVICE: 1000, HOST: 0}, chunk_budget=100)
    ledger.reserved_nbytes = reserved
    with pytest.raises(BudgetError, match=message) as caught:
        ledger.book(DEVICE, "param", 200)
    assert "at least" not in str(caught.value), "what else a step needs is not known here"


def test_bytes_that_are_there_already_are_not_counted_twice_nor_use_up_what_is_reserved():
    """What is booked after it was allocated was measured as non-model data until then."""
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, lambda booked: 800 - booked)
    with pytest.raises(BudgetError):
        ledger.book(DEVICE, "param", 300)
    ledger.book(DEVICE, "param", 300, is_allocated=True)
    assert (ledger.used(DEVICE), ledger.available(DEVICE)) == (300, 200)
    ledger = Ledger({DEVICE: 1000, HOST: 0}, lambda booked: max(300 - booked, 0))
    ledger.reserved_nbytes = 800
    with pytest.raises(BudgetError):
        ledger.book(DEVICE, "param", 300, is_allocated=True)
    ledger.reserved_nbytes = 700
    ledger.book(DEVICE, "param", 300, is_allocated=True)
    assert ledger.available(DEVICE) == 0


class Counted:
    """What is not booked takes, and how often it was measured."""

    def __init__(self, nbytes):
        self.nbytes, self.num_readings = nbytes, 0

    def __call__(self, booked):
        self.num_readings += 1
        return self.nbytes

    def readings(self):
        num, self.num_readings = self.num_readings, 0
        return num


def test_inside_of_a_block_memory_is_measured_once():
    others = Counted(100)
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, others)
    with ledger.one_reading():
        assert others.readings() == 0, "only when somebody asks"
        assert ledger.available(DEVICE) == 900
        others.nbytes = 150
        with ledger.one_reading():
            ledger.book(DEVICE, "param", 300)
        assert (ledger.available(DEVICE), ledger.non_model_nbytes(), others.readings()) == (600, 100, 1)
        ledger.read_again()
        assert ([ledger.available(DEVICE)] * 2, others.readings()) == ([550, 550], 1)
        others.nbytes = 450
        ledger.book(DEVICE, "own", 300, is_allocated=True)
        assert (ledger.non_model_nbytes(), ledger.total_peak) == (450, 750), "what was allocated is measured anew"
    with pytest.raises(BudgetError), ledger.one_reading():
        ledger.book(DEVICE, "param", 901)
    others.nbytes = 0
    assert ledger.available(DEVICE) == 400, "a block that failed is over"


def test_bytes_change_their_owner_even_on_a_full_tier():
    ledger = Ledger({DEVICE: 1000, HOST: 5000})
    ledger.book(DEVICE, "param", 1000)
    ledger.hand_over(DEVICE, "param", "pool", 400)
    assert ledger.owners(DEVICE) == {"param": 600, "pool": 400}
    assert (ledger.used(DEVICE), ledger.peak(DEVICE), ledger.owner_peaks(DEVICE)["pool"]) == (1000, 1000, 400)
    with pytest.raises(ValueError, match="cannot hand over 401 bytes of 'pool' on device: 400 are booked"):
        ledger.hand_over(DEVICE, "pool", "param", 401)
