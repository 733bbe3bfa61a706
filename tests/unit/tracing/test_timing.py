"""Operators that are called once more, to see how long they take here."""

import dataclasses
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.schedule.script import Kernel
from hf_patrickstar.tracing import timing
from hf_patrickstar.tracing.calls import OperatorCall
from hf_patrickstar.tracing.charges import Charges
from hf_patrickstar.tracing.costs import cost_of
from hf_patrickstar.tracing.timing import OperatorTimes

aten = torch.ops.aten
MODEL = "gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=200"


@pytest.fixture
def seconds(monkeypatch):
    """Each operator is called, and takes two seconds; calling one takes half a second."""
    calls = []

    def take(device, work, before):
        before()
        calls.append(work())
        return 2.0 if len(calls) > timing._REPETITIONS else 0.5

    monkeypatch.setattr(timing, "seconds_of", take)
    return calls


def fake(*shape, **kwargs):
    with FakeTensorMode():
        return torch.empty(*shape, **kwargs)


def test_an_operator_is_timed_once_for_operands_that_are_alike(seconds):
    times = OperatorTimes()
    assert times.find_ns(aten.mm.default, (fake(2, 3), fake(3, 4)), {}) == 1_500_000_000
    num = len(seconds)
    assert times.find_ns(aten.mm.default, (fake(2, 3), fake(3, 4)), {}) == 1_500_000_000
    assert len(seconds) == num
    assert times.find_ns(aten.mm.default, (fake(2, 3), fake(4, 3).t()), {}) == 1_500_000_000
    assert times.find_ns(aten.mm.default, (fake(2, 3, dtype=torch.bfloat16), fake(3, 4, dtype=torch.bfloat16)), {})
    assert len(seconds) == num + 2 * timing._REPETITIONS


def test_operands_have_bytes_of_the_same_layout(monkeypatch):
    seen = []

    def note(tensor, dim, index):
        seen.append((tensor, index))
        return tensor.index_select(dim, index)

    note._overloadpacket = aten.index_select
    expanded = fake(3, 1).expand(3, 4).t()
    assert OperatorTimes().find_ns(note, (expanded, 0, fake(2, dtype=torch.long)), {}) >= 0
    tensor, index = seen[0]
    assert type(tensor) is torch.Tensor
    assert (tensor.shape, tensor.stride()) == (expanded.shape, expanded.stride())
    assert index.tolist() == [0, 0], "places that are there"
    assert 0 <= tensor.min() < tensor.max() <= 1


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_nobody_watches_and_no_type_is_changed(mode):
    made = []

    def note(one, other):
        made.append(one @ other)
        return made[-1]

    note._overloadpacket = aten.mm
    one, other = fake(2, 3, requires_grad=True), fake(3, 4)
    times = OperatorTimes()
    with mode():
        assert times.find_ns(note, (one, other), {}) is not None
    assert {(type(result), result.dtype, result.requires_grad) for result in made} == {
        (torch.Tensor, torch.float32, False)
    }


def test_groups_of_a_grouped_product_share_the_rows():
    operands = fake(8, 16, dtype=torch.bfloat16), fake(2, 16, 16, dtype=torch.bfloat16), fake(2, dtype=torch.int32)
    call = OperatorCall.of(aten._grouped_mm.default, operands, {}).make(torch.device("cpu"))
    assert call.args[2].tolist() == [4, 8]
    assert OperatorTimes().find_ns(aten._grouped_mm.default, operands, {}) is not None


def test_what_is_too_large_or_refused_goes_by_the_rates():
    times = OperatorTimes(most_nbytes=1000)
    assert times.find_ns(aten.neg.default, (fake(251),), {}) is None
    assert times.find_ns(aten.neg.default, (fake(1).expand(251),), {}) is not None, "one number"
    assert times.find_ns(aten.mm.default, (fake(2, 3), fake(4, 5)), {}) is None


def test_slow_ones_are_not_repeated(monkeypatch):
    monkeypatch.setattr(timing, "_MOST_SECONDS", 0.0)
    calls = []

    def slow(tensor):
        calls.append(time.sleep(0.001))

    slow._overloadpacket = aten.neg
    OperatorTimes().find_ns(slow, (fake(1),), {})
    assert len(calls) == 2


def test_what_was_measured_is_charged(seconds):
    args, result = (fake(10),), fake(10)
    cost = cost_of(aten.neg.default, args, {}, result)
    charges = Charges(has_accelerator=False, times=OperatorTimes())
    assert list(charges.charge(aten.neg.default, args, {}, result, cost)) == [
        Kernel("aten.neg", 0, 80, "float32", "", 1_500_000_000)
    ]


def test_plans_for_this_machine_are_timed():
    arguments = {
        **{"task": None, "batch_size": 1, "length": 32, "num_micro_batches": 1, "world_size": 1, "max_norm": 1.0},
        **{"checkpointing": False, "dtype": "fp32", "optimizer": "adamw", "settings": None},
        **{"device_memory": "2MiB", "host_memory": "64MiB"},
    }
    subject, given = arrange(MODEL, CPU_TIER, **arguments)
    assert given.times is None
    by_rates = plan_and_simulate(subject, given)[1]
    timed = plan_and_simulate(subject, dataclasses.replace(given, times=OperatorTimes()))[1]
    kernels = [entry for entry in timed.script if isinstance(entry, Kernel) and entry.name.startswith("aten.")]
    assert sum(kernel.measured_ns is not None for kernel in kernels) > 0.9 * len(kernels)
    assert timed.moved_nbytes == by_rates.moved_nbytes


def test_operators_are_timed_with_the_threads_of_the_planned_process():
    seen = []

    def note(tensor):
        seen.append(torch.get_num_threads())
        return tensor

    note._overloadpacket = aten.neg

    before = torch.get_num_threads()
    OperatorTimes(num_threads=before + 1).find_ns(note, (fake(1),), {})
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
