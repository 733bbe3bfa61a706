"""What a run has come to, in three lines: memory, time, and the one setting most worth changing."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hf_patrickstar.units import format_nbytes, format_seconds

_MUCH_WAITING = 0.1
"""Share of the time from which waits for copies are worth a change."""
_MUCH_UPDATING = 0.3
_MUCH_OTHER = 0.5
_MUCH_ROOM = 0.25
"""Share of the device budget that has to be left over for a larger batch to be named."""
_MORE_MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured of a run, and how it was set up.

    Attributes:
        seconds: Seconds from the first forward to the end, without those of evaluating and saving.
        num_steps: Steps of the optimizer.
        stats: What the run has added to the engine's statistics; peaks, budgets and counts of chunks as they stand.
        has_lanes: Whether the device works beside the host; then the host's clock sees no wait of the device.
        is_metered: Whether non-model data counts against the device budget.
        num_chunks: Chunks of this process.
        num_on_device: How many of them live on the device.
        batch_size: Samples of a micro-batch.
        num_micro_batches: Micro-batches of a step.
        settings: The settings of the engine.
        machine: The machine by whose rates the next two are reckoned; empty if they are not known.
        copying: Share of a step in which all has to wait for copies, by the simulator's clock.
        updating: Share of a step in which all has to wait for the update on the host, likewise.
    """

    seconds: float
    num_steps: int
    stats: Mapping[str, Any]
    has_lanes: bool
    is_metered: bool
    num_chunks: int
    num_on_device: int
    batch_size: int
    num_micro_batches: int
    settings: Mapping[str, Any]
    machine: str = ""
    copying: float = 0.0
    updating: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """What the time went to: shares that add up to 1."""
        stats, whole = self.stats, max(self.seconds, 1e-9)
        waiting = min(stats["waiting_seconds"] + stats["loading_seconds"], stats["computing_seconds"])
        computing = stats["computing_seconds"] - waiting
        updating = stats["updating_seconds"]
        if self.has_lanes:
            computing += stats["settling_seconds"]  # in which the host waits for the device
        else:
            updating += stats["settling_seconds"]  # in which gradients are clipped
        found = {"compute": computing, "waiting for copies": waiting, "optimizer": updating}
        shares = {name: seconds / whole for name, seconds in found.items()}
        return shares | {"others": max(1 - sum(shares.values()), 0.0)}

    @property
    def room(self) -> float:
        """Share of the device budget that was never used; 0 if it is not known."""
        budget = self.stats["device_budget_nbytes"]
        return 1 - self.stats["device_total_peak_nbytes"] / budget if self.is_metered and budget else 0.0

    @property
    def fits_device(self) -> bool:
        """Whether everything lives on the device."""
        return self.num_on_device == self.num_chunks


def describe_outcome(outcome: Outcome) -> tuple[str, str, str]:
    """Three lines: the peak of each tier, what the time went to, and what to change.

    Args:
        outcome: What was measured.
    """
    return _memory(outcome), _time(outcome), _advice(outcome)


def describe_estimated(seconds: float, machine: str) -> str:
    """What a step is expected to take, in one line.

    Args:
        seconds: How long.
        machine: The name of the machine by whose rates that is reckoned.
    """
    return f"by the rates of '{machine}' a step takes about {format_seconds(seconds)}"


def describe_step(number: int, seconds: float, stats: Mapping[str, Any]) -> str:
    """What the first step by a plan has taken, in one line.

    Args:
        number: Its number.
        seconds: How long it took.
        stats: The engine's statistics after it.
    """
    tiers = _tiers(stats, "step_peak")
    return f"step {number}, the first one by a plan, took {format_seconds(seconds)}, and at most {tiers}"


def _memory(outcome: Outcome) -> str:
    return f"at most {_tiers(outcome.stats, 'peak')}"


def _tiers(stats: Mapping[str, Any], peak: str) -> str:
    device, host = stats["device_budget_nbytes"], stats["host_budget_nbytes"]
    chunks = ""
    if stats["chunk_budget_nbytes"] < device:
        chunks = f", chunks {_of(stats[f'device_{peak}_nbytes'], stats['chunk_budget_nbytes'])},"
    return (
        f"{_of(stats[f'device_total_{peak}_nbytes'], device)} on the device{chunks} and "
        f"{_of(stats[f'host_{peak}_nbytes'], host)} on the host"
    )


def _of(nbytes: int, budget: int) -> str:
    share = f" ({nbytes / budget:.0%})" if budget else ""
    return f"{format_nbytes(nbytes)} of {format_nbytes(budget)}{share}"


def _time(outcome: Outcome) -> str:
    names = {"compute": "forward and backward"}
    if outcome.has_lanes:
        names["compute"] += " with the waits of the device"
        names["waiting for copies"] = "the host waiting for copies"
    names["others"] = "others, such as data and logs"
    shares = ", ".join(f"{share:.0%} {names.get(name, name)}" for name, share in outcome.shares.items())
    num = outcome.num_steps
    each = f"{num} steps took {format_seconds(outcome.seconds)}, {format_seconds(outcome.seconds / num)} each"
    estimated = ""
    if outcome.machine:
        estimated = (
            f"; by the rates of '{outcome.machine}' a step waits {outcome.copying:.0%} of its time for copies and "
            f"{outcome.updating:.0%} for the update on the host"
        )
    return f"{each if num > 1 else f'1 step took {format_seconds(outcome.seconds)}'}: {shares}{estimated}"


def _advice(outcome: Outcome) -> str:
    found = next(_changes(outcome), None)
    if found is not None:
        return f"most worth changing: {found}"
    where = "everything lives on the device" if outcome.fits_device else "no part of a step stands out"
    return f"nothing to change: {where}"


def _changes(outcome: Outcome) -> Iterator[str]:
    """The changes that what was measured speaks for, the one most worth making first."""
    shares, stats = outcome.shares, outcome.stats
    batch, larger = outcome.batch_size, f"--per_device_train_batch_size above {outcome.batch_size}"
    if stats["retries"]:
        smaller = f"--per_device_train_batch_size below {batch}" if batch > 1 else "a larger device_budget"
        yield f"{smaller}, since memory did not suffice {stats['retries']} times and micro-batches were repeated"
    if shares["others"] >= _MUCH_OTHER:
        yield (
            f"--dataloader_num_workers, or what else the script does between steps, since {shares['others']:.0%} of "
            "the time went neither to the model nor to the optimizer"
        )
    waiting, updating = max(shares["waiting for copies"], outcome.copying), max(shares["optimizer"], outcome.updating)
    if waiting >= _MUCH_WAITING:
        why = f"since {waiting:.0%} of the time went to waiting for copies"
        if waiting > shares["waiting for copies"]:
            why = f"since by the rates of '{outcome.machine}' {waiting:.0%} of a step go to waiting for copies"
        if outcome.room >= _MUCH_ROOM and outcome.settings["chunk_budget"] == "auto":
            yield f"{larger}, {why}, and a larger batch computes more with each copy"
        else:
            limits = [name for name in ("chunk_budget", "device_budget") if outcome.settings[name] != "auto"]
            yield f"a larger {limits[0]}, {why}" if limits else f"{larger}, {why}"
    if updating >= _MUCH_UPDATING and not outcome.fits_device:
        num = _MORE_MICRO_BATCHES * outcome.num_micro_batches
        why = f"since {updating:.0%} of the time went to the optimizer"
        if updating > shares["optimizer"]:
            why = f"since by the rates of '{outcome.machine}' {updating:.0%} of a step go to waiting for the update"
        yield f"--gradient_accumulation_steps {num}, {why}, and the host then updates once for more samples"
    if outcome.room >= _MUCH_ROOM:
        yield f"{larger}, since {outcome.room:.0%} of the device budget was never used"
