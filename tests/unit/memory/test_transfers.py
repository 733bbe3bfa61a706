import pytest
import torch

from hf_patrickstar.memory.transfers import Ticket, Transfers


@pytest.fixture
def transfers():
    return Transfers(torch.device("cpu"))


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_bits_and_is_complete(transfers, direction, dtype):
    source = torch.randn(3, 5).to(dtype)
    target = torch.full((3, 5), float("nan"), dtype=dtype)
    assert getattr(transfers, direction)(source, target) is None
    assert torch.equal(source, target)
    assert source.data_ptr() != target.data_ptr()


def test_copies_into_a_view_and_nothing_beside_it(transfers):
    payload = torch.zeros(10)
    transfers.to_host(torch.ones(2, 3), payload.as_strided((2, 3), (3, 1), 2))
    assert payload.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]


def test_copies_from_a_transposed_gradient(transfers):
    source, target = torch.randn(4, 3).t(), torch.zeros(3, 4)
    transfers.to_host(source, target)
    assert torch.equal(source, target)


def test_shapes_must_agree(transfers):
    with pytest.raises(RuntimeError, match="size"):
        transfers.to_device(torch.zeros(4), torch.zeros(3))


class FakeEvent:
    def __init__(self):
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1


def test_a_ticket_waits_for_its_event():
    event = FakeEvent()
    Ticket(event).wait()
    assert event.num_waits == 1


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_there_and_back_on_a_gpu(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    transfers = Transfers(device)
    source = torch.randn(1000, pin_memory=pinned)
    on_device, back = torch.zeros(1000, device=device), torch.zeros(1000, pin_memory=pinned)
    transfers.to_device(source, on_device)
    ticket = transfers.to_host(on_device * 2, back)
    assert (ticket is not None) == pinned
    if ticket is not None:
        ticket.wait()
    assert torch.equal(back, source * 2)
