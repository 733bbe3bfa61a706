import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier

CPU = torch.device("cpu")
LIMIT = 2000


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the list of buffers that are out."""

    def __init__(self):
        super().__init__()
        self.pool = PayloadPool(Ledger(dict.fromkeys(Tier, LIMIT)), CPU, pinning=None)
        self.out = []

    def live(self, tier):
        return sum(buffer.numel() * buffer.dtype.itemsize for where, buffer in self.out if where is tier)

    @rule(
        tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
        numel=st.sampled_from([100, 200, 300]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        zero=st.booleans(),
    )
    def allocate(self, tier, numel, dtype, zero):
        nbytes = numel * dtype.itemsize
        if self.live(tier) + nbytes > LIMIT:
            with pytest.raises(BudgetError):
                self.pool.allocate(tier, numel, dtype, "param", zero=zero)
            return
        buffer = self.pool.allocate(tier, numel, dtype, "param", zero=zero)
        assert (buffer.shape, buffer.dtype) == ((numel,), dtype)
        assert not zero or not buffer.any()
        self.out.append((tier, buffer.fill_(len(self.out) + 1)))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), keep=st.sampled_from([True, True, False]))
    def release(self, data, keep):
        tier, buffer = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.pool.release(tier, buffer, "param", keep=keep)

    @rule()
    def trim(self):
        self.pool.trim()
        assert self.pool.ledger.used(Tier.DEVICE) == self.live(Tier.DEVICE)

    @invariant()
    def every_byte_is_booked(self):
        for tier in Tier:
            assert self.pool.ledger.owners(tier).get("param", 0) == self.live(tier)
            assert self.pool.room(tier) == LIMIT - self.live(tier)
            assert self.live(tier) <= self.pool.ledger.used(tier) <= LIMIT

    @invariant()
    def no_two_buffers_share_memory(self):
        addresses = [buffer.data_ptr() for _, buffer in self.out]
        assert len(set(addresses)) == len(addresses)
        for _, buffer in self.out:
            assert buffer.min() == buffer.max()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=100, stateful_step_count=30, database=None, derandomize=True)
