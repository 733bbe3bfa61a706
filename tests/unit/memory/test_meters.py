"""What counts as non-model data: on the CPU tier every storage that an operator makes, on CUDA what allocators say."""

import contextlib
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_patrickstar.memory import meters
from hf_patrickstar.memory.compute_device import used_nbytes
from hf_patrickstar.memory.meters import AllocatorMeter, StorageMeter
from hf_patrickstar.units import MIB

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


def modes():
    return _get_current_dispatch_mode_stack()


@pytest.fixture(autouse=True)
def _no_mode_is_left_behind():
    yield
    assert modes() == []


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
        for _ in range(20):  # at addresses that are used again
            tensor = kib(1)
            assert meter.live(0) == KIB
            del tensor
            assert meter.live(0) == 0


@pytest.mark.parametrize("is_new", [True, False])
def test_a_storage_counts_once_and_whole_as_long_as_a_view_keeps_it(is_new):
    base = None if is_new else kib(4)
    with measuring(make_meter()) as meter:
        base = kib(4) if is_new else base
        views = [base[:10], base.view(2, -1), base.t(), base.detach(), base.add_(1), torch.relu_(base)]
        del base
        assert meter.live(0) == 4 * KIB
        del views
        assert meter.live(0) == 0


SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_sparse_tensors_count_by_their_indices_and_values(layout):
    blocks = (2, 2) if layout is torch.sparse_bsc else None
    base = torch.eye(64).to_sparse(layout=layout, blocksize=blocks).clone()  # a clone has no more storage than it needs
    nbytes = sum(getattr(base, name)().untyped_storage().nbytes() for name in SPARSE[layout])
    with measuring(make_meter()) as meter:
        result = base.clone()
        view = result.detach()
        assert meter.live(0) == nbytes >= 64 * (8 + 4), "a column and a value for each entry"
        del result
        assert meter.live(0) == nbytes, "indices and values are the same"
        del view
        meter.start([base])
        assert meter.live(0) == nbytes
        del base
        assert meter.live(0) == 0


def test_all_that_an_operator_returns_counts():
    meter, rows = make_meter(), torch.ones(4, KIB)
    with measuring(meter):
        kept = torch.var_mean(rows, 0), torch._foreach_add([rows, rows], 1.0)
        assert meter.live(0) == (2 * 4 + 2 * 16) * KIB
    del kept


# Autograd


def make_net():
    """1 KiB of weights, and of activations for 16 rows."""
    return torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Tanh())


# On and off


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_failure_about_growth_goes_through_and_ends_the_measurement(fails_in):
    net, inputs, armed = make_net(), torch.randn(16, 16), []

    def fail():
        if armed:
            raise MemoryError("too small")

    with measuring(make_meter(on_growth=fail)) as meter:
        loss = net(inputs).sum()
        armed.append(1)
        with pytest.raises(MemoryError, match="too small"):
            loss.backward() if fails_in == "backward" else net(inputs)
        kept, before = kib(2), meter.live(0)
        assert before < 4 * KIB, "nobody is told twice"
    del kept


# On CUDA


@pytest.fixture
def gpu(monkeypatch):
    """A device of 1000 bytes: 400 free, 250 held by torch, of which 200 are allocated, 220 at the peak."""
    state = types.SimpleNamespace(free=400, total=1000, reserved=250, allocated=200, peak=220, now=100.0)
    stats = {"allocated_bytes": {"all": {"current": 0, "peak": 0}}}

    def nested(device):
        stats["allocated_bytes"]["all"].update(current=state.allocated, peak=state.peak)
        return stats

    def reset(device):
        state.peak = state.allocated

    for owner, name, function in (
        (torch.accelerator, "get_memory_info", lambda device: (state.free, state.total)),
        (torch.accelerator, "memory_reserved", lambda device: state.reserved),
        (torch.accelerator, "reset_peak_memory_stats", reset),
        (torch.cuda, "memory_stats_as_nested_dict", nested),
        (torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234")),
        (meters, "time", types.SimpleNamespace(monotonic=lambda: state.now)),
    ):
        monkeypatch.setattr(owner, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return state


@pytest.mark.parametrize(("error", "nbytes"), [(None, 640), (PermissionError("no"), 600)])
def test_nvml_is_asked_where_it_is_there_and_the_driver_else(gpu, monkeypatch, error, nbytes):
    def find(uuid):
        if error is not None:
            raise error
        assert uuid == "GPU-1234"

    assert used_nbytes(CUDA)() == 1000 - 400, "there is no NVML"
    used = types.SimpleNamespace(used=640)
    nvml = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": find, "nvmlDeviceGetMemoryInfo": lambda _: used}
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**nvml))
    assert used_nbytes(CUDA)() == nbytes


def test_what_the_allocator_has_beyond_the_book(gpu):
    meter = AllocatorMeter(CUDA)
    found = [(meter.live(booked), meter.peak(booked)) for booked in (150, 210, 500)]
    assert found == [(50, 70), (0, 10), (0, 0)]
    assert (meter.floor(150), meter.floor(200)) == (52, 0), "rounded up, but to no more than an eighth more"
    meter.restart()
    assert meter.peak(150) == meter.live(150) == 50


def test_whole_mib_are_there_before_a_step_on_a_large_device(gpu, monkeypatch):
    meter = AllocatorMeter(CUDA)
    monkeypatch.setattr(meter, "live", lambda booked: 100 * MIB + 1 - booked)
    assert [meter.floor(booked) for booked in (0, 1, 2)] == [101 * MIB, 100 * MIB, 100 * MIB]


def test_what_other_programs_took_counts_from_the_next_start_and_is_asked_once_a_second(gpu):
    meter = AllocatorMeter(CUDA)
    gpu.free -= 30
    for seconds, live in ((0.5, 50), (0.5, 80)):
        gpu.now += seconds
        meter.start(())
        assert meter.live(150) == live
    assert (meter.peak(150), meter.live(500)) == (100, 30)
    gpu.free += 100
    gpu.now += 1
    meter.start(())
    assert (meter.live(150), meter.peak(150)) == (50, 70), "what they gave back is no gain"
    meter.pause()
    meter.stop()


def test_a_pause_follows_nothing_new():
    with measuring(make_meter()) as meter:
        kept = kib(1)
        meter.pause()
        later = kib(2)
        assert meter.live(0) == KIB
        del kept, later
        assert meter.live(0) == 0, "what is known stays known until it is freed"


def test_a_kernel_in_python_computes_under_autocast_as_without_a_meter():
    """torch turns autocast off where it calls a mode, and on again only for the operator that it has called."""
    with torch.library._scoped_library("patrickstar_tests", "DEF") as library:
        library.define("product(Tensor left, Tensor right) -> Tensor")
        library.impl("product", torch.nn.functional.linear, "CPU")
        meter, left = make_meter(), torch.rand(4, 4)
        for is_on in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                expected = torch.ops.patrickstar_tests.product(left, left)
                with measuring(meter):
                    meter.note_autocast()
                    found = torch.ops.patrickstar_tests.product(left, left)
                    assert torch.is_autocast_enabled("cpu") is is_on
            assert expected.dtype is (torch.bfloat16 if is_on else torch.float32)
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)
