"""Carrying out plans by hand, on chunks of 16 bytes: of one process, and on one of two what it tells the other."""

import pytest
import torch
from unit.runtime.data_parts import CPU, Ticket
from unit.runtime.parts import Fake, NoForecast, Parts

from hf_patrickstar.dist.order import Collective, Subject
from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.buckets import Average
from hf_patrickstar.schedule.plan import Actions, Plan
from hf_patrickstar.schedule.trace import Trace, Visit

GATHER, REDUCE = Subject.GATHER, Subject.REDUCE


def make(num_chunks=3, *, homes=None, device_nbytes=48, collectives=None, **settings):
    """Parts with chunks of eight elements; where gradients are is left to fakes that write to ``told``."""
    told = settings.setdefault("told", [])
    fakes = {
        "placement": Fake([], leave_margin=False),
        "forecast": NoForecast(),
        "gradients": Fake(told, "bring_values_back", "add"),
        "gradient_mirrors": Fake(told, "sync_one", "drop"),
        "buckets": Fake(told),
        "watch": Fake([], "collect"),
    }
    parts = Parts(collectives, device_nbytes, **{**fakes, **settings})
    for home in homes or (Tier.HOST,) * num_chunks:
        parts.add_chunk(4, 4, home=home)
    return parts


def follow(parts, visits, actions=None, **trace):
    """Begins a step whose trace is known: visits, or their chunks; with a plan if there are actions."""
    visits = tuple(visit if isinstance(visit, Visit) else Visit(visit) for visit in visits)
    parts.tracer.traces["training"] = Trace("training", (16,) * len(parts.chunks), visits, **trace)
    step = parts.tracer.begin("training")
    step.plan = None if actions is None else Plan(tuple(actions), {}, ())
    return step


def visit(parts, *indices):
    for index in indices:
        parts.executor.ensure_on_device(parts.chunks[index], "m")


# What the ledger expects


@pytest.mark.parametrize(
    ("at", "moment", "reserved"), [((), None, 7), ((0,), None, 7), ((0, 1), None, 9), ((0,), 2, 5), ((), -1, 7)]
)
def test_a_step_that_is_followed_reserves_what_others_need_until_the_next_moment(at, moment, reserved):
    parts = make()
    step = follow(parts, [Visit(0, (), 7), Visit(1, (), 9), Visit(2, (), 5)])
    for index in at:
        assert step.cursor.advance(index)
    parts.executor.expect(step, moment)
    assert (parts.ledger.is_cautious, parts.ledger.reserved_nbytes) == (False, reserved)


def test_between_steps_nothing_is_reserved():
    parts = make()
    parts.ledger.reserved_nbytes = 5
    parts.executor.expect(None)
    assert (parts.ledger.is_cautious, parts.ledger.reserved_nbytes) == (False, 0)


def test_a_step_that_is_recorded_is_cautious():
    parts = make()
    parts.ledger.is_cautious, parts.ledger.reserved_nbytes = False, 5
    parts.executor.expect(parts.tracer.begin("training"))
    assert (parts.ledger.is_cautious, parts.ledger.reserved_nbytes) == (True, 0)


@pytest.mark.parametrize(("is_known", "reserved"), [(True, 9), (False, 0)])
def test_a_step_that_left_its_trace_reserves_the_most_that_is_known(is_known, reserved):
    parts = make()
    step = follow(parts, [Visit(0, (), 7), Visit(1, (), 9)])
    visit(parts, 2)
    if not is_known:
        parts.tracer.discard()
    parts.executor.expect(step)
    assert (step.is_diverged, parts.ledger.is_cautious, parts.ledger.reserved_nbytes) == (True, True, reserved)


# On demand


def test_a_chunk_comes_when_it_is_needed_and_is_there_the_second_time():
    parts = make()
    chunk = parts.chunks[1]
    payload = parts.executor.ensure_on_device(chunk, "m")
    assert payload is chunk.compute
    assert payload.tolist() == chunk.param.tolist()
    assert parts.count("chunk_hits") == 0
    assert parts.executor.ensure_on_device(chunk, "m") is payload
    assert (parts.moved(), parts.count("chunk_hits"), parts.count("late_prefetches")) == ([("load", 1)], 1, 0)


def test_the_chunk_that_was_used_longest_ago_leaves_for_another():
    parts = make(device_nbytes=32)
    visit(parts, 0, 1, 0, 2)
    assert parts.moved() == [("load", 0), ("load", 1), ("evict", 1), ("load", 2)]
    assert [chunk.last_access for chunk in parts.chunks] == [3, 2, 4]


def test_a_chunk_that_finds_no_room_says_who_needs_it():
    parts = make(device_nbytes=31)
    visit(parts, 0)
    parts.chunks[0].num_computing = 1
    with pytest.raises(DeviceMemoryError, match="device_budget is too small for module 'x': chunk 1 needs 16 B"):
        parts.executor.ensure_on_device(parts.chunks[1], "module 'x'")
    assert parts.chunks[1].compute is None


@pytest.mark.parametrize(("in_use", "events"), [((), [("evict", 0)]), ((0,), [])])
def test_others_that_have_grown_push_out_what_is_not_needed(in_use, events):
    """The chunk that is needed is there already, and it does not fail for them."""
    parts = make(2, device_nbytes=32)
    visit(parts, 0, 1)
    parts.moved()
    parts.others.nbytes = 20
    for index in in_use:
        parts.chunks[index].num_computing = 1
    visit(parts, 1)
    assert parts.moved() == events
    assert 1 in parts.on_device()


# Recording


def test_a_step_is_recorded_with_what_could_not_leave():
    parts = make()
    parts.tracer.begin("training")
    visit(parts, 0)
    parts.chunks[0].num_computing = 1
    visit(parts, 2, 0)
    parts.chunks[0].num_computing = 0
    visit(parts, 1)
    assert parts.tracer.step.visits == [(0, ()), (2, (0,)), (0, ()), (1, ())]
    assert parts.others.told == ["restart"] * 4, "what others take is measured from one moment to the next"


def test_what_is_at_home_on_the_device_is_visited_only_while_a_step_is_recorded():
    parts = make(homes=[Tier.DEVICE, Tier.DEVICE], device_nbytes=96)
    parts.tracer.begin("training")
    visit(parts, 1, 0)
    assert [index for index, _ in parts.tracer.step.visits] == [1, 0]
    parts.tracer.finish()
    assert parts.tracer.begin("training").cursor is not None
    visit(parts, 0, 0, 1)
    assert (parts.tracer.step.is_diverged, parts.count("diverged_steps")) == (False, 0)
    assert parts.chunks[0].last_access == 2, "nothing more was counted"
    assert (parts.count("chunk_hits"), parts.moved()) == (0, [])


@pytest.mark.parametrize(
    ("homes", "changes", "is_at_rest"),
    [
        ([Tier.DEVICE, Tier.DEVICE], "", True),
        ([Tier.DEVICE, Tier.HOST], "", False),
        ([Tier.DEVICE, Tier.DEVICE], "recorded", False),
        ([Tier.DEVICE, Tier.DEVICE], "followed", True),
    ],
)
def test_nothing_is_to_be_done_for_a_visit_where_all_is_at_home_and_nobody_counts(homes, changes, is_at_rest):
    parts = make(homes=homes, device_nbytes=192)
    if changes in ("recorded", "followed"):
        parts.tracer.begin("training")
        visit(parts, 0, 1)
    if changes == "followed":
        parts.tracer.finish()
        parts.tracer.begin("training")
    assert parts.executor.is_at_rest is is_at_rest


def test_a_static_chunk_is_visited_if_others_move():
    parts = make(homes=[Tier.DEVICE, Tier.HOST], device_nbytes=96)
    step = follow(parts, [0, 1])
    assert parts.executor.ensure_on_device(parts.chunks[0], "m") is parts.chunks[0].param
    visit(parts, 1)
    assert (step.cursor.moment, parts.moved(), parts.count("chunk_hits")) == (1, [("load", 1)], 0)


# By plan


def test_a_plan_is_carried_out_moment_by_moment():
    """Chunk 2 comes ahead; chunk 0 goes when the plan says so, not when room is needed."""
    parts = make()
    actions = [Actions(load=(0,)), Actions(load=(1, 2)), Actions(evict=(0,)), Actions(evict=(1, 2), load=(0,))]
    follow(parts, [0, 1, 2, 0], actions)
    told = []
    for index in (0, 1, 2, 0):
        visit(parts, index)
        told.append(parts.moved())
    assert told == [
        [("load", 0)],
        [("load", 1), ("ahead", 2)],
        [("evict", 0)],
        [("evict", 1), ("evict", 2), ("load", 0)],
    ]
    assert (parts.count("chunk_hits"), parts.count("late_prefetches")) == (1, 0)
    assert parts.others.told == [], "nothing is measured"


def test_a_plan_notes_what_others_are_known_to_take():
    parts = make()
    follow(parts, [Visit(0, (), 7), Visit(1, (), 2)], [Actions(load=(0,)), Actions(load=(1,))])
    visit(parts, 0)
    assert parts.ledger.total_peak == 16 + 7
    visit(parts, 1)
    assert (parts.ledger.total_peak, parts.ledger.reserved_nbytes) == (32 + 2, 2)


def test_what_cannot_be_done_as_planned_is_done_on_demand():
    """Chunk 0 is looked into when it should leave, so there is no room to bring 2 in ahead."""
    parts = make(device_nbytes=32)
    follow(parts, [0, 1, 2], [Actions(load=(0,)), Actions(evict=(0,), load=(1, 2)), Actions()])
    visit(parts, 0)
    view = parts.use(0)
    visit(parts, 1)
    assert parts.moved() == [("load", 0), ("load", 1)]
    del view
    visit(parts, 2)
    assert parts.moved() == [("evict", 1), ("load", 2)], "which is needed later than 0 in the next step"


def test_what_is_there_already_or_not_there_any_more_is_left_alone():
    parts = make()
    visit(parts, 0, 1)
    parts.moved()
    follow(parts, [0, 1], [Actions(evict=(2,), load=(0, 1)), Actions()])
    visit(parts, 0, 1)
    assert (parts.moved(), parts.count("chunk_hits")) == ([], 2)


def test_what_is_brought_in_ahead_may_take_kept_buffers():
    parts = make(device_nbytes=32)
    follow(parts, [0, 1, 2], [Actions(load=(0,)), Actions(load=(1,)), Actions(evict=(0, 1), load=(2, 0))])
    visit(parts, 0, 1, 2)
    assert parts.moved() == [("load", 0), ("load", 1), ("evict", 0), ("evict", 1), ("load", 2), ("ahead", 0)]


@pytest.mark.parametrize(("is_done", "hits", "late"), [(True, 1, 0), (False, 0, 1)])
def test_a_copy_that_has_not_arrived_in_time_is_no_hit(is_done, hits, late):
    class Slow:
        device = CPU

        def to_device(self, source, target, after=()):
            return None

        def fetch(self, source, target, after=()):
            ticket.is_done = is_done
            return ticket

    ticket = Ticket()
    parts = make(streams=Slow())
    follow(parts, [0, 1], [Actions(load=(0, 1)), Actions()])
    visit(parts, 0)
    assert ticket.num_waits == 0
    visit(parts, 1)
    assert (ticket.num_waits, parts.count("chunk_hits"), parts.count("late_prefetches")) == (1, hits, late)


def test_a_step_that_leaves_its_trace_goes_on_without_its_plan():
    parts = make()
    step = follow(parts, [0, 1], [Actions(load=(0,)), Actions(load=(1, 2))])
    visit(parts, 0, 2, 1)
    assert step.is_diverged
    assert parts.moved() == [("load", 0), ("load", 2), ("load", 1)]


def test_a_step_without_a_plan_is_followed_all_the_same():
    """Its trace says which copy is needed last."""
    parts = make(device_nbytes=32)
    follow(parts, [0, 1, 2, 0])
    visit(parts, 0, 1, 2)
    assert parts.moved() == [("load", 0), ("load", 1), ("evict", 1), ("load", 2)]


def test_while_debugging_everything_that_can_leave_does_so_at_once_and_is_poisoned():
    seen = []
    parts = make(evict_all=True, watch=Fake([], collect=lambda chunk: seen.append(chunk.compute[:2].tolist())))
    visit(parts, 0)
    visit(parts, 0)
    assert seen == [], "not the one that is needed"
    looking = parts.use(0)
    visit(parts, 1)
    assert (looking.tolist(), parts.on_device()) == ([0], [0, 1])
    visit(parts, 2)
    assert (looking.tolist(), parts.on_device()) == ([0], [0, 2])
    assert str(seen) == "[[32.0, 33.0], [nan, nan]]"


# How often it is measured what others take, which costs more than all else of a visit


def test_a_visit_of_a_plan_that_moves_nothing_measures_nothing():
    """Nothing leaves for others that have grown, either: they are met at the next load."""
    parts = make()
    follow(parts, [0, 1, 0, 1], [Actions(load=(0, 1)), Actions(), Actions(), Actions()])
    visit(parts, 0)
    parts.readings()
    parts.others.nbytes = 40
    visit(parts, 1, 0, 1)
    assert (parts.readings(), parts.on_device()) == (0, [0, 1])


def test_a_kept_buffer_goes_when_others_are_known_to_need_its_room():
    """What the trace says costs nothing to ask, so it counts at every visit."""
    parts = make(device_nbytes=32)
    follow(parts, [0, 1, Visit(1, (), 16)], [Actions(load=(0,)), Actions(evict=(0,), load=(1,)), Actions()])
    visit(parts, 0, 1)
    parts.copies.load(parts.chunks[2], ahead=False)
    parts.copies.evict(parts.chunks[2])
    assert parts.ledger.owners(Tier.DEVICE) == {"param": 16, "pool": 16}
    visit(parts, 1)
    assert parts.ledger.owners(Tier.DEVICE) == {"param": 16}
    assert parts.ledger.total_peak == 32


def test_a_moment_of_a_plan_measures_once_however_much_it_moves():
    """Into new buffers, and into those that were kept."""
    parts = make(4, device_nbytes=32)
    actions = [Actions(load=(0, 1)), Actions(evict=(0, 1), load=(2, 3)), Actions()]
    follow(parts, [0, 2, 3], actions)
    visit(parts, 0)
    assert parts.readings() == 1
    visit(parts, 2)
    assert parts.readings() == 1
    told = [("load", 0), ("ahead", 1), ("evict", 0), ("evict", 1), ("load", 2), ("ahead", 3)]
    assert parts.moved() == told


def test_a_load_on_demand_measures_once():
    parts = make(device_nbytes=32)
    follow(parts, [0, 1, 2])
    visit(parts, 0, 1)
    parts.readings()
    visit(parts, 2)
    assert (parts.moved()[-2:], parts.readings()) == ([("evict", 1), ("load", 2)], 1)


def test_a_load_of_a_plan_meets_others_that_have_grown():
    """Chunk 0 makes way for them and for chunk 1, and chunk 2 does not come ahead."""
    parts = make()
    follow(parts, [0, 0, 1], [Actions(load=(0,)), Actions(), Actions(load=(1, 2))])
    visit(parts, 0, 0)
    parts.others.nbytes = 24
    visit(parts, 1)
    assert parts.moved() == [("load", 0), ("evict", 0), ("load", 1)]


def test_a_load_ahead_meets_others_that_have_grown():
    """It is left out, and what is there beyond the budget leaves."""
    parts = make()
    follow(parts, [0, 1, 1], [Actions(load=(0, 1)), Actions(load=(2,)), Actions()])
    visit(parts, 0)
    parts.others.nbytes = 24
    visit(parts, 1)
    assert parts.moved() == [("load", 0), ("ahead", 1), ("evict", 0)]


@pytest.mark.parametrize("has_diverged", [True, False], ids=["diverged", "recorded"])
def test_a_step_without_a_plan_meets_others_at_every_visit(has_diverged):
    parts = make()
    if has_diverged:
        follow(parts, [0, 0], [Actions(load=(0,)), Actions()])
        visit(parts, 1)
    else:
        parts.tracer.begin("training")
    visit(parts, 0, 1)
    parts.others.nbytes = 24
    visit(parts, 1)
    assert ("evict", 0) in parts.moved()


# Averages


@pytest.mark.parametrize(("home", "crossing"), [(Tier.HOST, 8), (Tier.DEVICE, 0)])
def test_an_average_goes_home_after_what_was_written_to_its_mirror(home, crossing):
    parts = make(homes=[home])
    tensor, gradient = parts.tensors[0], torch.ones(4, dtype=torch.bfloat16)
    parts.executor.take_home([Average(tensor, gradient)])
    assert parts.told == [("sync_one", tensor), ("add", tensor, gradient), ("drop", tensor)]
    assert tensor.crossing_nbytes == crossing


# What is done together


class OneOfTwo:
    """The first of two processes, which takes part in gathers; the other never says anything."""

    rank, world_size = 0, 2

    def __init__(self, told):
        self.told, self.tickets = told, []

    def all_gather(self, buffer, what):
        self.told.append(what)
        self.tickets.append(Ticket())
        return self.tickets[-1]


def make_group(num_chunks=3, *, answer=lambda wanted, *_: (wanted,), **settings):
    """The first of two processes, and what it says, asks for and does; a copy has 32 bytes."""
    told = []
    order = Fake(told, "check", ask=lambda wanted, who, *, is_in_step: answer(wanted))
    order.is_alone = False
    buckets = Fake(told, is_complete=lambda chunk: chunk.spec.index in parts.complete, reduce=())
    settings = {"device_nbytes": 32 * num_chunks, "buckets": buckets, "told": told, **settings}
    parts = make(num_chunks, collectives=OneOfTwo(told), order=order, **settings)
    parts.complete = set()
    return parts


def done(parts):
    """What was said and done since the last call, without the details."""
    told, parts.told[:] = list(parts.told), []
    found = []
    for item in told:
        if isinstance(item, str):
            found.append(item)
        elif item[0] in ("check", "ask"):
            found.append((item[0], item[1].subject.name, item[1].group))
        elif item[0] == "reduce":
            found.append(("reduce", item[1].spec.index))
    return found


def gathered(index):
    return [("check", "GATHER", index), f"gathers group {index}"]


@pytest.mark.parametrize(("in_backward", "has_step"), [(False, False), (True, False), (False, True)])
def test_a_group_that_no_plan_brings_is_asked_for(in_backward, has_step):
    parts = make_group()
    if has_step:
        parts.tracer.begin("training")
    parts.executor.in_backward = in_backward
    visit(parts, 1)
    assert parts.told[0] == ("ask", Collective(GATHER, 1), "m", in_backward or has_step)
    assert parts.moved() == [("load", 1)]
    (ticket,) = parts.collectives.tickets
    assert (ticket.num_waits, parts.chunks[1].arrival) == (1, None)


def test_what_others_ask_for_at_the_same_time_is_done_too_and_not_waited_for():
    parts = make_group(answer=lambda wanted: (Collective(GATHER, 0), wanted, Collective(REDUCE, 2)))
    visit(parts, 1)
    assert done(parts) == [("ask", "GATHER", 1), "gathers group 0", "gathers group 1", ("reduce", 2)]
    assert parts.moved() == [("ahead", 0), ("load", 1)]
    assert [ticket.num_waits for ticket in parts.collectives.tickets] == [0, 1]


def test_between_steps_a_group_is_asked_for_although_it_is_there():
    """Nobody knows what others have at hand; so the copy is gathered anew, after what was under way."""
    parts = make_group()
    visit(parts, 0)
    parts.chunks[0].arrival = early = Ticket()
    visit(parts, 0)
    assert done(parts) == [("ask", "GATHER", 0), "gathers group 0"] * 2
    assert early.num_waits == 1
    assert parts.moved() == [("load", 0)]


def test_inside_of_a_step_a_group_that_is_there_is_not_asked_for():
    parts = make_group()
    parts.tracer.begin("training")
    visit(parts, 0, 0)
    assert done(parts) == [("ask", "GATHER", 0), "gathers group 0"]


def test_values_are_brought_back_before_others_get_them():
    parts = make_group()
    visit(parts, 2)
    assert parts.told[1:3] == [("bring_values_back", parts.chunks[2]), "gathers group 2"]


def test_a_plan_is_followed_up_to_the_moment_and_as_far_as_a_group_is_missing():
    parts = make_group()
    step = follow(parts, [0, 1, 2, 2], [Actions(load=(0, 1)), Actions(), Actions(evict=(0,), load=(2,)), Actions()])
    visit(parts, 0)
    assert (done(parts), step.num_followed) == ([*gathered(0), *gathered(1)], 1)
    visit(parts, 2)  # it leaves its trace
    assert (done(parts), step.num_followed, step.is_diverged) == (gathered(2), 3, True)
    assert parts.moved() == [("load", 0), ("ahead", 1), ("evict", 0), ("load", 2)]


def test_a_forward_does_not_follow_the_plan_into_the_backward():
    parts = make_group()
    actions = [Actions(load=(0,), reduce=(1,)), Actions(load=(2,))]
    step = follow(parts, [0, 2], actions, forward_ends=(1,))
    visit(parts, 2)
    assert step.num_followed == 1
    assert done(parts) == [*gathered(0), ("check", "REDUCE", 1), ("reduce", 1), ("ask", "GATHER", 2), "gathers group 2"]


def test_a_group_that_the_plan_has_brought_is_not_measured_for():
    """Others are measured once for all that a moment gathers."""
    parts = make_group(4, device_nbytes=64)
    actions = [Actions(load=(0, 1)), Actions(), Actions(evict=(0, 1), load=(2, 3)), Actions()]
    follow(parts, [0, 1, 2, 3], actions)
    found = []
    for index in range(4):
        visit(parts, index)
        found.append(parts.readings())
    assert found == [1, 0, 1, 0]
    assert parts.moved()[-2:] == [("load", 2), ("ahead", 3)]


@pytest.mark.parametrize(
    ("is_forward", "ended", "followed", "end"),
    [(True, [], 0, 2), (True, [2], 2, 5), (True, [2, 5], 5, 5), (False, [], 0, 6), (False, [2, 5], 5, 6)],
)
def test_how_far_the_plan_may_be_followed(is_forward, ended, followed, end):
    parts = make_group()
    step = follow(parts, [0] * 6, [Actions()] * 6, forward_ends=(2, 5))
    step.forward_ends, step.num_followed = ended, followed
    assert parts.executor.end_of_phase(step, is_forward) == end


def test_what_is_due_is_reduced_before_the_plan_goes_on():
    parts = make_group()
    step = follow(parts, [0, 1], [Actions(load=(0,), reduce=(2, 1)), Actions(load=(1,), reduce=(0,))])
    parts.executor.execute_until(step, 1)
    assert (done(parts), step.due) == (gathered(0), [2, 1])
    parts.executor.execute_until(step, 2)
    reduced = [("check", "REDUCE", 2), ("reduce", 2), ("check", "REDUCE", 1), ("reduce", 1)]
    assert (done(parts), step.due) == ([*reduced, *gathered(1)], [0])
    parts.executor.reduce_due(step)
    assert (done(parts), step.due) == ([("check", "REDUCE", 0), ("reduce", 0)], [])


@pytest.mark.parametrize(
    ("complete", "reduced"), [({1}, []), ({0}, [0]), ({0, 1}, [0]), ({0, 2}, [0, 2]), ({0, 1, 2}, [0, 2, 1])]
)
def test_groups_are_reduced_when_they_are_complete_and_it_is_their_turn(complete, reduced):
    parts = make_group()
    step = follow(parts, [0], [Actions()])
    step.due = [0, 2, 1]
    parts.complete = complete
    parts.executor.reduce_when_due(parts.chunks[min(complete)])
    assert done(parts) == [item for index in reduced for item in (("check", "REDUCE", index), ("reduce", index))]
    assert step.due == [0, 2, 1][len(reduced) :]


def test_without_a_plan_a_complete_group_is_asked_for_and_noted():
    parts = make_group()
    parts.tracer.begin("training")
    visit(parts, 0)
    done(parts)
    parts.executor.reduce_when_due(parts.chunks[1])
    assert done(parts) == []
    parts.complete = {1}
    parts.executor.reduce_when_due(parts.chunks[1])
    assert done(parts) == [("ask", "REDUCE", 1), ("reduce", 1)]
    assert parts.tracer.step.reduced == [[1]]


def test_averages_that_a_reduction_brings_go_home():
    gradient = torch.ones(4, dtype=torch.bfloat16)
    parts = make_group(buckets=Fake([], reduce=lambda chunk: [Average(chunk.tensors[1], gradient)]))
    parts.executor.perform([Collective(REDUCE, 0)])
    tensor = parts.tensors[1]
    assert parts.told == [("sync_one", tensor), ("add", tensor, gradient), ("drop", tensor)]
