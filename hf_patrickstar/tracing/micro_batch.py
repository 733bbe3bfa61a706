"""Traces a micro-batch of a model; models whose blocks repeat with a few of them.

See [Note: micro-batches that are replayed] and [Note: blocks that repeat].
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import TraceError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.model.casting import Casting
from hf_patrickstar.model.chunked_loss import chunk_losses, find_heads
from hf_patrickstar.schedule.op_trace import LeaveForward, OpTrace
from hf_patrickstar.schedule.repeats import FEW_BLOCKS, IrregularError, Names, Stack, extend
from hf_patrickstar.schedule.script import Begin, Part
from hf_patrickstar.setup.decisions import collect
from hf_patrickstar.setup.precision import choose_precision
from hf_patrickstar.tracing.answers import AnsweringMode
from hf_patrickstar.tracing.fake import HOOKS
from hf_patrickstar.tracing.recorder import Recorder, Setting

logger = logging.getLogger(__name__)

_MOST_RUNS = 3
LEAST_BLOCKS = 12
"""With fewer blocks a model runs in full as fast as it is cut and extended."""
_MOST_KINDS = 8
"""How many modules a block may be, at most."""
_Look = tuple[tuple[Any, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """What is traced.

    Attributes:
        make_model: Makes the model, a new one with each call; called under fake tensors.
        make_inputs: Makes the batch, likewise.
        compute_loss: Computes the loss, or whatever an evaluation computes.
        config: Settings of the engine, which decide in which types forwards compute, and how a loss is computed.
        num_micro_batches: Micro-batches of a step.
        is_training: Whether a backward follows.
        prepare: Returns the parameters of a model as numbers, and the types that its forwards compute in; by default as
            ``config`` says.
    """

    make_model: Callable[[], torch.nn.Module]
    make_inputs: Callable[[], Mapping[str, Any]]
    compute_loss: Callable[[Any, Mapping[str, Any]], Any]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_micro_batches: int = 1
    is_training: bool = True
    prepare: Callable[[torch.nn.Module], tuple[Sequence[TensorSpec], Casting]] | None = None

    def specs_and_casting(self, model: torch.nn.Module) -> tuple[Sequence[TensorSpec], Casting]:
        """The parameters of a model as numbers, and the types that its forwards compute in."""
        if self.prepare is not None:
            return self.prepare(model)
        specs, _, parameters = collect(model, {})
        chosen = choose_precision(model, PatrickStarConfig.from_any(dict(self.config)), "no", parameters)
        return chosen.assign(model, specs, parameters), chosen.casting(torch.device("cpu"))

    def run_backward(self, loss: torch.Tensor) -> None:
        """The backward of a loss, as the Trainer runs it."""
        (loss / self.num_micro_batches if self.num_micro_batches > 1 else loss).backward()


def trace(
    micro_batch: MicroBatch, setting: Setting, *, is_checked: bool = True, is_regular: bool = False
) -> OpTrace | None:
    """Runs a micro-batch, and notes what it does; called under fake tensors.

    Args:
        micro_batch: What is traced.
        setting: How its operators run.
        is_checked: Whether it is run twice, to see that it does the same each time. A step that follows the trace would
            notice it, too.
        is_regular: Whether it was traced in another setting, where its blocks did repeat: that is not checked again.

    Returns:
        The notes; ``None`` if one micro-batch is not like the other, or does what the notes have no word for.

    Raises:
        TraceError: If the model communicates, asks for a value that only bytes have, or takes too long.
    """

    def make() -> torch.nn.Module:
        with AnsweringMode(), torch.enable_grad():  # it answers what an initialisation asks of values
            return micro_batch.make_model()

    def ready(model: torch.nn.Module) -> _Ready:
        with AnsweringMode(), torch.no_grad():
            if micro_batch.config.get("chunked_loss") is True:
                chunk_losses(find_heads(model))
            specs, casting = micro_batch.specs_and_casting(model)
        return _Ready(micro_batch, model, specs, casting, setting)

    run = _Ready.record_twice if is_checked else _Ready.record
    whole = make()
    stacks = find_stacks(whole)
    if stacks:

        def ready_with(num_blocks: int) -> _Ready:
            return ready(cut(make(), stacks, num_blocks))

        try:
            return _trace_few(stacks, ready_with, run, None if is_regular else lambda: ready(whole))
        except TraceError:
            raise
        except Exception as error:  # code that counts on all blocks may raise anything
            logger.info("patrickstar: blocks repeat, but the model is run with all of them: %r", error)
            whole = make()
    return run(ready(whole))


def _trace_few(
    stacks: Sequence[Stack],
    ready_with: Callable[[int], "_Ready"],
    run: Callable[["_Ready"], OpTrace | None],
    ready_whole: Callable[[], "_Ready"] | None,
) -> OpTrace:
    """The notes, made of those of a few blocks.

    Args:
        stacks: The stacks of the model.
        ready_with: Gives a model with so many blocks in each of them.
        run: Notes what a model does.
        ready_whole: Gives the model with all blocks; ``None`` if they are not checked.

    Raises:
        IrregularError: If they are not those of all blocks.
    """
    model = ready_with(FEW_BLOCKS)
    found, names = run(model), model.names
    if found is None:
        raise IrregularError("a model with few blocks cannot be replayed")
    few = [dataclasses.replace(stack, num_blocks=FEW_BLOCKS) for stack in stacks]
    notes, all_names = extend(found.notes, names, few, [stack.num_blocks for stack in stacks])
    if ready_whole is None:
        return OpTrace(notes)
    more, more_names = extend(found.notes, names, few, [FEW_BLOCKS + 1] * len(few))
    model = ready_with(FEW_BLOCKS + 1)
    if model.record() != OpTrace(more) or model.names != more_names:
        raise IrregularError(f"{FEW_BLOCKS + 1} blocks do something else than {FEW_BLOCKS}, extended by one")
    model = ready_whole()
    begin = Begin(Part.BACKWARD)
    forward = notes[: notes.index(begin)] if begin in notes else notes
    if model.names != all_names or model.record(with_backward=False) != OpTrace(forward):
        raise IrregularError("the forward of all blocks does something else than those of a few, extended")
    return OpTrace(notes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    """A model that is ready to run."""

    what: MicroBatch
    model: torch.nn.Module
    specs: Sequence[TensorSpec]
    casting: Casting
    setting: Setting

    @property
    def names(self) -> Names:
        """The names of the parameters."""
        return {spec.index: spec.name for spec in self.specs}

    def record(self, *, with_backward: bool = True) -> OpTrace | None:
        """Notes a micro-batch, or what comes before its backward."""
        what = self.what
        with AnsweringMode():
            inputs = what.make_inputs()

        with torch.set_grad_enabled(what.is_training):
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            found = Recorder(self.model, self.specs, tensors, self.casting, self.setting).run(
                lambda: what.compute_loss(self.model, inputs),
                what.run_backward if what.is_training and with_backward else None,
            )
        if found is None or what.is_training:
            return found
        ends = (place for place, note in enumerate(found.notes) if isinstance(note, LeaveForward))
        return OpTrace(found.notes[: max(ends, default=-1) + 1])  # an evaluation ends with its last forward

    def record_twice(self) -> OpTrace | None:
        """Notes a micro-batch; ``None`` if one is not like the other: what is done once cannot be replayed."""
        before = self.record()
        for _ in range(_MOST_RUNS - 1):  # torch may remember of the first run what it is asked again
            found = self.record()
            if found is not None and found == before:
                return found
            before = found
        logger.info("patrickstar: the model does what cannot be replayed, and is run each time")
        return None


# Blocks that are alike


def find_stacks(model: torch.nn.Module) -> tuple[Stack, ...]:
    """Finds the stacks of a model that are worth being cut.

    Args:
        model: The model.

    Returns:
        Its stacks, in its order; none is inside of another one.
    """
    found: list[Stack] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and not is_inside:
            stack = _stack_of(path, list(module))
            found += [] if stack is None else [stack]
    return tuple(found)


def cut(model: torch.nn.Module, stacks: Iterable[Stack], num_blocks: int) -> torch.nn.Module:
    """Leaves so many blocks in each of the stacks of a model.

    Args:
        model: The model; changed in place.
        stacks: Its stacks.
        num_blocks: The blocks.

    Returns:
        The model.
    """
    for stack in stacks:
        modules: Any = model.get_submodule(stack.path)
        del modules[stack.first + num_blocks * stack.period :]
    return model


def _stack_of(path: str, modules: Sequence[torch.nn.Module]) -> Stack | None:
    """The stack that is the end of a list, with as few modules in a block as can be."""
    if len(modules) < LEAST_BLOCKS:
        return None
    looks = list(map(_look_at, modules))
    for period in range(1, min(_MOST_KINDS, len(modules) // LEAST_BLOCKS) + 1):
        first = len(modules) - period
        while first and _are_alike(looks[first - 1], looks[first - 1 + period], period):
            first -= 1
        num_blocks = (len(modules) - first) // period
        if num_blocks >= LEAST_BLOCKS:
            return Stack(path, len(modules) - num_blocks * period, period, num_blocks)
    return None


def _look_at(module: torch.nn.Module) -> _Look:
    """What decides what a block does, as far as it shows, and whole numbers that may be its number."""
    facts: list[Any] = []
    numbers: list[int] = []
    for name, part in module.named_modules():
        facts += [name, type(part), *(len(getattr(part, hooks)) for hooks in HOOKS)]
        facts += _shapes_of(part._parameters.items()), _shapes_of(part._buffers.items())
        for key, value in vars(part).items():
            if isinstance(value, int) and not isinstance(value, bool):
                facts.append(key)
                numbers.append(value)
            elif value is None or isinstance(value, (bool, float, str)):
                facts += key, value
    return tuple(facts), tuple(numbers)


def _shapes_of(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> tuple[Any, ...]:
    return tuple(
        (name, tensor is not None and (tensor.shape, tensor.dtype, tensor.requires_grad)) for name, tensor in tensors
    )


def _are_alike(one: _Look, other: _Look, distance: int) -> bool:
    """Whether two blocks are alike; their own numbers differ by their distance."""
    steps: Iterator[int] = (after - before for before, after in zip(one[1], other[1], strict=False))
    return one[0] == other[0] and all(step in (0, distance) for step in steps)
