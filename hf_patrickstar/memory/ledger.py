"""The book of bytes: every payload, per tier and owner. Going over a budget raises before anything is allocated."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

from hf_patrickstar.common.shortage import Limit, Shortage
from hf_patrickstar.errors import BudgetError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.units import format_nbytes, format_need

_NEED_LESS = "train fewer parameters, in 16 bits or with more processes"
_Peak = Tier | tuple[Tier, str] | str
_TOTAL = "chunks and non-model data on the device"


class Ledger:
    """Bytes booked per tier and owner, with their peaks.

    On ``DEVICE`` the budget covers non-model data too: the bytes measured now, or the bytes known to be needed until
    the next moment, whichever is more.

    Args:
        budgets: Bytes that each tier may hold.
        non_model_nbytes: Tells the non-model bytes on ``DEVICE``, from the bytes that are booked there.
        device_fraction: Part of the device's budget that may be used while ``is_cautious``.
        chunk_budget: See below.
        of_machine: The tiers whose budget is what the machine has, because nobody set one.

    Attributes:
        chunk_budget: Bytes that may be booked on ``DEVICE`` at most, beside what the budget says, or ``None``.
        tiers: The tiers that there are: a disk has to be asked for.
        is_cautious: Whether ``available`` keeps to the fraction, because the need of non-model data is not known yet.
        reserved_nbytes: Non-model bytes that are known to be needed on ``DEVICE`` before the next moment.
        spilled_nbytes: Bytes that are at home on ``DEVICE`` only because ``HOST`` is too small.
    """

    def __init__(
        self,
        budgets: Mapping[Tier, int],
        non_model_nbytes: Callable[[int], int] = lambda booked: 0,
        device_fraction: float = 1.0,
        chunk_budget: int | None = None,
        of_machine: Collection[Tier] = (),
    ) -> None:
        self.is_cautious = True
        self.reserved_nbytes = self.spilled_nbytes = 0
        self._budgets = {Tier.DISK: 0, **budgets}
        self.tiers = [tier for tier in Tier if tier is not Tier.DISK or self._budgets[tier]]
        self._fraction = device_fraction
        self._limits = dict(self._budgets)
        self.chunk_budget = chunk_budget
        self._of_machine = frozenset(of_machine)
        self._measure = non_model_nbytes
        self._reads_once = False
        self._reading: int | None = None
        self._owners: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}
        self._used = dict.fromkeys(Tier, 0)
        # The most bytes at once of each tier, of each (tier, owner), and of the device with non-model data: lately,
        # that is since a step began or somebody asked, and before that.
        self._peaks: dict[_Peak, int] = dict.fromkeys((*Tier, _TOTAL), 0)
        self._peaks_before: dict[_Peak, int] = {}

    def budget(self, tier: Tier) -> int:
        """The budget of a tier, in bytes."""
        return self._budgets[tier]

    def limit(self, tier: Tier, *, cautious: bool | None = None) -> int:
        """Bytes that may be used of the budget.

        Args:
            tier: The tier.
            cautious: Keep to the fraction; by default if the ledger ``is_cautious``.
        """
        if tier is Tier.DEVICE and (self.is_cautious if cautious is None else cautious):
            return int(self._limits[tier] * self._fraction)
        return self._limits[tier]

    def limits(self, tier: Tier) -> tuple[Limit, ...]:
        """The settings that limit a tier, whatever is booked: the limit of all bytes first, that of chunks second.

        Args:
            tier: The tier.
        """
        budget = Limit(f"{tier.value}_budget", self._limits[tier], tier in self._of_machine)
        if tier is not Tier.DEVICE or self.chunk_budget is None:
            return (budget,)
        return (budget, Limit("chunk_budget", self.chunk_budget))

    def lower_limit(self, tier: Tier, nbytes: int) -> None:
        """Allows a tier fewer bytes from now on; never more."""
        self._limits[tier] = min(self._limits[tier], nbytes)

    def used(self, tier: Tier) -> int:
        """Bytes booked on a tier now."""
        return self._used[tier]

    def owners(self, tier: Tier) -> dict[str, int]:
        """Bytes booked on a tier now, by owner."""
        return {owner: nbytes for owner, nbytes in self._owners[tier].items() if nbytes}

    def peak(self, key: _Peak) -> int:
        """The most bytes that were booked on a tier at once, or for an owner there."""
        return max(self._peaks.get(key, 0), self._peaks_before.get(key, 0))

    def step_peak(self, tier: Tier) -> int:
        """The most bytes that were booked on a tier at once since ``begin_step``."""
        return self._peaks[tier]

    @property
    def total_peak(self) -> int:
        """The most bytes of chunks and non-model data on ``DEVICE`` at once, as far as these are measured or known."""
        return self.peak(_TOTAL)

    @property
    def total_step_peak(self) -> int:
        """``total_peak`` since ``begin_step``."""
        return self._peaks[_TOTAL]

    def owner_peaks(self, tier: Tier) -> dict[str, int]:
        """The most bytes that each owner had booked on a tier at once."""
        peaks = {owner: self.peak((tier, owner)) for owner in self._owners[tier]}
        return {owner: nbytes for owner, nbytes in peaks.items() if nbytes}

    def take_owner_peak(self, tier: Tier, owner: str) -> int:
        """The most bytes that one owner had booked on a tier at once since the last call."""
        return self._begin_peak((tier, owner), self._owners[tier].get(owner, 0))

    def begin_step(self) -> None:
        """Begins the peaks of a step anew."""
        for tier, nbytes in self._used.items():
            self._begin_peak(tier, nbytes)
        self._begin_peak(_TOTAL, self._used[Tier.DEVICE])

    def _begin_peak(self, key: _Peak, nbytes: int) -> int:
        """Begins a peak anew with the bytes that there are now; returns what it was."""
        self._peaks_before[key] = self.peak(key)
        peak, self._peaks[key] = self._peaks.get(key, 0), nbytes
        return peak

    @contextlib.contextmanager
    def one_reading(self, *, measures: bool = True) -> Iterator[None]:
        """Inside of the block non-model data is measured once, when it is first asked for: an allocator takes its time.

        So it is for work that only books, and allocates and frees what is booked. Blocks may be inside of each other.

        Args:
            measures: As for ``available``, until ``read_again``.
        """
        is_outer, self._reads_once = not self._reads_once, True
        if is_outer and not measures:
            self._reading = 0
        try:
            yield
        finally:
            if is_outer:
                self._reads_once, self._reading = False, None

    def read_again(self) -> None:
        """Lets the next question measure anew, because non-model data was freed or allocated; see ``one_reading``."""
        self._reading = None

    def measured_nbytes(self) -> int:
        """Bytes on ``DEVICE`` that are there now and not booked."""
        if self._reading is not None:
            return self._reading
        nbytes = self._measure(self._used[Tier.DEVICE])
        if self._reads_once:
            self._reading = nbytes
        return nbytes

    def non_model_nbytes(self) -> int:
        """Bytes on ``DEVICE`` that are not booked: there now, or known to be needed before the next moment."""
        return max(self.measured_nbytes(), self.reserved_nbytes)

    def note_total(self, non_model_nbytes: int) -> None:
        """Notes non-model bytes that were measured on ``DEVICE`` beside the bytes that are booked now."""
        total = self._used[Tier.DEVICE] + non_model_nbytes
        if total > self._peaks[_TOTAL]:
            self._peaks[_TOTAL] = total

    def available(self, tier: Tier, *, cautious: bool | None = None, measures: bool = True) -> int:
        """Bytes that can still be booked; negative if non-model data has grown over the limit.

        Args:
            tier: The tier.
            cautious: Keep to the fraction; by default if the ledger ``is_cautious``.
            measures: Whether non-model data is measured; else there is only as much as is known to be needed.
        """
        used, limit = self._used[tier], self._limits[tier]
        if tier is not Tier.DEVICE:
            return limit - used
        # Every visit asks, so nothing is called here that need not be.
        if self.is_cautious if cautious is None else cautious:
            limit = int(limit * self._fraction)
        non_model = self.reserved_nbytes
        if measures:
            there = self._reading
            if there is None:
                there = self.measured_nbytes()
            if there > non_model:
                non_model = there
        free, chunk_budget = limit - used - non_model, self.chunk_budget
        return free if chunk_budget is None or chunk_budget - used > free else chunk_budget - used

    def book(self, tier: Tier, owner: str, nbytes: int, *, is_allocated: bool = False, ahead_nbytes: int = 0) -> None:
        """Books bytes for an owner.

        Args:
            tier: Where they live.
            owner: What they are, for example ``"exp_avg"``.
            nbytes: How many.
            is_allocated: Whether the bytes are allocated already: until they are booked they count as non-model data.
            ahead_nbytes: Bytes that the same owner will ask for next: what the error advises has room for them too.

        Raises:
            BudgetError: If the tier would go over its budget; nothing is booked then.
            ValueError: If the number is negative.
        """
        if nbytes < 0:
            raise ValueError(f"cannot book {nbytes} bytes for '{owner}'")
        available, non_model = self._room_for(tier, nbytes, is_allocated=is_allocated)
        if nbytes > max(available, 0):
            booked = self._used[tier] + nbytes + ahead_nbytes
            if tier is Tier.HOST and self.spilled_nbytes:
                booked += self.spilled_nbytes + self._owners[Tier.DEVICE].get(owner, 0)
            short = Shortage(zip(self.limits(tier), (booked + non_model, booked), strict=False))
            ahead = f", and up to {format_need(ahead_nbytes)} beside it later" if ahead_nbytes else ""
            raise BudgetError(
                f"{short.subject}: {format_need(nbytes)} more needed for '{owner}'{ahead}, "
                f"{format_need(max(available, 0))} left of {format_need(short.needs[0][0].nbytes)}. "
                f"{short.advise(_NEED_LESS) if tier is not Tier.DEVICE else ''}\n{self.table()}"
            )
        self._used[tier] += nbytes
        self._owners[tier][owner] = now = self._owners[tier].get(owner, 0) + nbytes
        self._peaks[tier] = max(self._peaks[tier], self._used[tier])
        self._peaks[tier, owner] = max(self._peaks.get((tier, owner), 0), now)
        if tier is Tier.DEVICE:
            self.note_total(non_model)

    def _room_for(self, tier: Tier, nbytes: int, *, is_allocated: bool) -> tuple[int, int]:
        """Bytes that can be booked, and non-model bytes beside them, from one measurement; see ``book``."""
        if tier is not Tier.DEVICE:
            return self.available(tier), 0
        if is_allocated:
            self.read_again()
        with self.one_reading():
            available, non_model = self.available(tier, cautious=False), self.non_model_nbytes()
            if is_allocated:
                # Booking takes the bytes out of the measured non-model data, but not out of the reserved bytes.
                rest = max(self.measured_nbytes() - nbytes, self.reserved_nbytes, 0)
                available, non_model = available + non_model - rest, rest
                self.read_again()
            return available, non_model

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

    def hand_over(self, tier: Tier, source: str, target: str, nbytes: int) -> None:
        """Gives booked bytes another owner; nothing is allocated or freed, so that nothing can fail for want of room.

        Raises:
            ValueError: If the source has fewer booked.
        """
        owners = self._owners[tier]
        booked = owners.get(source, 0)
        if not 0 <= nbytes <= booked:
            raise ValueError(f"cannot hand over {nbytes} bytes of '{source}' on {tier.value}: {booked} are booked")
        owners[source] = booked - nbytes
        owners[target] = now = owners.get(target, 0) + nbytes
        if now > self._peaks.get((tier, target), 0):
            self._peaks[tier, target] = now

    def table(self) -> str:
        """The book as text, for errors and reports."""
        rows = [f"{'tier':8}{'owner':24}{'now':>14}{'peak':>14}"]
        for tier in self.tiers:
            for owner in sorted(self._owners[tier]):
                now, peak = self._owners[tier][owner], self.peak((tier, owner))
                rows.append(f"{tier.value:8}{owner:24}{format_nbytes(now):>14}{format_nbytes(peak):>14}")
            total, peak = self._used[tier], self.peak(tier)
            rows.append(f"{tier.value:8}{'total':24}{format_nbytes(total):>14}{format_nbytes(peak):>14}")
            if tier is Tier.DEVICE:
                rows.append(f"{tier.value:8}{'non-model data':24}{format_nbytes(self.non_model_nbytes()):>14}")
                if self.chunk_budget is not None:
                    rows.append(f"{tier.value:8}{'chunk budget':24}{format_nbytes(self.chunk_budget):>14}")
            rows.append(f"{tier.value:8}{'budget':24}{format_nbytes(self._budgets[tier]):>14}")
            if self.limit(tier) != self._budgets[tier]:
                rows.append(f"{tier.value:8}{'usable now':24}{format_nbytes(self.limit(tier)):>14}")
        return "\n".join(rows)
