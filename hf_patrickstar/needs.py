"""The least memory with which a training has room: the decisions of ``decisions.py``, taken for other budgets."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.decisions import Decisions, decide_for, inspect
from hf_patrickstar.dist.collectives import ImaginedCollectives
from hf_patrickstar.errors import BudgetError, ConfigError, Later
from hf_patrickstar.homes import ModelNumbers, Situation, nbytes_in_use
from hf_patrickstar.layout.packing import Layout
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunked_loss import find_heads, has_chunked_loss
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.trace import Trace
from hf_patrickstar.units import format_nbytes, name_budget

PLENTY_NBYTES = 2**50
TracesOn = Callable[[Layout, int], Iterable[Trace]]
"""Gives the traces of a step in a layout, with a device of so many bytes."""
_STEPS = 128
"""Numbers that are tried between a power of two and the next one."""


@dataclasses.dataclass
class Remedies:
    """What leaves a training more of the device.

    Attributes:
        model: The model.
        config: The settings.
        is_wide: Whether it computes in fp32.
        command: What to paste into a shell for a plan of this training; empty if nobody knows.
    """

    model: torch.nn.Module
    config: PatrickStarConfig
    is_wide: bool
    command: str = ""

    def words(self) -> str:
        """What would change something for this training, and the command."""
        modules, config = [*self.model.modules()], self.config
        found = [
            "smaller or shorter batches (--per_device_train_batch_size, with --gradient_accumulation_steps for the "
            "same total)"
        ]
        is_checkpointing = any(getattr(module, "gradient_checkpointing", False) is True for module in modules)
        if not is_checkpointing and any(getattr(m, "supports_gradient_checkpointing", False) for m in modules):
            found.append("--gradient_checkpointing")
        with contextlib.suppress(ConfigError):
            if config.chunked_loss is not True and not has_chunked_loss(self.model) and find_heads(self.model):
                found.append("chunked_loss=true")
        found += ["activation_offload=auto"] * (config.activation_offload is False)
        found += ["chunk_numel=auto"] * (config.chunk_numel != "auto") + ["--bf16"] * self.is_wide
        more = f"\nFor more: {self.command}" if self.command else ""
        return f"What else helps: {', '.join(found)}.{more}"


def least(fits: Callable[[int], Any], there: int) -> int:
    """The least memory that fits, of numbers less than 1 % apart: the same one, whatever there is.

    Args:
        fits: Tries so many bytes.
        there: Bytes that do not fit.
    """

    def nbytes(place: int) -> int:
        return (_STEPS + place % _STEPS) << place // _STEPS

    exponent = max(there.bit_length() - _STEPS.bit_length(), 0)
    low = max(exponent * _STEPS + (there >> exponent) - _STEPS, 0)
    high = low + 1
    while not fits(nbytes(high)):
        low, high = high, high + _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        if fits(nbytes(middle)):
            high = middle
        else:
            low = middle
    return nbytes(high)


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
    in_use_nbytes = nbytes_in_use(situation, parameters)
    try:
        decided = decide_for(numbers, situation, in_use_nbytes)
    except BudgetError as error:
        said = str(error)
        raise BudgetError(
            Later(lambda: f"{said}\n{describe_least(numbers, situation, in_use_nbytes)}".rstrip())
        ) from None
    return dataclasses.replace(decided, parameters=parameters)


def describe_least(
    numbers: ModelNumbers, situation: Situation, in_use_nbytes: int, traces_on: TracesOn | None = None
) -> str:
    """Says which budgets are too small, each with the least that would do; nothing if none is, or nobody can know.

    As for ``hf-patrickstar plan``, the device is asked for first, with a host that is large enough.

    Args:
        numbers: The model.
        situation: What decisions depend on, with the present budgets.
        in_use_nbytes: Bytes of the device that are in use already.
        traces_on: What a step does; ``None`` if that is not known, nor what activations take. Then the host alone is
            asked for, with room for all chunks that do not all fit on the device.
    """
    ledger, config = situation.resources.ledger, situation.config
    there = {"device_budget": ledger.budget(Tier.DEVICE), "chunk_budget": ledger.chunk_budget}
    there["host_budget"] = ledger.budget(Tier.HOST)
    tried: dict[str, int] = dict.fromkeys(there, PLENTY_NBYTES)
    taken = (0, 0)

    def has_room(nbytes: int, name: str) -> bool:
        nonlocal taken
        tried[name] = nbytes
        budgets = {Tier.DEVICE: tried["device_budget"], Tier.HOST: tried["host_budget"]}
        ledger = Ledger(budgets, chunk_budget=None if there["chunk_budget"] is None else tried["chunk_budget"])
        collectives = copy.copy(situation.resources.collectives)
        collectives.__class__ = ImaginedCollectives
        resources = dataclasses.replace(situation.resources, ledger=ledger, collectives=collectives)
        other = dataclasses.replace(situation, resources=resources)
        try:
            decided = decide_for(numbers, other, in_use_nbytes)
        except BudgetError:
            return False
        if traces_on is None:
            return not decided.homes.spilled
        traces = {made.key: made for made in traces_on(decided.choice.layout, budgets[Tier.DEVICE])}
        found = decided.taken_nbytes(other, KnownTraces("", traces), decided.rules(other))
        taken = found or taken
        return found is not None

    words = []
    for name, nbytes in there.items() if has_room(PLENTY_NBYTES, "host_budget") else ():
        if nbytes is None or has_room(nbytes, name):
            continue
        if traces_on is None and name != "host_budget":
            return ""  # the error says it, as far as it is known
        fits = functools.partial(has_room, name=name)
        enough = least(fits, nbytes)
        fits(enough)  # what was tried last may have been less
        of_machine = ", which the machine does not have" if getattr(config, name) == "auto" else ""
        if traces_on is None:
            return f"With a {name} of {name_budget(enough)}{of_machine}, the host has room for all chunks."
        words.append(f"a {name} of at least {name_budget(enough)}{of_machine}")
    if not words:
        return ""
    kinds = f"{format_nbytes(taken[0])} of activations and temporaries, and {format_nbytes(taken[1])} of chunks"
    return f"The whole step needs {' and '.join(words)} ({kinds} on the device)."
