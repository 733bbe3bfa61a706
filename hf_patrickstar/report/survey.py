"""A survey of an engine: which parameter lives where, and what is on the device at each moment of a step. Pure data."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hf_patrickstar.dist.order import Room
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.schedule.move_plan import MovePlan
from hf_patrickstar.schedule.trace import Trace

Followed = Iterable[tuple[Trace, MovePlan, Room]]
"""For each kind of micro-batch its trace, its plan, and the memory that the plan was made for."""
NON_MODEL = "non-model data"
"""The name of what is on the device and not booked: activations, temporaries, memory of other programs."""
MOST_MOMENTS = 1000
"""A tide has at most so many rows; moments of longer steps are put together."""


@dataclasses.dataclass(frozen=True, slots=True)
class SurveyedChunk:
    """One chunk of this process, or the communication group that it belongs to.

    Attributes:
        index: Its place in the chunk list.
        home: The name of the tier where its lists live.
        dtype: The type of its values.
        numel: Elements of the whole buffer.
        param_nbytes: Bytes of this process's values at home.
        state_nbytes: Bytes of this process's other lists at home: masters, optimizer states, accumulated gradients.
        trainable: Whether its parameters receive gradients.
        parameters: Name and number of elements of each parameter, in the order of their places.
        disk_nbytes: Those of ``state_nbytes`` that are on the disk.
    """

    index: int
    home: str
    dtype: str
    numel: int
    param_nbytes: int
    state_nbytes: int
    trainable: bool
    parameters: tuple[tuple[str, int], ...]
    disk_nbytes: int = 0

    @classmethod
    def of(
        cls, spec: ChunkSpec, home: Tier, nbytes: tuple[int, int, int], tensors: Sequence[TensorSpec]
    ) -> "SurveyedChunk":
        """The chunk as it is now.

        Args:
            spec: The chunk.
            home: Where its lists live.
            nbytes: Those of values, of other lists, and of these on the disk.
            tensors: Its parameters.
        """
        parameters = tuple((tensor.name, tensor.numel) for tensor in tensors)
        numbers = spec.capacity_numel, *nbytes[:2]
        return cls(spec.index, home.value, spec.types.param, *numbers, spec.trainable, parameters, nbytes[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Tide:
    """Bytes on the device at each moment of a step that follows a plan, as the engine reckoned with them.

    Tuples of bytes have one entry for each moment, or for the fullest of ``stride`` moments in a row.

    Attributes:
        key: The key of the step's trace.
        limit_nbytes: What may be used of the device's budget.
        fixed_nbytes: Bytes that do not change: chunks at home on the device with all their lists, and scratch space.
        stride: Moments of an entry.
        forward_ends: For each outermost forward, the number of moments before its end.
        copies: Bytes of copies of chunks.
        gradients: Bytes of gradients that wait, for their group or for the update.
        others: Bytes of non-model data, as recorded.
        offloaded: Bytes of each activation that leaves the device between forward and backward, and the parameter that
            forward comes to next.
    """

    key: str
    limit_nbytes: int
    fixed_nbytes: int
    stride: int
    forward_ends: tuple[int, ...]
    copies: tuple[int, ...]
    gradients: tuple[int, ...]
    others: tuple[int, ...]
    offloaded: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls, trace: Trace, plan: MovePlan, room: Room, limit_nbytes: int, parameters: Mapping[int, Sequence[str]]
    ) -> "Tide":
        """The tide of a step.

        Args:
            trace: What the step does.
            plan: What moves.
            room: The memory that the plan was made for.
            limit_nbytes: What may be used of the device's budget.
            parameters: The names of those in each chunk, by its index.
        """
        visits = trace.visits
        stride = -(-len(visits) // MOST_MOMENTS) or 1
        others = [max(visit.non_model_nbytes, room.floor_nbytes) for visit in visits]  # some is there all the time
        kinds = list(zip(plan.chunk_nbytes, (visit.gradient_nbytes for visit in visits), others, strict=True))
        fullest = [max(kinds[first : first + stride], key=sum) for first in range(0, len(kinds), stride)]
        copies, gradients, beside = (tuple(row[kind] for row in fullest) for kind in range(3))
        # A chunk of many small parameters is visited all over the model: the next large one says where forward is.
        large = [parameters.get(visit.chunk_index, ()) for visit in visits]
        offloaded = tuple(
            (next((names[0] for names in large[kept.kept_at + 1 :] if len(names) == 1), "the loss"), kept.nbytes)
            for kept in trace.offloaded
        )
        fixed = limit_nbytes, limit_nbytes - room.free_nbytes, stride, trace.forward_ends
        return cls(trace.key, *fixed, copies, gradients, beside, offloaded)

    @property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """The bytes of each kind, in words, by entry."""
        return {
            "chunks at home on the device, with optimizer states": (self.fixed_nbytes,) * len(self.copies),
            "copies of chunks of the host": self.copies,
            "gradients": self.gradients,
            "activations and temporaries": self.others,
        }

    @property
    def totals(self) -> tuple[int, ...]:
        """All bytes on the device, by entry."""
        return tuple(map(sum, zip(*self.kinds.values(), strict=True)))

    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind at the fullest moment."""
        place = self.totals.index(max(self.totals))
        return {kind: values[place] for kind, values in self.kinds.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """What is known of an engine between two steps.

    Attributes:
        budgets: Bytes that each tier may hold, by the name of the tier.
        chunks: The chunks that hold something.
        tides: One for each micro-batch of a step of the optimizer, as far as they follow plans.
        reasons: What was decided when the engine was made, a sentence each.
    """

    budgets: Mapping[str, int]
    chunks: tuple[SurveyedChunk, ...]
    tides: tuple[Tide, ...]
    reasons: tuple[str, ...]

    @classmethod
    def of(
        cls, chunks: Iterable[SurveyedChunk], ledger: Ledger, followed: Followed, reasons: Sequence[str]
    ) -> "Survey":
        """The survey of an engine.

        Args:
            chunks: The chunks that hold something.
            ledger: The book of bytes.
            followed: What micro-batches follow.
            reasons: What was decided.
        """
        limit, chunks = ledger.limit(Tier.DEVICE, cautious=False), tuple(chunks)
        names = {chunk.index: [name for name, _ in chunk.parameters] for chunk in chunks}
        tides = tuple(Tide.of(trace, plan, room, limit, names) for trace, plan, room in followed)
        return cls({tier.value: ledger.budget(tier) for tier in ledger.tiers}, chunks, tides, tuple(reasons))

    def to_dict(self) -> dict[str, Any]:
        """The survey as plain data that ``from_dict`` takes back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Survey":
        """Reads what ``to_dict`` has made, of JSON or not.

        Raises:
            KeyError: If a name is missing.
            TypeError: If a value is of another type, or has a name that is not known.
        """
        chunks = tuple(_read(SurveyedChunk, chunk) for chunk in values["chunks"])
        tides = tuple(_read(Tide, tide) for tide in values["tides"])
        return cls(values["budgets"], chunks, tides, tuple(values["reasons"]))


def _read(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    return kind(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def take_survey(chunks: Iterable[Chunk], ledger: Ledger, followed: Followed, reasons: Sequence[str]) -> Survey:
    """Surveys an engine between two steps; nothing is waited for.

    Args:
        chunks: All chunks.
        ledger: The book of bytes.
        followed: What micro-batches follow.
        reasons: What was decided.
    """
    surveyed = []
    for chunk in chunks:
        if not chunk.is_retired:
            specs = [tensor.spec for tensor in chunk.tensors]
            regions = chunk.home_lists.regions.values()
            nbytes = chunk.param_nbytes, chunk.state_nbytes, sum(region.tensor.nbytes for region in regions)
            surveyed.append(SurveyedChunk.of(chunk.spec, chunk.home, nbytes, specs))
    return Survey.of(surveyed, ledger, followed, reasons)
