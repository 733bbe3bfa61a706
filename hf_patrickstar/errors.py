"""The exceptions that the package raises on purpose.

Every message says what failed, which parameter, chunk, module or file it concerns, how much was needed against how
much there is, and what to change.
"""

import functools
from collections.abc import Callable


class Later:
    """A part of the message of an error that is worded when somebody reads it: to find what would be enough takes time.

    Args:
        word: Words it.
    """

    def __init__(self, word: Callable[[], str]) -> None:
        self._text = functools.cache(word)

    def __str__(self) -> str:
        return self._text()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class PatrickStarError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(PatrickStarError, ValueError):
    """A configuration value, or a combination of values, that cannot work."""


class BudgetError(PatrickStarError, MemoryError):
    """A tier would have gone over its byte budget; nothing was allocated beyond it.

    The message has the need and what there is, in bytes, and what to change (PatrickStar section 9.2.1 tells when
    training cannot work: the largest set of chunks in use at once must fit the device).

    Attributes:
        more: What the message goes on with: what there is, and what helps.
    """

    more: Later | str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.more}".rstrip()


class DeviceMemoryError(BudgetError, RuntimeError):
    """The compute device has no memory left in the middle of a step: chunks in use, activations and all.

    ``PatrickStarEngine.attempt``, and so the Trainer, repeats the micro-batch before anybody sees it, if that may help.
    """


class EngineError(PatrickStarError, RuntimeError):
    """The engine was used in a way, or at a moment, in which it cannot give a right answer."""


class CollectiveError(PatrickStarError, RuntimeError):
    """A collective failed, ranks disagree, or one was left alone; the group of processes is of no use any more.

    The message says which collective on which rank, who is gone or did not answer, and what to do.
    """


class CheckpointError(PatrickStarError, RuntimeError):
    """A checkpoint could not be written or read.

    The message names the file and the tensor, with the shapes where they differ. A checkpoint that could not be written
    does not exist; what could not be read has changed nothing.
    """


class TraceError(PatrickStarError, RuntimeError):
    """A model cannot be traced: copied without bytes, or run on tensors without bytes.

    Nothing of the model has changed then, and it can be trained as it is: its first step is recorded. The message names
    the module and the attribute, or the operator, that prevents it.
    """
