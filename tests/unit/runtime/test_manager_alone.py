"""ChunkManager with parts that write down what they are told: changes of the model, gradients, loading, and the end."""

import contextlib
import types

import pytest
import torch
from unit.runtime.parts import Fake, Named, Parts, narrow

from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.live_parameter import raw_grad, set_raw_grad
from hf_patrickstar.runtime.manager import ChunkManager


def make(*chunks, step=None, **answers):
    """A manager of chunks of so many tensors of two elements each, and what all parts are told.

    Args:
        *chunks: The number of tensors of each chunk; by default one chunk of two.
        step: The step that runs.
        **answers: What parts answer, or what they do, by the name of the part.
    """
    parts = Parts()
    for num_tensors in chunks or (2,):
        parts.add_chunk(*[2] * num_tensors)
    parts.told = told = []

    def fake(part, *silent, **found):
        return Fake(Named(told, part), *silent, **{**found, **answers.get(part, {})})

    gradients = fake(
        "gradients",
        "note_zeroed",
        "drop",
        "close",
        take_unstored=None,
        has=False,
        is_absent=False,
        of=lambda tensor: "of",
    )
    gradients.lock, gradients.has_factor = contextlib.nullcontext(), False
    gradients.coefficient = gradients.inverse_scale = "left"
    gradients.attempts = fake("attempts", undo=set())
    parameters = fake("parameters", "release_held_outside_forward", "forget", "check_usable")
    parameters.tensors, parameters.by_index = parts.tensors, dict(enumerate(parts.tensors))
    parameters.find = lambda parameter: next((it for it in parts.tensors if it.parameter is parameter), None)
    steps = fake("steps", "abandon_step", "stop_idle_meter")
    steps.executor, steps.micro_batch = types.SimpleNamespace(in_backward=True), 1
    tracer = fake("tracer", "note_chunks")
    tracer.step = step
    values = types.SimpleNamespace(version=7, sharing=fake("sharing", tensor=lambda held, what: (held, what)))
    data = types.SimpleNamespace(
        originals=fake("originals", "drop"),
        values=values,
        mirrors=fake("mirrors", "refresh", "close"),
        gradient_mirrors=fake("gradient mirrors", "sync_one", "drop", "close", zero=False),
        gradients=gradients,
        writes=fake("writes", "sync", "forget"),
        watch=None,
        buckets=fake("buckets", "note_chunks", "close"),
    )
    services = types.SimpleNamespace(
        chunks=parts.chunks,
        copies=fake("copies", "note_chunks", "forget", "invalidate", "close"),
        reclaim=None,
        tracer=tracer,
        pool=parts.pool,
        order=fake("order", "note_tensors"),
        meter=fake("meter", "stop"),
    )
    phases = fake("phases", "unwind", "abandon_failed_backward", "apply_factor")
    streams = fake("streams", "release_in_flight", "close")
    placement = fake("placement", "note_chunks")
    parts.steps, parts.gradients, parts.values = steps, gradients, values
    return parts, ChunkManager(services, steps, placement, data, parameters, phases, streams)


def told(parts, *left_out):
    """What was told since the last call: tensors by their names, chunks by their numbers."""
    found, parts.told[:] = list(parts.told), []
    return [(name, *map(_word, arguments)) for name, *arguments in found if name not in left_out]


def _word(value):
    spec = getattr(value, "spec", None)
    return value if spec is None else getattr(spec, "name", spec.index)


def test_the_manager_has_the_parts_and_finds_parameters():
    parts, manager = make()
    assert (manager.tensors, manager.chunks) == (parts.tensors, parts.chunks)
    assert manager.ledger is parts.pool.ledger
    assert manager.find(parts.tensors[1].parameter) is parts.tensors[1]
    assert manager.find(torch.nn.Parameter(torch.ones(1))) is None
    assert manager.has_new_groups is False


# Changes of the model


def test_a_change_begins_when_nothing_runs_and_nothing_is_unwritten():
    parts, manager = make()
    manager.begin_change()
    assert told(parts) == [("phases.unwind",), ("writes.sync",), ("steps.abandon_step",)]


def test_chunks_that_are_added_come_last_and_are_noted():
    parts, manager = make()
    (first,) = parts.chunks
    other = Parts()
    other.add_chunk(2)
    manager.add_chunks(other.chunks)
    assert manager.chunks == [first, other.chunks[0]]
    assert told(parts) == [("copies.note_chunks",)]


def test_a_parameter_that_is_removed_leaves_its_chunk_to_the_others():
    parts, manager = make()
    first, second = parts.tensors
    manager.remove(first)
    assert told(parts) == [("writes.forget", "t0"), ("originals.drop", "t0"), ("parameters.forget", "t0")]
    assert (parts.chunks[0].tensors, first.num_writes, second.num_writes) == ([second], 1, 0)
    assert not parts.chunks[0].is_retired


def test_the_last_parameter_takes_its_chunk_along():
    parts, manager = make(1)
    chunk = parts.chunks[0]
    used = parts.ledger.used(Tier.HOST)
    manager.remove(parts.tensors[0])
    assert told(parts)[-1] == ("copies.forget", 0)
    assert (chunk.is_retired, used > 0, parts.ledger.used(Tier.HOST)) == (True, True, 0)


def test_a_change_ends_when_everybody_knows_the_chunks():
    parts, manager = make(2, 1)
    manager.end_change(["bytes"])
    assert told(parts) == [
        ("tracer.note_chunks", [8, 4]),
        ("copies.note_chunks",),
        ("buckets.note_chunks",),
        ("order.note_tensors", 3),
        ("placement.note_chunks", ["bytes"]),
    ]
    assert parts.values.version == 8


def test_a_model_may_lose_all_its_parameters():
    parts, manager = make()
    manager.by_index.clear()
    manager.end_change([])
    assert ("order.note_tensors", 0) in told(parts)


# Gradients between steps


def test_a_gradient_is_read_where_it_is_at_home():
    parts, manager = make()
    held, what = manager.read_gradient(parts.tensors[1], torch.float32)
    assert (held.tensor, held.source, held.dtype, what) == (parts.tensors[1], "of", torch.float32, "the gradient")
    assert told(parts)[0] == ("gradient mirrors.sync_one", "t1")


def test_discarded_gradients_are_dropped_in_both_places():
    parts, manager = make()
    manager.discard_gradients()
    assert told(parts, "gradients.is_absent") == [
        ("phases.abandon_failed_backward",),
        ("parameters.release_held_outside_forward",),
        ("steps.stop_idle_meter",),
        ("gradients.take_unstored", "t0"),
        *(("gradient mirrors.sync_one", "t0"), ("gradient mirrors.drop", "t0"), ("gradients.drop", "t0", False)),
        ("gradients.take_unstored", "t1"),
        *(("gradient mirrors.sync_one", "t1"), ("gradient mirrors.drop", "t1"), ("gradients.drop", "t1", False)),
    ]
    assert (parts.gradients.coefficient, parts.gradients.inverse_scale, parts.steps.micro_batch) == (None, None, 0)


def test_in_a_step_the_count_of_micro_batches_goes_on():
    parts, manager = make(step="step")
    manager.discard_gradients()
    assert parts.steps.micro_batch == 1


def test_what_has_no_gradient_has_none_to_discard():
    parts, manager = make(gradients={"is_absent": lambda tensor: tensor.spec.index == 0})
    manager.discard_gradients()
    assert [it[1] for it in told(parts) if it[0] == "gradients.drop"] == ["t1"]


@pytest.mark.parametrize(("is_zero_there", "dropped"), [(True, []), (False, ["t0"])])
def test_a_gradient_that_somebody_has_is_zeroed_there_if_it_can_be(is_zero_there, dropped):
    parts, manager = make(1, **{"gradient mirrors": {"zero": is_zero_there}})
    manager.discard_gradients(to_zero=True)
    found = told(parts)
    assert [it[1] for it in found if it[0] == "gradient mirrors.drop"] == dropped
    assert found[-1] == ("gradients.drop", "t0", True)


@pytest.mark.parametrize(
    ("has_factor", "chosen", "has", "applies"),
    [
        (True, [0], {1}, True),
        (True, [0], {0}, False),
        (True, [0, 1], {0, 1}, False),
        (True, None, {0, 1}, False),
        (False, [0], {1}, False),
    ],
)
def test_gradients_that_stay_are_multiplied_before_the_factor_is_forgotten(has_factor, chosen, has, applies):
    parts, manager = make(gradients={"has": lambda tensor: tensor.spec.index in has})
    parts.gradients.has_factor = has_factor
    manager.discard_gradients(None if chosen is None else (parts.tensors[index] for index in chosen))
    assert (("phases.apply_factor",) in told(parts)) is applies


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_reaches_parameters_in_chunks_and_others(set_to_none):
    parts, manager = make(gradients={"is_absent": False})
    other, without = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    other.grad = gradient = torch.ones(1)
    manager.zero_gradients([parts.tensors[1].parameter, other, without], set_to_none=set_to_none)
    found = told(parts)
    assert [it for it in found if it[0] == "gradients.drop"] == [("gradients.drop", "t1", not set_to_none)]
    assert found[-1] == ("gradients.note_zeroed", parts.chunks)
    assert without.grad is None
    assert (other.grad is None) is set_to_none
    assert gradient.tolist() == ([1] if set_to_none else [0])


def test_a_parameter_with_two_names_is_zeroed_once():
    parts, manager = make(1)
    manager.zero_gradients([parts.tensors[0].parameter] * 2, set_to_none=True)
    assert [it[0] for it in told(parts)].count("gradients.drop") == 1


def test_a_failed_attempt_leaves_no_gradient_anywhere():
    parts, manager = make(attempts={"undo": {1}})
    for tensor in parts.tensors:
        set_raw_grad(tensor.parameter, narrow(1, 1))
        tensor.deferred_gradient, tensor.crossing_nbytes = narrow(1, 1), 4
    manager.undo_attempt()
    assert told(parts) == [("streams.release_in_flight",), ("attempts.undo",), ("gradients.drop", "t1")]
    for tensor in parts.tensors:
        assert raw_grad(tensor.parameter) is None
        assert (tensor.deferred_gradient, tensor.crossing_nbytes) == (None, 0)
    assert parts.steps.executor.in_backward is False


# Loading, and the end


def test_loading_begins_without_gradients_and_copies():
    parts, manager = make(1, 1)
    manager.begin_loading()
    names = [it for it in told(parts) if it[0] in ("phases.unwind", "writes.sync", "gradients.drop")]
    assert names == [
        ("phases.unwind",),
        ("writes.sync",),
        ("gradients.drop", "t0", False),
        ("gradients.drop", "t1", False),
    ]


def test_loading_drops_the_copies_of_all_chunks_last():
    parts, manager = make(1, 1)
    manager.begin_loading()
    assert told(parts)[-2:] == [("copies.invalidate", 0), ("copies.invalidate", 1)]


def test_nothing_is_loaded_while_a_parameter_is_open():
    def refuse(tensor):
        raise EngineError("open")

    parts, manager = make(parameters={"check_usable": refuse})
    parts.tensors[1].is_open = True
    with pytest.raises(EngineError, match="open"):
        manager.begin_loading()
    assert told(parts) == [("phases.unwind",), ("parameters.check_usable", "t1")]


def test_after_loading_graphs_of_before_are_void_and_mirrors_follow():
    parts, manager = make()
    manager.end_loading()
    assert told(parts) == [("mirrors.refresh", "t0"), ("mirrors.refresh", "t1")]
    assert (parts.values.version, [tensor.num_writes for tensor in parts.tensors]) == (8, [1, 1])


def test_the_end_gives_every_payload_back():
    parts, manager = make(2, 1)
    parts.chunks[0].compute = parts.chunks[0].param
    assert parts.ledger.used(Tier.HOST) > 0
    manager.close()
    assert parts.ledger.used(Tier.HOST) == 0
    assert [(chunk.lists, chunk.compute) for chunk in parts.chunks] == [({}, None)] * 2
    assert told(parts) == [
        *(("mirrors.close",), ("gradient mirrors.close",)),
        *(("originals.drop", "t0"), ("originals.drop", "t1"), ("originals.drop", "t2")),
        *(("streams.release_in_flight",), ("buckets.close",), ("gradients.close",), ("copies.close",)),
        *(("meter.stop",), ("streams.close",)),
    ]


def test_a_chunk_that_was_freed_before_is_not_given_back_again():
    parts, manager = make(1, 1)
    manager.remove(parts.tensors[0])
    used = parts.ledger.used(Tier.HOST)
    manager.close()
    assert (used > 0, parts.ledger.used(Tier.HOST)) == (True, 0)
