"""Where the gradient of a parameter can be.

[Note: gradient reuse]
With one micro-batch per step the gradient overwrites the parameter's place at home (PatrickStar section 6.2). The
value is not lost: it is ``master`` rounded to the parameter's type. Whenever somebody needs the value while the
gradient is there (a second forward before the optimizer's step, say) the gradient moves to an accumulation list and
the value is written again. So no way of calling forward and backward can lose a gradient or compute with one.

With several processes what comes here is the average that the owner of a parameter gets. A copy on the device never
holds a gradient, so only a gather, which sends values from home, has to bring them back.
"""

import enum


class GradientPlace(enum.Enum):
    """Where the gradient of a parameter is.

    ``PARAM``: over the parameter's own place in the ``param`` list (gradient reuse, PatrickStar section 6.2).
    ``LIST``: in the accumulation list. ``REMOTE``: on the rank that has the parameter at home. ``ZERO``: all zeros,
    written nowhere yet. ``KEPT``: after a step, in the tensor that a user still refers to. ``CONSUMED``: the step has
    used it, and it is nowhere now. ``INCOMPLETE``: a gradient came that torch would have added to a consumed one.

    On its way to one of these a gradient is in the buffer of its group (``GroupBuckets``), or in
    ``ManagedTensor.deferred_gradient`` while the graph still needs the value that it would go over.
    """

    NONE = "none"
    PARAM = "param"
    LIST = "list"
    REMOTE = "remote"
    ZERO = "zero"
    KEPT = "kept"
    CONSUMED = "consumed"
    INCOMPLETE = "incomplete"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


AT_HOME = frozenset({GradientPlace.PARAM, GradientPlace.LIST})
"""Updates find gradients in these places."""
