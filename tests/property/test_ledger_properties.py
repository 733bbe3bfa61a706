import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier

OWNERS = ("param", "master", "exp_avg")
tiers = st.sampled_from(Tier)
owners = st.sampled_from(OWNERS)
sizes = st.integers(0, 400)


class LedgerMachine(RuleBasedStateMachine):
    """A ledger beside a dictionary that says what should be in it."""

    @initialize(
        device=st.integers(0, 1000),
        host=st.integers(0, 1000),
        disk=st.none() | st.integers(0, 1000),
        fraction=st.sampled_from([1.0, 0.8, 0.5]),
        chunk_budget=st.none() | st.integers(0, 1000),
    )
    def start(self, device, host, disk, fraction, chunk_budget):
        self.others = self.reserved = 0
        self.cautious = True
        given = {Tier.DEVICE: device, Tier.HOST: host, **({} if disk is None else {Tier.DISK: disk})}
        self.ledger = Ledger(given, lambda booked: self.others, fraction, chunk_budget=chunk_budget)
        self.budgets = {Tier.DISK: 0, **given}
        self.fractions = {Tier.DEVICE: fraction, Tier.HOST: 1.0, Tier.DISK: 1.0}
        self.chunk_budget = chunk_budget
        self.booked = {(tier, owner): 0 for tier in Tier for owner in OWNERS}
        self.peaks = dict.fromkeys(self.booked, 0)
        self.tier_peaks = dict.fromkeys(Tier, 0)
        self.step_peaks = dict.fromkeys(Tier, 0)
        self.total_peak = self.total_step_peak = 0

    def used(self, tier):
        return sum(nbytes for (where, _), nbytes in self.booked.items() if where is tier)

    def limit(self, tier, cautious):
        return int(self.budgets[tier] * self.fractions[tier]) if cautious else self.budgets[tier]

    def available(self, tier, cautious):
        free = self.limit(tier, cautious) - self.used(tier)
        if tier is not Tier.DEVICE:
            return free
        free -= max(self.others, self.reserved)
        return free if self.chunk_budget is None else min(free, self.chunk_budget - self.used(tier))

    def scarce(self, tier):
        """The setting that leaves the least room."""
        if tier is not Tier.DEVICE or self.chunk_budget is None:
            return f"{tier.value}_budget"
        of_device = self.budgets[tier] - max(self.others, self.reserved)
        return "chunk_budget" if self.chunk_budget <= of_device else "device_budget"

    def note_total(self, others):
        total = self.used(Tier.DEVICE) + others
        self.total_peak = max(self.total_peak, total)
        self.total_step_peak = max(self.total_step_peak, total)

    @rule(tier=tiers, owner=owners, nbytes=sizes)
    def book(self, tier, owner, nbytes):
        if nbytes > max(self.available(tier, cautious=False), 0):
            with pytest.raises(BudgetError, match=rf"^(\w+ and )?{self.scarce(tier)}( and \w+)? (is|are) too small"):
                self.ledger.book(tier, owner, nbytes)
            return
        self.ledger.book(tier, owner, nbytes)
        self.booked[tier, owner] += nbytes
        self.peaks[tier, owner] = max(self.peaks[tier, owner], self.booked[tier, owner])
        self.tier_peaks[tier] = max(self.tier_peaks[tier], self.used(tier))
        self.step_peaks[tier] = max(self.step_peaks[tier], self.used(tier))
        if tier is Tier.DEVICE:
            self.note_total(max(self.others, self.reserved))

    @rule(tier=tiers, owner=owners, nbytes=sizes)
    def unbook(self, tier, owner, nbytes):
        if nbytes > self.booked[tier, owner]:
            with pytest.raises(ValueError, match=f"cannot unbook {nbytes} bytes"):
                self.ledger.unbook(tier, owner, nbytes)
            return
        self.ledger.unbook(tier, owner, nbytes)
        self.booked[tier, owner] -= nbytes

    @rule(nbytes=sizes)
    def others_grow_or_shrink(self, nbytes):
        self.others = nbytes

    @rule(nbytes=sizes)
    def something_is_reserved(self, nbytes):
        self.ledger.reserved_nbytes = self.reserved = nbytes

    @rule(cautious=st.booleans())
    def becomes_cautious_or_bold(self, cautious):
        self.ledger.is_cautious = self.cautious = cautious

    @rule(nbytes=sizes)
    def others_were_seen(self, nbytes):
        self.ledger.note_total(nbytes)
        self.note_total(nbytes)

    @rule()
    def a_step_begins(self):
        self.ledger.begin_step()
        self.step_peaks = {tier: self.used(tier) for tier in Tier}
        self.total_step_peak = self.used(Tier.DEVICE)

    @invariant()
    def book_is_right(self):
        for tier in Tier:
            assert self.ledger.used(tier) == self.used(tier) <= self.budgets[tier] == self.ledger.budget(tier)
            for asked, cautious in ((None, self.cautious), (True, True), (False, False)):
                assert self.ledger.limit(tier, cautious=asked) == self.limit(tier, cautious)
                assert self.ledger.available(tier, cautious=asked) == self.available(tier, cautious)
            now = {owner: self.booked[tier, owner] for owner in OWNERS if self.booked[tier, owner]}
            assert self.ledger.owners(tier) == now

    @invariant()
    def a_disk_is_there_if_it_has_a_budget(self):
        assert self.ledger.tiers == [Tier.DEVICE, Tier.HOST, *([Tier.DISK] if self.budgets[Tier.DISK] else [])]

    @invariant()
    def peaks_are_the_running_maximum(self):
        assert (self.ledger.total_peak, self.ledger.total_step_peak) == (self.total_peak, self.total_step_peak)
        for tier in Tier:
            assert self.ledger.peak(tier) == self.tier_peaks[tier] >= self.used(tier)
            assert self.ledger.step_peak(tier) == self.step_peaks[tier] >= self.used(tier)
            for owner in OWNERS:
                assert self.ledger.owner_peaks(tier).get(owner, 0) == self.peaks[tier, owner]


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(deadline=None, max_examples=60, stateful_step_count=30, database=None, derandomize=True)
