"""What a step needs in all, told from what is there, what a layout needs, and the trace."""

import types

import pytest
from unit.runtime.parts import Parts

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.forecast import Forecast
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit


def make(need_at=lambda device, chunks: 0, *, homes=(Tier.HOST,) * 3, loaded=(), step=None, **settings):
    """A forecast over chunks of 16 bytes and the parts that it is made of; ``asked`` has what the layout was asked."""
    parts = Parts(device_nbytes=settings.pop("device_nbytes", 100), **settings)
    for home in homes:
        parts.add_chunk(4, 4, home=home)
    parts.copies.note_chunks()
    for index in loaded:
        parts.copies.load(parts.chunks[index], ahead=False)
    parts.asked = asked = []

    def ask(device_nbytes, chunk_nbytes):
        asked.append((device_nbytes, chunk_nbytes))
        return need_at(device_nbytes, chunk_nbytes)

    parts.tracer = types.SimpleNamespace(step=step)
    forecast = Forecast(parts.chunks, parts.pool, parts.others, parts.tracer, ask)
    return forecast, parts


def needs(shortage):
    """The settings that are named, with what they would have to be."""
    return {limit.setting: nbytes for limit, nbytes in shortage.needs}


def step_of(*visits, nbytes=(), is_recorded=True, trace=None):
    """A step with visits so far, and what others took meanwhile."""
    cursor = None if trace is None else Cursor(trace)
    return types.SimpleNamespace(
        key="training",
        visits=[(index, ()) for index in visits],
        non_model_nbytes=list(nbytes),
        is_recorded=is_recorded,
        cursor=cursor,
    )


# Chunks


@pytest.mark.parametrize(("in_use", "need", "nbytes"), [(200, 0, 200), (200, 150, 200), (0, 150, 150)])
def test_what_is_needed_is_the_most_of_what_is_in_use_and_what_the_layout_needs(in_use, need, nbytes):
    forecast, _ = make(lambda device, chunks: need, homes=())
    assert needs(forecast.shortage(in_use)) == {"device_budget": nbytes}


def test_the_layout_is_asked_for_larger_budgets_until_one_suffices():
    """A larger budget has larger chunks: with 100 bytes they need 120, with 120 they need 130."""
    forecast, parts = make(lambda device, chunks: {100: 120, 120: 130}.get(device, 130), homes=())
    assert needs(forecast.shortage(0)) == {"device_budget": 130}
    assert parts.asked == [(100, None), (120, None), (130, None)]
    forecast.shortage(0)
    assert len(parts.asked) == 3, "an answer is remembered"


def test_a_layout_that_grows_for_ever_is_given_up():
    forecast, parts = make(lambda device, chunks: device + 1, homes=())
    assert needs(forecast.shortage(0)) == {"device_budget": 132}
    assert len(parts.asked) == 32


def test_budgets_for_which_there_is_no_layout_are_left_out():
    def need_at(device, chunks):
        if device < 120:
            raise BudgetError("no layout")
        return 125

    forecast, parts = make(need_at, homes=())
    assert needs(forecast.shortage(0)) == {"device_budget": 125}
    assert [device for device, _ in parts.asked] == [100, 112, 126]


def test_a_budget_of_chunks_is_named_for_chunks_alone():
    forecast, parts = make(lambda device, chunks: 60, homes=(), chunk_budget=50)
    parts.others.nbytes = 10
    assert needs(forecast.shortage(0)) == {"chunk_budget": 60}
    assert parts.asked == [(100, 50), (100, 60)]
    parts.others.nbytes = 30
    assert needs(forecast.shortage(0)) == {"chunk_budget": 60, "device_budget": 120}


def test_what_is_there_beside_copies_is_needed_too():
    """Copies of 32 bytes, a workspace of 20; of the copies 16 bytes are in use."""
    forecast, parts = make(loaded=(0, 1))
    parts.ledger.book(Tier.DEVICE, "workspace", 20)
    parts.copies.evict(parts.chunks[1])
    assert parts.ledger.used(Tier.DEVICE) == 52
    assert needs(forecast.shortage(100)) == {"device_budget": 120 + 48 - 16}


@pytest.mark.parametrize(("need", "nbytes"), [(0, 48 + 80), (100, 48 + 80), (130, 130)])
def test_what_is_at_home_on_the_device_is_a_part_of_what_the_layout_needs(need, nbytes):
    forecast, _ = make(lambda device, chunks: need, homes=(Tier.DEVICE,))
    assert needs(forecast.shortage(80)) == {"device_budget": nbytes}


@pytest.mark.parametrize(
    ("step", "in_use", "nbytes"),
    [
        (None, 70, 70 + 32),
        (None, 60, 60),
        (step_of(0, 1), 70, 70 + 16),
        (step_of(0, 1, 2), 70, 70),
        (step_of(0, 1, is_recorded=False), 70, 70 + 32),
    ],
)
def test_where_more_is_held_than_modules_tell_what_comes_may_be_held_too(step, in_use, nbytes):
    """Chunk 0 is there; the layout explains 60 bytes."""
    forecast, _ = make(lambda device, chunks: 60, loaded=(0,), step=step, device_nbytes=60)
    assert sum(needs(forecast.shortage(in_use)).values()) == nbytes


def test_the_names_of_what_is_computed_with():
    forecast, parts = make()
    parts.tensors[4].users = parts.tensors[1].users = 1
    assert forecast.names_in_use() == {"t1", "t4"}


# Others


def others_at(forecast):
    """What others are foreseen to need beside 100 bytes in use."""
    return needs(forecast.shortage(100))["device_budget"] - 100


@pytest.mark.parametrize(
    ("now", "peak", "reserved", "nbytes"), [(5, 5, 0, 10), (5, 8, 0, 16), (5, 5, 9, 18), (9, 5, 5, 18)]
)
def test_of_a_step_of_which_nothing_is_known_twice_what_was_seen_is_foreseen(now, peak, reserved, nbytes):
    forecast, parts = make(homes=())
    parts.others.nbytes, parts.others.peak_nbytes, parts.ledger.reserved_nbytes = now, peak, reserved
    assert others_at(forecast) == nbytes


@pytest.mark.parametrize(("recorded", "seen"), [((30, 20), 30), ((1,), 5), ((), 5)])
def test_what_was_seen_at_any_moment_counts(recorded, seen):
    forecast, parts = make(homes=(), step=step_of(nbytes=recorded))
    parts.others.nbytes = 5
    assert others_at(forecast) == 2 * seen


@pytest.mark.parametrize(("known", "nbytes"), [(40, 40), (3, 10)])
def test_of_a_step_that_follows_a_trace_the_largest_moment_is_known(known, nbytes):
    trace = Trace("training", (), (Visit(0), Visit(0, (), known), Visit(0)))
    forecast, parts = make(homes=(), step=step_of(is_recorded=False, trace=trace))
    parts.others.nbytes = 5
    assert others_at(forecast) == nbytes
    parts.tracer.step = step_of(nbytes=(2,))
    assert others_at(forecast) == nbytes, "also when the step is repeated without its trace"


def test_where_nothing_is_measured_nothing_is_foreseen():
    forecast, parts = make(homes=(), others=Meter())
    parts.ledger.reserved_nbytes = 50
    assert others_at(forecast) == 0
