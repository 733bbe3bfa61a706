"""Gradients that leave through a ring of pinned memory, over simulated streams: the sums, the order, the room."""

import pytest
import torch
from support.race_detector import SimulatedDriver

from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.gradient_ring import LEAST_NBYTES, OWNER, GradientRing

CPU = torch.device("cpu")


class Parts:
    """A ring, and a list on the host."""

    def __init__(self, seed=None, most_nbytes=1024, host_nbytes=10**6):
        self.driver = SimulatedDriver(seed)
        self.streams = DeviceStreams(CPU, self.driver)
        self.ledger = Ledger({Tier.DEVICE: 10**6, Tier.HOST: host_nbytes})
        self.pool = PayloadPool(self.ledger, CPU, pinning=None)
        self.ring = GradientRing(self.pool, self.streams, most_nbytes)

    def make_list(self, numel):
        return self.pool.allocate(Tier.HOST, numel, torch.float32, "grad", zero=True)


@pytest.fixture(params=[None, 1, 2])
def parts(request):
    parts = Parts(request.param)
    with parts.driver.watching():
        yield parts


@pytest.mark.parametrize(("numel", "dtype"), [(1, torch.bfloat16), (100, torch.float32), (1000, torch.bfloat16)])
def test_sums_are_those_of_the_host(parts, dtype, numel):
    """Larger ones go in pieces: the ring holds 256 elements of fp32."""
    place = parts.make_list(numel)
    gradients = [torch.randn(numel, dtype=dtype) for _ in range(4)]
    assert parts.ring.open()
    for number, gradient in enumerate(gradients):
        tickets = list(parts.ring.add(gradient, place, is_first=number == 0))
        assert len(tickets) == -(-numel * dtype.itemsize // 256)
    tickets[-1].wait()
    expected = gradients[0].float()
    for gradient in gradients[1:]:
        expected.add_(gradient)
    assert torch.equal(place, expected)
    place, gradient = parts.make_list(24).view(4, 6).t(), torch.randn(4, 6).t()
    list(parts.ring.add(gradient, place, is_first=True))[-1].wait()
    assert torch.equal(place, gradient), "in any dense order in memory"


def test_the_host_goes_on_until_the_ring_is_full():
    parts = Parts()
    place = parts.make_list(1000)
    parts.ring.open()
    tickets = []
    for _ in range(4):
        tickets += parts.ring.add(torch.ones(64), place[:64], is_first=False)
    assert not any(ticket.is_done for ticket in tickets)
    tickets += parts.ring.add(torch.ones(64), place[:64], is_first=False)
    assert [ticket.is_done for ticket in tickets] == [True, False, False, False, False]
    parts.ring.close()
    assert all(ticket.is_done for ticket in tickets)
    assert place[:64].tolist() == [5] * 64


@pytest.mark.parametrize(("free", "taken"), [(4 * LEAST_NBYTES, LEAST_NBYTES), (4 * LEAST_NBYTES - 256, 0)])
def test_it_takes_a_part_of_what_is_free_and_gives_it_back(free, taken):
    parts = Parts(most_nbytes=10**6, host_nbytes=free)
    assert parts.ring.open() is (taken > 0)
    assert parts.ring.open() is (taken > 0)
    assert parts.ledger.owners(Tier.HOST).get(OWNER, 0) == taken
    parts.ring.close()
    parts.ring.close()
    assert parts.ledger.owners(Tier.HOST).get(OWNER, 0) == 0
