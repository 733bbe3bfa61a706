"""Operators that are called once more, to see how long they take here."""

import dataclasses
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.planner import planning
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.schedule.script import DeviceOp
from hf_patrickstar.tracing import timing
from hf_patrickstar.tracing.calls import OperatorCall
from hf_patrickstar.tracing.timing import OperatorTimes

aten = torch.ops.aten


def fake(*shape, **kwargs):
    with FakeTensorMode():
        return torch.empty(*shape, **kwargs)


def watched(operator, function):
    """A function in place of an operator."""
    function._overloadpacket = operator
    return function


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_an_operator_is_called_as_it_is_with_bytes_of_the_same_layout_and_nobody_watches(mode):
    seen = []

    def look(tensor, dim, index):
        seen.append((tensor, index, tensor @ tensor.t(), torch.get_num_threads()))
        return tensor.index_select(dim, index)

    before, expanded = torch.get_num_threads(), fake(3, 1, requires_grad=True).expand(3, 4).t()
    operands = expanded, 0, fake(2, dtype=torch.long)
    with mode():
        assert OperatorTimes(num_threads=before + 1).find_ns(watched(aten.index_select, look), operands, {}) >= 0
    tensor, index, result, _ = seen[0]
    assert (tensor.shape, tensor.stride()) == (expanded.shape, expanded.stride())
    assert (type(result), result.dtype, result.requires_grad) == (torch.Tensor, torch.float32, False)
    assert index.tolist() == [0, 0], "places that are there"
    assert 0 <= tensor.min() < tensor.max() <= 1
    assert {threads for *_, threads in seen} == {before + 1}, "those of the planned process"
    assert torch.get_num_threads() == before


def test_groups_of_a_grouped_product_share_the_rows():
    operands = fake(8, 16, dtype=torch.bfloat16), fake(2, 16, 16, dtype=torch.bfloat16), fake(2, dtype=torch.int32)
    call = OperatorCall.of(aten._grouped_mm.default, operands, {}).make(torch.device("cpu"))
    assert call.args[2].tolist() == [4, 8]
    assert OperatorTimes().find_ns(aten._grouped_mm.default, operands, {}) is not None


def test_what_is_too_large_or_refused_goes_by_the_rates_and_slow_ones_are_not_repeated(monkeypatch):
    times = OperatorTimes(most_nbytes=1000)
    assert times.find_ns(aten.neg.default, (fake(251),), {}) is None
    assert times.find_ns(aten.neg.default, (fake(1).expand(251),), {}) is not None, "one number"
    assert times.find_ns(aten.mm.default, (fake(2, 3), fake(4, 5)), {}) is None
    monkeypatch.setattr(timing, "_MOST_SECONDS", 0.0)
    calls = []
    OperatorTimes().find_ns(watched(aten.neg, lambda tensor: calls.append(time.sleep(0.001))), (fake(1),), {})
    assert len(calls) == 2


def test_plans_for_this_machine_are_timed_beside_one_competing_process_for_every_other_process(monkeypatch):
    arguments = {
        **{"task": None, "batch_size": 1, "length": 32, "num_micro_batches": 1, "world_size": 1, "max_norm": 1.0},
        **{"checkpointing": False, "dtype": "fp32", "optimizer": "adamw", "settings": None},
        **{"device_memory": "2MiB", "host_memory": "64MiB"},
    }
    subject, given = arrange("gpt2:n_layer=2,n_embd=64,n_head=2,vocab_size=200", CPU_TIER, **arguments)
    assert given.times is None
    by_rates = plan_and_simulate(subject, given)[1]
    timed = plan_and_simulate(subject, dataclasses.replace(given, times=OperatorTimes()))[1]
    kernels = [entry for entry in timed.script if isinstance(entry, DeviceOp) and entry.name.startswith("aten.")]
    assert sum(kernel.measured_ns is not None for kernel in kernels) > 0.9 * len(kernels)
    assert timed.moved_nbytes == by_rates.moved_nbytes
    made = []
    monkeypatch.setattr(planning, "OperatorTimes", lambda **kwargs: made.append(kwargs))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    planning.time_operators(1)
    planning.time_operators(3)
    assert made == [{}, {"num_threads": 1, "num_competing": 2}]
