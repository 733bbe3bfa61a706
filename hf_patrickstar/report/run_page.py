"""The page of a real run, from its record; with the figures of a plan beside it if there is one."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report import scales
from hf_patrickstar.report.blocks import (
    Block,
    Bullets,
    Cell,
    Chart,
    Fact,
    Page,
    Section,
    Table,
    Text,
    of_bytes,
    of_count,
    of_number,
    of_share,
)
from hf_patrickstar.report.charts import Line, Words, fits, lines
from hf_patrickstar.report.memory_blocks import chunk_blocks, kinds_chart, tide_blocks
from hf_patrickstar.report.plan_page import settings_table
from hf_patrickstar.report.run_record import Run
from hf_patrickstar.report.scales import Scale
from hf_patrickstar.report.time_blocks import time_blocks
from hf_patrickstar.units import format_nbytes

_MOST_STEPS = 500
"""Of a longer run so many logs are shown, evenly chosen; the last one is among them."""
_TO_DEVICE, _TO_HOST, _WAITED = "host_to_device_nbytes", "device_to_host_nbytes", "waiting_seconds"
_PEAKS = {Tier.DEVICE: "device_total_step_peak_nbytes", Tier.HOST: "host_step_peak_nbytes"}

SAME = ("num_parameters", "batch_size", "num_micro_batches", "world_size")
"""What a plan and a run must have in common for their figures to be comparable."""
_SAME_IF_KNOWN = ("num_trainable", "length", "checkpointing", "precision")
"""What they must have in common, too, where both say it: runs and plans of earlier versions do not."""

Rows = Sequence[Mapping[str, Any]]


def run_page(run: Run, plan: Mapping[str, Any] | None = None, trace_name: str | None = None) -> Page:
    """The page of a run.

    Args:
        run: What it has recorded.
        plan: A plan as ``hf-patrickstar plan --json`` writes it, whose figures are shown beside.
        trace_name: The name of a file beside the page with the timeline.
    """
    about, survey = run.about, run.survey
    shown = _thinned(run.steps)
    memory: list[Block] = [_kinds(run, tier) for tier in Tier]
    memory += [_peaks(run, shown, tier) for tier in Tier] if shown else []
    return Page(
        title=f"Run of {about['model']}",
        subtitle=_headline(about),
        verdict=f"{len(run.steps)} logs of a training loss, up to step {_last(run, 'step') or 0}.",
        is_good=None,
        facts=tuple(_facts(run)),
        sections=(
            Section("compared", "Planned and measured", list(_compared(run, plan)) if plan is not None else []),
            Section("loss", "Loss and throughput", list(_progress(run, shown))),
            Section("movement", "Movement and waits", list(_movement(shown))),
            Section("time", "Time", [] if run.timeline is None else list(time_blocks(run.timeline, is_measured=True))),
            Section("memory", "Memory", memory),
            Section("tide", "The tide", list(tide_blocks(survey))),
            Section("chunks", "Chunks", list(chunk_blocks(survey))),
            Section("decisions", "Decisions", list(_decisions(run))),
        ),
        trace_name=trace_name,
    )


def _headline(about: Mapping[str, Any]) -> str:
    where = f"{about['world_size']} processes on" if about["world_size"] > 1 else "on"
    return (
        f"{about['model_class']}: {about['num_parameters']:,} parameters, {about['num_trainable']:,} trained, "
        f"{about['precision']}, batches of {about['batch_size']}, {about['num_micro_batches']} a step, "
        f"{where} {about['device']}"
    )


def _last(run: Run, name: str) -> Any:
    return run.steps[-1].get(name) if run.steps else None


def later(run: Run) -> Rows:
    """The logs that figures of a usual step are taken from: all but the first, whose steps are recorded."""
    return run.steps[1:] or run.steps


def typical(run: Run, name: str) -> float | None:
    """The median of a figure over the logs of a run, without the first one; ``None`` if it is not known.

    Args:
        run: The run.
        name: The name of the figure.
    """
    values = [row[name] for row in later(run) if row.get(name) is not None]
    return statistics.median(values) if values else None


def _facts(run: Run) -> Iterator[Fact]:
    yield Fact("last loss", of_number(_last(run, "loss"), digits=5), f"at step {_last(run, 'step') or 0}")
    if run.evaluations:
        last = run.evaluations[-1]
        yield Fact("last evaluation", of_number(last["eval_loss"], digits=5), f"at step {last['step']}")
    yield Fact("seconds per step", of_number(typical(run, "seconds"), "s"), "median of the logs after the first")
    yield Fact("samples per second", of_number(typical(run, "samples_per_s")), "of all processes")
    for tier, name in _PEAKS.items():
        peak = max((row[name] for row in run.steps if row.get(name) is not None), default=0)
        note = f"at most, of {format_nbytes(run.survey.budgets[tier.value])}"
        yield Fact(f"{tier.value} memory", of_bytes(peak), note)
    on_device = sum(chunk.home == Tier.DEVICE.value for chunk in run.survey.chunks)
    yield Fact("chunks", of_count(len(run.survey.chunks)), f"{on_device} live on the device")


def _progress(run: Run, shown: Rows) -> Iterator[Block]:
    if not shown:
        yield Text("No training loss has been logged yet.")
        return
    evaluations = _thinned(run.evaluations)
    found = [Line("training loss", _points(shown, "loss"))]
    if evaluations:
        found.append(Line("evaluation loss", _points(evaluations, "eval_loss")))
    rows = [("training", row["step"], row.get("loss")) for row in shown]
    rows += [("evaluation", row["step"], row["eval_loss"]) for row in evaluations]
    cells: list[tuple[Cell, ...]] = [(of_count(step), Cell(of), of_number(loss, digits=7)) for of, step, loss in rows]
    said = f"The last training loss is {of_number(_last(run, 'loss'), digits=5).text}."
    yield _over_steps("Loss", said, "loss", found, _scale(found), ("of", "loss"), cells)
    found = [Line("seconds per step", _points(shown, "seconds"))]
    yield _over_steps(
        "Seconds per step",
        "Means from log to log, with the time that loading of data takes, and without evaluation and saving. "
        "The first step is planned before it begins, which takes longer.",
        "seconds",
        found,
        scales.of_seconds(_highest(found) * 1.05),
        ("seconds",),
        [(of_count(row["step"]), of_number(row.get("seconds"), "s")) for row in shown],
    )
    names = {"samples_per_s": "samples"}
    if any(row.get("tokens_per_s") is not None for row in shown):
        names["tokens_per_s"] = "tokens"
    for name, what in names.items():
        label = f"{what} per second"
        found = [Line(label, _points(shown, name))]
        cells = [(of_count(row["step"]), of_number(row.get(name))) for row in shown]
        scale = scales.of_numbers(0, _highest(found) * 1.05)
        said = "Of all processes together."
        yield _over_steps(f"Throughput in {what}", said, "per second", found, scale, (label,), cells)


def _over_steps(
    title: str,
    summary: str,
    y_label: str,
    found: Sequence[Line],
    scale: Scale,
    header: Sequence[str],
    cells: Iterable[tuple[Cell, ...]],
    caption: str | None = None,
    limit: float | None = None,
) -> Chart:
    """Figures of the logs, with a table of them that has the title of the chart, or another caption."""
    table = Table(caption or title, ("step", *header), tuple(cells))
    return lines(Words(title, summary, "step of the optimizer", y_label), found, scale, table, limit)


def _movement(shown: Rows) -> Iterator[Block]:
    if not shown:
        return
    ways = {_TO_DEVICE: "host to device", _TO_HOST: "device to host"}
    found = [Line(label, _points(shown, name)) for name, label in ways.items()]
    cells = [
        (
            of_count(row["step"]),
            *(of_bytes(row[name]) for name in ways),
            *(of_number(row[name]) for name in ("chunk_loads", "prefetches", "chunk_evictions")),
        )
        for row in shown
    ]
    scale = scales.of_bytes(_highest(found) * 1.05)
    header = (*ways.values(), "loads", "started ahead", "evictions")
    yield _over_steps("Bytes moved per step", "Means from log to log.", "bytes", found, scale, header, cells)
    found = [Line("waits for copies", _points(shown, _WAITED))]
    yield _over_steps(
        "Waits per step",
        "How long the host waited for copies that had been started ahead and had not arrived; means from log to log.",
        "seconds",
        found,
        scales.of_seconds(_highest(found) * 1.05),
        ("seconds waited", "late copies", "share of the step"),
        [
            (
                of_count(row["step"]),
                of_number(row[_WAITED], "s"),
                of_number(row["late_prefetches"]),
                of_share(row[_WAITED] / row["seconds"]) if row.get("seconds") else of_number(None),
            )
            for row in shown
        ],
    )


def _kinds(run: Run, tier: Tier) -> Chart:
    owners = run.survey.owners.get(tier.value, {})
    name = {Tier.DEVICE: "device_total_peak_nbytes", Tier.HOST: "host_peak_nbytes"}[tier]
    return kinds_chart(tier.value, run.survey.budgets[tier.value], _last(run, name) or 0, owners)


def _peaks(run: Run, shown: Rows, tier: Tier) -> Chart:
    name, budget = _PEAKS[tier], run.survey.budgets[tier.value]
    found = [Line(f"most bytes on the {tier.value} in a step", _points(shown, name))]
    highest = _highest(found)
    has_limit = fits(budget, highest)
    beyond = "" if has_limit else f" The budget, {format_nbytes(budget)}, is far above."
    return _over_steps(
        f"Peaks on the {tier.value}",
        f"The most bytes at once in the last step before each log, at most {format_nbytes(round(highest))}.{beyond}",
        "bytes",
        found,
        scales.of_bytes(max(highest, budget if has_limit else 0) * 1.05),
        ("most bytes", "share of the budget"),
        [(of_count(row["step"]), of_bytes(row[name]), of_share(row[name] / max(budget, 1))) for row in shown],
        f"Most bytes on the {tier.value} in a step",
        budget if has_limit else None,
    )


def _compared(run: Run, plan: Mapping[str, Any]) -> Iterator[Block]:
    """What was planned beside what was measured."""
    speed, chunks, tiers = plan["speed"] or {}, plan["chunks"] or {}, plan["tiers"]
    needs = {tier: tiers[tier.value]["need_nbytes"] for tier in Tier}
    planned = {name: plan[name] for name in SAME}
    peaks = {
        tier: max((row[name] for row in run.steps if row.get(name) is not None), default=None)
        for tier, name in _PEAKS.items()
    }
    homes = sum(chunk.home == Tier.DEVICE.value for chunk in run.survey.chunks)
    pairs: list[tuple[str, Any, Any, str]] = [
        ("seconds per step", speed.get("seconds"), typical(run, "seconds"), "s"),
        ("bytes to the device per step", speed.get("to_device_nbytes"), typical(run, _TO_DEVICE), "B"),
        ("bytes to the host per step", speed.get("to_host_nbytes"), typical(run, _TO_HOST), "B"),
        *((f"most bytes on the {tier.value}", needs[tier], peaks[tier], "B") for tier in Tier),
        ("chunks", chunks.get("num"), len(run.survey.chunks), ""),
        ("chunks that live on the device", chunks.get("num_on_device"), homes, ""),
    ]
    if planned["world_size"] > 1:
        pairs.append(("bytes to other processes per step", speed.get("sent_nbytes"), typical(run, "sent_nbytes"), "B"))
    known = [name for name in _SAME_IF_KNOWN if plan.get(name) is not None and run.about.get(name) is not None]
    planned |= {name: plan[name] for name in known}
    others = [
        f"{name} is {value} in the plan, {run.about[name]} in the run"
        for name, value in planned.items()
        if value != run.about[name]
    ]
    if others:
        yield Text(f"The plan is not one of this run: {'; '.join(others)}.")
    if run.evaluations:
        yield Text(
            "The plan is of steps of training alone, and this run evaluates, too: the log after an evaluation has the "
            "bytes that the evaluation moved."
        )
    yield Table(
        f"Planned for {plan.get('machine', 'a machine')}, and measured on {run.about['device']}",
        ("what", "planned", "measured", "ratio"),
        tuple(
            (Cell(what), _figure(ours, unit), _figure(real, unit), _ratio(ours, real))
            for what, ours, real, unit in pairs
        ),
        is_open=True,
    )


def _figure(value: float | None, unit: str) -> Cell:
    if value is None:
        return of_number(None)
    return of_bytes(value) if unit == "B" else of_number(value, unit)


def _ratio(planned: float | None, measured: float | None) -> Cell:
    return of_number(measured / planned, digits=3) if planned and measured is not None else Cell("-")


def _decisions(run: Run) -> Iterator[Block]:
    yield Bullets(run.survey.reasons)
    about = {name: value for name, value in run.about.items() if name != "settings"}
    yield settings_table(
        {**about, **{f"setting {name}": value for name, value in run.about["settings"].items()}}, is_open=False
    )
    if len(run.steps) > _MOST_STEPS:
        yield Text(f"{_MOST_STEPS} of {len(run.steps)} logs are shown, evenly chosen.")


def _thinned(rows: Rows) -> Rows:
    if len(rows) <= _MOST_STEPS:
        return rows
    return [rows[(place + 1) * len(rows) // _MOST_STEPS - 1] for place in range(_MOST_STEPS)]


def _points(rows: Rows, name: str) -> tuple[tuple[float, float | None], ...]:
    return tuple((row["step"], row.get(name)) for row in rows)


def _values(found: Sequence[Line]) -> list[float]:
    return [value for line in found for _, value in line.points if value is not None]


def _highest(found: Sequence[Line]) -> float:
    return max(_values(found), default=0.0)


def _scale(found: Sequence[Line]) -> Scale:
    values = _values(found) or [0.0]
    low, high = min(values), max(values)
    room = (high - low) * 0.05
    return scales.of_numbers(max(low - room, 0.0) if low >= 0 else low - room, high + room)
