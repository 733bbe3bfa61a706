"""The states of a tensor (PatrickStar section 6.2, figure 7), and what the engine is doing when one changes."""

import enum


class TensorState(enum.Enum):
    """What is going on with one managed parameter.

    ``FREE`` has no value in a chunk. ``COMPUTE`` is being read by an operator: its chunk is pinned to the device. The
    three hold states may be moved: ``HOLD`` keeps a value, ``HOLD_AFTER_FWD`` one that a backward will need, and
    ``HOLD_AFTER_BWD`` a gradient in its place. Nobody sets a state: ``ManagedParameter.state`` follows from facts.
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
