import itertools
import re

import pytest

from hf_patrickstar.errors import PatrickStarError, StateError
from hf_patrickstar.states import Stage, TensorState, check_transition, legal_transitions

LEGAL = {
    ("FREE", "HOLD"),  # filled
    ("HOLD", "FREE"),
    ("HOLD", "COMPUTE"),  # an operator starts
    ("HOLD", "HOLD_AFTER_BWD"),  # a gradient without a managed forward
    ("COMPUTE", "HOLD"),  # evaluation
    ("COMPUTE", "HOLD_AFTER_FWD"),
    ("HOLD_AFTER_FWD", "FREE"),
    ("HOLD_AFTER_FWD", "COMPUTE"),  # used twice, or recomputed
    ("HOLD_AFTER_FWD", "HOLD"),  # no gradient came
    ("HOLD_AFTER_FWD", "HOLD_AFTER_BWD"),
    ("HOLD_AFTER_BWD", "FREE"),
    ("HOLD_AFTER_BWD", "COMPUTE"),  # the next micro-batch
    ("HOLD_AFTER_BWD", "HOLD"),  # the optimizer's step
}
PAIRS = list(itertools.product(TensorState, TensorState))


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda state: state.name)
def test_every_pair(old, new):
    if (old.name, new.name) in LEGAL:
        assert check_transition("h.0.weight", old, new) is new
    else:
        message = f"parameter 'h.0.weight': illegal transition {old.name} -> {new.name}"
        with pytest.raises(StateError, match=re.escape(message)):
            check_transition("h.0.weight", old, new)


def test_the_error_says_what_is_legal():
    with pytest.raises(StateError, match=r"from COMPUTE: HOLD, HOLD_AFTER_FWD$"):
        check_transition("w", TensorState.COMPUTE, TensorState.FREE)
    assert issubclass(StateError, PatrickStarError)


def test_legal_transitions_are_the_table():
    assert {(old.name, new.name) for old in TensorState for new in legal_transitions(old)} == LEGAL


def test_every_state_can_be_reached_and_left():
    assert {new for _, new in LEGAL} == {old for old, _ in LEGAL} == {state.name for state in TensorState}


@pytest.mark.parametrize(
    ("stage", "state"),
    [
        (Stage.FORWARD, TensorState.HOLD_AFTER_FWD),
        (Stage.BACKWARD, TensorState.HOLD_AFTER_FWD),
        (Stage.EVALUATION, TensorState.HOLD),
    ],
)
def test_state_after_a_stage(stage, state):
    assert stage.to_released() is state
    assert state in legal_transitions(TensorState.COMPUTE)
