"""Records traces, and follows them once they are there (PatrickStar section 8.1)."""

import dataclasses
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hf_patrickstar.dist.order import Order
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import GRADIENTS, Device
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.plan import MovePlan
from hf_patrickstar.schedule.trace import Cursor, Shapes, StepKind, Trace, Visit, trace_key

NOTHING_KNOWN = KnownTraces()
_MOST_DIVERGED_IN_A_ROW = 2
MOST_VISITS = 200_000

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Step:
    """A step that is being recorded or followed.

    Attributes:
        key: The name of its trace.
        shapes: Shapes of its inputs.
        dropped_after: Chunks whose device copies are void when it has ended.
        cursor: Its place in the trace that it follows; ``None`` if it is recorded, or has diverged.
        is_diverged: Whether it has left its trace.
        plan: What to move at each moment, if there is a plan. A diverged step keeps it: other processes execute it too.
        is_metered: Whether non-model data is measured while it runs.
        is_measured: Whether it is the first that follows a trace made beforehand: what it takes corrects the trace.
        is_void: Whether what was measured of it is more than a later step will need; then no trace is made of it.
        num_followed: How many moments of the plan have been executed; processes execute all of them together.
        due: Reductions of the last executed moment that are still to be done.
    """

    key: str
    shapes: Shapes
    dropped_after: frozenset[int]
    cursor: Cursor | None = None
    is_diverged: bool = False
    plan: MovePlan | None = None
    is_metered: bool = True
    is_measured: bool = False
    is_void: bool = False
    num_followed: int = 0
    due: list[int] = dataclasses.field(default_factory=list)
    visits: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    non_model_nbytes: list[int] = dataclasses.field(default_factory=list)
    gradient_nbytes: list[int] = dataclasses.field(default_factory=list)
    reduced: list[list[int]] = dataclasses.field(default_factory=list)
    forward_ends: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_recorded(self) -> bool:
        """Whether this step makes a trace."""
        return self.cursor is None and not self.is_diverged

    @property
    def has_moments(self) -> bool:
        """Whether non-model data is measured from each moment to the next."""
        return self.is_measured if self.cursor is not None else not self.is_diverged

    def note_visit(self, chunk_index: int, pinned: Iterable[int]) -> None:
        """Notes a visit to a chunk.

        Args:
            chunk_index: The chunk.
            pinned: Chunks that cannot leave meanwhile.
        """
        self.visits.append((chunk_index, tuple(pinned)))
        self.reduced.append([])


class Tracer:
    """The traces of a model, one for each kind of step and bucket of input shapes.

    The first step of a kind is recorded, and later steps follow its trace. A step with larger inputs than any recorded
    one is recorded too, since its activations may need more memory; its trace is merged with the known one. A step
    whose visits differ from its trace has diverged: it is counted, and goes on without knowing later visits. After two
    diverged steps in a row the trace is recorded anew: the first step may have failed half way, or the model may have
    changed.

    A trace may also be made before its first step (``learn``). Then that step is measured, and the bytes that it takes
    correct the trace. If it diverges, it is recorded itself; with several processes the next one is.

    Args:
        device: The device.
        order: Makes one trace of the traces of several processes.
        known: Traces of a plan: steps follow them that would be recorded first otherwise.

    Attributes:
        known: As it was given.
        traces: The traces, by key.
        version: Another number when a step has been recorded: what follows from the traces is decided anew.
        step: The step that runs, or ``None``.
        asks_padding: Whether traces of a plan without padding are there that no step has followed yet.
        diverging: Keys of steps whose non-model data is measured although they follow a trace: one has diverged.
    """

    def __init__(
        self,
        device: Device,
        order: Order,
        known: KnownTraces = NOTHING_KNOWN,
    ) -> None:
        self.known = known
        self.traces: dict[str, Trace] = dict(known.traces)
        self.version = 1 if known.traces else 0
        self.step: Step | None = None
        self.asks_padding = bool(known.traces) and not known.has_padding
        self.diverging: set[str] = set()
        self._chunk_nbytes = tuple(chunk.copy_nbytes for chunk in device.chunks)
        self._meter, self._ledger, self._counts = device.meter, device.ledger, device.counts
        self._order = order
        self._diverged_in_a_row: dict[str, int] = {}
        self._learnt = set(known.traces)  # traces made beforehand that no step has followed yet
        self._wrong: set[str] = set()  # steps whose traces, made beforehand, were not what they did
        self._interrupted: list[Step | None] = []
        self._num_begun = 0
        self._chunk_order: Mapping[int, int] = {}
        self._order_version = -1  # the version that it was made for

    @property
    def fingerprint(self) -> int:
        """A number that is the same on processes with traces of the same steps."""
        text = repr(sorted((key, trace.shapes, trace.num_offloaded) for key, trace in self.traces.items()))
        return zlib.crc32(text.encode())

    @property
    def place(self) -> tuple[int, int]:
        """Where recording is: how many steps have begun so far, nested ones too, and how many visits this one has."""
        return self._num_begun, 0 if self.step is None else len(self.step.visits)

    @property
    def chunk_order(self) -> Mapping[int, int]:
        """The places of chunks in the order in which training visits them, as it was recorded first; empty before."""
        if self._order_version != self.version:
            trace = next((trace for trace in self.traces.values() if trace.kind.is_training), None)
            visited = dict.fromkeys(visit.chunk_index for visit in trace.visits) if trace is not None else ()
            self._chunk_order = {index: place for place, index in enumerate(visited)}
            self._order_version = self.version
        return self._chunk_order

    def covers(self, kind: str, shapes: Shapes) -> bool:
        """Whether a step would follow a trace; see ``begin``."""
        trace = self.traces.get(trace_key(kind, shapes))
        return trace is not None and trace.covers(shapes)

    def may_learn(self, kind: str, shapes: Shapes) -> bool:
        """Whether a trace that is made beforehand is worth it: none has been wrong for such a step; see ``begin``.

        Of evaluations of one bucket, which grow with each token that is generated, the first one alone is worth it.
        """
        key = trace_key(kind, shapes)
        is_known = key in self.traces and not StepKind.of(kind).is_training
        return bool(shapes) and key not in self._wrong and not is_known

    def learn(self, traces: Iterable[Trace]) -> None:
        """Takes traces that were made before the steps that follow them."""
        traces = list(traces)
        for key in self.outdated_by(traces):
            self._learnt.discard(key)
            del self.traces[key]
        for trace in traces:
            known = self.traces.get(trace.key)
            self.traces[trace.key] = trace if known is None else trace.merged(known)
            self._learnt.add(trace.key)
        self.version += 1

    def offload(self, num: int) -> None:
        """Lets so many activations leave the device, the first ones of each micro-batch of training."""
        self.traces = {key: trace.offloading(num) for key, trace in self.traces.items()}

    def outdated_by(self, traces: Iterable[Trace]) -> set[str]:
        """Keys of known traces that no step has followed, and of batches of another size: those of an earlier run."""
        sizes = {_batch_sizes(trace) for trace in traces if trace.kind.is_training}
        unfollowed = {key: self.traces[key] for key in self._learnt & self.known.traces.keys() & self.traces.keys()}
        return {
            key
            for key, trace in unfollowed.items()
            if sizes and trace.kind.is_training and _batch_sizes(trace) not in sizes
        }

    def learn_update(self, kind: str, chunk_indices: Sequence[int]) -> None:
        """Makes the trace of an optimizer's step, if none is known; see ``begin``.

        What it takes beside the chunks is measured when it runs first.
        """
        trace = self.traces.get(trace_key(kind, ()))
        if trace is None or not trace.visits_in_order(chunk_indices):
            visits = tuple(Visit(index) for index in chunk_indices)
            self.traces.pop(trace_key(kind, ()), None)
            self.learn([Trace(trace_key(kind, ()), self._chunk_nbytes, visits)])

    def begin(
        self,
        kind: str,
        shapes: Shapes = (),
        dropped_after: frozenset[int] = frozenset(),
        always_metered: bool = False,
        chunk_indices: Sequence[int] | None = None,
    ) -> Step:
        """Begins a step; a step that was not finished is forgotten.

        Args:
            kind: The kind of step, and the module if that is not the model.
            shapes: Shapes of its inputs.
            dropped_after: Chunks whose device copies are void when it has ended.
            always_metered: Measure non-model data even if the step only follows its trace.
            chunk_indices: The chunks that it will visit, in order, if that is known. A trace of other chunks is
                dropped: the step is recorded anew, and does not diverge.
        """
        self._num_begun += 1
        key = trace_key(kind, shapes)
        step = Step(key, shapes, dropped_after)
        trace = self.traces.get(key)
        if trace is not None and chunk_indices is not None and not trace.visits_in_order(chunk_indices):
            trace = None
            del self.traces[key]
        if trace is not None and trace.covers(shapes):
            step.cursor = Cursor(trace, dropped_after)
            step.is_measured = key in self._learnt
            step.is_metered = always_metered or step.is_measured or key in self.diverging
        self.step = step
        return step

    def visit(self, chunk_index: int, pinned: Callable[..., Iterable[int]], *of: Any) -> int | None:
        """Notes a visit to a chunk.

        Args:
            chunk_index: The chunk.
            pinned: Tells which other chunks cannot leave now; asked only while recording.
            *of: What it is asked with.

        Returns:
            The moment, if the step follows its trace.
        """
        step = self.step
        if step is None or step.is_diverged:
            return None
        cursor = step.cursor
        if cursor is None:
            if len(step.visits) == MOST_VISITS:  # of forwards without a backward
                self.abandon()
                return None
            self._close_moment(step)
            step.note_visit(chunk_index, pinned(*of))
            return None
        visits = cursor.trace.visits
        cursor.moment = moment = cursor.moment + 1
        if moment < len(visits) and visits[moment].chunk_index == chunk_index:
            if step.is_measured:
                self._close_moment(step)
                step.note_visit(chunk_index, pinned(*of))
            return moment
        step.cursor = None
        self._counts.diverged_steps += 1
        if step.is_measured and self._order.is_alone:  # all of its visits are known, and it goes on as one recorded
            self._wrong.add(step.key)
            self._learnt.discard(step.key)
            self.traces.pop(step.key, None)
            step.is_measured, step.plan = False, None
            logger.info("patrickstar: step '%s' does something else than was estimated, and is recorded", step.key)
            return self.visit(chunk_index, pinned, *of)
        step.is_diverged = True
        self.diverging.add(step.key)
        return None

    def note_forward_end(self) -> None:
        """Notes that an outermost forward has ended."""
        if self.step is not None:
            self.step.forward_ends.append(len(self.step.visits))

    def note_reduced(self, chunk_index: int) -> None:
        """Notes that the gradients of a group were reduced."""
        if self.step is not None and self.step.is_recorded and self.step.visits:
            self.step.reduced[-1].append(chunk_index)

    def begin_nested_evaluation(self, kind: str, shapes: Shapes = (), always_metered: bool = False) -> Step:
        """Begins a step of another kind inside a step, or between steps: an evaluation, say; see ``begin``."""
        if self.step is not None and self.step.has_moments:
            self._close_moment(self.step)  # the inner step has peaks of its own
        self._interrupted.append(self.step)
        return self.begin(kind, shapes, always_metered=always_metered)

    def end_nested_evaluation(self, *, is_whole: bool = True) -> None:
        """Ends the inner step and goes on with the outer one; an inner step that is not whole makes no trace."""
        if not is_whole:
            self.step = None
        self.finish()
        if self._interrupted:
            self.step = self._interrupted.pop()

    def abandon(self) -> None:
        """Drops a step that came to nothing: a forward without backward, or one that failed."""
        self.step = None
        self._interrupted.clear()

    def finish(self) -> None:
        """Ends the step; what was recorded becomes its trace."""
        step, self.step = self.step, None
        if step is None:
            return
        if step.is_recorded and step.visits:
            self._close_moment(step)
            rows = zip(step.visits, step.non_model_nbytes, step.gradient_nbytes, step.reduced, strict=True)
            visits = tuple(Visit(*visit, nbytes, gradients, tuple(done)) for visit, nbytes, gradients, done in rows)
            trace = Trace(step.key, self._chunk_nbytes, visits, (step.shapes,), tuple(step.forward_ends))
            trace = self._order.agree_on_trace(trace)
            if not step.is_void:  # of other processes, which keep it, the next step finds that they have another trace
                known = self.traces.get(step.key)
                self.traces[step.key] = trace if known is None else trace.merged(known)
            self.version += 1
            self._counts.recorded_steps += 1
            self._diverged_in_a_row[step.key] = 0
            return
        if step.is_measured:
            self._correct(step)
        in_a_row = self._diverged_in_a_row.get(step.key, 0) + 1 if step.is_diverged else 0
        if in_a_row == _MOST_DIVERGED_IN_A_ROW:
            self.traces.pop(step.key, None)
            in_a_row = 0
        self._diverged_in_a_row[step.key] = in_a_row

    def _correct(self, step: Step) -> None:
        """Corrects a trace that was made beforehand by what the first step took that followed it."""
        self._learnt.discard(step.key)
        trace = self.traces.get(step.key)
        if step.is_diverged:
            self._wrong.add(step.key)
            self.traces.pop(step.key, None)
        elif trace is not None:
            corrected = trace
            if len(step.visits) == len(trace.visits) and not step.is_void:
                self._close_moment(step)
                corrected = trace.with_non_model_nbytes(step.non_model_nbytes)
            corrected = self._order.agree_on_trace(corrected)
            if corrected != trace:
                self.traces[step.key] = corrected
                self.version += 1

    def note_padding(self, has_padding: bool) -> None:
        """Drops the traces of a plan without padding, if the first batch has some: it may need more memory.

        Args:
            has_padding: Whether it has.
        """
        self.asks_padding = False
        if has_padding:
            logger.info(
                "patrickstar: reuse_plan: the batches of the plan have no padding, and the first one here has; the "
                "first step is planned anew"
            )
            self.discard()

    def discard(self) -> None:
        """Drops every trace: what was recorded is no longer true, and the next steps are recorded anew."""
        self.traces.clear()
        self._learnt.clear()
        self._diverged_in_a_row.clear()

    def distrust(self) -> None:
        """Drops every trace, since a step has run out of memory that followed one; no trace is made beforehand."""
        self._wrong.update(self.traces)
        self.discard()

    def note_chunks(self, chunk_nbytes: Iterable[int]) -> None:
        """Drops every trace, because there are other chunks now.

        Args:
            chunk_nbytes: Bytes of every chunk's ``param`` payload, by chunk index.
        """
        self._chunk_nbytes = tuple(chunk_nbytes)
        self.discard()

    def _close_moment(self, step: Step) -> None:
        """Notes the most non-model bytes, and bytes of gradients that waited for their group, since the last moment."""
        if not step.visits:
            return
        is_open = len(step.non_model_nbytes) < len(step.visits)  # else an inner step has closed it before
        nbytes = 0 if is_open and step.is_void else self._meter.peak(self._ledger.used(Tier.DEVICE))
        self._ledger.note_total(nbytes)
        gradients = self._ledger.take_owner_peak(Tier.DEVICE, GRADIENTS)
        if is_open:
            step.non_model_nbytes.append(nbytes)
            step.gradient_nbytes.append(gradients)
        else:
            step.non_model_nbytes[-1] = max(step.non_model_nbytes[-1], nbytes)
            step.gradient_nbytes[-1] = max(step.gradient_nbytes[-1], gradients)


def _batch_sizes(trace: Trace) -> tuple[tuple[int, ...], ...]:
    return tuple(shape[:1] for shape in trace.shapes[0])
