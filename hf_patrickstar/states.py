"""The states of a tensor and the transitions between them (PatrickStar section 6.2, figure 7)."""

import enum

from hf_patrickstar.errors import StateError


class TensorState(enum.Enum):
    """What is going on with one managed parameter.

    ``FREE`` has no storage. ``COMPUTE`` is being read by an operator: its chunk is pinned to the compute device. The
    three hold states keep a value (or, after backward, a gradient) and may be moved.
    """

    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_FWD = "hold_after_fwd"
    HOLD_AFTER_BWD = "hold_after_bwd"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


class Stage(enum.Enum):
    """What the engine is doing when an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"

    def to_released(self) -> TensorState:
        """The state of a parameter that an operator of this stage has finished with.

        A forward operator that runs in backward is a recomputation: its gradient is still to come, hence
        ``HOLD_AFTER_FWD``.
        """
        return TensorState.HOLD if self is Stage.EVALUATION else TensorState.HOLD_AFTER_FWD


_S = TensorState
LEGAL = {
    _S.FREE: frozenset({_S.HOLD}),
    _S.HOLD: frozenset({_S.FREE, _S.COMPUTE, _S.HOLD_AFTER_BWD}),
    _S.COMPUTE: frozenset({_S.HOLD, _S.HOLD_AFTER_FWD}),
    _S.HOLD_AFTER_FWD: frozenset({_S.FREE, _S.COMPUTE, _S.HOLD, _S.HOLD_AFTER_BWD}),
    _S.HOLD_AFTER_BWD: frozenset({_S.FREE, _S.COMPUTE, _S.HOLD}),
}
"""The states that a tensor may take from each."""


def check_transition(name: str, old: TensorState, new: TensorState) -> TensorState:
    """Returns ``new`` if a tensor may go there from ``old``.

    Args:
        name: The parameter's name, for the error.
        old: The state that it is in.
        new: The state that it is asked to take.

    Raises:
        StateError: If the transition is illegal.
    """
    if new not in LEGAL[old]:
        legal = ", ".join(sorted(state.name for state in LEGAL[old]))
        raise StateError(f"parameter '{name}': illegal transition {old.name} -> {new.name}; from {old.name}: {legal}")
    return new


def legal_transitions(state: TensorState) -> frozenset[TensorState]:
    """The states that a tensor may take from ``state``."""
    return LEGAL[state]
