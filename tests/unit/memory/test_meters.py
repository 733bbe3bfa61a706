import contextlib
import gc
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_patrickstar.memory import meters
from hf_patrickstar.memory.accelerator import used_nbytes
from hf_patrickstar.memory.meters import AllocatorMeter, Meter, StorageMeter
from hf_patrickstar.memory.operators import unseen

pytestmark = pytest.mark.own_streams  # which modes of operators there are

CUDA = torch.device("cuda", 0)
KIB = 1024


def make_meter(owned=(), on_growth=lambda: None):
    return StorageMeter(lambda key: key in owned, on_growth)


@contextlib.contextmanager
def measuring(meter, present=()):
    meter.start(present)
    meter.restart()
    try:
        yield meter
    finally:
        meter.stop()


@pytest.fixture(autouse=True)
def _no_mode_is_left_behind():
    yield
    assert _get_current_dispatch_mode_stack() == []


def kib(numel=1):
    """A tensor of so many KiB that an operator makes."""
    return torch.zeros(numel * KIB // 4)


# What counts


def test_results_count_until_they_are_freed():
    with measuring(make_meter()) as meter:
        first, second = kib(2), kib(3)
        assert meter.live(0) == meter.live(12345) == 5 * KIB
        del first
        assert (meter.live(0), meter.peak(0)) == (3 * KIB, 5 * KIB)
        meter.restart()
        assert meter.peak(0) == 3 * KIB
        del second
        assert (meter.live(0), meter.peak(0)) == (0, 3 * KIB)


def test_views_and_results_in_place_count_once():
    with measuring(make_meter()) as meter:
        base = kib(4)
        views = [base[:10], base.view(2, -1), base.t(), base.detach(), base.add_(1), torch.relu_(base)]
        assert meter.live(0) == 4 * KIB
        del base
        assert meter.live(0) == 4 * KIB, "views keep the storage"
        del views
        assert meter.live(0) == 0


def test_a_view_of_what_was_there_before_counts_its_whole_storage_once():
    base = kib(4)
    with measuring(make_meter()) as meter:
        views = [base[:1], base[1:2]]
        assert meter.live(0) == 4 * KIB
        del views
        assert meter.live(0) == 4 * KIB
        del base
        assert meter.live(0) == 0


@pytest.mark.parametrize("make", [lambda: kib(4).chunk(4), lambda: torch.unbind(kib(4)[:4])])
def test_results_in_sequences_are_found(make):
    with measuring(make_meter()) as meter:
        pieces = make()
        assert meter.live(0) == 4 * KIB
        del pieces
        assert meter.live(0) == 0


def test_every_one_of_several_results_counts():
    with measuring(make_meter()) as meter:
        values, indices = kib(1).sort()
        assert meter.live(0) == values.nbytes + indices.nbytes
        results = torch._foreach_add([values, values], 1.0)
        assert meter.live(0) == values.nbytes + indices.nbytes + sum(result.nbytes for result in results)


def test_temporaries_between_two_operators_make_the_peak():
    with measuring(make_meter()) as meter:
        (kib(1) + kib(2).sum()).sum()
        assert meter.live(0) < KIB
        assert 3 * KIB <= meter.peak(0) < 5 * KIB


def test_what_is_given_at_the_start_counts_until_it_is_freed():
    batch, other = kib(2), kib(1)
    with measuring(make_meter()) as meter:
        meter.start([batch, batch[1:], other])
        assert meter.live(0) == 3 * KIB
        meter.restart()
        assert meter.peak(0) == 3 * KIB
        del batch
        assert meter.live(0) == KIB


def test_storages_of_the_pool_never_count():
    pool = kib(4)
    with measuring(make_meter({pool.untyped_storage()._cdata}), [pool]) as meter:
        view = pool[:16].view(4, 4)
        pool.add_(1)
        assert meter.live(0) == 0
        result = view * 2
        assert meter.live(0) == result.nbytes


SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def sparse(dense, layout):
    return dense.to_sparse(layout=layout, blocksize=(2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None)


def storage_nbytes(tensor):
    """Bytes of the indices and values of a sparse tensor."""
    return sum(getattr(tensor, name)().untyped_storage().nbytes() for name in SPARSE[tensor.layout])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_sparse_results_count_by_their_indices_and_values(layout):
    base, other = sparse(torch.eye(64), layout).clone(), kib(1)  # a clone has no more storage than it needs
    nbytes = storage_nbytes(base)
    assert nbytes >= 64 * (8 + 4), "a column and a value for each entry"
    with measuring(make_meter()) as meter:
        result = base.clone()
        assert meter.live(0) == nbytes
        other.add_(1)
        assert meter.live(0) == nbytes + KIB
        view = result.detach()
        assert meter.live(0) == nbytes + KIB, "indices and values are the same"
        del result
        assert meter.live(0) == nbytes + KIB
        del view
        assert meter.live(0) == KIB


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_sparse_inputs_that_are_given_at_the_start_count(layout):
    batch = sparse(torch.eye(64), layout)
    nbytes = storage_nbytes(batch)
    with measuring(make_meter()) as meter:
        meter.start([batch])
        assert meter.live(0) == nbytes
        del batch
        assert meter.live(0) == 0


def test_a_sparse_gradient_of_an_embedding_counts():
    """It is not coalesced: one row for each lookup; its indices are those that were given."""
    table, ids = torch.nn.Embedding(100, 8, sparse=True), torch.arange(64)
    with measuring(make_meter()) as meter:
        table(ids).sum().backward()
        assert not table.weight.grad.is_coalesced()
        before = meter.live(0)
        table.weight.grad = None
        assert before - meter.live(0) >= 64 * 8 * 4


def test_an_address_that_is_used_again_counts_again():
    with measuring(make_meter()) as meter:
        for _ in range(50):
            tensor = kib(1)
            assert meter.live(0) == KIB
            del tensor
            assert meter.live(0) == 0


# Autograd


def make_net():
    """1 KiB of weights, and of activations for 16 rows."""
    return torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Tanh())


def test_activations_that_autograd_keeps_count_until_backward_is_through():
    net, inputs = make_net(), torch.randn(16, 16)
    net.requires_grad_(False)
    inputs.requires_grad_()
    with measuring(make_meter({weight.untyped_storage()._cdata for weight in net.parameters()}), [inputs]) as meter:
        loss = net(inputs).sum()
        held = meter.live(0)
        assert held == inputs.nbytes + KIB + loss.nbytes, "the input and what tanh saved"
        loss.backward()
        assert meter.live(0) == inputs.nbytes + inputs.grad.nbytes + loss.nbytes
        assert meter.peak(0) > held, "gradients between operators"


def test_gradients_of_parameters_count():
    net, inputs = make_net(), torch.randn(16, 16)
    with measuring(make_meter({weight.untyped_storage()._cdata for weight in net.parameters()}), [inputs]) as meter:
        net(inputs).sum().backward()
        assert meter.live(0) == inputs.nbytes + net[0].weight.grad.nbytes
        net.zero_grad()
        assert meter.live(0) == inputs.nbytes


def test_backward_is_followed_and_growth_is_told_in_it():
    sizes = []
    meter = make_meter(on_growth=lambda: sizes.append(meter.live(0)))
    net, inputs = make_net(), torch.randn(16, 16)
    with measuring(meter):
        loss = net(inputs).sum()
        num_forward = len(sizes)
        loss.backward()
    assert num_forward > 0
    assert len(sizes) > num_forward


# On and off


def test_pause_leaves_the_mode_but_follows_nothing():
    meter = make_meter()
    meter.start(())
    kept = kib(1)
    meter.pause()
    unseen = kib(2)
    assert len(_get_current_dispatch_mode_stack()) == 1
    assert (meter.live(0), meter.peak(0)) == (KIB, KIB)
    del kept
    assert meter.live(0) == 0, "what is known stays known until it is freed"
    meter.start(())
    assert len(_get_current_dispatch_mode_stack()) == 1, "the same one"
    seen = kib(3)
    assert meter.live(0) == 3 * KIB
    meter.stop()
    assert _get_current_dispatch_mode_stack() == []
    unseen_either = kib(1)
    assert meter.live(0) == 3 * KIB
    del unseen, seen, unseen_either
    assert meter.live(0) == 0


def test_pausing_inside_backward_and_stopping_after_it():
    """A hook on a parameter cannot take the mode off: backward put the thread's modes there."""
    net, inputs = make_net(), torch.randn(16, 16)
    meter = make_meter()
    net[0].weight.register_post_accumulate_grad_hook(lambda _: meter.pause())
    meter.start(())
    net(inputs).sum().backward()
    before = meter.live(0)
    unseen = kib(4)
    assert meter.live(0) == before
    assert len(_get_current_dispatch_mode_stack()) == 1
    meter.stop()
    assert _get_current_dispatch_mode_stack() == []
    del unseen


def test_stopping_twice_or_without_start_does_no_harm():
    meter = make_meter()
    meter.stop()
    meter.start(())
    meter.stop()
    meter.stop()
    meter.pause()


def test_growth_is_told_after_every_operator_that_adds_to_the_total():
    seen = []
    meter = make_meter(on_growth=lambda: seen.append((meter.live(0), meter.peak(0))))
    with measuring(meter):
        tensor = kib(1)
        tensor.add_(1)
        tensor[:3]
        another = kib(2)
        del tensor, another
    assert seen == [(KIB, KIB), (3 * KIB, 3 * KIB)]


def test_what_is_done_about_growth_is_not_measured():
    kept = []
    meter = make_meter(on_growth=lambda: kept.append(kib(8)))
    with measuring(meter):
        tensor = kib(1)
        assert len(kept) == 1
        assert (meter.live(0), meter.peak(0)) == (KIB, KIB)
        another = kib(1)
        assert meter.live(0) == 2 * KIB, "measured again afterwards"
    del tensor, another


def test_a_failure_about_growth_goes_through_and_ends_the_measurement():
    calls = []

    def fail():
        calls.append(1)
        raise MemoryError("too small")

    meter = make_meter(on_growth=fail)
    meter.start(())
    with pytest.raises(MemoryError, match="too small"):
        kib(1)
    kept = kib(2)
    assert len(calls) == 1, "nobody is told twice"
    assert meter.live(0) == 0
    meter.stop()
    assert _get_current_dispatch_mode_stack() == []
    del kept


def test_a_failure_inside_backward_goes_through():
    armed = []

    def fail():
        if armed:
            raise MemoryError("too small")

    meter, inputs = make_meter(on_growth=fail), torch.randn(16, 16)
    with measuring(meter):
        loss = make_net()(inputs).sum()
        armed.append(1)
        with pytest.raises(MemoryError, match="too small"):
            loss.backward()
    assert _get_current_dispatch_mode_stack() == []


def test_a_meter_that_is_gone_is_not_told_of_freed_storages():
    meter = make_meter()
    with measuring(meter):
        tensor = kib(1)
    del meter
    gc.collect()
    del tensor


# Beside the modes of users


class Counting(TorchDispatchMode):
    """Somebody's own dispatch mode."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_it_goes_below_the_mode_of_another_and_stays_when_that_goes():
    """The user's mode comes off when its block ends, before the backward: it takes what is on top off."""
    meter = make_meter()
    with Counting() as other:
        with unseen():
            meter.start(())
            hidden = kib(1)
        assert (meter.live(0), other.count) == (KIB, 0)
        assert _get_current_dispatch_mode_stack()[-1] is other
        tensor = kib(1)
        assert (meter.live(0), other.count) == (2 * KIB, 1)
    assert len(_get_current_dispatch_mode_stack()) == 1
    another = kib(1)
    assert (meter.live(0), other.count) == (3 * KIB, 1)
    with Counting() as other:
        with unseen():
            meter.stop()
        assert _get_current_dispatch_mode_stack() == [other]
    del hidden, tensor, another


def test_a_mode_that_came_later_is_not_taken_off():
    meter = make_meter()
    meter.start(())
    with Counting() as other:
        meter.stop()
        assert _get_current_dispatch_mode_stack()[-1] is other
        kept = kib(1)
        assert (meter.live(0), other.count) == (0, 1)
    meter.stop()
    assert _get_current_dispatch_mode_stack() == []
    del kept


def test_the_mode_of_a_meter_that_is_gone_is_taken_off():
    """So it is with that of an engine that was dropped between backward and step."""
    first, second = make_meter(), make_meter()
    first.start(())
    second.start(())
    kept = kib(1)
    assert second.live(0) == 1024
    second.stop()
    first.pause()
    del first
    gc.collect()
    assert len(_get_current_dispatch_mode_stack()) == 1
    second.start(())
    assert len(_get_current_dispatch_mode_stack()) == 1
    second.stop()
    assert _get_current_dispatch_mode_stack() == []
    del kept


# Without measurement, and on CUDA


def test_a_tier_that_nobody_measures():
    meter = Meter()
    meter.start([kib(1)])
    kept = kib(4)
    assert _get_current_dispatch_mode_stack() == []
    assert (meter.live(0), meter.peak(0), meter.live(10**9), meter.peak(10**9)) == (0, 0, 0, 0)
    meter.restart()
    meter.pause()
    meter.stop()
    assert (meter.live(0), meter.peak(0)) == (0, 0)
    del kept


@pytest.fixture
def gpu(monkeypatch):
    """A device of 1000 bytes: 400 free, 250 held by torch, of which 200 are allocated, 220 at the peak."""
    state = types.SimpleNamespace(free=400, total=1000, reserved=250, allocated=200, peak=220, resets=0)

    def reset(device):
        state.resets += 1
        state.peak = state.allocated

    for name, function in {
        "get_memory_info": lambda device: (state.free, state.total),
        "memory_reserved": lambda device: state.reserved,
        "reset_peak_memory_stats": reset,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    for name, function in {
        "memory_stats_as_nested_dict": lambda device: {
            "allocated_bytes": {"all": {"current": state.allocated, "peak": state.peak}}
        },
        "get_device_properties": lambda device: types.SimpleNamespace(uuid="1234"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return state


def make_nvml(used, *, error=None):
    """A stand-in for pynvml."""
    nvml = types.ModuleType("pynvml")

    def find(uuid):
        if error is not None:
            raise error
        assert uuid == "GPU-1234"
        return "handle"

    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = find
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=used)
    return nvml


def test_without_nvml_the_driver_says_what_is_taken(gpu):
    ask = used_nbytes(CUDA)
    assert ask() == 1000 - 400
    gpu.free = 100
    assert ask() == 900


def test_nvml_is_asked_if_it_is_there(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(used=640))
    assert used_nbytes(CUDA)() == 640


def test_nvml_without_rights_is_passed_over(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(used=640, error=PermissionError("no")))
    assert used_nbytes(CUDA)() == 600


@pytest.mark.parametrize(("booked", "live", "peak"), [(150, 50, 70), (210, 0, 10), (500, 0, 0)])
def test_the_allocator_beyond_the_book(gpu, booked, live, peak):
    meter = AllocatorMeter(CUDA)
    assert (meter.live(booked), meter.peak(booked)) == (live, peak)


def test_restarting_forgets_the_peak_of_the_allocator(gpu):
    meter = AllocatorMeter(CUDA)
    meter.restart()
    assert gpu.resets == 1
    assert meter.peak(150) == meter.live(150) == 50


@pytest.fixture
def clock(monkeypatch):
    """The time of the meter, in seconds; it stands still until a test changes it."""
    state = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(meters, "time", types.SimpleNamespace(monotonic=lambda: state.now))
    return state


def test_what_others_took_since_the_beginning_counts_from_the_next_start(gpu, clock):
    meter = AllocatorMeter(CUDA)
    clock.now += 1
    gpu.free -= 30
    assert meter.live(150) == 50
    meter.start(())
    assert (meter.live(150), meter.peak(150), meter.live(500)) == (80, 100, 30)
    gpu.free += 100
    clock.now += 1
    meter.start(())
    assert (meter.live(150), meter.peak(150)) == (50, 70), "what they gave back is no gain"
    meter.pause()
    meter.stop()
    assert _get_current_dispatch_mode_stack() == []


def test_others_are_asked_for_at_most_once_a_second(gpu, clock):
    meter = AllocatorMeter(CUDA)
    gpu.free -= 30
    clock.now += 0.5
    meter.start(())
    assert meter.live(200) == 0
    clock.now += 0.5
    meter.start(())
    assert meter.live(200) == 30


def test_what_is_there_before_a_step_is_its_floor(gpu):
    assert AllocatorMeter(CUDA).floor(150) == 1024 * 1024
    assert AllocatorMeter(CUDA).floor(200) == 0
    assert make_meter().floor(0) == 0


@pytest.mark.gpu
def test_a_real_device():
    device = torch.device("cuda", torch.cuda.current_device())
    meter = AllocatorMeter(device)
    booked = torch.cuda.memory_allocated(device)
    meter.start(())
    growth = meter.live(booked)
    meter.restart()
    tensor = torch.zeros(2**20, device=device)
    assert meter.live(booked) == growth + tensor.nbytes
    del tensor
    assert (meter.live(booked), meter.peak(booked)) == (growth, growth + 2**22)
    assert 0 < used_nbytes(device)() <= torch.cuda.mem_get_info(device)[1]
