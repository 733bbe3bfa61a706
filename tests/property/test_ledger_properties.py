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

    @initialize(device=st.integers(0, 1000), host=st.integers(0, 1000), fraction=st.sampled_from([1.0, 0.8, 0.5]))
    def start(self, device, host, fraction):
        self.others = 0
        self.ledger = Ledger({Tier.DEVICE: device, Tier.HOST: host}, lambda booked: self.others, fraction)
        self.limits = {Tier.DEVICE: int(device * fraction), Tier.HOST: host}
        self.booked = {(tier, owner): 0 for tier in Tier for owner in OWNERS}
        self.peaks = dict.fromkeys(self.booked, 0)
        self.tier_peaks = dict.fromkeys(Tier, 0)

    def used(self, tier):
        return sum(nbytes for (where, _), nbytes in self.booked.items() if where is tier)

    def available(self, tier):
        return self.limits[tier] - self.used(tier) - (self.others if tier is Tier.DEVICE else 0)

    @rule(tier=tiers, owner=owners, nbytes=sizes)
    def book(self, tier, owner, nbytes):
        if nbytes > max(self.available(tier), 0):
            with pytest.raises(BudgetError, match=f"{tier.value}_budget exceeded"):
                self.ledger.book(tier, owner, nbytes)
            return
        self.ledger.book(tier, owner, nbytes)
        self.booked[tier, owner] += nbytes
        self.peaks[tier, owner] = max(self.peaks[tier, owner], self.booked[tier, owner])
        self.tier_peaks[tier] = max(self.tier_peaks[tier], self.used(tier))

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

    @invariant()
    def book_is_right(self):
        for tier in Tier:
            assert self.ledger.used(tier) == self.used(tier) <= self.ledger.limit(tier) == self.limits[tier]
            assert self.ledger.available(tier) == self.available(tier)
            now = {owner: self.booked[tier, owner] for owner in OWNERS if self.booked[tier, owner]}
            assert self.ledger.owners(tier) == now

    @invariant()
    def peaks_are_the_running_maximum(self):
        for tier in Tier:
            assert self.ledger.peak(tier) == self.tier_peaks[tier] >= self.used(tier)
            for owner in OWNERS:
                assert self.ledger.owner_peak(tier, owner) == self.peaks[tier, owner]


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(deadline=None, max_examples=60, stateful_step_count=30, database=None, derandomize=True)
