"""The least memory with which a training has room: the decisions of ``decisions.py``, taken for other budgets."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.decisions import Decisions, decide_for
from hf_patrickstar.dist.collectives import ImaginedCollectives
from hf_patrickstar.errors import BudgetError, ConfigError
from hf_patrickstar.homes import Situation
from hf_patrickstar.layout.packing import Layout
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunked_loss import find_heads, has_chunked_loss
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.trace import Trace
from hf_patrickstar.units import format_nbytes, name_budget

PLENTY_NBYTES = 2**50
_PARTS = 100
"""The least memory is known to a part of so many."""


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
        """What would change something for this training, in sentences."""
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
        more = f" For more: {self.command}" if self.command else ""
        return f"What else helps: {', '.join(found)}.{more}"


def least(fits: Callable[[int], Any], there: int) -> int:
    """The least memory that fits: it was tried, and so was 1 % less, which does not fit.

    Args:
        fits: Tries so many bytes.
        there: Bytes that do not fit.
    """
    low, high = there, there + max(there // 4, 1)
    while not fits(high):
        low, high = high, 2 * high
    while high - low > max(high // _PARTS, 1):
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def describe_least(
    decisions: Decisions, situation: Situation, traces_on: Callable[[Layout, int], Iterable[Trace]]
) -> str:
    """Says which budgets are too small for a step, each with the least that would do; nothing if none is.

    As for ``hf-patrickstar plan``, the device is asked for first, with a host that is large enough.

    Args:
        decisions: What was decided with the present budgets.
        situation: What the decisions depended on.
        traces_on: What a step does in another layout, with a device of so many bytes.
    """
    ledger, config = situation.resources.ledger, situation.config
    there = {"device_budget": ledger.budget(Tier.DEVICE), "chunk_budget": ledger.chunk_budget}
    there["host_budget"] = ledger.budget(Tier.HOST)
    tried: dict[str, int] = dict.fromkeys(there, PLENTY_NBYTES)
    taken = (0, 0)

    def has_room(**changed: int) -> bool:
        nonlocal taken
        tried.update(changed)
        budgets = {Tier.DEVICE: tried["device_budget"], Tier.HOST: tried["host_budget"]}
        ledger = Ledger(budgets, chunk_budget=None if there["chunk_budget"] is None else tried["chunk_budget"])
        collectives = copy.copy(situation.resources.collectives)
        collectives.__class__ = ImaginedCollectives
        resources = dataclasses.replace(situation.resources, ledger=ledger, collectives=collectives)
        other, found = dataclasses.replace(situation, resources=resources), None
        with contextlib.suppress(BudgetError):
            decided = decide_for(decisions.numbers, other, decisions.in_use_nbytes)
            traces = {made.key: made for made in traces_on(decided.choice.layout, budgets[Tier.DEVICE])}
            found = decided.taken_nbytes(other, KnownTraces("", traces), decided.rules(other))
            taken = found or taken
        return found is not None

    words = []
    if has_room():
        for name, nbytes in there.items():
            if nbytes is not None and not has_room(**{name: nbytes}):
                enough = least(lambda nbytes, name=name: has_room(**{name: nbytes}), nbytes)
                has_room(**{name: enough})  # what was tried last may have been less
                of_machine = ", which the machine does not have" if getattr(config, name) == "auto" else ""
                words.append(f"{name}={name_budget(enough)}{of_machine}")
    if not words:
        return ""
    kinds = f"{format_nbytes(taken[0])} of activations and temporaries, and {format_nbytes(taken[1])} of chunks"
    return f"The whole step needs at least {' and '.join(words)} ({kinds} on the device)."
