"""What a page says of memory: bytes by kind and tier, the tide, and which parameter lives where."""

from collections.abc import Iterator, Mapping

from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.blocks import (
    Block,
    Cell,
    Chart,
    ChunkMap,
    MappedChunk,
    Table,
    Text,
    of_bytes,
    of_count,
    of_share,
)
from hf_patrickstar.report.charts import Row, Words, bars, fits, stacked
from hf_patrickstar.report.scales import of_bytes as bytes_scale
from hf_patrickstar.report.survey import NON_MODEL, Survey, SurveyedChunk, Tide
from hf_patrickstar.units import format_nbytes

_KIND, _ALL = 0, 1
_LOOKS = {_KIND: "one kind", _ALL: "everything at once"}


def kinds_chart(
    tier: str, budget_nbytes: int, need_nbytes: int, owners: Mapping[str, int], *, is_least: bool = False
) -> Chart:
    """The most bytes of each kind on a tier, and of all kinds at once.

    Args:
        tier: The name of the tier.
        budget_nbytes: What there is.
        need_nbytes: The most bytes at once.
        owners: The most bytes of each kind; these moments need not be the same.
        is_least: Whether ``need_nbytes`` is what would do, for a plan that does not fit.
    """
    kinds = sorted(owners.items(), key=lambda item: -item[1])
    everything = {"everything at once": need_nbytes}
    highest = max(need_nbytes, *(nbytes for _, nbytes in kinds), 1) if kinds else max(need_nbytes, 1)
    has_limit = fits(budget_nbytes, highest)
    rows = [Row(label, {_ALL: [(0, nbytes)]}) for label, nbytes in everything.items()]
    rows += [Row(label, {_KIND: [(0, nbytes)]}) for label, nbytes in kinds]
    named = [*everything.items(), *kinds, ("budget", budget_nbytes)]
    table = Table(
        f"Most bytes on the {tier}",
        ("kind", "most bytes", "share of the budget"),
        tuple((Cell(label), of_bytes(nbytes), of_share(nbytes / max(budget_nbytes, 1))) for label, nbytes in named),
    )
    beyond = "" if has_limit else f" The budget of {format_nbytes(budget_nbytes)} is far to the right of the chart."
    at_most = "At least" if is_least else "At most"
    summary = (
        f"{at_most} {format_nbytes(need_nbytes)} of {format_nbytes(budget_nbytes)} at once. The kinds need not be "
        f"largest at the same moment.{beyond}"
    )
    scale = bytes_scale(max(highest, budget_nbytes if has_limit else 0) * 1.02)
    words = Words(f"Bytes on the {tier}, by kind", summary, "bytes")
    return bars(words, rows, _LOOKS, scale, table, budget_nbytes if has_limit else None)


def tide_chart(tide: Tide) -> Chart:
    """What is on the device at each moment of a step."""
    totals = tide.totals
    columns = {
        "chunks at home on the device, with their states": [tide.fixed_nbytes] * len(totals),
        "copies of chunks": tide.copies,
        "gradients on their way": tide.gradients,
        f"{NON_MODEL}: activations and temporaries": tide.others,
    }
    places = [tide.stride * row for row in range(len(totals) + 1)]
    highest, least = max(totals, default=0), min(totals, default=0)
    beyond = (
        "" if fits(tide.limit_nbytes, highest) else f" The limit, {format_nbytes(tide.limit_nbytes)}, is far above."
    )
    merged = (
        f" Each place stands for {tide.stride} moments, and has the bytes of the fullest one."
        if tide.stride > 1
        else ""
    )
    words = Words(
        f"The tide of '{tide.key}'",
        f"Between {format_nbytes(least)} and {format_nbytes(highest)} at once, of {format_nbytes(tide.limit_nbytes)} "
        f"that may be used. A moment is a visit to a chunk.{beyond}{merged}",
        "moment of the step",
        "bytes on the device",
    )
    rows = zip(
        places, tide.chunks, tide.copies, tide.gradients, tide.others, totals, tide.loads, tide.evictions, strict=False
    )
    table = Table(
        f"The tide of '{tide.key}', {format_nbytes(tide.fixed_nbytes)} of it at home on the device",
        ("moment", "chunk", "copies", "gradients", NON_MODEL, "at once", "loads", "evictions"),
        tuple(
            (of_count(moment), of_count(chunk), *map(of_bytes, nbytes), of_count(loads), of_count(evictions))
            for moment, chunk, *nbytes, loads, evictions in rows
        ),
    )
    return stacked(words, columns, places, tide.limit_nbytes, tide.forward_ends, table)


def tide_blocks(survey: Survey) -> Iterator[Block]:
    """The tide of each micro-batch of a step."""
    if not survey.tides:
        yield Text("No step has followed a plan yet.")
        return
    yield Text(
        "The engine evicts, loads and brings in ahead so that all of this stays under the limit: chunks take what "
        "activations leave. Bytes of non-model data were measured in the first such step."
    )
    for tide in survey.tides:
        yield tide_chart(tide)


def chunk_blocks(survey: Survey) -> Iterator[Block]:
    """Which parameter lives where."""
    if not survey.chunks:
        return
    on_device = sum(chunk.home == Tier.DEVICE.value for chunk in survey.chunks)
    yield Text(
        f"{len(survey.chunks)} chunks hold the model; {on_device} of them live on the device with their optimizer "
        "states, and the others on the host. Open a chunk to see its parameters."
    )
    table = Table(
        "All chunks",
        ("chunk", "home", "type", "elements", "used", "values", "other lists", "parameters", "trained"),
        tuple(_row(chunk) for chunk in survey.chunks),
    )
    yield ChunkMap(tuple(_mapped(chunk) for chunk in survey.chunks), table)


def _row(chunk: SurveyedChunk) -> tuple[Cell, ...]:
    return (
        of_count(chunk.index),
        Cell(chunk.home),
        Cell(chunk.dtype),
        of_count(chunk.numel),
        of_share(chunk.used_numel / max(chunk.numel, 1)),
        of_bytes(chunk.param_nbytes),
        of_bytes(chunk.state_nbytes),
        of_count(len(chunk.parameters)),
        Cell("yes" if chunk.trainable else "no, frozen"),
    )


def _mapped(chunk: SurveyedChunk) -> MappedChunk:
    nbytes = format_nbytes(chunk.param_nbytes + chunk.state_nbytes)
    facts = f"{chunk.dtype}, {nbytes} in all lists{'' if chunk.trainable else ', frozen'}"
    fill = chunk.used_numel / max(chunk.numel, 1)
    return MappedChunk(f"chunk {chunk.index}", chunk.home, fill, facts, chunk.parameters)
