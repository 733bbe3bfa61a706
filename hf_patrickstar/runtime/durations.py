"""How long the caller's thread was in each part of a step."""

import time


class Durations:
    """Adds up seconds by the host's clock, from the begin of a part to its end; a part that was given up is left out.

    An accelerator works beside the host, so a part of a step there may go on when the host has left it.

    Attributes:
        computing_s: Seconds from the begin of an outermost forward of training to the end of its backward.
        settling_s: Seconds from the end of the last backward of a step to the begin of the optimizer's step.
        updating_s: Seconds of steps of optimizers.
    """

    def __init__(self) -> None:
        self.computing_s = self.settling_s = self.updating_s = 0.0
        self._begin: float | None = None
        self._end: float | None = None

    def begin_computing(self) -> None:
        """A micro-batch begins."""
        self._begin, self._end = time.perf_counter(), None

    def end_computing(self) -> None:
        """The backward of a micro-batch has ended."""
        if self._begin is not None:
            self._end = time.perf_counter()
            self.computing_s += self._end - self._begin
            self._begin = None

    def begin_update(self) -> None:
        """The optimizer's step begins."""
        now = time.perf_counter()
        if self._end is not None:
            self.settling_s += now - self._end
        self._begin, self._end = now, None

    def end_update(self) -> None:
        """The optimizer's step has ended."""
        if self._begin is not None:
            self.updating_s += time.perf_counter() - self._begin
            self._begin = None
