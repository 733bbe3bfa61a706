"""Steps: what begins and ends, what is measured and recorded meanwhile, and which plan is made; a copy has 16 bytes."""

import logging

import pytest
from unit.runtime.parts import Fake, OneOfTwo, Others, Parts

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.order import Beginning, Collective, Ended, Ending, Phase, Room, Subject
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.executor import MovePolicy
from hf_patrickstar.runtime.steps import DeviceGauges
from hf_patrickstar.schedule.plan import Actions, Plan
from hf_patrickstar.schedule.trace import Trace, Visit

SHAPES = ((2, 4),)
NONE, RECORDED, FOLLOWED = "no step", "recorded", "followed"


def make(num_chunks=3, *, homes=None, frozen=(), device_nbytes=48, collectives=None, **settings):
    """Parts with chunks of eight elements; the executor writes to ``told``."""
    told = []
    fakes = {
        "executor": Fake(told, "expect", "execute_until", "reduce_due", "ask", "perform", end_of_phase=7),
        "reclaim": Fake(told, "evict_unused"),
        "watch": Fake([], "collect"),
    }
    parts = Parts(collectives, device_nbytes, **{**fakes, **settings})
    parts.told = told
    for index, home in enumerate(homes or (Tier.HOST,) * num_chunks):
        parts.add_chunk(4, 4, home=home, trainable=index not in frozen)
    return parts


def told(parts):
    """What the executor was told since the last call; steps by their state."""
    found, parts.told[:] = list(parts.told), []
    return [(name, *(_told(argument) for argument in arguments)) for name, *arguments in found]


def _told(argument):
    if argument is None:
        return NONE
    if hasattr(argument, "is_recorded") and hasattr(argument, "cursor"):
        return RECORDED if argument.cursor is None else FOLLOWED
    return argument


def metered(parts):
    """What the meter was told since the last call."""
    found, parts.others.told[:] = list(parts.others.told), []
    return found


def begin(parts, name="", shapes=SHAPES, present=(), version=0):
    parts.steps.begin_step(name, shapes, present, version, lambda title, shapes: False)
    return parts.tracer.step


def record(parts, *visits, name="", shapes=SHAPES):
    """A whole step, which is recorded; then nothing was told."""
    begin(parts, name, shapes)
    for index in visits:
        parts.tracer.visit(index, tuple)
    parts.steps.end_forward()
    parts.steps.end_micro_batch()
    parts.steps.micro_batch = 0
    parts.steps.stop_idle_meter()
    told(parts), metered(parts)


# What is measured


def test_what_others_take_is_measured_beside_the_chunks_and_noted():
    asked = []
    meter = Fake(asked, peak=30)
    ledger = Ledger({Tier.DEVICE: 100, Tier.HOST: 0})
    ledger.book(Tier.DEVICE, "param", 16)
    assert DeviceGauges(meter, ledger).take_non_model_peak() == 30
    assert (asked, ledger.total_step_peak) == ([("peak", 16)], 46)


def test_the_most_gradients_since_the_last_time():
    ledger = Ledger({Tier.DEVICE: 100, Tier.HOST: 0})
    gauges = DeviceGauges(Others(), ledger)
    ledger.book(Tier.DEVICE, "gradients", 16)
    ledger.book(Tier.DEVICE, "param", 64)
    ledger.unbook(Tier.DEVICE, "gradients", 12)
    assert [gauges.take_gradient_peak(), gauges.take_gradient_peak()] == [16, 4]


# What begins


@pytest.mark.parametrize(
    ("num_micro_batches", "kinds"),
    [
        (1, ["training"] * 3),
        (2, ["training first", "training last"]),
        (4, ["training first", "training middle", "training middle", "training last"]),
    ],
)
def test_what_a_micro_batch_is_among_those_of_its_step(num_micro_batches, kinds):
    parts = make(num_micro_batches=num_micro_batches)
    found = []
    for _ in kinds:
        found.append(begin(parts, shapes=()).key)
        parts.steps.end_micro_batch()
    assert (found, parts.steps.micro_batch) == (kinds, len(kinds))


@pytest.mark.parametrize(
    ("name", "shapes", "key"),
    [("", (), "training"), ("encoder", (), "training:encoder"), ("encoder", ((2, 5),), "training:encoder/2x6")],
)
def test_a_step_is_called_by_its_kind_its_module_and_its_shapes(name, shapes, key):
    parts = make()
    assert begin(parts, name, shapes).key == key
    parts.steps.begin_nested_evaluation(name, shapes, (), 0, lambda title, shapes: False)
    assert parts.tracer.step.key == key.replace("training", "evaluation")


@pytest.mark.parametrize(
    ("num_micro_batches", "micro_batch", "dropped"), [(1, 0, {0, 2}), (2, 0, set()), (2, 1, {0, 2}), (3, 1, set())]
)
def test_copies_of_what_is_trained_are_void_after_the_last_micro_batch(num_micro_batches, micro_batch, dropped):
    parts = make(frozen=(1,), num_micro_batches=num_micro_batches)
    parts.steps.micro_batch = micro_batch
    assert begin(parts).dropped_after == dropped


def test_the_first_step_is_recorded_and_measured_and_the_next_is_not():
    parts = make()
    step = begin(parts, present=("a tensor", "another"))
    assert (step.is_recorded, step.plan) == (True, None)
    assert (metered(parts), told(parts)) == ([("start", 2), "restart"], [("expect", RECORDED)])
    parts.tracer.visit(0, tuple)
    parts.steps.end_micro_batch()
    assert (metered(parts), told(parts)) == (["pause"], [("expect", NONE)])
    assert parts.tracer.traces["training/2x4"].visits == (Visit(0),)
    step = begin(parts)
    assert step.plan == Plan((Actions(load=(0,)),), {0: 0}, (16,))
    assert (metered(parts), told(parts)) == ([], [("expect", FOLLOWED)])


def test_a_step_whose_inputs_cannot_be_seen_is_always_measured():
    parts = make()
    record(parts, 0, shapes=())
    assert begin(parts, shapes=()).cursor is not None
    assert metered(parts) == [("start", 0), "restart"]


def test_others_are_measured_from_one_visit_to_the_next():
    parts = make()
    begin(parts)
    parts.others.nbytes = 5
    parts.tracer.visit(0, tuple)
    parts.others.nbytes = 7
    parts.tracer.visit(1, tuple)
    parts.others.nbytes = 3
    parts.steps.end_micro_batch()
    assert [visit.non_model_nbytes for visit in parts.tracer.traces["training/2x4"].visits] == [7, 3]


@pytest.mark.parametrize(("home", "nbytes"), [(Tier.DEVICE, 48 + 20), (Tier.HOST, 0)])
def test_where_nothing_moves_what_a_step_takes_is_noted_when_it_begins(home, nbytes):
    """Else it is noted from one visit to the next."""
    parts = make(homes=[home], device_nbytes=100)
    parts.others.nbytes = 20
    record(parts, 0)
    parts.others.nbytes = 0
    parts.ledger.begin_step()
    begin(parts)
    assert parts.ledger.total_step_peak == nbytes


# Plans


def plan_again(parts):
    """Begins the step again and drops it; returns its plan."""
    plan = begin(parts).plan
    parts.steps.abandon_step()
    return plan


def test_a_plan_is_made_once_for_one_situation():
    parts = make()
    record(parts, 0, 1)
    first = plan_again(parts)
    assert plan_again(parts) is first
    assert first == Plan((Actions(load=(0,)), Actions(load=(1,))), {0: 0, 1: 1}, (16, 32))


def _load(parts):
    parts.copies.load(parts.chunks[1], ahead=False)


def _move_home(parts):
    parts.copies.rehome(parts.chunks[1], Tier.DEVICE)


def _book(parts):
    parts.ledger.book(Tier.DEVICE, "workspace", 64)


def _floor(parts):
    parts.others.floor_nbytes = 64


def _limit(parts):
    parts.ledger.lower_limit(Tier.DEVICE, 31)


def _record_anew(parts):
    parts.tracer.discard()
    record(parts, 0, 1)


BOTH = ((16, 32), [(0,), (1,)], [(), ()])
IN_TURN = ((16, 16), [(0,), (1,)], [(), (0,)])


@pytest.mark.parametrize(
    ("change", "device_nbytes", "plan"),
    [
        (_load, 96, ((32, 32), [(0,), ()], [(), ()])),
        (_move_home, 96, ((16, 16), [(0,), ()], [(), ()])),
        (_book, 80, IN_TURN),
        (_floor, 80, IN_TURN),
        (_limit, 96, IN_TURN),
        (_record_anew, 96, BOTH),
    ],
)
def test_a_plan_is_made_anew_for_another_situation(change, device_nbytes, plan):
    parts = make(device_nbytes=device_nbytes)
    record(parts, 0, 1)
    first = plan_again(parts)
    change(parts)
    second = plan_again(parts)
    assert second is not first
    assert (second.chunk_nbytes, [a.load for a in second.moments], [a.evict for a in second.moments]) == plan


def test_a_plan_keeps_to_what_chunks_may_take():
    parts = make(device_nbytes=1000, chunk_budget=31)
    record(parts, 0, 1)
    assert plan_again(parts).moments == (Actions(load=(0,)), Actions((0,), (1,)))


def test_a_plan_knows_which_copy_was_used_longest_ago():
    parts = make(chooser="lru")
    for tick, index in enumerate((2, 0)):
        parts.copies.load(parts.chunks[index], ahead=False)
        parts.chunks[index].last_access = tick
    parts.ledger.lower_limit(Tier.DEVICE, 32)
    record(parts, 1)
    assert plan_again(parts).moments == (Actions((2,), (1,)),)


@pytest.mark.parametrize(("evict_all", "load"), [(False, [(0, 1), ()]), (True, [(0,), (1,)])])
def test_chunks_come_ahead_unless_all_that_is_ahead_leaves_at_once(evict_all, load):
    parts = make(prefetch_depth=1, evict_all=evict_all)
    record(parts, 0, 1)
    assert [actions.load for actions in plan_again(parts).moments] == load


def test_where_no_plan_fits_there_is_none_and_no_other_is_looked_for(caplog):
    caplog.set_level(logging.INFO, logger="hf_patrickstar")
    parts = make()
    record(parts, 0)
    parts.ledger.lower_limit(Tier.DEVICE, 15)
    assert (plan_again(parts), plan_again(parts)) == (None, None)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("patrickstar: no plan for 'training/2x4', chunks move on demand: moment 0 of trace ")


# Evaluations


def test_an_evaluation_between_steps_makes_a_trace_and_ends_the_measuring():
    parts = make()
    parts.steps.begin_nested_evaluation("", SHAPES, (), 0, lambda title, shapes: False)
    parts.tracer.visit(1, tuple)
    assert (metered(parts), told(parts)) == ([("start", 0), "restart"], [("expect", RECORDED)])
    parts.steps.end_nested_evaluation(is_whole=True)
    assert list(parts.tracer.traces) == ["evaluation/2x4"]
    assert (metered(parts), told(parts)) == (["pause", "stop"], [("expect", NONE)])


def test_an_evaluation_that_did_not_come_to_its_end_makes_none():
    parts = make()
    parts.steps.begin_nested_evaluation("", SHAPES, (), 0, lambda title, shapes: False)
    parts.tracer.visit(1, tuple)
    parts.steps.end_nested_evaluation(is_whole=False)
    assert parts.tracer.traces == {}


@pytest.mark.parametrize(
    ("is_known", "state", "told_meter"), [(False, RECORDED, []), (True, FOLLOWED, ["pause", "stop"])]
)
def test_the_step_that_an_evaluation_interrupted_goes_on(is_known, state, told_meter):
    """If it is measured, that goes on too."""
    parts = make()
    if is_known:
        record(parts, 0)
    step = begin(parts)
    parts.steps.begin_nested_evaluation("", SHAPES, (), 0, lambda title, shapes: False)
    told(parts), metered(parts)
    parts.steps.end_nested_evaluation(is_whole=True)
    assert parts.tracer.step is step
    assert (told(parts), metered(parts)) == ([("expect", state)], told_meter)


# What ends


def test_the_end_of_a_forward_is_recorded():
    parts = make()
    record(parts, 0, 1)
    assert parts.tracer.traces["training/2x4"].forward_ends == (2,)


def test_the_optimizers_step_is_recorded_beside_the_chunks_that_it_comes_to():
    parts = make()
    begin(parts)
    told(parts), metered(parts)
    parts.steps.begin_update([1, 0])
    assert parts.tracer.step.key == "optimizer"
    parts.steps.visit_for_update(parts.chunks[1])
    parts.steps.visit_for_update(parts.chunks[0])
    assert metered(parts) == [("start", 0), "restart", "restart", "restart"]
    parts.steps.end_update()
    assert [visit.chunk_index for visit in parts.tracer.traces["optimizer"].visits] == [1, 0]
    assert metered(parts) == ["pause", "stop", "stop"]
    parts.steps.begin_update([1, 0])
    parts.steps.visit_for_update(parts.chunks[1])
    assert metered(parts) == []


@pytest.mark.parametrize(
    ("indices", "number", "keys"), [([0, 1], 0, ["optimizer"]), ([0], 1, ["optimizer", "optimizer:1"])]
)
def test_an_optimizers_step_that_comes_to_other_chunks_is_recorded_and_does_not_diverge(indices, number, keys):
    """The first one comes before a forward was recorded, whose order the others follow; each optimizer has its own."""
    parts = make()
    for chunk_indices, optimizer_index in (([1, 0], 0), (indices, number), (indices, number)):
        parts.steps.begin_update(chunk_indices, optimizer_index)
        for index in chunk_indices:
            parts.steps.visit_for_update(parts.chunks[index])
        assert not parts.tracer.step.is_diverged
        is_recorded = parts.tracer.step.is_recorded
        parts.steps.end_update()
    assert not is_recorded
    assert sorted(parts.tracer.traces) == keys
    assert [visit.chunk_index for visit in parts.tracer.traces[keys[-1]].visits] == indices


def test_the_optimizers_step_ends_the_micro_batches_and_the_peaks():
    parts = make(num_micro_batches=3)
    for _ in range(2):
        begin(parts)
        parts.steps.end_micro_batch()
    parts.copies.load(parts.chunks[0], ahead=False)
    parts.copies.load(parts.chunks[1], ahead=False)
    parts.ledger.note_total(9)
    parts.ledger.unbook(Tier.DEVICE, "param", 16)
    parts.steps.begin_update([])
    assert parts.steps.end_update() == 2
    assert (parts.steps.micro_batch, parts.steps.num_updates) == (0, 1)
    assert parts.steps.peaks == (32, 41, 3 * 48)
    parts.steps.begin_update([])
    assert (parts.steps.end_update(), parts.steps.num_updates, parts.steps.peaks) == (0, 2, (16, 16, 3 * 48))


def test_a_step_that_came_to_nothing_leaves_nothing():
    parts = make()
    begin(parts)
    parts.tracer.visit(0, tuple)
    told(parts), metered(parts)
    parts.steps.abandon_step()
    assert (parts.tracer.step, parts.tracer.traces) == (None, {})
    assert (metered(parts), told(parts)) == (["stop"], [("expect", NONE)])


def test_a_step_that_has_failed_is_not_measured_any_more():
    parts = make()
    begin(parts)
    metered(parts)
    parts.steps.give_up()
    parts.steps.stop_idle_meter()
    assert metered(parts) == ["pause"], "it may go on: the meter stays on this thread"
    parts.steps.abandon_step()
    assert metered(parts) == ["stop"]


def test_one_process_agrees_with_itself():
    parts = make()
    begin(parts)
    told(parts)
    assert parts.steps.end_phase(Phase.BACKWARD, lambda: [1], [3, 5]) == {3, 5}
    assert told(parts) == []


# Together


def make_group(beginning=None, endings=(), **settings):
    """The first of two processes: what all agree on when a step begins, and what others say when a phase ends."""
    said = []
    answers = iter(endings)
    order = Fake(
        said,
        begin=lambda title, shapes, traces, room, version: beginning or Beginning(shapes, True, room),
        end=lambda ending: next(answers, Ended((), ending.is_diverged, frozenset(ending.indices))),
        agree_on_trace=lambda trace: trace,
    )
    order.is_alone = False
    parts = make(collectives=OneOfTwo(), order=order, **{"device_nbytes": 96, **settings})
    parts.said = said
    return parts


def test_a_step_begins_with_what_all_have():
    parts = make_group(Beginning(((9, 9),), True, Room(64, 48, 16, ())))
    step = begin(parts, "encoder", version=4)
    (message,) = parts.said
    fingerprint = parts.tracer.fingerprint
    assert message == ("begin", "training:encoder", SHAPES, fingerprint, Room(96, None, 0, ()), 4)
    assert (step.key, step.shapes) == ("training:encoder/12x12", ((9, 9),))
    assert told(parts) == [("expect", RECORDED)]


def test_the_room_is_what_neither_homes_nor_workspaces_take():
    parts = make_group(device_nbytes=1000, chunk_budget=500, homes=[Tier.DEVICE, Tier.HOST])
    parts.ledger.book(Tier.DEVICE, "workspace", 100)
    with parts.copies.loaded_by_others(parts.chunks[1], ahead=False):
        pass
    parts.others.floor_nbytes = 7
    begin(parts)
    fixed = 48 + 100
    assert parts.said[0][4] == Room(1000 - fixed, 500 - fixed, 7, (1,))


@pytest.mark.parametrize(
    ("is_traced", "resident", "events", "num_traces"),
    [(True, (1,), [], 1), (True, (), [("evict_unused",)], 1), (False, (1,), [], 0)],
)
def test_what_is_not_the_same_everywhere_is_dropped(is_traced, resident, events, num_traces):
    parts = make_group(Beginning(SHAPES, is_traced, Room(96, None, 0, resident)))
    with parts.copies.loaded_by_others(parts.chunks[1], ahead=False):
        pass
    parts.tracer.traces["training/9"] = Trace("training/9", (32,) * 3, ())
    begin(parts)
    assert told(parts) == [*events, ("expect", RECORDED)]
    assert len(parts.tracer.traces) == num_traces


class Told:
    """Foresight that has nothing to tell."""

    def foresee(self, call, shapes):
        return None


@pytest.mark.parametrize("has_changed", [True, False])
def test_a_step_begins_anew_where_processes_may_have_foreseen_it(has_changed):
    """All of them say so, or none, whatever has changed here: one that does not say it would wait for ever."""
    parts = make_group()
    asked = []

    def make_ready(title, shapes):
        asked.append((title, shapes))
        return has_changed

    def begin_as(shapes):
        parts.said.clear()
        parts.steps.begin_step("", shapes, (), 0, make_ready)
        return [name for name, *_ in parts.said]

    assert (begin_as(SHAPES), asked) == (["begin"], [("training", SHAPES)]), "nobody foresees anything"
    parts.steps.foresight = Told()
    assert begin_as(SHAPES) == ["begin", "begin"]
    assert begin_as(()) == ["begin"], "inputs that cannot be compared"
    parts.tracer.traces["training/2x4"] = Trace("training/2x4", (32,) * 3, (Visit(0),), (SHAPES,))
    assert (begin_as(SHAPES), len(asked)) == (["begin"], 3), "it is known"


@pytest.mark.parametrize(("evict_all", "has_plan"), [(False, True), (True, False)])
def test_processes_that_evict_everything_follow_no_plan(evict_all, has_plan):
    parts = make_group(evict_all=evict_all)
    record(parts, 0)
    assert (begin(parts).plan is not None) == has_plan


def test_groups_leave_after_forward_where_that_is_wanted_and_there_are_others():
    config = PatrickStarConfig(prefetch_depth=0, reshard_after_forward=True)
    group, alone = (MovePolicy.of(config, world_size, 0) for world_size in (2, 1))
    leaving = []
    for parts in (make_group(policy=group), make(policy=alone, device_nbytes=96)):
        begin(parts)
        parts.tracer.visit(0, tuple)
        parts.tracer.note_forward_end()
        parts.tracer.visit(1, tuple)
        parts.steps.end_micro_batch()
        leaving.append([actions.evict for actions in begin(parts).plan.moments])
    assert leaving == [[(), (0,)], [(), ()]]


@pytest.mark.parametrize(
    ("phase", "is_forward", "reduces"),
    [(Phase.FORWARD, True, []), (Phase.BACKWARD, False, [("reduce_due", FOLLOWED)])],
)
def test_a_phase_ends_when_the_plan_is_carried_out_that_far(phase, is_forward, reduces):
    parts = make_group()
    record(parts, 0)
    begin(parts)
    told(parts)
    parts.said.clear()
    assert parts.steps.end_phase(phase, indices=iter([4, 2])) == {2, 4}
    assert told(parts) == [("end_of_phase", FOLLOWED, is_forward), ("execute_until", FOLLOWED, 7), *reduces]
    assert parts.said == [("end", Ending(phase, False, [2, 4], False))]


def test_gradients_that_no_plan_expects_are_reduced_before_a_backward_ends():
    parts = make_group()
    begin(parts)
    told(parts)
    waiting = [[2, 1], [1], []]
    parts.steps.end_phase(Phase.BACKWARD, lambda: waiting.pop(0))
    why = "gradients that no plan expects"
    assert told(parts) == [("ask", Subject.REDUCE, 2, why), ("ask", Subject.REDUCE, 1, why)]


def test_a_phase_has_not_ended_while_others_ask_for_something():
    wanted = (Collective(Subject.GATHER, 1),)
    more = (Collective(Subject.REDUCE, 2),)
    parts = make_group(endings=[Ended(wanted), Ended(more), Ended((), False, frozenset({9}))])
    begin(parts)
    told(parts)
    parts.said.clear()
    assert parts.steps.end_phase(Phase.BACKWARD, indices=[3]) == {9}
    assert told(parts) == [("perform", wanted), ("perform", more)]
    assert parts.said == [("end", Ending(Phase.BACKWARD, False, [3], True))] * 3


@pytest.mark.parametrize(("phase", "is_diverged"), [(Phase.FORWARD, False), (Phase.BACKWARD, True)])
def test_a_step_that_left_its_trace_anywhere_has_left_it_everywhere(phase, is_diverged):
    parts = make_group(endings=[Ended((), True, frozenset())])
    step = begin(parts)
    parts.steps.end_phase(phase)
    assert step.is_diverged is is_diverged


def test_an_evaluation_ends_for_all_unless_it_was_interrupted():
    parts = make_group()
    for is_whole in (True, False):
        parts.steps.begin_nested_evaluation("", SHAPES, (), 0, lambda title, shapes: False)
        parts.said.clear()
        parts.steps.end_nested_evaluation(is_whole=is_whole)
        ends = [ending.phase for name, ending, *_ in parts.said if name == "end"]
        assert ends == [Phase.EVALUATION] * is_whole
