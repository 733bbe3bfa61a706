"""The page of a real run, from its record, and the comparison with a plan."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report import sections
from hf_patrickstar.report.page import Block, Cell, Fact, Page, Table, lines, of_bytes, of_number
from hf_patrickstar.report.run_record import Run
from hf_patrickstar.report.survey import Survey
from hf_patrickstar.units import describe_wear, format_nbytes

_MOST_STEPS = 300
"""Of a longer run so many logs are shown, evenly chosen; the last one is among them."""
_PEAKS = {"device": "device_total_step_peak_nbytes", "host": "host_step_peak_nbytes"}
_CHARTS = (
    ("Loss", "", {"training": "loss", "evaluation": "eval_loss"}),
    ("Seconds per step", "s", {"whole step": "seconds", "the host waits for copies": "waiting_seconds"}),
    ("Bytes copied per step", "B", {"to the device": "host_to_device_nbytes", "to the host": "device_to_host_nbytes"}),
)
"""Title, unit, and for each line the name of its figure."""
_OWN = ("model", "settings")
"""What a plan and a run both have, and what need not be the same for their figures to be comparable."""


def run_page(run: Run, plan: Mapping[str, Any] | None = None, trace_name: str | None = None) -> Page:
    """The page of a run.

    Args:
        run: What it has recorded.
        plan: A plan as ``hf-patrickstar plan --json`` writes it, with which the run is compared.
        trace_name: The name of a file beside the page with the timeline.
    """
    about, survey, timeline = run.about, run.survey, run.timeline
    return Page(
        title=f"Run of {about['model']}",
        subtitle=f"{about['model_class']}: {about['num_parameters']:,} parameters, {about['num_trainable']:,} trained, "
        f"{about['precision']}, micro-batches of {about['batch_size']} ({about['num_micro_batches']} per step), "
        f"{about['world_size']} x {about['device']}",
        verdict=f"{len(run.steps)} logs of the training loss, up to step {_last(run, 'step') or 0}.",
        is_good=None,
        facts=tuple(_facts(run)),
        sections={
            "Planned and measured": list(_compared(run, plan)) if plan is not None else [],
            "Training": list(_training(run)),
            "What was decided": sections.decisions(survey.reasons, about),
            "Memory": list(_memory(run)),
            "Time": list(sections.time_of_step(timeline, is_measured=True)) if timeline is not None else [],
            "Chunks": list(sections.chunks(survey)),
        },
        trace_name=trace_name,
    )


def _last(run: Run, name: str) -> Any:
    return run.steps[-1].get(name) if run.steps else None


def typical(run: Run, name: str) -> float | None:
    """The median of a figure over the logs of a run, without the first one; ``None`` if it is not known.

    Args:
        run: The run.
        name: The name of the figure.
    """
    rows = run.steps[1:] or run.steps  # the first log has the step that makes the plan
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def _peak(run: Run, tier: str) -> int | None:
    """The most bytes in a step before a log."""
    return max((row[_PEAKS[tier]] for row in run.steps), default=None)


def _on_device(survey: Survey) -> int:
    return sum(chunk.home == Tier.DEVICE.value for chunk in survey.chunks)


def _facts(run: Run) -> Iterator[Fact]:
    yield "last loss", of_number(_last(run, "loss"), digits=5), f"step {_last(run, 'step') or 0}"
    if run.evaluations:
        last = run.evaluations[-1]
        yield "last evaluation", of_number(last["eval_loss"], digits=5), f"step {last['step']}"
    yield "seconds per step", of_number(typical(run, "seconds"), "s"), "median, without the first log"
    yield "samples per second", of_number(typical(run, "samples_per_s")), "all processes"
    for tier in _PEAKS:
        yield f"{tier} memory", of_bytes(_peak(run, tier) or 0), f"peak, of {format_nbytes(run.survey.budgets[tier])}"
    if wear := round(typical(run, "disk_written_nbytes") or 0):
        yield "written to the disk", of_bytes(wear), describe_wear(wear, typical(run, "seconds") or 0)
    yield "chunks", of_number(len(run.survey.chunks)), f"{_on_device(run.survey)} at home on the device"


def _training(run: Run) -> Iterator[Block]:
    if not run.steps:
        yield "No training loss has been logged yet."
        return
    shown = _thinned(run.steps)
    logs: dict[int, dict[str, Any]] = {}
    for row in (*shown, *_thinned(run.evaluations)):
        logs.setdefault(row["step"], {}).update(row)
    rows = [logs[step] for step in sorted(logs)]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    changing = [name for name in names if len(rows) == 1 or len({row.get(name) for row in rows}) > 1]
    yield "Averages between logs. Seconds include data loading, but neither evaluation nor saving."
    for title, unit, of in _CHARTS:
        found = {label: [(row["step"], row[name]) for row in rows if name in row] for label, name in of.items()}
        yield lines(title, {label: points for label, points in found.items() if points}, unit)
    caption = "All logs" if len(shown) == len(run.steps) else f"{len(shown)} of {len(run.steps)} logs, evenly chosen"
    cells = [[Cell(str(row["step"])), *(_logged(row, name) for name in changing)] for row in rows]
    yield Table(f"{caption}; figures that never change are left out", ("step", *changing), cells, is_open=False)


def _logged(row: Mapping[str, Any], name: str) -> Cell:
    unit = "B" if name.endswith("_nbytes") else "s" if name.endswith("seconds") else ""
    return Cell("") if row.get(name) is None else of_number(row[name], unit, digits=7)


def _thinned(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return rows[:: -(len(rows) // _MOST_STEPS + 1)][::-1]


def _memory(run: Run) -> Iterator[Block]:
    """What fills the device in a step that follows a plan, and the host."""
    survey = run.survey
    if not survey.tides:
        yield "No step has followed a plan yet."
        return
    fullest = max(survey.tides, key=lambda tide: max(tide.totals))
    yield sections.peak("device", fullest.at_peak(), survey.budgets["device"], "planned step")
    chunks = [chunk for chunk in survey.chunks if chunk.home == Tier.HOST.value]
    host = {
        "parameters": sum(chunk.param_nbytes for chunk in chunks),
        "masters, optimizer states and gradients": sum(chunk.state_nbytes - chunk.disk_nbytes for chunk in chunks),
    }
    host["buffers and all else"] = max((_last(run, _PEAKS["host"]) or 0) - sum(host.values()), 0)
    yield sections.peak("host", host, survey.budgets["host"], "last step")
    if disk := sum(chunk.disk_nbytes for chunk in chunks):
        yield sections.peak("disk", {"masters and optimizer states": disk}, survey.budgets["disk"], "last step")
    yield from sections.tides(survey)


def _compared(run: Run, plan: Mapping[str, Any]) -> Iterator[Block]:
    about, survey, speed, chunks = run.about, run.survey, plan["speed"] or {}, plan["chunks"] or {}
    others = {name: value for name, value in about.items() if name not in _OWN and plan.get(name) not in (None, value)}
    differ = [f"{name} is {plan[name]} in the plan and {value} in the run" for name, value in others.items()]
    if differ:
        yield f"This is the plan of another training: {'; '.join(differ)}."
    if run.evaluations:
        yield "The run also evaluates, which the plan does not include: the next step then copies more."
    rows: dict[str, tuple[str, float | None, float | None]] = {
        "seconds per step": ("s", speed.get("seconds"), typical(run, "seconds")),
        "host to device per step": ("B", speed.get("to_device_nbytes"), typical(run, "host_to_device_nbytes")),
        "device to host per step": ("B", speed.get("to_host_nbytes"), typical(run, "device_to_host_nbytes")),
        "to the disk per step": ("B", speed.get("disk_written_nbytes"), typical(run, "disk_written_nbytes")),
        "to other processes per step": ("B", speed.get("sent_nbytes"), typical(run, "sent_nbytes")),
        **{f"peak on the {tier}": ("B", plan["tiers"][tier]["need_nbytes"], _peak(run, tier)) for tier in _PEAKS},
        "chunks": ("", chunks.get("num"), len(survey.chunks)),
        "chunks at home on the device": ("", chunks.get("num_on_device"), _on_device(survey)),
    }
    cells = [
        (what, of_number(planned, unit), of_number(measured, unit), of_number(_ratio(planned, measured), digits=3))
        for what, (unit, planned, measured) in rows.items()
        if planned or measured
    ]
    header = ("what", "planned", "measured", "ratio")
    yield Table(f"Planned for {plan['machine']}, measured on {about['device']}", header, cells)


def _ratio(planned: float | None, measured: float | None) -> float | None:
    return measured / planned if planned and measured is not None else None
