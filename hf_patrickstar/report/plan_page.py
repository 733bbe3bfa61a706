"""The page of a plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.report import sections
from hf_patrickstar.report.page import Block, Cell, Fact, Page, of_bytes, of_number
from hf_patrickstar.report.survey import NON_MODEL, Survey
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.units import describe_wear, format_nbytes, format_seconds

_CAVEAT = "Times are simulated. Memory of Python, of libraries and of the data is not counted."
_GIVEN = ("model", "task", "machine", "batch_size", "length", "num_micro_batches", "world_size", "checkpointing")
_STATES = {name: f"optimizer states: {name}" for name in ("master", "exp_avg", "exp_avg_sq")}
_KINDS = {"param": "parameters", NON_MODEL: "activations and temporaries", **_STATES}


def plan_page(
    plan: Mapping[str, Any],
    headline: str,
    verdict: str,
    survey: Survey | None,
    timeline: Timeline | None,
    *,
    changes: Sequence[str] = (),
    largest: Sequence[str] = (),
    trace_name: str | None = None,
    found: str | None = None,
) -> Page:
    """The page of a plan.

    Args:
        plan: The plan as ``hf-patrickstar plan --json`` writes it.
        headline: What is planned, in a sentence.
        verdict: Whether it fits, as the end of a sentence that begins with "It".
        survey: What the engine did in the step that was simulated; ``None`` if the plan does not fit.
        timeline: The time of that step, likewise.
        changes: What to change, each tried.
        largest: The largest batch and the longest sequence that fit, in sentences.
        trace_name: The name of a file beside the page with the timeline.
        found: What the search has found that the plan comes from, in a sentence.
    """
    reasons = plan["chunks"]["reasons"] if plan["chunks"] is not None else ()
    given = {name: plan[name] for name in (*_GIVEN, "settings")}
    memory: list[Block] = []
    for name, use in plan["tiers"].items():
        kinds = {_KINDS.get(kind, kind): nbytes for kind, nbytes in use["owners"].items()}
        memory.append(sections.peak(name, kinds, use["budget_nbytes"], use.get("moment", "")))
    return Page(
        title=f"Plan of {plan['model']}",
        subtitle=headline,
        verdict=f"It {verdict.rstrip('.')}.",
        is_good=plan["fits"],
        facts=tuple(_facts(plan)),
        sections={
            "What was found": [found] if found is not None else [],
            "What to change": [*([changes] if changes else []), *largest],
            "What was decided": sections.decisions(reasons, given),
            "Memory": [*memory, *(sections.tides(survey) if survey is not None else ())],
            "Time": [_CAVEAT, *sections.time_of_step(timeline, is_measured=False)] if timeline is not None else [],
            "Chunks": list(sections.chunks(survey)) if survey is not None else [],
        },
        trace_name=trace_name,
    )


def _facts(plan: Mapping[str, Any]) -> Iterator[Fact]:
    speed, chunks = plan["speed"], plan["chunks"]
    if speed is not None:
        clipped = speed["clipped_seconds"]
        at_least = "" if clipped is None else f"at least {format_seconds(clipped)} with gradient clipping"
        yield "seconds per step", of_number(speed["seconds"], "s"), at_least
        yield f"{plan['unit']} per second", of_number(round(speed["tokens_per_s"])), "all processes"
        yield "bottleneck", Cell(speed["binding"]), f"needs {format_seconds(speed['least_seconds'])}"
        yield "host to device", of_bytes(speed["to_device_nbytes"]), "copied per step"
        yield "device to host", of_bytes(speed["to_host_nbytes"]), "copied per step"
        if wear := speed["disk_written_nbytes"]:
            yield "written to the disk", of_bytes(wear), describe_wear(wear, speed["seconds"])
        if plan["world_size"] > 1:
            yield "between processes", of_bytes(speed["sent_nbytes"]), "sent per step by each"
    for name, use in plan["tiers"].items():
        note = f"{'peak' if plan['fits'] else 'needed'}, of {format_nbytes(use['budget_nbytes'])}"
        yield f"{name} memory", of_bytes(use["need_nbytes"]), note
    if chunks is not None:
        yield "chunks", of_number(chunks["num"]), f"{chunks['num_on_device']} at home on the device"
