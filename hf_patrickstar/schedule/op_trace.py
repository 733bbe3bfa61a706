"""What torch tells an engine in a micro-batch, in order. Pure data.

[Note: micro-batches that are replayed]
Which operators a model calls, which parameters its modules need and when, and what memory its activations take depend
on the model and its batch, and on which embeddings are looked up at home, but not on chunks or budgets. So one
micro-batch of the plain model is run with fake tensors (``tracing/recorder.py``), and all that torch would tell an
engine is noted. ``schedule/step.py`` replays it for any chunks and budgets, which takes a fraction of the time,
since no operator of the model runs.

The planner runs the model twice, and the notes of both runs must be equal: what it does the first time alone, or
otherwise each time, cannot be replayed. An engine runs it once: the first step checks the notes. A model whose blocks
repeat runs with a few of them; see [Note: blocks that repeat].
"""

import collections
import dataclasses

from hf_patrickstar.schedule.script import Begin, BlockingCopy, DeviceOp, HostWork
from hf_patrickstar.schedule.trace import Shapes


@dataclasses.dataclass(frozen=True, slots=True)
class EnterForward:
    """An outermost forward begins: of training, or an evaluation.

    Attributes:
        shapes: Shapes of its inputs.
        others: Storages that are there already beside the batch and the model's buffers.
        nbytes: Bytes of the batch.
        buffers_nbytes: Bytes of the model's buffers.
        is_inner: Whether it is an evaluation inside of a training step, whose visits are not the step's.
    """

    shapes: Shapes
    others: tuple[int, ...]
    nbytes: int = 0
    buffers_nbytes: int = 0
    is_inner: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveForward:
    """The outermost forward has ended.

    Attributes:
        is_inner: See ``EnterForward``.
    """

    is_inner: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Acquire:
    """A module, or code of another one, begins to compute with a parameter.

    Attributes:
        index: The parameter.
    """

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """An acquisition ends.

    Attributes:
        index: The parameter.
        is_seen: Whether a tensor still looks into its chunk.
    """

    index: int
    is_seen: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """Backward needs a parameter as an operand.

    Attributes:
        index: The parameter.
    """

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class LookedUp:
    """An embedding has read rows of its weight where that is at home.

    Attributes:
        index: The weight.
        nbytes: Bytes of the rows.
    """

    index: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LetGo:
    """No tensor looks into the place of a parameter any more.

    Attributes:
        index: The parameter.
    """

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Allocate:
    """An operator of the model has made memory.

    Attributes:
        storages: The number and the bytes of each storage.
    """

    storages: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Memory that an operator of the model had made is free.

    Attributes:
        storage: Which.
    """

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Autograd keeps an operand that is no parameter, and no vector; see ``Activation.place`` in ``trace.py``.

    Attributes:
        storage: Where it is; -1 if that is not memory of the micro-batch.
        kept: The number that stands for what autograd keeps, as one of a storage that is free when autograd lets go.
    """

    storage: int
    kept: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """Backward needs an operand that autograd has kept.

    Attributes:
        kept: See ``Kept``.
    """

    kept: int


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter is finished.

    Attributes:
        index: The parameter.
        storage: Where it is.
        nbytes: Its bytes.
        is_at_home: Whether it was computed on the host, where the parameter is at home.
        is_kept: Whether autograd still keeps the parameter as an operand.
    """

    index: int
    storage: int
    nbytes: int
    is_at_home: bool = False
    is_kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveBackward:
    """The backward has ended."""


_OfParameters = Acquire | Release | Need | LookedUp | LetGo | Gradient
_OfMemory = Allocate | Free | Kept | Wanted
_OfOperators = DeviceOp | HostWork | BlockingCopy
Note = Begin | EnterForward | LeaveForward | LeaveBackward | _OfParameters | _OfMemory | _OfOperators


@dataclasses.dataclass(frozen=True, slots=True)
class OpTrace:
    """All that torch tells an engine in one micro-batch; see [Note: micro-batches that are replayed].

    Attributes:
        notes: What it tells, in order; what operators cost comes between.
    """

    notes: tuple[Note, ...]

    def looked_up_nbytes(self) -> collections.Counter[int]:
        """Bytes of the rows that embeddings have read where they are at home, by the index of the parameter."""
        found = collections.Counter[int]()
        for note in self.notes:
            if isinstance(note, LookedUp):
                found[note.index] += note.nbytes
        return found
