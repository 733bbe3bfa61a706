"""Finds the settings that limit memory when it does not suffice, and words the advice for error messages."""

import dataclasses
from collections.abc import Iterable

from hf_patrickstar.units import name_budget

_PLACES = {"device_budget": "the compute device", "chunk_budget": "the compute device", "host_budget": "the host"}


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """The bytes that a setting allows.

    Attributes:
        setting: Its key in ``PatrickStarConfig``.
        nbytes: Bytes that it leaves for a need.
        is_auto: Whether the value comes from ``"auto"``: it is then all that the machine has, and cannot be raised.
        counts_activations: Whether activations, whose bytes are not known yet, count against the setting too.
    """

    setting: str
    nbytes: int
    is_auto: bool = False
    counts_activations: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """The limits that are too small, each with the bytes that are needed of it; at least one limit."""

    needs: tuple[tuple[Limit, int], ...]

    @classmethod
    def of(cls, needs: Iterable[tuple[Limit, int]]) -> "Shortage":
        """Selects the limits that leave fewer bytes than are needed.

        Args:
            needs: Limits, and the bytes that are needed of each. If all suffice, the tightest one is selected.
        """
        needs = list(needs)
        short = [(limit, need) for limit, need in needs if need > limit.nbytes]
        return cls(tuple(short) or (min(needs, key=lambda item: item[0].nbytes - item[1]),))

    @property
    def _of_machine(self) -> Limit | None:
        """The limit that is all that the machine has, so that no setting helps; ``None`` if there is none such."""
        return next((limit for limit, _ in self.needs if limit.is_auto), None)

    @property
    def subject(self) -> str:
        """What is too small: the beginning of a sentence."""
        if (auto := self._of_machine) is not None:
            return f"{_PLACES[auto.setting]} has too little memory"
        names = [limit.setting for limit, _ in self.needs]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} too small"

    def advise(self, otherwise: str) -> str:
        """What to do, as a sentence.

        Args:
            otherwise: What helps beside a larger setting, as an imperative.
        """
        if (auto := self._of_machine) is not None:
            return f"{auto.setting}=auto is all that the machine has to give, so {otherwise}."
        least = (
            ", where activations come beside" if limit.counts_activations else f" to at least {name_budget(need)}"
            for limit, need in self.needs
        )
        values = " and ".join(f"{limit.setting}{text}" for (limit, _), text in zip(self.needs, least, strict=True))
        return f"Raise {values}, or {otherwise}."
