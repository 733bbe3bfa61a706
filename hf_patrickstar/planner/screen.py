"""A plan as one screen of text."""

import collections
import re
import textwrap
from collections.abc import Iterator, Sequence

from hf_patrickstar.layout.specs import GRADIENT
from hf_patrickstar.machine import Machine, whole_host_nbytes
from hf_patrickstar.optim.kernel import WORKSPACE
from hf_patrickstar.optim.torch_kernel import OWN_STATE
from hf_patrickstar.planner.search import Found, Goal
from hf_patrickstar.planner.training_plan import Chunks, Plan, Speed, TierUse
from hf_patrickstar.runtime import gradient_ring
from hf_patrickstar.runtime.chunk import GRADIENTS, STAGING
from hf_patrickstar.schedule.pace import describe_start
from hf_patrickstar.units import describe_wear, format_count, format_nbytes

_WIDTH = 10
_MOST_COLUMNS = 80
_LONG_NAME = 40
_STATES = ("master", "exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2", OWN_STATE)
_KINDS = {
    "param": "parameters",
    **dict.fromkeys(_STATES, "optimizer states"),
    "non-model data": "activations",
    **dict.fromkeys((GRADIENT, gradient_ring.OWNER), GRADIENTS),
    **dict.fromkeys((WORKSPACE, STAGING), "buffers"),
}
"""What kinds of bytes are called on the screen."""
_SLACK = 1.05
"""What a step takes beyond its bounds is told from here on."""
_FULL = 0.95
"""A lane that is busy for so much of a step has no time for more."""


def wrapped(text: str) -> str:
    """A text in lines of at most 80 columns, as ``--help`` has them; only a name without spaces may be longer.

    Args:
        text: What one of the functions below returns.
    """
    wrap = textwrap.TextWrapper(_MOST_COLUMNS, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        indent = re.match(r"([a-z]* {2,}(\d\. )?)?", line)  # of a row of a table, or after a number
        wrap.subsequent_indent = " " * (indent.end() if indent else 0)
        lines += wrap.wrap(re.sub(r"(?<=\d) (?=[A-Z]?i?B\b|m?s\b)", "\N{NO-BREAK SPACE}", line)) or [""]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def describe_memory(num_parameters: int, nbytes: int, machine: Machine, length: int | None = None) -> str:
    """What model data takes, which is known before a step is simulated.

    Args:
        num_parameters: Parameters of the model.
        nbytes: Bytes of model data of one process, optimizer states included.
        machine: Where it trains; its memory is what training may take.
        length: Tokens of a sequence, where nobody said how many.
    """
    num, whole = machine.num_devices, whole_host_nbytes(machine.name)
    host = f"{format_nbytes(machine.host_nbytes)} of the host"
    if whole is not None and num * machine.host_nbytes <= whole:
        host += f" ({format_nbytes(whole)} in all{f', for {num} devices' if num > 1 else ''})"
    if machine.disk_nbytes:
        host += f", and {format_nbytes(machine.disk_nbytes)} of a drive"
    fits = "" if nbytes <= machine.device_nbytes + machine.host_nbytes + machine.disk_nbytes else ": too little"
    taken = "" if length is None else f" Sequences have {length} tokens (--seq-len)."
    return (
        f"Model data of {format_count(num_parameters)} parameters takes {format_nbytes(nbytes)}"
        f"{' in each process. Each' if num > 1 else '. Training'} may take {format_nbytes(machine.device_nbytes)} of "
        f"{'its' if num > 1 else 'the'} device and {host}{fits}.{taken}"
    )


def describe(plan: Plan, *, is_verbose: bool = False) -> str:
    """The plan in words.

    Args:
        plan: The plan.
        is_verbose: Whether every kind of memory, what each lane does, and each decision are said, too.
    """
    lines = [headline(plan)]
    for tier, use in plan.tiers.items():
        lines += _rows(tier, [_memory(use, fits=plan.fits, is_verbose=is_verbose)])
    if plan.chunks is not None:
        lines += _rows("chunks", [_chunks(plan.chunks)])
        lines += _rows("decided", plan.chunks.reasons if is_verbose else ())
    if plan.speed is not None:
        lines += _speed(plan.speed, plan, is_verbose=is_verbose)
    lines += _rows("note", plan.remarks)
    return "\n".join(lines)


def caveat(*, is_verbose: bool) -> str:
    """What a plan does not know.

    Args:
        is_verbose: Whether everything is said already.
    """
    more = "" if is_verbose else " --verbose shows what was decided, and why."
    return f"Times are simulated. Memory of Python, of libraries and of the data is not counted.{more}"


def describe_changes(plan: Plan) -> str:
    """What was tried beside the plan, in words.

    Args:
        plan: The plan, with what was tried.
    """
    if plan.changes:
        lines = ["Faster, each planned:" if plan.fits else "These changes fit, each planned:"]
        lines += [f"  {place}. {text}" for place, text in enumerate(changes_of(plan), 1)]
    else:
        lines = ["No change was found that makes a step 2 % faster." if plan.fits else "No change was found that fits."]
    if plan.failed:
        lines.append(f"These do not fit: {'; '.join(plan.failed)}.")
    return "\n".join([*lines, *largest_of(plan)])


def changes_of(plan: Plan) -> list[str]:
    """Each change and what it would bring, in words.

    Args:
        plan: The plan.
    """
    return [
        f"{change.text}: {change.tokens_per_s:,.0f} {plan.unit} per second"
        + ("" if change.gain is None else f" ({change.gain:.2f} times as fast)")
        for change in plan.changes or ()
    ]


def largest_of(plan: Plan) -> list[str]:
    """The largest batch and the longest sequence that fit, each in a sentence, where they were searched.

    Args:
        plan: The plan.
    """
    tokens = f" with {plan.length} tokens" if plan.unit == "tokens" else ""
    words = {
        "batch_size": (f"batch that fits{tokens}", "--batch-size"),
        "length": (f"sequence that fits with a batch of {plan.batch_size}", "--seq-len"),
    }
    texts = []
    for name, answer in (plan.largest or {}).items():
        what, option = words[name]
        texts.append(f"No {what}." if answer is None else f"The largest {what}: {answer} ({option} {answer})")
    return texts


_UNITS = {Goal.MAX_BATCH: " sequences", Goal.MAX_LENGTH: " tokens", Goal.MAX_MODEL: " layers", Goal.CHEAPEST: ""}


def describe_found(found: Found) -> str:
    """The result of a search in words.

    Args:
        found: The result.
    """
    unit, plans = _UNITS[found.goal], f"({found.num_plans} plans)"
    if found.plan is None:
        one = unit.removesuffix("s") if found.refused == 1 else unit
        tried = "" if found.refused is None else f", not even {found.refused}{one}"
        return f"{found.goal}: nothing fits{tried} {plans}"
    if found.goal is Goal.CHEAPEST:
        refused = "no cheaper one is known" if found.refused is None else f"{found.refused} is too small"
        unit = " (--dtype fp16)" * (found.plan.settings.get("dtype") == "fp16")
    else:
        refused = "the most there can be" if found.refused is None else f"{found.refused} do not fit"
    if found.goal is Goal.MAX_BATCH and found.plan.unit != "tokens":
        unit = f" {found.plan.unit}"
    size = f", {format_count(found.plan.num_parameters)} parameters" if found.goal is Goal.MAX_MODEL else ""
    return f"{found.goal}: {found.answer}{unit}{size}; {refused} {plans}"


def headline(plan: Plan) -> str:
    """What is planned, and whether it fits."""
    name = plan.model if len(plan.model) <= _LONG_NAME else f"{plan.model[: plan.model.find(':') + 1]}..."
    parts = [f"{name} ({format_count(plan.num_parameters)} parameters)"]
    if plan.num_trainable < plan.num_parameters:
        parts.append(f"{format_count(plan.num_trainable)} of them trained")
    parts += [plan.task, str(plan.settings.get("dtype", "auto")), plan.batch]
    if plan.num_micro_batches > 1:
        parts.append(f"{plan.num_micro_batches} micro-batches")
    parts.append("gradient checkpointing" if plan.checkpointing else "all activations kept")
    where = f"{plan.world_size} processes on" if plan.world_size > 1 else "on"
    verdict = "fits" if plan.fits else "does not fit: " + ", ".join(_missing(plan))
    return f"{', '.join(parts)}, {where} {plan.machine}\n{verdict}"


def _missing(plan: Plan) -> Iterator[str]:
    for name, use in plan.tiers.items():
        if use.missing_nbytes:
            yield f"{format_nbytes(use.missing_nbytes)} too little on the {name}"
    if plan.shortage is not None:
        yield plan.shortage


def _memory(use: TierUse, *, fits: bool, is_verbose: bool) -> str:
    need = f"{format_nbytes(use.need_nbytes)} of {format_nbytes(use.budget_nbytes)}"
    if not fits and use.need_nbytes:
        need = f"needs {need}"
    kinds: collections.Counter[str] = collections.Counter()
    for kind, nbytes in use.owners.items():
        kinds[kind if is_verbose else _KINDS.get(kind, kind)] += nbytes
    shown = [f"{name} {format_nbytes(nbytes)}" for name, nbytes in kinds.most_common() if nbytes]
    when = f" at the peak ({use.moment})" if use.moment else ""
    return f"{need}{when}" + (f": {', '.join(shown)}" if shown else "")


def _chunks(chunks: Chunks) -> str:
    sizes = f"{format_nbytes(chunks.nbytes)} of parameters, the largest chunk {format_nbytes(chunks.largest_nbytes)}"
    resident, others = chunks.num_on_device, chunks.num - chunks.num_on_device
    return f"{chunks.num} ({sizes}): {resident} always on the device, with optimizer states, {others} on the host"


def _speed(speed: Speed, plan: Plan, *, is_verbose: bool) -> list[str]:
    least, clipped = speed.least_seconds, speed.clipped_seconds
    to_device, to_host = format_nbytes(speed.to_device_nbytes), format_nbytes(speed.to_host_nbytes)
    sent = f", {format_nbytes(speed.sent_nbytes)} between processes" if plan.world_size > 1 else ""
    limit = f"{speed.binding} ({least:.3g} s)"
    if speed.busy["host"] >= _FULL:
        limit = f"Python and launches on the host; then {limit}"
    if clipped is not None:
        limit = f"{limit}. With gradient clipping a step takes at least {clipped:.3g} s"
    if speed.seconds > _SLACK * max(least, clipped or 0) and speed.busy["host"] < _FULL:
        links = sorted(speed.chain.items(), key=lambda item: -item[1])[:3]
        limit = f"{limit}. In turn: {', '.join(f'{name} {seconds:.3g} s' for name, seconds in links)}"
    start = f"; {sum(speed.start.values()):.2g} s from the engine to the end of the first step"
    busy = sorted(speed.busy.items(), key=lambda item: -item[1])
    return [
        *_rows("speed", [f"{speed.seconds:.3g} s per step, {speed.tokens_per_s:,.0f} {plan.unit} per second{start}"]),
        *_rows("limit", [limit]),
        *_rows("busy", ["; ".join(f"{name} {share:.0%}" for name, share in busy if share >= 0.005)] * is_verbose),
        *_rows("copies", [f"{to_device} to the device and {to_host} to the host per step{sent}"]),
        *_rows("wear", [describe_wear(speed.disk_written_nbytes, speed.seconds)] * (speed.disk_written_nbytes > 0)),
        *_rows("start", [describe_start(speed.start, plan.machine)] * is_verbose),
    ]


def _rows(name: str, texts: Sequence[str]) -> list[str]:
    return [f"{name if not place else '':<{_WIDTH}}{text}" for place, text in enumerate(texts)]
