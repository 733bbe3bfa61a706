"""Where the gradient of a parameter can be.

[Note: gradient reuse]
With one micro-batch per step the gradient overwrites the parameter's place at home (PatrickStar section 6.2). The
value is not lost: it is ``master`` rounded to the parameter's type. Whenever somebody needs the value while the
gradient is there (a second forward before the optimizer's step, say) the gradient moves to an accumulation list and
the value is written again. So no way of calling forward and backward can lose a gradient or compute with one.

With several processes what comes here is the average that the owner of a parameter gets. A copy on the device never
holds a gradient, so only a gather, which sends values from home, has to bring them back.

[Note: the last gradient]
With several micro-batches per step the last gradient need not be added to the list in a pass of its own. It goes over
the parameter's place, as the only gradient of a step would, and the update adds it to the sum in scratch space. That
saves the host a read and a write of the list, 8 bytes per parameter. It is done for 16-bit parameters of chunks at home
on the host that Adam or AdamW updates, if nothing needs the value there any more, gradients are not kept after the
step, and no norms are recorded, which are those of whole sums (``Gradients._stays_apart``). Whatever else reads the
gradient, or needs the value, adds both in the list first; so does a further gradient, if this was not the last one
after all.
"""

import enum


class GradientPlace(enum.Enum):
    """Where the gradient of a parameter is.

    ``PARAM``: over the parameter's own place in the ``param`` list (gradient reuse, PatrickStar section 6.2).
    ``LIST``: in the accumulation list. ``BOTH``: the sum of earlier micro-batches in the list, and the last gradient
    over the parameter's own place; see [Note: the last gradient]. ``REMOTE``: on the rank that has the parameter at
    home. ``ZERO``: all zeros, written nowhere yet. ``KEPT``: after a step, in the tensor that a user still refers to.
    ``CONSUMED``: the step has used it, and it is nowhere now. ``INCOMPLETE``: a gradient came that torch would have
    added to a consumed one.

    On its way to one of these a gradient is in the buffer of its group (``GroupBuckets``), or in
    ``ManagedTensor.deferred_gradient`` while the graph still needs the value that it would go over.
    """

    NONE = "none"
    PARAM = "param"
    LIST = "list"
    BOTH = "both"
    REMOTE = "remote"
    ZERO = "zero"
    KEPT = "kept"
    CONSUMED = "consumed"
    INCOMPLETE = "incomplete"

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function


OVER_VALUE = frozenset({GradientPlace.PARAM, GradientPlace.BOTH})
"""A gradient in one of these places is where ``param`` at home had the value."""

IN_LIST = frozenset({GradientPlace.LIST, GradientPlace.BOTH})
"""The accumulation list has a gradient in one of these places, or a part of it."""

AT_HOME = OVER_VALUE | IN_LIST
"""Updates find gradients in these places; in ``BOTH`` only those of kernels with ``adds_last_gradient``."""
