"""The page of a plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_patrickstar.report.blocks import (
    Block,
    Bullets,
    Cell,
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
from hf_patrickstar.report.memory_blocks import chunk_blocks, kinds_chart, tide_blocks
from hf_patrickstar.report.survey import Survey
from hf_patrickstar.report.time_blocks import time_blocks
from hf_patrickstar.schedule.clock import Timeline
from hf_patrickstar.units import format_count, format_nbytes

_CAVEAT = "Times are simulated; bytes of Python, of libraries and of the data are not counted."


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
        verdict: That it fits, or does not and why, as the end of a sentence that begins with "It".
        survey: What the engine did in the step that was simulated; ``None`` if the plan does not fit.
        timeline: The time of that step, likewise.
        changes: What to change, each tried.
        largest: The largest batch and the longest sequence that fit, in sentences.
        trace_name: The name of a file beside the page with the timeline.
        found: What the search has found that the plan comes from, in a sentence.
    """
    memory = [
        kinds_chart(name, use["budget_nbytes"], use["need_nbytes"], use["owners"], is_least=not plan["fits"])
        for name, use in plan["tiers"].items()
    ]
    to_change: list[Block] = [Bullets(tuple(changes), is_ordered=True)] if changes else []
    to_change += [Text(sentence) for sentence in largest]
    return Page(
        title=f"Plan of {plan['model']}",
        subtitle=headline,
        verdict=f"It {verdict.rstrip('.')}.",
        is_good=plan["fits"],
        facts=tuple(_facts(plan)),
        sections=(
            Section("search", "What was found", [Text(found)] if found is not None else []),
            Section("changes", "What to change", to_change),
            Section("memory", "Memory", memory),
            Section("tide", "The tide", list(tide_blocks(survey)) if survey is not None else []),
            Section("time", "Time", list(_time(plan, timeline))),
            Section("movement", "Movement", list(_movement(plan))),
            Section("chunks", "Chunks", list(chunk_blocks(survey)) if survey is not None else []),
            Section("decisions", "Decisions", list(_decisions(plan))),
        ),
        trace_name=trace_name,
    )


def _facts(plan: Mapping[str, Any]) -> Iterator[Fact]:
    speed, chunks = plan["speed"], plan["chunks"]
    if speed is not None:
        yield Fact("seconds per step", of_number(speed["seconds"], "s"), "simulated")
        yield Fact(
            f"{plan.get('unit', 'tokens')} per second", of_count(round(speed["tokens_per_s"])), "of all processes"
        )
        yield Fact("what binds", Cell(speed["binding"]), f"{speed['least_seconds']:.3g} s alone")
    for name, use in plan["tiers"].items():
        at_least = "at most" if plan["fits"] else "at least"
        yield Fact(
            f"{name} memory", of_bytes(use["need_nbytes"]), f"{at_least}, of {format_nbytes(use['budget_nbytes'])}"
        )
    if chunks is not None:
        yield Fact("chunks", of_count(chunks["num"]), f"{chunks['num_on_device']} live on the device")
    numel = plan["num_parameters"]
    yield Fact("parameters", Cell(format_count(numel), numel), f"{plan['num_trainable']:,} trained")


def _time(plan: Mapping[str, Any], timeline: Timeline | None) -> Iterator[Block]:
    speed = plan["speed"]
    if speed is None:
        return
    busy = sorted(speed["busy"].items(), key=lambda item: -item[1])
    clipped = [] if speed["clipped_seconds"] is None else [speed["clipped_seconds"]]
    rows = [
        (Cell("a step"), of_number(speed["seconds"], "s")),
        (Cell(f"{speed['binding']} alone, which has the most to do"), of_number(speed["least_seconds"], "s")),
        *(
            (Cell("the least where gradients are clipped by their norm"), of_number(seconds, "s"))
            for seconds in clipped
        ),
        *((Cell(f"busy: {name}"), of_share(share)) for name, share in busy),
    ]
    yield Table("What bounds a step", ("what", "time or share"), tuple(rows), is_open=True)
    if timeline is not None:
        yield from time_blocks(timeline)


def _movement(plan: Mapping[str, Any]) -> Iterator[Block]:
    speed = plan["speed"]
    if speed is None:
        return
    rows = [
        (Cell("host to device"), of_bytes(speed["to_device_nbytes"])),
        (Cell("device to host"), of_bytes(speed["to_host_nbytes"])),
    ]
    if plan["world_size"] > 1:
        rows.append((Cell("each process to the others"), of_bytes(speed["sent_nbytes"])))
    yield Table("Bytes that cross in a step", ("direction", "bytes"), tuple(rows), is_open=True)


def _decisions(plan: Mapping[str, Any]) -> Iterator[Block]:
    if plan["chunks"] is not None:
        yield Bullets(tuple(plan["chunks"]["reasons"]))
    given = {
        "model": plan["model"],
        "task": plan["task"],
        "machine": plan["machine"],
        "batch of a process": plan["batch_size"],
        **({"tokens of a sequence": plan["length"]} if plan.get("unit", "tokens") == "tokens" else {}),
        "micro-batches of a step": plan["num_micro_batches"],
        "processes": plan["world_size"],
        "activations": "computed again in backward" if plan["checkpointing"] else "kept",
        **{f"setting {name}": value for name, value in plan["settings"].items()},
    }
    yield settings_table(given)
    yield Text(_CAVEAT)


def settings_table(given: Mapping[str, Any], *, is_open: bool = True) -> Table:
    """What a user has chosen, by name."""
    rows = tuple((Cell(name), Cell(str(value))) for name, value in given.items())
    return Table("What was asked for", ("what", "value"), rows, is_open)
