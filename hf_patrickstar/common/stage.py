"""What the engine is doing."""

import enum


class Stage(enum.Enum):
    """What the engine is doing when an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"
