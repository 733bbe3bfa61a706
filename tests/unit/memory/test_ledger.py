import re

import pytest

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


@pytest.fixture
def ledger():
    return Ledger({DEVICE: 1000, HOST: 5000})


def snapshot(ledger):
    return [(ledger.used(tier), ledger.peak(tier), ledger.owners(tier), ledger.available(tier)) for tier in Tier] + [
        ledger.table()
    ]


def test_starts_empty(ledger):
    assert [ledger.budget(tier) for tier in Tier] == [1000, 5000]
    assert [ledger.limit(tier) for tier in Tier] == [1000, 5000]
    assert [ledger.used(tier) for tier in Tier] == [0, 0]
    assert [ledger.available(tier) for tier in Tier] == [1000, 5000]


def test_books_per_tier_and_owner(ledger):
    ledger.book(DEVICE, "param", 300)
    ledger.book(DEVICE, "param", 200)
    ledger.book(DEVICE, "pool", 100)
    ledger.book(HOST, "param", 4000)
    assert ledger.owners(DEVICE) == {"param": 500, "pool": 100}
    assert ledger.owners(HOST) == {"param": 4000}
    assert (ledger.used(DEVICE), ledger.available(DEVICE)) == (600, 400)
    assert (ledger.used(HOST), ledger.available(HOST)) == (4000, 1000)


def test_unbook(ledger):
    ledger.book(DEVICE, "param", 300)
    ledger.unbook(DEVICE, "param", 100)
    assert (ledger.used(DEVICE), ledger.owners(DEVICE)) == (200, {"param": 200})
    ledger.unbook(DEVICE, "param", 200)
    assert (ledger.used(DEVICE), ledger.owners(DEVICE)) == (0, {})


def test_the_last_byte_can_be_booked(ledger):
    ledger.book(DEVICE, "param", 1000)
    assert ledger.available(DEVICE) == 0
    with pytest.raises(BudgetError):
        ledger.book(DEVICE, "param", 1)


@pytest.mark.parametrize(("owner", "nbytes", "booked"), [("param", 301, 300), ("pool", 1, 0)])
def test_unbooking_more_than_is_booked(ledger, owner, nbytes, booked):
    ledger.book(DEVICE, "param", 300)
    before = snapshot(ledger)
    with pytest.raises(ValueError, match=f"cannot unbook {nbytes} bytes of '{owner}' on device: {booked} are booked"):
        ledger.unbook(DEVICE, owner, nbytes)
    assert snapshot(ledger) == before


def test_peaks_are_the_most_at_once(ledger):
    ledger.book(DEVICE, "param", 300)
    ledger.book(DEVICE, "pool", 400)
    ledger.unbook(DEVICE, "param", 300)
    ledger.book(DEVICE, "pool", 200)
    assert ledger.peak(DEVICE) == 700
    assert ledger.owner_peaks(DEVICE).get("param", 0) == 300
    assert ledger.owner_peaks(DEVICE).get("pool", 0) == 600
    assert ledger.owner_peaks(HOST).get("param", 0) == ledger.owner_peaks(DEVICE).get("stranger", 0) == 0
    assert ledger.peak(HOST) == 0


def test_going_over_changes_nothing_and_carries_the_table(ledger):
    ledger.book(HOST, "exp_avg", 4000)
    before = snapshot(ledger)
    with pytest.raises(BudgetError, match=r"^host_budget is too small") as caught:
        ledger.book(HOST, "exp_avg_sq", 1500)
    assert snapshot(ledger) == before
    message = str(caught.value)
    assert "1.46 KiB (1500 bytes) more needed for 'exp_avg_sq'" in message
    assert "1000 B (1000 bytes) left of 4.88 KiB (5000 bytes)" in message
    assert "Raise host_budget to at least 5500 bytes" in message
    assert message.endswith(ledger.table())


def test_a_budget_error_is_a_memory_error(ledger):
    with pytest.raises(MemoryError):
        ledger.book(DEVICE, "param", 1001)


def test_table(ledger):
    ledger.book(DEVICE, "param", 600)
    ledger.unbook(DEVICE, "param", 100)
    ledger.book(HOST, "master", 2048)
    rows = [tuple(re.split(r"\s{2,}", row.strip())) for row in ledger.table().splitlines()]
    assert rows == [
        ("tier", "owner", "now", "peak"),
        ("device", "param", "500 B", "600 B"),
        ("device", "total", "500 B", "600 B"),
        ("device", "non-model data", "0 B"),
        ("device", "budget", "1000 B"),
        ("host", "master", "2.00 KiB", "2.00 KiB"),
        ("host", "total", "2.00 KiB", "2.00 KiB"),
        ("host", "budget", "4.88 KiB"),
    ]


def test_only_a_fraction_of_the_device_is_available_to_the_cautious():
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, device_fraction=0.8)
    assert (ledger.budget(DEVICE), ledger.limit(DEVICE), ledger.available(DEVICE)) == (1000, 800, 800)
    assert (ledger.limit(DEVICE, cautious=False), ledger.available(DEVICE, cautious=False)) == (1000, 1000)
    assert (ledger.budget(HOST), ledger.limit(HOST)) == (1000, 1000)
    assert "usable now" in ledger.table()
    ledger.is_cautious = False
    assert (ledger.limit(DEVICE), ledger.available(DEVICE)) == (1000, 1000)
    assert (ledger.limit(DEVICE, cautious=True), ledger.available(DEVICE, cautious=True)) == (800, 800)
    assert "usable now" not in ledger.table()


def test_booking_checks_the_whole_budget_even_while_cautious():
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, device_fraction=0.8)
    ledger.book(DEVICE, "param", 801)
    assert (ledger.available(DEVICE), ledger.available(DEVICE, cautious=False)) == (-1, 199)
    ledger.book(DEVICE, "param", 199)
    with pytest.raises(BudgetError, match=r"^device_budget is too small.*to at least 1001 bytes"):
        ledger.book(DEVICE, "param", 1)
    ledger.book(HOST, "param", 1000)


def test_a_limit_only_ever_gets_lower():
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, device_fraction=0.5)
    ledger.lower_limit(DEVICE, 600)
    ledger.lower_limit(DEVICE, 700)
    assert (ledger.budget(DEVICE), ledger.limit(DEVICE), ledger.limit(DEVICE, cautious=False)) == (1000, 300, 600)
    with pytest.raises(BudgetError, match="600 B"):
        ledger.book(DEVICE, "param", 601)


@pytest.mark.parametrize("fraction", [1.0, 0.8])
def test_the_advice_of_the_error_is_enough(fraction):
    with pytest.raises(BudgetError) as caught:
        Ledger({DEVICE: 1000, HOST: 0}, device_fraction=fraction).book(DEVICE, "param", 1500)
    advised = int(re.search(r"Raise device_budget to at least (\d+) bytes", str(caught.value)).group(1))
    Ledger({DEVICE: advised, HOST: 0}, device_fraction=fraction).book(DEVICE, "param", 1500)


def test_bytes_of_others_count_on_the_device_only():
    others = {"nbytes": 300, "asked": []}

    def measure(booked):
        others["asked"].append(booked)
        return others["nbytes"]

    ledger = Ledger({DEVICE: 1000, HOST: 1000}, measure)
    ledger.book(DEVICE, "param", 500)
    assert (ledger.available(DEVICE), ledger.used(DEVICE)) == (200, 500)
    assert others["asked"][-1] == 500
    assert ledger.available(HOST) == 1000
    with pytest.raises(BudgetError, match="201 B"):
        ledger.book(DEVICE, "param", 201)
    others["nbytes"] = 700
    assert ledger.available(DEVICE) == -200
    with pytest.raises(BudgetError, match=r"0 B \(0 bytes\) left.*to at least 1201 bytes"):
        ledger.book(DEVICE, "param", 1)


def test_the_caller_keeps_its_own_budgets():
    budgets = {DEVICE: 1000, HOST: 1000}
    ledger = Ledger(budgets, device_fraction=0.5)
    budgets[DEVICE] = 0
    assert (ledger.budget(DEVICE), ledger.limit(DEVICE)) == (1000, 500)


def test_a_chunk_budget_is_a_second_limit_of_the_device():
    others = {"nbytes": 0}
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, lambda booked: others["nbytes"], 0.8, chunk_budget=300)
    assert ledger.chunk_budget == 300
    assert [ledger.available(tier) for tier in Tier] == [300, 1000]
    ledger.book(DEVICE, "param", 200)
    assert ledger.available(DEVICE) == 100
    others["nbytes"] = 550
    assert (ledger.available(DEVICE), ledger.available(DEVICE, cautious=False)) == (50, 100)
    with pytest.raises(BudgetError, match=r"^chunk_budget is too small"):
        ledger.book(DEVICE, "param", 101)
    ledger.book(DEVICE, "param", 100)
    assert ("device", "chunk budget", "300 B") in {
        tuple(re.split(r"\s{2,}", row.strip())) for row in ledger.table().splitlines()
    }


def test_what_others_are_known_to_need_is_kept_free_for_them():
    others = {"nbytes": 100}
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, lambda booked: others["nbytes"])
    ledger.reserved_nbytes = 400
    assert (ledger.non_model_nbytes(), ledger.available(DEVICE), ledger.available(HOST)) == (400, 600, 1000)
    others["nbytes"] = 500
    assert (ledger.non_model_nbytes(), ledger.available(DEVICE)) == (500, 500)
    with pytest.raises(BudgetError):
        ledger.book(DEVICE, "param", 501)
    ledger.reserved_nbytes = others["nbytes"] = 0
    ledger.book(DEVICE, "param", 501)


def test_bytes_that_are_there_already_are_not_counted_twice():
    """What is booked after it was allocated was measured as somebody else's until then."""
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, lambda booked: 800 - booked)
    with pytest.raises(BudgetError):
        ledger.book(DEVICE, "param", 300)
    ledger.book(DEVICE, "param", 300, is_allocated=True)
    assert (ledger.used(DEVICE), ledger.available(DEVICE)) == (300, 200)


def test_peaks_of_chunks_and_others_together():
    others = {"nbytes": 100}
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, lambda booked: others["nbytes"])
    assert (ledger.total_peak, ledger.total_step_peak) == (0, 0)
    ledger.book(DEVICE, "param", 300)
    assert (ledger.total_peak, ledger.total_step_peak) == (400, 400)
    ledger.note_total(250)
    ledger.note_total(150)
    ledger.book(HOST, "param", 900)
    assert (ledger.total_peak, ledger.total_step_peak) == (550, 550)
    ledger.unbook(DEVICE, "param", 200)
    ledger.begin_step()
    assert (ledger.total_peak, ledger.total_step_peak) == (550, 100)
    ledger.reserved_nbytes = 300
    ledger.book(DEVICE, "param", 50)
    assert (ledger.total_peak, ledger.total_step_peak) == (550, 450)


def test_peaks_of_a_step_begin_with_what_is_booked_then():
    ledger = Ledger({DEVICE: 1000, HOST: 1000})
    ledger.book(DEVICE, "param", 700)
    ledger.book(HOST, "param", 600)
    ledger.unbook(DEVICE, "param", 500)
    assert [ledger.step_peak(tier) for tier in Tier] == [700, 600]
    ledger.begin_step()
    assert [ledger.step_peak(tier) for tier in Tier] == [200, 600]
    ledger.book(DEVICE, "param", 100)
    ledger.unbook(DEVICE, "param", 300)
    assert [ledger.step_peak(tier) for tier in Tier] == [300, 600]
    assert [ledger.peak(tier) for tier in Tier] == [700, 600]


def test_the_advice_names_the_setting_that_binds():
    ledger = Ledger({DEVICE: 1000, HOST: 0}, chunk_budget=100)
    with pytest.raises(BudgetError, match=r"^chunk_budget is .*\(100 bytes\) left of 100 B.*to at least 200 bytes"):
        ledger.book(DEVICE, "param", 200)
    ledger.reserved_nbytes = 950
    with pytest.raises(
        BudgetError, match=r"^device_budget and chunk_budget are .*device_budget to at least 1150 bytes"
    ):
        ledger.book(DEVICE, "param", 200)


def test_bytes_that_are_there_already_do_not_use_up_what_is_reserved():
    ledger = Ledger({DEVICE: 1000, HOST: 0}, lambda booked: max(300 - booked, 0))
    ledger.reserved_nbytes = 800
    with pytest.raises(BudgetError):
        ledger.book(DEVICE, "optimizer_state", 300, is_allocated=True)
    ledger.reserved_nbytes = 700
    ledger.book(DEVICE, "optimizer_state", 300, is_allocated=True)
    assert ledger.available(DEVICE) == 0


def test_bytes_change_their_owner_even_on_a_full_tier(ledger):
    ledger.book(DEVICE, "param", 1000)
    ledger.hand_over(DEVICE, "param", "pool", 400)
    assert ledger.owners(DEVICE) == {"param": 600, "pool": 400}
    assert (ledger.used(DEVICE), ledger.peak(DEVICE), ledger.owner_peaks(DEVICE).get("pool", 0)) == (1000, 1000, 400)
    with pytest.raises(ValueError, match="cannot hand over 401 bytes of 'pool' on device: 400 are booked"):
        ledger.hand_over(DEVICE, "pool", "param", 401)


class Counted:
    """What others take, and how often it was asked for."""

    def __init__(self, nbytes):
        self.nbytes, self.num_readings = nbytes, 0

    def __call__(self, booked):
        self.num_readings += 1
        return self.nbytes

    def readings(self):
        num, self.num_readings = self.num_readings, 0
        return num


def test_a_booking_measures_once():
    others = Counted(100)
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, others)
    ledger.book(DEVICE, "param", 300)
    assert (others.readings(), ledger.total_peak) == (1, 400)
    ledger.book(DEVICE, "own", 60, is_allocated=True)  # 60 of the 100
    assert (others.readings(), ledger.total_peak) == (1, 400)
    ledger.book(HOST, "param", 300)
    assert others.readings() == 0
    with pytest.raises(BudgetError, match=r"540 B \(540 bytes\) left"):
        ledger.book(DEVICE, "param", 541)


def test_inside_of_a_block_others_are_measured_once():
    others = Counted(100)
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, others)
    with ledger.one_reading():
        assert others.readings() == 0, "only when somebody asks"
        assert ledger.available(DEVICE) == 900
        others.nbytes = 150
        with ledger.one_reading():
            ledger.book(DEVICE, "param", 300)
        assert (ledger.available(DEVICE), ledger.non_model_nbytes()) == (600, 100)
        ledger.unbook(DEVICE, "param", 200)
        assert ledger.available(DEVICE) == 800
        assert others.readings() == 1
        ledger.read_again()
        assert [ledger.available(DEVICE), ledger.available(DEVICE)] == [750, 750]
        assert others.readings() == 1
    others.nbytes = 200
    assert [ledger.available(DEVICE), ledger.available(DEVICE)] == [700, 700]
    assert others.readings() == 2


def test_a_block_that_fails_is_over():
    others = Counted(100)
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, others)
    with pytest.raises(BudgetError), ledger.one_reading():
        ledger.book(DEVICE, "param", 901)
    others.nbytes = 0
    ledger.book(DEVICE, "param", 901)


def test_inside_of_a_block_what_is_there_already_is_measured_anew():
    """It was allocated after the reading, as somebody else's until it is booked."""
    allocated = [100]
    ledger = Ledger({DEVICE: 1000, HOST: 1000}, lambda booked: allocated[0] - booked)
    with ledger.one_reading():
        assert ledger.available(DEVICE) == 900
        allocated[0] += 300
        ledger.book(DEVICE, "own", 300, is_allocated=True)
        assert (ledger.available(DEVICE), ledger.non_model_nbytes(), ledger.total_peak) == (600, 100, 400)
