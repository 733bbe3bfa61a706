"""What a run says of itself: figures in its logs, its first planned step, and at the end what to change first.

Figures have documented names. What is printed has time and memory, too.
"""

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
PREFIX = "patrickstar/"
PER_STEP = (
    *("host_to_device_nbytes", "device_to_host_nbytes", "chunk_loads", "chunk_evictions", "chunk_hits", "prefetches"),
    *("late_prefetches", "waiting_seconds", "chunk_moves", "moved_home_to_device_nbytes", "moved_home_to_host_nbytes"),
    *("offloaded_nbytes", "all_gathers", "reduce_scatters", "sent_nbytes", "messages"),
    *("disk_read_nbytes", "disk_written_nbytes", "disk_seconds"),
)
"""Statistics that are logged as the mean over the optimizer steps since the last log."""
STANDING = (
    *("device_step_peak_nbytes", "device_total_step_peak_nbytes", "host_step_peak_nbytes", "device_peak_nbytes"),
    *("device_total_peak_nbytes", "host_peak_nbytes", "device_budget_nbytes", "host_budget_nbytes", "chunks_in_margin"),
    *("skipped_steps", "diverged_steps", "recorded_steps", "retries"),
)
"""Statistics that are logged as they stand."""


def figures_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """All figures, under their names: means over the steps between two moments, and what stands.

    Args:
        before: The engine's statistics at the first moment; empty for when it was made.
        now: Those at the second moment; sizes in bytes.
    """
    added = {key: now[key] - before.get(key, 0) for key in (*PER_STEP, "steps", "skipped_steps")}
    steps = max(added["steps"] + added["skipped_steps"], 1)
    return {PREFIX + key: added[key] / steps for key in PER_STEP} | {PREFIX + key: now[key] for key in STANDING}


FEW = (
    *("device_total_step_peak_nbytes", "host_step_peak_nbytes", "host_to_device_nbytes", "device_to_host_nbytes"),
    "waiting_seconds",
)
"""Statistics that are logged where nobody asks for all."""


def few(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures that are logged where nobody asks for all.

    Args:
        figures: All figures.
    """
    return {PREFIX + name: figures[PREFIX + name] for name in FEW}


def brief(figures: Mapping[str, float]) -> dict[str, str]:
    """Two figures for a reader: the device's peak in the last step, and bytes moved per step.

    Args:
        figures: All figures.
    """
    moved = sum(figures[f"{PREFIX}{way}_nbytes"] for way in ("host_to_device", "device_to_host"))
    return {
        f"{PREFIX}device": format_nbytes(int(figures[f"{PREFIX}device_total_step_peak_nbytes"])),
        f"{PREFIX}moved": format_nbytes(int(moved)),
    }


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
        computing, updating = stats["computing_seconds"] - waiting, stats["updating_seconds"]
        if self.has_lanes:
            computing += stats["settling_seconds"]  # in which the host waits for the device
        else:
            updating += stats["settling_seconds"]  # in which gradients are clipped
        found = {"forward and backward": computing, "waiting for copies": waiting, "optimizer": updating}
        shares = {name: seconds / whole for name, seconds in found.items()}
        return shares | {"other (data, logs)": max(1 - sum(shares.values()), 0.0)}

    @property
    def room(self) -> float:
        """Share of the device budget that was never used; 0 if it is not known."""
        budget = self.stats["device_budget_nbytes"]
        return 1 - self.stats["device_total_peak_nbytes"] / budget if self.is_metered and budget else 0.0


def describe_step(number: int, seconds: float, stats: Mapping[str, Any], estimated_s: float | None = None) -> str:
    """What the first step by a plan has taken, in one line.

    Args:
        number: Its number.
        seconds: How long it took.
        stats: The engine's statistics after it.
        estimated_s: How long it was estimated to take, if it was.
    """
    estimated = "" if estimated_s is None else f" ({format_seconds(estimated_s)} estimated)"
    return f"first planned step (step {number}): {format_seconds(seconds)}{estimated}; {_peaks(stats, 'step_peak')}"


def describe_outcome(outcome: Outcome) -> str:
    """What the time went to, the peak of each tier, and what to change, in one line.

    Args:
        outcome: What was measured.
    """
    num, shares = outcome.num_steps, ", ".join(f"{share:.0%} {name}" for name, share in outcome.shares.items())
    texts = [f"{num} step{'s' if num > 1 else ''}, {format_seconds(outcome.seconds / num)} each: {shares}"]
    if outcome.machine:
        lanes = f"{outcome.copying:.0%} waiting for copies, {outcome.updating:.0%} waiting for updates on the host"
        texts.append(f"estimated for '{outcome.machine}': {lanes}")
    texts.append(_peaks(outcome.stats, "peak"))
    texts += [f"to change first: {advice}" for advice in [*_changes(outcome)][:1]]
    return "; ".join(texts)


def _peaks(stats: Mapping[str, Any], peak: str) -> str:
    def used(name: str, budget: str) -> str:
        nbytes, most = stats[f"{name}_{peak}_nbytes"], stats[f"{budget}_budget_nbytes"]
        return f"{format_nbytes(nbytes)} of {format_nbytes(most)}"

    is_limited = stats["chunk_budget_nbytes"] < stats["device_budget_nbytes"]
    chunks = f"{used('device', 'chunk')} for chunks, " if is_limited else ""
    return f"peak {used('device_total', 'device')} on the device, {chunks}{used('host', 'host')} on the host"


def _changes(outcome: Outcome) -> Iterator[str]:
    """The changes that the measured figures support, the one to make first first."""
    shares, stats, settings = outcome.shares, outcome.stats, outcome.settings
    batch, larger = outcome.batch_size, f"--per_device_train_batch_size above {outcome.batch_size}"
    if stats["retries"]:
        smaller = f"--per_device_train_batch_size below {batch}" if batch > 1 else "a larger device_budget"
        yield f"{smaller}, because memory ran out {stats['retries']} times and micro-batches were repeated"
    other = shares["other (data, logs)"]
    if other >= _MUCH_OTHER:
        yield f"--dataloader_num_workers, or what the script does between steps, which takes {other:.0%} of the time"
    waiting, updating = max(shares["waiting for copies"], outcome.copying), max(shares["optimizer"], outcome.updating)
    if waiting >= _MUCH_WAITING:
        limits = [name for name in ("chunk_budget", "device_budget") if settings[name] != "auto"]
        if not limits or (outcome.room >= _MUCH_ROOM and settings["chunk_budget"] == "auto"):
            yield f"{larger}: {waiting:.0%} of the time waits for copies, and a larger batch computes more per copy"
        else:
            yield f"a larger {limits[0]}: {waiting:.0%} of the time waits for copies"
    if updating >= _MUCH_UPDATING and outcome.num_on_device < outcome.num_chunks:
        why = f"the optimizer takes {updating:.0%} of the time, and then updates less often"
        yield f"--gradient_accumulation_steps {_MORE_MICRO_BATCHES * outcome.num_micro_batches}: {why}"
    if outcome.room >= _MUCH_ROOM:
        yield f"{larger}: {outcome.room:.0%} of the device budget was never used"
