import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_patrickstar.errors import StateError
from hf_patrickstar.states import Stage, TensorState, check_transition, legal_transitions

fast = settings(deadline=None, max_examples=100, database=None, derandomize=True)


@fast
@given(st.lists(st.sampled_from(TensorState), max_size=50))
def test_a_random_walk_is_always_where_the_table_says(wishes):
    state, path = TensorState.FREE, [TensorState.FREE]
    for wish in wishes:
        if wish in legal_transitions(state):
            state = check_transition("w", state, wish)
            path.append(wish)
        else:
            with pytest.raises(StateError, match=f"'w': illegal transition {state.name} -> {wish.name}"):
                check_transition("w", state, wish)
        assert state is path[-1]
    for old, new in itertools.pairwise(path):
        assert new in legal_transitions(old)
        assert old is not new


@st.composite
def training_runs(draw):
    """States of one parameter through forwards, backwards, evaluations and steps as an engine asks for them."""
    path = [TensorState.HOLD]
    for _ in range(draw(st.integers(1, 8))):
        evaluates = draw(st.booleans())
        stage = Stage.EVALUATION if evaluates else Stage.FORWARD
        for _ in range(draw(st.integers(1, 3))):
            path += [TensorState.COMPUTE, stage.to_released()]
        if evaluates:
            continue
        if draw(st.booleans()):
            path += [TensorState.COMPUTE, Stage.BACKWARD.to_released()]
        if draw(st.booleans()):
            path += [TensorState.HOLD_AFTER_BWD]
        if draw(st.booleans()):
            path += [TensorState.HOLD]
    return path


@fast
@given(training_runs())
def test_every_way_of_training_is_legal(path):
    for old, new in itertools.pairwise(path):
        assert check_transition("w", old, new) is new
