"""The book of bytes: every payload, per tier and owner. Going over a budget raises before anything is allocated."""

import math
from collections.abc import Callable, Mapping

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import format_nbytes, format_need


class Ledger:
    """Bytes booked per tier and owner, with their peaks.

    Args:
        budgets: Bytes that each tier may hold.
        non_model_nbytes: Tells, from the bytes booked on ``DEVICE``, how many more are taken there by others.
        device_fraction: Part of the device's budget that may be used.
    """

    def __init__(
        self,
        budgets: Mapping[Tier, int],
        non_model_nbytes: Callable[[int], int] = lambda booked: 0,
        device_fraction: float = 1.0,
    ) -> None:
        self._budgets = dict(budgets)
        self._fraction = {tier: device_fraction if tier is Tier.DEVICE else 1.0 for tier in Tier}
        self._limits = {tier: int(budgets[tier] * self._fraction[tier]) for tier in Tier}
        self._non_model_nbytes = non_model_nbytes
        self._owners: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}
        self._used = dict.fromkeys(Tier, 0)
        self._peak = dict.fromkeys(Tier, 0)
        self._owner_peaks: dict[tuple[Tier, str], int] = {}

    def budget(self, tier: Tier) -> int:
        """The budget of a tier, in bytes."""
        return self._budgets[tier]

    def limit(self, tier: Tier) -> int:
        """Bytes that may be used of the budget."""
        return self._limits[tier]

    def usable(self, tier: Tier) -> float:
        """Part of a tier's budget that may be used, between 0 and 1."""
        return self._fraction[tier]

    def lower_limit(self, tier: Tier, nbytes: int) -> None:
        """Allows a tier fewer bytes from now on; never more."""
        self._limits[tier] = min(self._limits[tier], nbytes)

    def used(self, tier: Tier) -> int:
        """Bytes booked on a tier now."""
        return self._used[tier]

    def peak(self, tier: Tier) -> int:
        """The most bytes that were booked on a tier at once."""
        return self._peak[tier]

    def owner_peak(self, tier: Tier, owner: str) -> int:
        """The most bytes that one owner had booked on a tier at once."""
        return self._owner_peaks.get((tier, owner), 0)

    def owners(self, tier: Tier) -> dict[str, int]:
        """Bytes booked on a tier now, by owner."""
        return {owner: nbytes for owner, nbytes in self._owners[tier].items() if nbytes}

    def available(self, tier: Tier) -> int:
        """Bytes that can still be booked; negative when others on the device grew past the limit."""
        free = self._limits[tier] - self._used[tier]
        if tier is Tier.DEVICE:
            free -= self._non_model_nbytes(self._used[tier])
        return free

    def book(self, tier: Tier, owner: str, nbytes: int, *, is_allocated: bool = False) -> None:
        """Books bytes for an owner.

        Args:
            tier: Where they live.
            owner: What they are, for example ``"exp_avg"``.
            nbytes: How many.
            is_allocated: Whether they are taken already, so that they count as non-model data until they are booked.

        Raises:
            BudgetError: If the tier would go over its budget; nothing is booked then.
            ValueError: If the number is negative.
        """
        if nbytes < 0:
            raise ValueError(f"cannot book {nbytes} bytes for '{owner}'")
        available = self.available(tier)
        if is_allocated and tier is Tier.DEVICE:
            available += min(nbytes, self._non_model_nbytes(self._used[tier]))
        if nbytes > max(available, 0):
            raise BudgetError(
                f"{tier.value}_budget exceeded: {format_need(nbytes)} more needed for '{owner}', "
                f"{format_need(max(available, 0))} left of {format_need(self._limits[tier])}. Raise "
                f"{tier.value}_budget by at least {math.ceil((nbytes - available) / self._fraction[tier])} bytes.\n"
                f"{self.table()}"
            )
        self._owners[tier][owner] = self._owners[tier].get(owner, 0) + nbytes
        self._used[tier] += nbytes
        self._peak[tier] = max(self._peak[tier], self._used[tier])
        key = (tier, owner)
        self._owner_peaks[key] = max(self._owner_peaks.get(key, 0), self._owners[tier][owner])

    def unbook(self, tier: Tier, owner: str, nbytes: int) -> None:
        """Takes bytes of an owner out of the book.

        Raises:
            ValueError: If the owner has fewer booked: the book would be wrong.
        """
        booked = self._owners[tier].get(owner, 0)
        if not 0 <= nbytes <= booked:
            raise ValueError(f"cannot unbook {nbytes} bytes of '{owner}' on {tier.value}: {booked} are booked")
        self._owners[tier][owner] = booked - nbytes
        self._used[tier] -= nbytes

    def table(self) -> str:
        """The book as text, for errors and reports."""
        rows = [f"{'tier':8}{'owner':24}{'now':>14}{'peak':>14}"]
        for tier in Tier:
            for owner in sorted(self._owners[tier]):
                now, peak = self._owners[tier][owner], self.owner_peak(tier, owner)
                rows.append(f"{tier.value:8}{owner:24}{format_nbytes(now):>14}{format_nbytes(peak):>14}")
            total, peak = self._used[tier], self._peak[tier]
            rows.append(f"{tier.value:8}{'total':24}{format_nbytes(total):>14}{format_nbytes(peak):>14}")
            if tier is Tier.DEVICE:
                others = self._non_model_nbytes(total)
                rows.append(f"{tier.value:8}{'non-model data':24}{format_nbytes(others):>14}")
            rows.append(f"{tier.value:8}{'budget':24}{format_nbytes(self._budgets[tier]):>14}")
            if self._limits[tier] != self._budgets[tier]:
                rows.append(f"{tier.value:8}{'usable now':24}{format_nbytes(self._limits[tier]):>14}")
        return "\n".join(rows)
