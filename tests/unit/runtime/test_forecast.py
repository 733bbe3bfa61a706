"""What a step needs in all, told from what is there, what a layout needs, and calls that are rehearsed."""

import types

import pytest
import torch
from unit.runtime.data_parts import CPU
from unit.runtime.parts import Parts

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.meters import UnmeteredTier
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.casting import Casting
from hf_patrickstar.runtime.forecast import Forecast
from hf_patrickstar.schedule.trace import Trace, Visit

AS_IT_IS = Casting(CPU, None, None)


def make(need_at=lambda device, chunks: 0, *, homes=(Tier.HOST,) * 3, loaded=(), step=None, device=CPU, **settings):
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

    parts.tracer = types.SimpleNamespace(step=step, traces={})
    forecast = Forecast(parts.chunks, parts.pool, parts.others, parts.tracer, device, ask)
    return forecast, parts


def needs(shortage):
    """The settings that are named, with what they would have to be."""
    return {limit.setting: nbytes for limit, nbytes in shortage.needs}


def step_of(*visits, key="training", nbytes=(), is_recorded=True):
    """A step with visits so far, and what others took meanwhile."""
    return types.SimpleNamespace(
        key=key, visits=[(index, ()) for index in visits], non_model_nbytes=list(nbytes), is_recorded=is_recorded
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


@pytest.mark.parametrize(("recorded", "known", "seen"), [((30, 20), None, 30), ((1,), 40, 40), ((), 3, 5)])
def test_what_was_seen_at_any_moment_counts(recorded, known, seen):
    forecast, parts = make(homes=(), step=step_of(nbytes=recorded))
    parts.others.nbytes = 5
    if known is not None:
        parts.tracer.traces["training"] = Trace("training", (), (Visit(0, (), known), Visit(0)))
    assert others_at(forecast) == 2 * seen


def test_an_accelerator_takes_a_twentieth_more():
    forecast, parts = make(homes=(), device=torch.device("cuda"))
    parts.others.nbytes = 100
    assert others_at(forecast) == 210


def test_where_nothing_is_measured_nothing_is_foreseen():
    forecast, parts = make(homes=(), others=UnmeteredTier())
    parts.ledger.reserved_nbytes = 50
    forecast.note(torch.nn.ReLU(), ((torch.ones(2),), {}), AS_IT_IS, is_training=True)
    assert others_at(forecast) == 0


# Calls that are rehearsed


class Square(torch.nn.Module):
    """Counts its calls: also those of its copies."""

    def __init__(self, calls):
        super().__init__()
        self.calls = types.SimpleNamespace(append=calls.append, __deepcopy__=lambda memo: self.calls)

    def forward(self, x, cache=None):
        self.calls.append(tuple(x.shape))
        return x * x


def call(forecast, module, *inputs, is_training=False):
    forecast.note(module, (inputs, {}), AS_IT_IS, is_training=is_training)


def test_what_a_call_takes_is_added_to_what_was_there_before_it():
    """Four floats, beside ten bytes; what was seen is less."""
    forecast, parts = make(homes=())
    parts.others.nbytes = 10
    call(forecast, Square([]), torch.ones(4))
    parts.others.nbytes = 12
    assert others_at(forecast) == 10 + 16
    parts.others.nbytes = 30
    assert others_at(forecast) == 30


def test_calls_of_one_step_add_up_and_each_is_rehearsed_once():
    calls = []
    forecast, _ = make(homes=())
    square = Square(calls)
    call(forecast, square, torch.ones(4))
    call(forecast, square, torch.ones(2, 4))
    call(forecast, square, torch.ones(4))
    assert calls == [], "nothing is computed before somebody asks"
    assert (others_at(forecast), others_at(forecast)) == (16 + 32 + 16, 16 + 32 + 16)
    assert calls == [(4,), (2, 4)]


@pytest.mark.parametrize(("seen", "nbytes"), [(5, 16), (9, 18)])
def test_where_a_call_cannot_be_rehearsed_more_than_was_seen_is_foreseen(seen, nbytes):
    """Twice as much, or what the other calls take."""
    forecast, parts = make(homes=())
    call(forecast, Square([]), torch.ones(4))
    call(forecast, Square([]), torch.ones(4), object())
    parts.others.nbytes = seen
    assert others_at(forecast) == nbytes


def test_calls_are_forgotten_when_their_step_has_ended():
    """The end of an evaluation leaves those of the step that it interrupted."""
    forecast, _ = make(homes=())
    call(forecast, torch.nn.Identity(), torch.ones(4, requires_grad=True), is_training=True)
    of_step = others_at(forecast)
    assert of_step > 0
    call(forecast, Square([]), torch.ones(8))
    assert others_at(forecast) == of_step + 32
    forecast.clear(is_evaluation=True)
    assert others_at(forecast) == of_step
    forecast.clear()
    assert others_at(forecast) == 0


@pytest.mark.parametrize(("num_calls", "num_remembered"), [(16, 16), (17, 17), (32, 32), (40, 32)])
def test_of_forwards_that_never_meet_a_backward_the_last_are_remembered(num_calls, num_remembered):
    forecast, _ = make(homes=())
    square = Square([])
    for _ in range(num_calls):
        call(forecast, square, torch.ones(4))
    assert others_at(forecast) == num_remembered * 16


def test_a_new_step_begins_with_what_is_there_then():
    forecast, parts = make(homes=())
    parts.others.nbytes = 10
    call(forecast, Square([]), torch.ones(4))
    forecast.clear()
    parts.others.nbytes = 2
    call(forecast, Square([]), torch.ones(4))
    assert others_at(forecast) == 2 + 16
