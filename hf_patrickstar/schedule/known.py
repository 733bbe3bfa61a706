"""Traces that are known before the first step, because a plan, or an earlier run, has left them."""

import dataclasses
from collections.abc import Mapping

from hf_patrickstar.schedule.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTraces:
    """The traces of a training, and what was decided from them.

    Attributes:
        key: Names what traces depend on: model, layout, types, versions. Traces are true for trainings of the same key.
        traces: The traces, by their own keys; empty if nothing is known.
        lookups: Where input embeddings are looked up, ``"home"`` or ``"device"``, by the index of the parameter: those
            for which ``cpu_embedding="auto"`` was decided.
        has_padding: Whether the batches had padding, for which a model may make a mask of all pairs of tokens.
    """

    key: str = ""
    traces: Mapping[str, Trace] = dataclasses.field(default_factory=dict)
    lookups: Mapping[int, str] = dataclasses.field(default_factory=dict)
    has_padding: bool = False

    def offloading(self, num: int) -> "KnownTraces":
        """The same if so many activations leave the device between forward and backward.

        Args:
            num: How many, of each micro-batch.
        """
        return dataclasses.replace(self, traces={key: made.offloading(num) for key, made in self.traces.items()})
