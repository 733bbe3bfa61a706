"""Traces that are known before the first step, because a plan has recorded them."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hf_patrickstar.errors import ConfigError
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

    def to_json(self) -> str:
        """The traces as JSON text that ``from_json`` takes back."""
        traces = [json.loads(trace.to_json()) for trace in self.traces.values()]
        found = {"key": self.key, "traces": traces, "lookups": sorted(self.lookups.items())}
        return json.dumps({**found, "has_padding": self.has_padding})

    @classmethod
    def from_json(cls, text: str) -> "KnownTraces":
        """Reads traces.

        Raises:
            ConfigError: If the text does not hold traces.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            found = [Trace.from_json(json.dumps(trace)) for trace in values["traces"]]
            lookups = {int(index): str(place) for index, place in values["lookups"]}
            known = cls(str(values["key"]), {trace.key: trace for trace in found}, lookups, bool(values["has_padding"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"these are not traces of a plan: {type(error).__name__}: {error}; make the plan again"
            ) from error
        if not set(lookups.values()) <= {"home", "device"}:
            raise ConfigError(f"these are not traces of a plan: lookups {lookups}; make the plan again")
        return known
