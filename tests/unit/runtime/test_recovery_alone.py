"""Repeating a micro-batch that ran out of memory, with a manager that only writes down what it is told."""

import random
import types
import weakref

import numpy
import pytest
import torch

from hf_patrickstar.errors import BudgetError, ConfigError, DeviceMemoryError
from hf_patrickstar.events import MicroBatchRepeated
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.recovery import MAX_RETRIES, Recovery, is_out_of_memory
from hf_patrickstar.runtime.turns import Turns

CPU = torch.device("cpu")
RESET = ["unwind", "undo attempt", "forget step"]
CAREFUL = ["discard trace", "leave margin", "evict unused"]


class Attempts:
    def __init__(self, log):
        self.has_leftovers = False
        self.begin, self.end = (lambda: log.append("begin")), (lambda: log.append("end"))


class Manager:
    """What ``Recovery`` needs of ``ChunkManager``."""

    def __init__(self):
        self.log = log = []
        self.events = []

        def note(event):
            return lambda: log.append(event)

        self.ledger = Ledger({Tier.DEVICE: 1000, Tier.HOST: 1000})
        self.gradients = types.SimpleNamespace(attempts=Attempts(log))
        self.phases = types.SimpleNamespace(unwind=note("unwind"), turns=Turns())
        self.steps = types.SimpleNamespace(abandon_step=note("forget step"))
        self.tracer = types.SimpleNamespace(distrust=note("discard trace"))
        self.placement = types.SimpleNamespace(leave_margin=note("leave margin"))
        self.reclaim = types.SimpleNamespace(evict_unused=note("evict unused"))
        self.undo_attempt = note("undo attempt")
        self.discard_gradients = note("discard gradients")


class Failing:
    """A micro-batch that fails some times, and then returns 7."""

    def __init__(self, log, times, error=None, work=lambda: None):
        self.log, self.times, self.work = log, times, work
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def __call__(self):
        self.log.append("run")
        self.work()
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return 7


@pytest.fixture
def manager():
    return Manager()


def make_recovery(manager, *buffers):
    return Recovery(manager, CPU, lambda: buffers, manager.events.append)


def test_what_does_not_fail_runs_once(manager):
    recovery = make_recovery(manager)
    assert recovery.run(Failing(manager.log, 0)) == 7
    assert manager.log == ["begin", "run", "end"]
    assert manager.events == []


@pytest.mark.parametrize("times", [1, MAX_RETRIES])
def test_between_attempts_everything_is_as_before_and_as_careful_as_at_first(manager, times):
    recovery = make_recovery(manager)
    assert recovery.run(Failing(manager.log, times)) == 7
    assert manager.log == ["begin", *["run", *RESET, *CAREFUL] * times, "run", "end"]
    assert manager.events == [MicroBatchRepeated(attempt) for attempt in range(1, times + 1)]


def test_the_budget_of_a_device_without_an_allocator_stays(manager):
    make_recovery(manager).run(Failing(manager.log, 1))
    assert manager.ledger.limit(Tier.DEVICE, cautious=False) == 1000


# Memory in pieces, on an accelerator

IN_PIECES = "CUDA out of memory. Tried to allocate 20.00 MiB, and 64.00 MiB is reserved by PyTorch but unallocated."
NONE_LEFT = "CUDA out of memory. Tried to allocate 20.00 MiB, and 2.00 MiB is reserved by PyTorch but unallocated."


@pytest.fixture
def on_gpu(manager, monkeypatch):
    """A recovery on a device that is not there."""
    for name in ("random_state", "set_random_state"):
        monkeypatch.setattr(f"hf_patrickstar.runtime.recovery.{name}", lambda *args: None)
    monkeypatch.setattr("hf_patrickstar.runtime.recovery.empty_cache", lambda: manager.log.append("empty_cache"))
    return Recovery(manager, torch.device("cuda", 0), lambda: (), manager.events.append)


def fail(manager, recovery, *texts):
    """Runs a micro-batch whose attempts fail with these texts; returns the limit afterwards."""
    errors = [torch.OutOfMemoryError(text) for text in texts]

    def micro_batch():
        if errors:
            raise errors.pop(0)

    recovery.run(micro_batch)
    return manager.ledger.limit(Tier.DEVICE, cautious=False)


def test_memory_that_was_there_in_pieces_costs_no_budget(manager, on_gpu, caplog):
    assert fail(manager, on_gpu, IN_PIECES) == 1000
    assert [event for event in manager.log if event in (*CAREFUL, "empty_cache")] == [*CAREFUL, "empty_cache"]
    assert manager.events == [MicroBatchRepeated(1, is_defragmented=True)]
    assert (
        "1000 B leave as before, because the memory was there in pieces; if this is often said, start with"
        in caplog.text
    )


def test_memory_that_was_not_there_costs_a_tenth(manager, on_gpu):
    assert fail(manager, on_gpu, NONE_LEFT) == 900
    assert manager.events == [MicroBatchRepeated(1)]


def test_pieces_that_come_again_at_once_cost_a_tenth(manager, on_gpu):
    """Everything had left the device, and yet the memory was not there: it is not the pieces."""
    assert fail(manager, on_gpu, IN_PIECES, IN_PIECES) == 900
    assert manager.events == [MicroBatchRepeated(1, is_defragmented=True), MicroBatchRepeated(2)]


@pytest.mark.parametrize(("num_between", "limit"), [(8, 900), (9, 1000)])
def test_pieces_that_come_again_soon_cost_a_tenth_and_later_nothing(manager, on_gpu, num_between, limit):
    """A repetition in every step would cost more than a tenth of the room; the repeated one itself is calm."""
    fail(manager, on_gpu, IN_PIECES)
    for _ in range(num_between):
        fail(manager, on_gpu)
    assert fail(manager, on_gpu, IN_PIECES) == limit


def test_retries_are_told(manager, caplog):
    make_recovery(manager).run(Failing(manager.log, 1))
    assert [record.getMessage() for record in caplog.records] == [
        "patrickstar: out of memory on cpu, retry 1 of 3 with chunks limited to what 1000 B leave (cpu itself has no "
        "more memory, which no setting changes: CUDA out of memory. Tried to allocate 20.00 MiB)"
    ]


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_who_fails_every_time_is_given_up(manager, max_retries):
    recovery = make_recovery(manager)
    error = DeviceMemoryError("device_budget: 30 bytes more needed for 'param'")
    with pytest.raises(DeviceMemoryError, match="30 bytes more needed for 'param'") as caught:
        recovery.run(Failing(manager.log, 9, error), max_retries)
    assert manager.log == ["begin", *["run", *RESET, *CAREFUL] * max_retries, "run", *RESET, "end"]
    assert len(manager.events) == max_retries
    assert caught.value.__cause__ is error
    times = (
        f"{max_retries + 1} times, at last with every chunk that was not in use off the device"
        if max_retries
        else "and was not to be repeated"
    )
    text = str(caught.value)
    assert text.startswith(f"cpu: out of memory. The micro-batch failed {times}. Parameters are as they were before")
    assert "Gradients are as they were before it. Use a smaller batch" in text
    assert "no setting changes" not in text
    assert text.count("\ntier ") == 1


def test_an_error_that_has_the_table_is_not_given_a_second_one(manager):
    error = DeviceMemoryError(f"no room\n{manager.ledger.table()}")
    with pytest.raises(DeviceMemoryError) as caught:
        make_recovery(manager).run(Failing(manager.log, 1, error), 0)
    assert str(caught.value).count("\ntier ") == 1


def test_contributions_that_only_a_repetition_makes_whole_are_dropped_when_there_is_none(manager):
    manager.gradients.attempts.has_leftovers = True
    with pytest.raises(DeviceMemoryError, match="so all gradients of this step are dropped"):
        make_recovery(manager).run(Failing(manager.log, 1), 0)
    assert manager.log == ["begin", "run", *RESET, "discard gradients", "end"]


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), MemoryError("x"), KeyboardInterrupt()])
def test_other_errors_are_not_repeated_and_end_the_attempt(manager, error):
    recovery = make_recovery(manager)
    with pytest.raises(type(error)) as caught:
        recovery.run(Failing(manager.log, 1, error))
    assert caught.value is error
    assert manager.log == ["begin", "run", "end"]
    assert recovery.run(Failing(manager.log, 1)) == 7  # it is not inside of an attempt any more


def test_an_attempt_inside_of_another_leaves_repeating_to_that(manager):
    recovery = make_recovery(manager)
    inner = Failing(manager.log, 1)
    assert recovery.run(lambda: recovery.run(inner)) == 7
    assert manager.log == ["begin", "run", *RESET, *CAREFUL, "run", "end"]


def test_every_attempt_draws_the_same_random_numbers(manager):
    drawn = []

    def draw():
        drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))

    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    make_recovery(manager).run(Failing(manager.log, 2, work=draw))
    assert len(drawn) == 3
    assert len(set(drawn)) == 1


def test_buffers_are_as_before_the_first_attempt(manager):
    mean, count = torch.zeros(2), torch.tensor(5)

    def forward():
        mean.add_(1)
        count.add_(1)

    make_recovery(manager, mean, count).run(Failing(manager.log, 2, work=forward))
    assert (mean.tolist(), count.item()) == ([1.0, 1.0], 6)
    with pytest.raises(DeviceMemoryError):
        make_recovery(manager, mean, count).run(Failing(manager.log, 9, work=forward))
    assert (mean.tolist(), count.item()) == ([1.0, 1.0], 6), "as they were before what was given up"


def test_buffers_that_are_parts_of_a_graph_are_restored_too(manager):
    buffer = torch.zeros(2, requires_grad=True)

    def forward():
        buffer.data.add_(1)

    make_recovery(manager, buffer).run(Failing(manager.log, 1, work=forward))
    assert buffer.tolist() == [1.0, 1.0]


def test_the_activations_of_a_failed_attempt_are_gone_before_the_next(manager):
    activations = []

    def forward():
        assert not any(found() is not None for found in activations)
        activation = torch.ones(4)
        activations.append(weakref.ref(activation))
        if len(activations) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    make_recovery(manager).run(forward)
    assert len(activations) == 3


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (DeviceMemoryError("no room"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False),
        (BudgetError("host_budget: 30 bytes more needed"), False),
        (MemoryError("out of memory"), False),
        (ConfigError("out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_that_the_device_is_full(error, is_memory):
    assert is_out_of_memory(error) == is_memory
