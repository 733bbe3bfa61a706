"""What happens in each phase of a step, in which order: all that phases call is stood in for, and writes it down."""

import contextlib
import types

import pytest
import torch
from unit.runtime.data_parts import InBackward
from unit.runtime.parts import Fake, Named, Parts, narrow

from hf_patrickstar.dist.order import Phase
from hf_patrickstar.errors import EngineError
from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.frames import Frame
from hf_patrickstar.runtime.phases import Phases
from hf_patrickstar.runtime.steps import Foreseen
from hf_patrickstar.runtime.update import Update
from hf_patrickstar.states import Stage

FORWARD, BACKWARD, EVALUATION = Stage.FORWARD, Stage.BACKWARD, Stage.EVALUATION
SHAPES = ((2, 4),)


def make(*, step=None, factor=None, num_micro_batches=2, homes=(Tier.HOST,), overlaps_updates=True, **answers):
    """Phases over chunks of two tensors, and all that they call."""
    parts = Parts()
    for home in homes:
        parts.add_chunk(2, 2, home=home)
    parts.told = told = []

    def fake(part, *silent, **found):
        return Fake(Named(told, part), *silent, **{**found, **answers.get(part, {})})

    executor = fake("executor", "reduce_when_due", "take_home")
    executor.in_backward = False
    steps = fake(
        "steps",
        *(
            "stop_idle_meter",
            "begin_step",
            "begin_nested_evaluation",
            "end_nested_evaluation",
            "abandon_step",
            "end_forward",
        ),
        *("end_micro_batch", "begin_update", "visit_for_update", "foresee", "agree_on_foreseen"),
        end_update=num_micro_batches,
        end_phase=frozenset(),
    )
    steps.executor, steps.num_updates = executor, 0
    gradients = fake(
        "gradients",
        *("place", "multiply", "finish_update", "note_step", "place_deferred", "note_remote"),
        has=True,
    )
    gradients.lock = contextlib.nullcontext()
    gradients.take_factor = lambda: factor
    gradients.take_unstored = lambda tensor: None
    buckets = fake("buckets", "store", abandon="left", finish="left")
    buckets.unreduced, buckets.found = "unreduced", {0}
    parameters = fake(
        "parameters", "release_all", "check_gradient", "release_held_outside_forward", acquire_all=acquire
    )
    parameters.tensors = parts.tensors
    parameters.by_index = dict(enumerate(parts.tensors))
    data = types.SimpleNamespace(
        values=types.SimpleNamespace(version=7),
        writes=fake("writes", "sync"),
        mirrors=fake("mirrors", "refresh"),
        gradients=gradients,
        gradient_mirrors=fake("gradient mirrors", "sync_one", "refresh", "drop", kept="kept"),
        buckets=buckets,
    )
    services = types.SimpleNamespace(
        pool=parts.pool,
        chunks=parts.chunks,
        copies=fake("copies", "invalidate", find=None),
        reclaim="reclaim",
        tracer=types.SimpleNamespace(step=step),
        policy=types.SimpleNamespace(overlaps_updates=overlaps_updates),
    )
    placement, streams = fake("placement", "prepare", "update"), fake("streams", "release_in_flight", on_host="ticket")
    parts.steps = steps
    parts.data, parts.executor, parts.gradients, parts.tracer = data, executor, gradients, services.tracer
    turns = fake("turns", "take_backward", "give_up_backward", "give_up")
    phases = Phases(services, steps, placement, data, parameters, turns, streams)
    return parts, phases


def told(parts):
    """What was told since the last call; tensors by their names."""
    found, parts.told[:] = list(parts.told), []
    return [(name, *map(word, arguments)) for name, *arguments in found]


def word(it):
    return [word(item) for item in it] if isinstance(it, list) else getattr(getattr(it, "spec", None), "name", it)


def acquire(tensors, name, acquired, *, is_recomputed):
    """What a module is given: all that it asks for."""
    acquired += tensors


def frame_of(stage, **settings):
    return Frame(torch.nn.Identity(), stage, **settings)


class Step:
    """A step that runs."""


# Forward


def test_a_forward_of_training_begins_a_step():
    parts, phases = make()
    phases.before_forward(FORWARD, "encoder", SHAPES, "present")
    assert told(parts) == [
        ("writes.sync",),
        ("steps.stop_idle_meter",),
        ("steps.begin_step", "encoder", SHAPES, "present", 7, phases._make_ready),
    ]


def foreseeing(answers, *, covers=True, agreed=None, step=None):
    """Phases of which steps are foreseen as the answers say, each time that they are asked."""
    answers = iter(answers)
    parts, phases = make(
        step=step,
        steps={
            "foresee": lambda title, shapes: next(answers),
            "agree_on_foreseen": lambda own, shapes: own if agreed is None else agreed,
        },
    )
    parts.tracer.learn = lambda traces: parts.told.append(("tracer.learn", traces))
    parts.tracer.covers = lambda title, shapes: covers
    parts.steps.num_micro_batches = 2
    for tensor in parts.tensors:
        tensor.lookup_nbytes = 0
    return parts, phases


def without_asking(parts):
    return [(name, *arguments) for name, *arguments in told(parts) if not name.startswith("steps.")]


def test_a_step_that_is_foreseen_has_its_homes_before_it_begins():
    seen = []
    parts, phases = foreseeing([Foreseen(["a trace"], {0: 8})])
    lookups = lambda *_, **how: seen.append([tensor.lookup_nbytes for tensor in parts.tensors])  # noqa: E731
    phases._placement._answers["update"] = lookups
    assert phases._make_ready("training/2x4", SHAPES)
    assert without_asking(parts) == [("tracer.learn", ["a trace"]), ("placement.update", "reclaim", 2, True, False)]
    assert seen == [[16, 0]], "of all micro-batches"
    assert [tensor.lookup_nbytes for tensor in parts.tensors] == [0, 0], "nothing was looked up yet"


def test_no_chunk_moves_home_inside_of_a_step_that_runs():
    parts, phases = foreseeing([Foreseen(["a trace"], {})], step=Step())
    assert phases._make_ready("evaluation/2x4", SHAPES)
    assert without_asking(parts) == [("tracer.learn", ["a trace"])]


@pytest.mark.parametrize(("title", "is_training"), [("training/2x4", True), ("evaluation/2x4", False)])
def test_where_nothing_is_foreseen_there_is_room_for_what_a_step_may_need(title, is_training):
    parts, phases = foreseeing([None])
    assert not phases._make_ready(title, SHAPES)
    assert without_asking(parts) == [("placement.prepare", SHAPES, is_training)]


def test_a_step_is_foreseen_again_where_its_lookups_were_decided_and_not_for_ever():
    parts, phases = foreseeing([Foreseen([number], {}) for number in range(9)], covers=False)
    assert not phases._make_ready("training/2x4", SHAPES)
    learnt = [arguments for name, *arguments in without_asking(parts) if name == "tracer.learn"]
    assert learnt == [[[0]], [[1]], [[2]]]


def test_what_all_processes_foresee_is_learnt():
    parts, phases = foreseeing([Foreseen(["own"], {})], agreed=["of all"])
    assert phases._make_ready("training/2x4", SHAPES)
    assert [arguments for name, *arguments in without_asking(parts) if name == "tracer.learn"] == [
        [["own"]],
        [["of all"]],
    ]


def test_what_another_process_does_not_foresee_is_not_foreseen():
    parts, phases = foreseeing([Foreseen(["own"], {})], agreed=())
    assert not phases._make_ready("training/2x4", SHAPES)
    assert without_asking(parts)[-1] == ("placement.prepare", SHAPES, True)


def test_a_forward_of_training_goes_on_with_a_step_that_runs():
    parts, phases = make(step=Step())
    phases.before_forward(FORWARD, "", SHAPES, ())
    assert told(parts) == [("writes.sync",)]


@pytest.mark.parametrize("step", [None, Step()])
def test_an_evaluation_is_a_step_of_its_own_even_inside_of_another(step):
    parts, phases = make(step=step)
    phases.before_forward(EVALUATION, "", SHAPES, ())
    assert told(parts) == [
        ("parameters.release_held_outside_forward",),
        ("writes.sync",),
        ("steps.stop_idle_meter",),
        ("steps.begin_nested_evaluation", "", SHAPES, (), 7, phases._make_ready),
    ]


@pytest.mark.parametrize("stage", [FORWARD, EVALUATION])
def test_a_backward_that_raised_is_dropped_before_the_next_forward(stage):
    parts, phases = make(step=Step())
    parts.executor.in_backward = True
    phases.before_forward(stage, "", SHAPES, ())
    assert told(parts)[:3] == [("buckets.abandon",), ("executor.take_home", "left"), ("steps.abandon_step",)]
    assert not parts.executor.in_backward


def test_what_a_backward_that_raised_has_left_with_autograd_is_stored():
    """A hook raised before the engine had the gradient; torch has it, too."""
    parts, phases = make(step=Step())
    parts.executor.in_backward = True
    left = narrow(1, 2)
    parts.gradients.take_unstored = {parts.tensors[0]: None, parts.tensors[1]: left}.get
    phases.abandon_failed_backward()
    assert told(parts)[3:] == [("gradients.place", "t1", left)]


@pytest.mark.parametrize(
    ("stage", "has_failed", "events"),
    [
        (FORWARD, False, [("steps.end_forward",)]),
        (FORWARD, True, [("steps.abandon_step",)]),
        (EVALUATION, False, [("steps.end_nested_evaluation", True)]),
        (EVALUATION, True, [("steps.end_nested_evaluation", False)]),
        (BACKWARD, False, []),
        (BACKWARD, True, []),
    ],
)
def test_a_forward_ends(stage, has_failed, events):
    parts, phases = make()
    frame = frame_of(stage, has_turn=True)
    phases.after_forward(frame, has_failed=has_failed)
    assert told(parts) == [*events, ("turns.give_up",)]
    assert not frame.has_turn
    phases.after_forward(frame, has_failed=has_failed)
    assert told(parts) == events, "what has no turn gives none up"


def test_the_turn_ends_even_if_the_end_of_the_forward_fails():
    def fail():
        raise EngineError("the others are gone")

    parts, phases = make(steps={"end_forward": fail})
    with pytest.raises(EngineError, match="the others are gone"):
        phases.after_forward(frame_of(FORWARD, has_turn=True), has_failed=False)
    assert told(parts)[-1] == ("turns.give_up",)


@pytest.mark.parametrize(("stage", "is_recomputed"), [(FORWARD, False), (EVALUATION, False), (BACKWARD, True)])
def test_a_module_has_its_parameters_until_it_has_computed(stage, is_recomputed):
    parts, phases = make()
    frame = frame_of(stage)
    phases.before_module(frame, parts.tensors, "layer")
    assert told(parts) == [("parameters.acquire_all", ["t0", "t1"], "layer", ["t0", "t1"], is_recomputed)]
    phases.after_module(frame)
    assert told(parts) == [("parameters.release_all", ["t0", "t1"])]


def test_what_a_module_got_before_an_error_is_released():
    def acquire_one(tensors, name, acquired, *, is_recomputed):
        acquired.append(tensors[0])
        raise EngineError("no room")

    parts, phases = make(parameters={"acquire_all": acquire_one})
    frame = frame_of(FORWARD)
    with pytest.raises(EngineError, match="no room"):
        phases.before_module(frame, parts.tensors, "layer")
    told(parts)
    phases.after_module(frame)
    assert told(parts) == [("parameters.release_all", ["t0"])]


def test_parameters_that_copies_stood_in_for_are_put_back():
    _, phases = make()
    names = {"weight": "a copy"}
    phases.after_module(frame_of(FORWARD, replaced=[(names, "weight", "the parameter")]))
    assert names == {"weight": "the parameter"}


def test_every_forward_that_was_interrupted_ends_innermost_first():
    parts, phases = make()
    left = []
    context = types.SimpleNamespace(__exit__=lambda *error: left.append(error))
    outer = frame_of(FORWARD, acquired=[parts.tensors[0]], autocast=context, has_turn=True)
    inner = frame_of(FORWARD, acquired=[parts.tensors[1]])
    phases.frames.stack += [outer, inner]
    phases.unwind()
    assert told(parts) == [
        ("steps.abandon_step",),
        ("parameters.release_all", ["t1"]),
        ("parameters.release_all", ["t0"]),
        ("turns.give_up",),
    ]
    assert (phases.frames.stack, left) == ([], [(None, None, None)])


# Backward


def test_operands_that_are_in_no_chunk_are_kept_and_come_back_as_they_are():
    parts, phases = make()
    operand = torch.ones(2)
    assert phases.operand_needed(phases.operand_saved(operand)) is operand
    assert [name for name, *_ in told(parts)] == ["copies.find"]


def test_a_backward_begins_with_what_users_wrote():
    parts, phases = make()
    phases.backward_begin()
    begun = [("turns.take_backward",), ("writes.sync",)]
    assert told(parts) == begun
    assert parts.executor.in_backward
    phases.backward_begin()
    assert told(parts) == begun, "one inside of it, as of checkpointing, is not another"


def test_what_is_there_before_a_backward_is_multiplied_first():
    factor = torch.tensor(0.5)
    parts, phases = make(factor=factor)
    phases.backward_begin()
    assert told(parts)[2:] == [
        ("gradients.multiply", "t0", factor),
        ("gradient mirrors.refresh", "t0"),
        ("gradients.multiply", "t1", factor),
        ("gradient mirrors.refresh", "t1"),
    ]


@pytest.mark.parametrize("is_at_home", [True, False])
def test_a_gradient_goes_to_its_bucket_after_what_was_written_to_its_mirror(is_at_home):
    parts, phases = make()
    gradient = narrow(1, 2)
    phases.gradient_ready(parts.tensors[1], gradient, is_at_home=is_at_home)
    assert told(parts) == [
        ("parameters.check_gradient", "t1"),
        ("gradient mirrors.sync_one", "t1"),
        ("buckets.store", "t1", gradient, is_at_home),
        ("executor.reduce_when_due", parts.chunks[0]),
    ]


def test_a_gradient_that_is_refused_goes_nowhere():
    def refuse(tensor):
        raise EngineError("frozen")

    parts, phases = make(parameters={"check_gradient": refuse})
    with pytest.raises(EngineError, match="frozen"):
        phases.gradient_ready(parts.tensors[0], narrow(1, 2))
    assert told(parts) == [("parameters.check_gradient", "t0")]


def test_a_sparse_gradient_is_stored_dense():
    parts, phases = make()
    phases.gradient_ready(parts.tensors[0], torch.sparse_coo_tensor([[1]], [3.0], (2,), check_invariants=True))
    ((_, _, gradient, _),) = [event for event in parts.told if event[0] == "buckets.store"]
    assert (gradient.layout, gradient.tolist()) == (torch.strided, [0, 3])


def test_a_backward_ends_with_gradients_that_waited_for_their_places():
    parts, phases = make(steps={"end_phase": frozenset()})
    parts.executor.in_backward = True
    parts.tensors[1].deferred_gradient = narrow(1, 2)
    phases.backward_end()
    assert told(parts) == [
        ("parameters.release_held_outside_forward",),
        ("steps.end_phase", Phase.BACKWARD, "unreduced", {0}),
        ("buckets.finish", frozenset()),
        ("executor.take_home", "left"),
        ("gradients.place_deferred", "t1"),
        ("streams.release_in_flight",),
        ("steps.end_micro_batch",),
        ("turns.give_up_backward",),
    ]
    assert not parts.executor.in_backward


def test_a_backward_of_several_processes_ends_when_all_averages_are_at_home():
    """Of what another process has at home only is known that it got a gradient."""
    parts, phases = make(steps={"end_phase": frozenset({1})})
    parts.tensors[1].is_owned = False
    phases.backward_end()
    assert told(parts) == [
        ("parameters.release_held_outside_forward",),
        ("steps.end_phase", Phase.BACKWARD, "unreduced", {0}),
        ("buckets.finish", frozenset({1})),
        ("executor.take_home", "left"),
        ("gradients.note_remote", "t1"),
        ("gradient mirrors.drop", "t1"),
        ("streams.release_in_flight",),
        ("steps.end_micro_batch",),
        ("turns.give_up_backward",),
    ]


def test_of_an_own_gradient_that_arrived_only_its_mirror_goes():
    parts, phases = make(steps={"end_phase": frozenset({0})})
    phases.backward_end()
    assert [event for event in told(parts) if "t0" in event] == [("gradient mirrors.drop", "t0")]


def test_the_turn_ends_even_if_the_end_of_the_backward_fails():
    def fail():
        raise EngineError("the others are gone")

    parts, phases = make(streams={"release_in_flight": fail})
    with pytest.raises(EngineError, match="the others are gone"):
        phases.backward_end()
    assert told(parts)[-1] == ("turns.give_up_backward",)


def test_a_backward_that_runs_has_not_failed():
    parts, phases = make()
    parts.executor.in_backward = True
    InBackward.apply(torch.ones(1, requires_grad=True), phases.abandon_failed_backward).backward()
    assert (told(parts), parts.executor.in_backward) == ([], True)
    phases.abandon_failed_backward()
    assert (told(parts)[-1], parts.executor.in_backward) == (("steps.abandon_step",), False)


def test_where_no_backward_has_begun_none_has_failed():
    parts, phases = make()
    phases.abandon_failed_backward()
    assert told(parts) == []


# The optimizer's step


def test_an_update_begins_without_copies_of_what_it_will_change():
    parts, phases = make(homes=[Tier.HOST] * 3)
    phases.frames.stack.append(frame_of(FORWARD, acquired=[parts.tensors[0]]))
    phases.update_begin([parts.chunks[2], parts.chunks[0]])
    assert told(parts) == [
        ("steps.abandon_step",),
        ("parameters.release_all", ["t0"]),
        ("copies.invalidate", parts.chunks[2]),
        ("copies.invalidate", parts.chunks[0]),
        ("steps.begin_update", [2, 0], 0),
    ]


def test_copies_that_an_update_voids_are_dropped_with_one_reading():
    parts = Parts()
    for _ in range(3):
        parts.copies.load(parts.add_chunk(4)[0].chunk, ahead=False)
    phases = parts.phases
    parts.readings()
    phases.update_begin(parts.chunks)
    assert (parts.on_device(), parts.readings()) == ([], 1)


def test_a_checkpoint_that_is_being_written_goes_before_an_update():
    parts, phases = make()
    (chunk,) = parts.chunks
    chunk.reader = Fake(Named(parts.told, "reader"), "wait")
    phases.before_update(chunk)
    assert told(parts) == [("steps.visit_for_update", chunk), ("reader.wait",)]
    assert chunk.reader is None


class Note:
    """A ticket that writes down that it is waited for."""

    def __init__(self, log, name):
        self.lane, self._log, self._name = WorkLane.TO_HOST, log, name

    def wait(self):
        self._log.append((f"wait for {self._name}",))


def test_an_update_on_the_host_goes_on_beside():
    parts, phases = make(homes=[Tier.HOST] * 2)
    notes = [Note(parts.told, "a gradient"), Note(parts.told, "another")]
    for chunk, note in zip(parts.chunks, notes, strict=True):
        chunk.note(note)
    update = Update(lambda: None)
    phases.update(parts.chunks, update, may_run_beside=True)
    assert told(parts) == [("streams.on_host", update, notes, update.give_up)]
    assert [chunk.update for chunk in parts.chunks] == ["ticket"] * 2


@pytest.mark.parametrize(
    ("home", "may_run_beside", "overlaps_updates"),
    [(Tier.DEVICE, True, True), (Tier.HOST, False, True), (Tier.HOST, True, False)],
)
def test_other_updates_are_done_when_they_are_told(home, may_run_beside, overlaps_updates):
    parts, phases = make(homes=[home], overlaps_updates=overlaps_updates)
    parts.chunks[0].note(Note(parts.told, "a gradient"))
    phases.update(parts.chunks, Update(lambda: parts.told.append(("update",))), may_run_beside=may_run_beside)
    assert told(parts) == [("wait for a gradient",), ("update",)]
    assert parts.chunks[0].update is None


def test_an_update_on_the_host_waits_for_those_beside_which_use_the_same_workspace():
    parts, phases = make(homes=[Tier.HOST] * 2)
    phases._streams.on_host = lambda *_: Note(parts.told, "the one beside")
    phases.update(parts.chunks[:1], Update(lambda: None), may_run_beside=True)
    phases.update(parts.chunks[1:], Update(lambda: parts.told.append(("update",))), may_run_beside=False)
    assert told(parts) == [("wait for the one beside",), ("update",)]


@pytest.mark.parametrize("may_run_beside", [False, True])
def test_an_update_that_fails_is_taken_back(may_run_beside):
    def fail(*_):
        raise ArithmeticError

    parts, phases = make(homes=[Tier.HOST])
    phases._streams.on_host = fail
    update = Update(fail, lambda: parts.told.append(("taken back",)), lambda: parts.told.append(("restored",)))
    with pytest.raises(ArithmeticError):
        phases.update(parts.chunks, update, may_run_beside=may_run_beside)
    assert told(parts) == [("taken back",)]
    update.give_up()
    assert told(parts) == [("taken back",), ("restored",)]


@pytest.mark.parametrize("keeps", [False, True])
def test_an_update_changes_the_values_of_what_it_has_and_consumes_its_gradients(keeps):
    """Three tensors have gradients, of which the optimizer has two."""
    parts, phases = make(homes=[Tier.HOST] * 2, gradients={"has": lambda tensor: tensor.spec.index != 1})
    for chunk in parts.chunks:
        phases.chunk_updated(chunk, {0, 1, 3}, keeps=keeps)
    names = [event for event in told(parts) if event[0] != "gradients.has"]
    assert names == [
        ("gradient mirrors.kept", "t0"),
        ("gradients.finish_update", "t0", "kept", keeps),
        ("mirrors.refresh", "t0"),
        ("gradient mirrors.kept", "t3"),
        ("gradients.finish_update", "t3", "kept", keeps),
        ("mirrors.refresh", "t3"),
    ]
    assert [tensor.num_writes for tensor in parts.tensors] == [1, 0, 0, 1]


def test_after_an_update_chunks_may_move_to_better_homes():
    parts, phases = make(num_micro_batches=3)
    parts.tensors[1].lookup_nbytes = 64
    phases.update_end()
    assert told(parts) == [
        ("gradients.note_step",),
        ("steps.end_update",),
        ("placement.update", "reclaim", 3),
    ]
    assert (parts.data.values.version, parts.tensors[1].lookup_nbytes) == (8, 0)


# All of it, of real parts


def test_a_step_of_real_parts():
    """Two chunks of which one fits: a forward, a backward and an update by hand."""
    parts = Parts(device_nbytes=8)
    parts.add_chunk(4)
    parts.add_chunk(4)
    phases = parts.phases
    phases.before_forward(FORWARD, "", SHAPES, ())
    for tensor in parts.tensors:
        frame = frame_of(FORWARD)
        phases.before_module(frame, [tensor], "layer")
        phases.after_module(frame)
    phases.after_forward(frame_of(FORWARD), has_failed=False)
    phases.backward_begin()
    for tensor in reversed(parts.tensors):
        phases.gradient_ready(tensor, torch.ones(4, dtype=torch.bfloat16))
    phases.backward_end()
    assert parts.moved() == [("load", 0), ("evict", 0), ("load", 1), ("gradient", 1, 1), ("gradient", 0, 0)]
    phases.update_begin(parts.chunks)
    for chunk in parts.chunks:
        phases.before_update(chunk)
        phases.chunk_updated(chunk, {0, 1}, keeps=False)
    phases.update_end()
    assert sorted(parts.tracer.traces) == ["optimizer", "training/2x4"]
    assert parts.steps.num_updates == 1
