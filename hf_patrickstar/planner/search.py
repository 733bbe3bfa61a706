"""Searches for the largest training that fits a machine, or for the cheapest machine that a training fits."""

import dataclasses
import enum
import json
from collections.abc import Callable

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import BY_PRICE, MACHINES, Machine, find_machine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import BESIDE, TrainingSetup, arrange_machine, model_data_nbytes, plan_if_fits
from hf_patrickstar.planner.subject import Subject, most_tokens
from hf_patrickstar.planner.training_plan import Plan
from hf_patrickstar.runtime.activations import ACTIVATIONS

LENGTH_STEP = 64
"""Sequence lengths are searched in steps of so many tokens; in single tokens if the model has fewer positions."""
_MOST_BATCH = 2**16
_MOST_LENGTH = 1_000_000
_MOST_LAYERS = 2**12

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


def search(goal: Goal | str, subject: Subject, given: TrainingSetup, progress: Progress = lambda text: None) -> Found:
    """Searches for the largest batch, sequence or model that fits, or for the cheapest machine.

    The answer has a plan of its own, and the next larger one was planned and refused. A larger model has more layers
    and is otherwise the same. Machines are tried in the order of ``BY_PRICE``, with a process on each device.

    Args:
        goal: What to search for.
        subject: The model and its batches; its own size is what is tried first.
        given: How it is trained.
        progress: Called with every plan before it is made.

    Raises:
        ConfigError: If the goal is unknown, or the model cannot have other layers.
    """
    try:
        goal = Goal(goal)
    except ValueError:
        raise ConfigError(f"search '{goal}' is not known; known are {', '.join(Goal)}") from None
    if goal is Goal.CHEAPEST:
        return _cheapest(subject, given, progress)
    return _searched(goal, _scale_of(goal, subject), subject.length, given, progress)


def answered(found: Found, subject: Subject, given: TrainingSetup) -> tuple[Subject, TrainingSetup]:
    """What the plan of a result was made of.

    Args:
        found: The result; something fits.
        subject: The model and its batches, as they were given to the search.
        given: How it is trained, likewise.
    """
    if found.goal is Goal.CHEAPEST:
        return subject, _on(find_machine(str(found.answer)), given)
    assert isinstance(found.answer, int)
    return _scale_of(found.goal, subject).change(found.answer), given


def search_below(goal: Goal, subject: Subject, given: TrainingSetup, progress: Progress = lambda text: None) -> Found:
    """The largest batch or sequence that fits, where the one that was asked for does not.

    Args:
        goal: ``MAX_BATCH`` or ``MAX_LENGTH``.
        subject: The model and its batches, which do not fit.
        given: How it is trained.
        progress: Called with every plan before it is made.
    """
    scale = _scale_of(goal, subject)
    asked = subject.batch_size if goal is Goal.MAX_BATCH else subject.length
    steps = (asked - 1) // scale.step
    return _searched(goal, dataclasses.replace(scale, first=1, most=steps), asked // 2, given, progress, below=asked)


def _searched(
    goal: Goal, scale: "_Scale", first: int, given: TrainingSetup, progress: Progress, below: int = LENGTH_STEP
) -> Found:
    """Searches, and goes on below the first step, where that does not fit or is too long."""
    found = _Search(goal, scale, given, progress).run()
    below = min(below, scale.step)
    if found.answer is not None or below < 2:
        return found
    single = dataclasses.replace(scale, first=max(first, 1), step=1, most=below - 1)
    finer = _Search(goal, single, given, progress).run()
    refused = below if finer.refused is None else finer.refused
    return dataclasses.replace(finer, refused=refused, num_plans=found.num_plans + finer.num_plans)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """How a subject is made larger.

    Attributes:
        change: Makes the subject of a size.
        first: What to try first, in steps.
        step: What a step is worth.
        most: The most steps.
        largest: The last step ends here.
    """

    change: Callable[[int], Subject]
    first: int
    step: int
    most: int
    largest: int

    def size(self, steps: int) -> int:
        """The size after so many steps."""
        return min(steps * self.step, self.largest)


def _scale_of(goal: Goal, subject: Subject) -> _Scale:
    if goal is Goal.MAX_BATCH:
        first, most = subject.batch_size, _MOST_BATCH
        return _Scale(lambda size: dataclasses.replace(subject, batch_size=size), first, 1, most, most)
    if goal is Goal.MAX_LENGTH:
        if subject.length == 1 or subject.task == "image-classification":
            raise ConfigError(
                f"search 'max-seq-len': '{subject.name}' reads no sequences of tokens; search for max-batch or "
                "max-model"
            )
        longest = min(most_tokens(subject.config) or _MOST_LENGTH, _MOST_LENGTH)
        step = LENGTH_STEP if longest >= LENGTH_STEP else 1
        first, most = max(subject.length // step, 1), -(-longest // step)
        return _Scale(lambda length: dataclasses.replace(subject, length=length), first, step, most, longest)
    if not subject.num_layers:
        raise ConfigError(
            f"search 'max-model': '{subject.name}' cannot have other layers: give MODEL, with a configuration that has "
            "num_hidden_layers"
        )
    return _Scale(subject.with_layers, subject.num_layers, 1, _MOST_LAYERS, _MOST_LAYERS)


class _Search:
    """A search for the largest size; see [Note: few plans].

    [Note: few plans]
    Sizes between the largest that fits (``low``) and the smallest that does not (``high``) are open. Bytes are about
    linear in the size, and every plan that fits tells how many there are; so the next size to try is where the line
    through the two largest plans meets what the machine has. Activations have to fit the device; model data of more
    layers and activations together have to fit both tiers, and the smaller of both sizes counts. Where the guess was on
    the wrong side, the next one is a step beyond it, then four, then sixteen, and the middle where that is nearer.
    """

    def __init__(self, goal: Goal, scale: _Scale, given: TrainingSetup, progress: Progress) -> None:
        self._goal, self._scale, self._given, self._progress = goal, scale, given, progress
        self._plan: Plan | None = None  # of the largest size that fits
        self._used = [(0, [(0, 0)] * 2)]  # the bytes of each size that fits
        self._model_nbytes: dict[int, int] = {}
        self._num_plans = 0

    def run(self) -> Found:
        """Searches."""
        low, high, stride = 0, self._scale.most + 1, 1
        probe = min(self._scale.first, self._scale.most)
        while high - low > 1:
            plan = self._try(probe)
            if plan is not None:
                low, self._plan = probe, plan
                self._used.append((probe, self._bytes(plan)))
                # A guess that was too small: beyond it there is more than the line says.
                probe = max(self._guess(), low + stride)
            else:
                high = probe
                probe = min(self._guess(), high - stride) if low else high // 2
            stride *= 4
            if not low < probe < high:
                probe = (low + high) // 2 if high <= self._scale.most else min(2 * low, high - 1)
        refused = self._scale.size(high) if high <= self._scale.most else None
        return Found(self._goal, self._scale.size(low) or None, self._plan, refused, self._num_plans)

    def _try(self, steps: int) -> Plan | None:
        size = self._scale.size(steps)
        self._progress(f"{_WORDS[self._goal]} {size}")
        self._num_plans += 1
        subject = self._scale.change(size)
        plan = plan_if_fits(subject, self._given)
        if plan is not None and plan.num_parameters not in self._model_nbytes:  # larger batches have the same model
            self._model_nbytes[plan.num_parameters] = model_data_nbytes(subject, self._given)[1]
        return plan

    def _guess(self) -> int:
        """The largest size that fits if bytes are linear in it, the smaller of both limits."""
        (before, earlier), (size, used) = self._used[-2:]
        guesses = []
        for (now, there), (then, _) in zip(used, earlier, strict=True):
            slope = (now - then) / (size - before)
            if slope > 0:
                guesses.append(size + int((there - now) / slope))
        return min(guesses, default=2 * size)

    def _bytes(self, plan: Plan) -> list[tuple[int, int]]:
        """Pairs of bytes that grow with the size and of the bytes that there may be.

        They are those of activations that have to be on the device, and those of model data and all activations on both
        tiers.
        """
        device, host = plan.tier(Tier.DEVICE), plan.tier(Tier.HOST)
        assert plan.chunks is not None
        assert plan.speed is not None
        activations = device.owners["non-model data"] + host.owners.get(ACTIVATIONS, 0)
        room = device.budget_nbytes - device.owners.get(BESIDE, 0) - 2 * plan.chunks.numel
        together = self._model_nbytes[plan.num_parameters] + activations
        return [(plan.speed.least_activation_nbytes, room), (together, room + host.budget_nbytes)]


_WORDS = {Goal.MAX_BATCH: "batch", Goal.MAX_LENGTH: "length", Goal.MAX_MODEL: "layers", Goal.CHEAPEST: "machine"}


def _cheapest(subject: Subject, given: TrainingSetup, progress: Progress) -> Found:
    refused, num_asked = None, given.world_size
    names = BY_PRICE if num_asked == 1 else [f"{num_asked}x{card}" for card in MACHINES]
    for num, name in enumerate(names, 1):
        progress(f"{_WORDS[Goal.CHEAPEST]} {name}")
        plan = plan_if_fits(subject, _on(find_machine(name), given))
        if plan is not None:
            return Found(Goal.CHEAPEST, name, plan, refused, num)
        refused = name
    return Found(Goal.CHEAPEST, None, None, refused, len(names))


def _on(machine: Machine, given: TrainingSetup) -> TrainingSetup:
    """The same on all of another machine, with a process on each of its devices, in fp16 if they have no bfloat16."""
    num, settings = machine.num_devices, given.settings
    if not given.computes_in_type(machine):
        settings = {**settings, "dtype": "fp16"}
    found = arrange_machine(machine, num, disk_memory=given.machine.disk_nbytes or None)
    return dataclasses.replace(given, machine=found, world_size=num, settings=settings)
