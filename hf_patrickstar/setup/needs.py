"""The least memory with which a training has room: the decisions of ``setup/decisions.py``, taken for other budgets."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import BudgetError, ConfigError, Later
from hf_patrickstar.layout.packing import Layout
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.admission import is_checkpointing
from hf_patrickstar.model.chunked_loss import find_heads, has_chunked_loss
from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.schedule.placement import Homes
from hf_patrickstar.schedule.trace import KnownTraces, Trace
from hf_patrickstar.setup.decisions import Decisions, decide_for, inspect
from hf_patrickstar.setup.homes import ModelNumbers, Situation
from hf_patrickstar.units import describe_disk, format_nbytes, name_budget

PLENTY_NBYTES = 2**50
TracesOn = Callable[[Layout, int], Iterable[Trace]]
"""Gives the traces of a step in a layout, with a device of so many bytes."""
_STEPS = 128
"""Numbers that are tried between a power of two and the next one."""
_T = TypeVar("_T")


def remedies(model: torch.nn.Module, config: PatrickStarConfig, *, is_wide: bool) -> str:
    """What leaves a training, or an evaluation, more of the device, as far as it would change something.

    Args:
        model: The model, in the mode in which it was used.
        config: The settings.
        is_wide: Whether it computes in fp32.
    """
    found = ["smaller or shorter batches (--per_device_eval_batch_size)"]
    if model.training:
        found = [
            "smaller or shorter batches (--per_device_train_batch_size, with --gradient_accumulation_steps for the "
            "same total)"
        ]
        can_recompute = any(getattr(module, "supports_gradient_checkpointing", False) for module in model.modules())
        if can_recompute and not is_checkpointing(model):
            found.append("--gradient_checkpointing")
        with contextlib.suppress(ConfigError):
            if config.chunked_loss is not True and not has_chunked_loss(model) and find_heads(model):
                found.append("chunked_loss=true")
        found += ["activation_offload=auto"] * (config.activation_offload is False)
    found += ["chunk_numel=auto"] * (config.chunk_numel != "auto") + ["--bf16"] * is_wide
    return f"What else helps: {', '.join(found)}."


def least_budgets(
    there: Mapping[str, int], fits: Callable[[Mapping[str, int]], _T | None]
) -> tuple[dict[str, int], _T] | None:
    """The least memory that fits, of numbers less than 1 % apart: the same one, whatever there is.

    One budget after the other is asked for, with those after it large enough.

    Args:
        there: Bytes of each budget; where they suffice, they stay.
        fits: Says what is so with these budgets, or ``None`` if that is not enough.

    Returns:
        Bytes of each, and what is so with them; ``None`` if no memory is enough.
    """
    budgets = dict.fromkeys(there, PLENTY_NBYTES)
    found = fits(budgets)
    if found is None:
        return None
    for name, nbytes in there.items():

        def tried(nbytes: int, name: str = name) -> _T | None:
            return fits({**budgets, name: nbytes})

        if nbytes < PLENTY_NBYTES:
            budgets[name], found = _least(nbytes, tried)
    assert found is not None
    return budgets, found


def _least(there: int, fits: Callable[[int], _T | None]) -> tuple[int, _T]:
    """The least bytes that fit, from those on that there are, and what is so with them."""

    def nbytes(place: int) -> int:
        return there if place == first else (_STEPS + place % _STEPS) << place // _STEPS

    exponent = max(there.bit_length() - _STEPS.bit_length(), 0)
    first = max(exponent * _STEPS + (there >> exponent) - _STEPS, 0)
    low, high = first - 1, first
    while (found := fits(nbytes(high))) is None:
        low, high = high, high + _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        made = fits(nbytes(middle))
        if made is None:
            low = middle
        else:
            high, found = middle, made
    return nbytes(high), found


def decide(model: torch.nn.Module, precision: str, situation: Situation) -> Decisions:
    """Decides types, layout and homes for a model.

    Args:
        model: The model; it stays as it is.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what ``dtype="auto"`` follows.
        situation: What decisions depend on.

    Raises:
        ConfigError: If a setting cannot work for this model, or processes were given different ones.
        BudgetError: If a budget is too small.
        EngineError: If the model cannot be managed.
    """
    numbers, parameters = inspect(model, precision, situation)
    try:
        decided = decide_for(numbers, situation)
    except BudgetError as error:
        error.more = Later(functools.partial(describe_least, numbers, situation))
        raise
    return dataclasses.replace(decided, parameters=parameters)


def describe_least(numbers: ModelNumbers, situation: Situation, traces_on: TracesOn | None = None) -> str:
    """Says which budgets are too small, each with the least that would do; nothing if none is, or nobody can know.

    As for ``hf-patrickstar plan``, the device is asked for first, with a host that is large enough.

    Args:
        numbers: The model.
        situation: What decisions depend on, with the present budgets.
        traces_on: What a step does; ``None`` if that is not known, nor what activations take. Then the host alone is
            asked for, with room for all chunks that do not all fit on the device.
    """
    ledger = situation.resources.ledger
    there = {
        "device_budget": ledger.budget(Tier.DEVICE),
        "chunk_budget": PLENTY_NBYTES if ledger.chunk_budget is None else ledger.chunk_budget,
        "host_budget": ledger.budget(Tier.HOST),
    }
    asked = {name: nbytes for name, nbytes in there.items() if traces_on is not None or name == "host_budget"}

    def begun(budgets: Mapping[str, int], disk: int) -> tuple[Estimate, Homes] | None:
        """What a step begins with, if need be with activations that leave the device."""
        device, chunks, host = {**there, **budgets}.values()
        tiers = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
        resources = dataclasses.replace(situation.resources, ledger=Ledger(tiers, chunk_budget=chunks))
        other = dataclasses.replace(situation, resources=resources)
        try:
            decided = decide_for(numbers, other, agree=lambda limits: limits)
        except BudgetError:
            return None
        traces = [] if traces_on is None else traces_on(decided.choice.layout, device)
        estimate = decided.estimate(KnownTraces("", {made.key: made for made in traces}))
        return (estimate, decided.homes) if traces_on is None else estimate.with_least_offload(decided.homes)

    def taken(budgets: Mapping[str, int]) -> tuple[int, int] | None:
        """What a step takes on the device; see ``Estimate.fullest``."""
        if (made := begun(budgets, ledger.budget(Tier.DISK))) is None:
            return None
        estimate, homes = made
        if traces_on is None:
            return None if homes.margin else (0, 0)
        return estimate.fullest(frozenset(homes.margin))

    found = least_budgets(asked, taken)
    short = {} if found is None else {name: nbytes for name, nbytes in found[0].items() if nbytes > there[name]}
    if found is None or not short:
        return ""  # of a device that is too small for copies, the error says it
    needs = [
        f"a {name} of at least {name_budget(nbytes)}"
        + ", which the machine does not have" * (getattr(situation.config, name) == "auto")
        for name, nbytes in short.items()
    ]
    disk = begun({}, PLENTY_NBYTES) if not ledger.budget(Tier.DISK) and "host_budget" in short else None
    instead = "" if disk is None else f" With disk_path, a directory on a local drive, {_describe_disk(*disk)}."
    if traces_on is None:
        return f"With {needs[0]}, the host has room for all chunks.{instead}"
    kinds = "{} of activations and temporaries, and {} of chunks".format(*map(format_nbytes, found[1]))
    return f"The whole step needs {' and '.join(needs)} ({kinds} on the device).{instead}"


def _describe_disk(estimate: Estimate, homes: Homes) -> str:
    """What it would cost that states are on a drive; see ``describe_disk``."""
    nbytes, machine = sum(chunk.disk_nbytes for chunk in estimate.nbytes), estimate.machine
    cost = estimate.cost_when_settled(homes)
    return describe_disk(nbytes, machine.disk_bandwidth, cost.seconds if cost else machine.disk_ns(2 * nbytes) / 1e9)
