"""Searches for the largest training that fits a machine, or for the cheapest machine that a training fits."""

import dataclasses
import enum
import json
from collections.abc import Callable

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import BY_PRICE, MACHINES
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.plan import Plan
from hf_patrickstar.planner.planning import BESIDE, Circumstances, arrange_machine, computes_in_type, plan_if_fits
from hf_patrickstar.planner.subject import Subject, most_tokens, with_batch

LENGTH_STEP = 64
"""Sequence lengths are searched in steps of so many tokens; in single tokens if the model has fewer positions."""
_MOST_BATCH = 2**16
_MOST_LENGTH = 1_000_000
_MOST_LAYERS = 2**12
_STATES_NBYTES = 14
"""Bytes of a parameter with its optimizer states, for a first guess."""

Progress = Callable[[str], None]


class Goal(enum.StrEnum):
    """What is searched for: the value of ``--search``."""

    MAX_BATCH = "max-batch"
    MAX_LENGTH = "max-seq-len"
    MAX_MODEL = "max-model"
    CHEAPEST = "cheapest-machine"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        goal: What was searched for.
        answer: Sequences of a micro-batch, tokens of a sequence, layers of the model, or the name of a machine;
            ``None`` if nothing fits.
        plan: The plan of the answer; ``None`` if nothing fits.
        refused: What was planned and does not fit: the next larger number, or the next cheaper machine; ``None`` if
            the answer is the largest that the model allows, or the cheapest of all.
        num_plans: How many plans were made.
    """

    goal: Goal
    answer: int | str | None
    plan: Plan | None
    refused: int | str | None
    num_plans: int

    def to_json(self) -> str:
        """The result as JSON text."""
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        return json.dumps({**dataclasses.asdict(self), "plan": plan}, indent=2)


def search(goal: Goal | str, subject: Subject, given: Circumstances, progress: Progress = lambda text: None) -> Found:
    """Searches for the largest batch, sequence or model that fits, or for the cheapest machine.

    The answer has a plan of its own, and the next larger one was planned and refused. A larger model has more layers
    and is otherwise the same. Machines are tried in the order of ``BY_PRICE``, with a process on each device.

    Args:
        goal: What to search for.
        subject: The model and its batches; its own size is what is tried first.
        given: How it is trained.
        progress: Told of every plan before it is made.

    Raises:
        ConfigError: If the goal is unknown, or the model cannot have other layers.
    """
    try:
        goal = Goal(goal)
    except ValueError:
        raise ConfigError(f"search '{goal}' is not known; known are {', '.join(Goal)}") from None
    if goal is Goal.CHEAPEST:
        return _cheapest(subject, given, progress)
    scale = _scale_of(goal, subject)
    return _Search(goal, scale, given, progress).run()


def answered(found: Found, subject: Subject, given: Circumstances) -> tuple[Subject, Circumstances]:
    """What the plan of a result was made of.

    Args:
        found: The result; something fits.
        subject: The model and its batches, as they were given to the search.
        given: How it is trained, likewise.
    """
    if found.goal is Goal.CHEAPEST:
        machine = MACHINES[str(found.answer)]
        whole = arrange_machine(machine, machine.num_devices, None, None)
        return subject, dataclasses.replace(given, machine=whole, world_size=machine.num_devices)
    assert isinstance(found.answer, int)
    return _scale_of(found.goal, subject).change(found.answer), given


def search_below(goal: Goal, subject: Subject, given: Circumstances, progress: Progress = lambda text: None) -> Found:
    """The largest batch or sequence that fits, where the one that was asked for does not.

    Args:
        goal: ``MAX_BATCH`` or ``MAX_LENGTH``.
        subject: The model and its batches, which do not fit.
        given: How it is trained.
        progress: Told of every plan before it is made.
    """
    scale = _scale_of(goal, subject)
    asked = subject.batch_size if goal is Goal.MAX_BATCH else -(-subject.length // scale.step)
    return _Search(goal, dataclasses.replace(scale, first=1, most=max(asked - 1, 0)), given, progress).run()


@dataclasses.dataclass(frozen=True)
class _Scale:
    """How a subject is made larger.

    Attributes:
        change: Makes the subject of a size.
        first: What to try first, in steps.
        step: What a step is worth.
        most: The most steps.
    """

    change: Callable[[int], Subject]
    first: int
    step: int
    most: int


def _scale_of(goal: Goal, subject: Subject) -> _Scale:
    if goal is Goal.MAX_BATCH:
        return _Scale(lambda size: with_batch(subject, size, subject.length), subject.batch_size, 1, _MOST_BATCH)
    if goal is Goal.MAX_LENGTH:
        if subject.length == 1 or subject.task == "image-classification":
            raise ConfigError(
                f"search 'max-seq-len': '{subject.name}' reads no sequences of tokens; search for max-batch or "
                "max-model"
            )
        longest = min(most_tokens(subject.config) or _MOST_LENGTH, _MOST_LENGTH)
        step = LENGTH_STEP if longest >= LENGTH_STEP else 1
        first = min(max(subject.length // step, 1), longest // step)
        return _Scale(lambda length: with_batch(subject, subject.batch_size, length), first, step, longest // step)
    if not subject.num_layers:
        raise ConfigError(
            f"search 'max-model': '{subject.name}' cannot have other layers: give MODEL, with a configuration that has "
            "num_hidden_layers"
        )
    return _Scale(subject.with_layers, subject.num_layers, 1, _MOST_LAYERS)


class _Search:
    """A search for the largest size; see [Note: few plans].

    [Note: few plans]
    Sizes between the largest that fits (``low``) and the smallest that does not (``high``) are open. Bytes are about
    linear in the size, and every plan that fits tells how many there are; so the next size to try is where the line
    through the two largest plans meets what the machine has. Where the guess was on the wrong side, the next one is a
    step beyond it, then two, then four, and the middle where that is nearer.
    """

    def __init__(self, goal: Goal, scale: _Scale, given: Circumstances, progress: Progress) -> None:
        self._goal, self._scale, self._given, self._progress = goal, scale, given, progress
        self._fitting: list[tuple[int, Plan]] = []
        self._num_plans = 0

    def run(self) -> Found:
        """Searches."""
        low, high, stride = 0, self._scale.most + 1, 1
        probe = min(self._scale.first, self._scale.most)
        while high - low > 1:
            plan = self._try(probe)
            if plan is not None:
                # A guess that was too small: beyond it there is more than the line says.
                low, guess = probe, self._guess_after(probe, plan)
                probe = max(guess, low + stride)
            else:
                high = probe
                guess = self._guess()
                probe = min(guess, high - stride) if self._fitting else high // 2
            stride *= 2
            is_beyond = not low < probe < high
            if is_beyond:
                probe = (low + high) // 2 if high <= self._scale.most else min(2 * low, high - 1)
        return self._result(low, high)

    def _try(self, size: int) -> Plan | None:
        self._progress(f"{_WORDS[self._goal]} {size * self._scale.step}")
        self._num_plans += 1
        return plan_if_fits(self._scale.change(size * self._scale.step), self._given)

    def _result(self, low: int, high: int) -> Found:
        step = self._scale.step
        plan = self._fitting[-1][1] if self._fitting else None
        refused = high * step if high <= self._scale.most else None
        return Found(self._goal, low * step or None, plan, refused, self._num_plans)

    def _guess_after(self, size: int, plan: Plan) -> int:
        self._fitting.append((size, plan))
        return self._guess()

    def _guess(self) -> int:
        """The largest size that fits if bytes are linear in it; 0 if nothing is known."""
        if not self._fitting:
            return 0
        size, plan = self._fitting[-1]
        used, there = self._bytes(plan)
        before, used_before = 0, 0
        if len(self._fitting) > 1:
            before, earlier = self._fitting[-2]
            used_before = self._bytes(earlier)[0]
        slope = (used - used_before) / (size - before)
        return size + int((there - used) / slope) if slope > 0 else 2 * size

    def _bytes(self, plan: Plan) -> tuple[int, int]:
        """Bytes that grow with the size, and how many of them there may be."""
        device, host = plan.tier(Tier.DEVICE), plan.tier(Tier.HOST)
        activations = device.owners["non-model data"]
        assert plan.chunks is not None
        chunks = 2 * plan.chunks.numel
        if self._goal is Goal.MAX_MODEL:
            nbytes = _STATES_NBYTES * plan.num_trainable + 2 * (plan.num_parameters - plan.num_trainable)
            return nbytes // plan.world_size, device.budget_nbytes + host.budget_nbytes - activations - chunks
        return activations, device.budget_nbytes - device.owners.get(BESIDE, 0) - chunks


_WORDS = {Goal.MAX_BATCH: "batch", Goal.MAX_LENGTH: "length", Goal.MAX_MODEL: "layers", Goal.CHEAPEST: "machine"}


def _cheapest(subject: Subject, given: Circumstances, progress: Progress) -> Found:
    refused, num = None, 0
    for name in BY_PRICE:
        machine = MACHINES[name]
        if not computes_in_type(machine, given):
            continue  # the device does not compute in this type
        if given.world_size > machine.num_devices:
            continue
        progress(f"{_WORDS[Goal.CHEAPEST]} {name}")
        num += 1
        found = arrange_machine(machine, machine.num_devices, None, None)
        plan = plan_if_fits(subject, dataclasses.replace(given, machine=found, world_size=machine.num_devices))
        if plan is not None:
            return Found(Goal.CHEAPEST, name, plan, refused, num)
        refused = name
    return Found(Goal.CHEAPEST, None, None, refused, num)
