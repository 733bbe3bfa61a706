"""Updates of chunks inside of a backward, before ``optimizer.step()`` is called.

[Note: updates in backward]
Where gradients are not clipped, nothing of a step depends on all gradients, and a chunk could be updated as soon as its
own are complete, beside the rest of backward. An update cannot be taken back without rounding. So the user has to
promise, by ``overlap_optimizer="backward"``, that between the last backward of a step and ``step()`` nothing happens to
gradients, parameters or settings; then the results have the same bits as those of updates in ``step()``. The engine
relies on the promise only

- in steps that follow a plan, whose predecessor neither clipped nor scaled gradients, nor read one, nor used a
  parameter or its state between its last gradients and ``step()``, other than in modules that compute;
- in the last micro-batch of a step, for optimizers that update parameters one by one, for chunks at home on the host;
- for a chunk that the plan does not visit again in this step, and of which the program has no tensor (``p.data``, a
  view) that it could read or write meanwhile.

With several processes each updates its own parts of a group when their averages are at home, and nothing is carried
over to the next step. A process that has not computed all gradients of its parts of a group leaves them to ``step()``,
and no process updates in the backward of a forward in which one of them has left its trace. One that leaves it in
backward may need a group that others have updated: that is an error, too.

The host launches the kernels of a backward long before the device has run them, so at that moment nobody can see how
much of the host's time is left until ``step()``. So the plan of the step names the chunks (``Plan.ahead``): the rates
of the machine say how many (``schedule/ahead.py``). All other chunks are updated by ``step()``, in the order of the
next forward.

What breaks the promise ends with an ``EngineError`` that says so: a further forward or backward, a use of a parameter
that was updated, reading, clipping or zeroing gradients, other settings. A micro-batch that runs out of device memory
is not repeated once an update has begun. Norms of gradients can still be asked for; they are noted when gradients
arrive.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from hf_patrickstar.interrupts import held_back
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.state import GroupsBefore
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.gradient_place import AT_HOME
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.ranges import named
from hf_patrickstar.runtime.tracer import Step
from hf_patrickstar.schedule.trace import StepKind

logger = logging.getLogger(__name__)


class UpdatesAhead:
    """Updates chunks in backward; see [Note: updates in backward].

    Args:
        manager: The manager of the chunks.
        optimizers: The optimizers of the engine; the list may grow.
    """

    def __init__(self, manager: ChunkManager, optimizers: Sequence[ChunkedOptimizer]) -> None:
        self._manager = manager
        self._optimizers = optimizers
        self._step: Step | None = None
        self._relies = False
        self._arrived: dict[int, set[int]] = {}  # by chunk, the tensors whose gradients came home in this step
        self._due: frozenset[int] = frozenset()  # chunks that the plan has updated in this backward
        self._said = ""
        manager.values.on_use = manager.gradients.note_use

    @torch.no_grad()
    def update_complete(self) -> None:
        """Updates chunks whose gradients are complete; called when a gradient was stored."""
        step = self._manager.tracer.step
        if step is not self._step:
            self._begin(step)
        gradients = self._manager.gradients
        come, gradients.arrived = gradients.arrived, []
        if not self._relies or step is None or step.is_diverged or step.diverged_anywhere:
            return
        for tensor in come:
            chunk = tensor.chunk
            arrived = self._arrived.setdefault(chunk.spec.index, set())
            arrived.add(tensor.spec.index)
            if len(arrived) < len(chunk.owned):
                continue
            if chunk.spec.index in self._due and self._can_update(chunk, step):
                with held_back():  # the update is counted, handed over and noted, or none of these
                    self._update(chunk)

    def _begin(self, step: Step | None) -> None:
        self._step = step
        self._arrived.clear()
        self._relies = False
        if step is None or not StepKind.of(step.key).is_last:
            return
        self._manager.gradients.awaits_step = True
        for optimizer in self._optimizers:
            optimizer.kernel.on_use = self._manager.gradients.note_use
        if step.plan is None or step.cursor is None:
            return
        if not self._manager.steps.num_updates:
            return  # what the program does with gradients is seen at its first step()
        said = self._why_not()
        self._relies = not said
        if self._relies:
            self._optimizers[0].follow_groups()  # the program may have changed them since the last step
            self._due = frozenset(step.plan.ahead.updated)
            num = sum(chunk.spec.is_updated for chunk in self._manager.chunks)
            said = f"{len(self._due)} of {num} chunks are updated while backward runs, the others by step()"
        else:
            said = f"chunks are updated by step(), because {said}"
        if said != self._said:
            logger.info("patrickstar: overlap_optimizer='backward': %s", said)
        self._said = said

    def _why_not(self) -> str:
        if len(self._optimizers) != 1:
            return f"the model has {len(self._optimizers)} optimizers"
        optimizer, gradients = self._optimizers[0], self._manager.gradients
        if optimizer.kernel.waits_because:
            return optimizer.kernel.waits_because
        if gradients.must_keep:
            return "gradients are kept after step(): call optimizer.zero_grad() after it, and read none"
        if not optimizer.was_left_alone:
            return (
                "before the last step() gradients were clipped, scaled or read, or parameters or states of the "
                "optimizer were used, or step() has hooks"
            )
        return ""

    def _can_update(self, chunk: Chunk, step: Step) -> bool:
        """Whether nobody needs a chunk as it is any more, in this step."""
        manager, gradients, optimizer = self._manager, self._manager.gradients, self._optimizers[0]
        needs_norm = gradients.records_norms
        is_complete = all(
            tensor.gradient in AT_HOME
            and tensor.deferred_gradient is None
            and not manager.mirrors.has(tensor)
            and not tensor.is_needed_at_home
            and not (needs_norm and tensor.gradient_norm is None)
            and tensor.spec.index in optimizer.group_numbers
            for tensor in chunk.owned
        )
        assert step.cursor is not None
        is_visited = step.cursor.next_visit(chunk.spec.index) is not None
        is_seen = (
            len(manager.gradient_mirrors) > 0
            or manager.watch.watches(chunk)
            or not optimizer.kernel.may_run_beside([chunk])
        )
        return is_complete and chunk.home is Tier.HOST and not is_visited and not is_seen

    def _update(self, chunk: Chunk) -> None:
        manager, optimizer = self._manager, self._optimizers[0]
        gradients, index = manager.gradients, chunk.spec.index
        if not gradients.used_ahead:
            optimizer.groups_ahead = GroupsBefore(optimizer.param_groups)
        chunk.wait_for_reader()
        norms = [tensor.gradient_norm for tensor in chunk.owned]
        update = optimizer.kernel.prepare([chunk], optimizer.group_numbers, None)
        with named("update", index), gradients.lock:
            manager.phases.update([chunk], update, may_run_beside=True)
            own = {tensor.spec.index for tensor in chunk.owned}  # step() settles those of other processes
            manager.phases.chunk_updated(chunk, own.intersection(optimizer.group_numbers), keeps=False)
            manager.copies.outdate(chunk)
            gradients.used_ahead.add(index)
            for tensor, norm in zip(chunk.owned, norms, strict=True):
                tensor.gradient_norm = norm


def update_in_backward(manager: ChunkManager, optimizers: Sequence[ChunkedOptimizer]) -> Callable[[], None]:
    """Lets chunks be updated as soon as their gradients are complete; see [Note: updates in backward].

    Args:
        manager: The manager of the chunks.
        optimizers: The optimizers of the engine; the list may grow.

    Returns:
        What is to be called when a gradient was stored.
    """
    if manager.steps.policy.updates_ahead:
        return UpdatesAhead(manager, optimizers).update_complete
    return _do_nothing


def _do_nothing() -> None:
    """Where nothing runs beside computation, nothing is gained."""
