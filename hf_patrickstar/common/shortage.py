"""Finds the settings that limit memory when it does not suffice, and words the advice for error messages."""

from collections.abc import Iterable
from typing import NamedTuple

from hf_patrickstar.units import name_budget

_PLACES = {"device_budget": "the compute device", "chunk_budget": "the compute device", "host_budget": "the host"}


class Limit(NamedTuple):
    """The bytes that a setting allows.

    Attributes:
        setting: Its key in ``PatrickStarConfig``.
        nbytes: Bytes that it leaves for a need.
        is_auto: Whether the value comes from ``"auto"``: it is then all that the machine has, and cannot be raised.
    """

    setting: str
    nbytes: int
    is_auto: bool = False


class Shortage:
    """The limits that are too small, each with the bytes that are needed of it; at least one limit.

    Args:
        needs: Limits, and the bytes that are needed of each. If all suffice, the tightest one is selected.
    """

    def __init__(self, needs: Iterable[tuple[Limit, int]]) -> None:
        needs = list(needs)
        short = [(limit, need) for limit, need in needs if need > limit.nbytes]
        self.needs = short or [min(needs, key=lambda item: item[0].nbytes - item[1])]
        self._of_machine = next((limit.setting for limit, _ in self.needs if limit.is_auto), None)

    @property
    def subject(self) -> str:
        """What is too small: the beginning of a sentence."""
        if self._of_machine is not None:
            return f"{_PLACES[self._of_machine]} has too little memory"
        names = [limit.setting for limit, _ in self.needs]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} too small"

    def advise(self, otherwise: str) -> str:
        """What to do, as a sentence; of a budget that activations need, too, nobody knows the least.

        Args:
            otherwise: What helps beside a larger setting, as an imperative.
        """
        if self._of_machine is not None:
            return f"{self._of_machine}=auto is all that the machine has to give, so {otherwise}."
        values = []
        for limit, need in self.needs:
            is_shared = limit.setting == "device_budget"
            least = " (activations need room in it, too)" if is_shared else f" to at least {name_budget(need)}"
            values.append(limit.setting + least)
        return f"Raise {' and '.join(values)}, or {otherwise}."
