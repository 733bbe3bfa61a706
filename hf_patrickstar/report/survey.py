"""A survey of an engine: which parameter lives where, and what is on the device at each moment of a step. Pure data."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_patrickstar.dist.order import Room
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import CACHE_OWNER
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.schedule.plan import Plan
from hf_patrickstar.schedule.trace import Trace

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
        used_numel: Elements that parameters fill.
        param_nbytes: Bytes of this process's values at home.
        state_nbytes: Bytes of this process's other lists at home: masters, optimizer states, accumulated gradients.
        trainable: Whether its parameters receive gradients.
        parameters: Name and number of elements of each parameter, in the order of their places.
    """

    index: int
    home: str
    dtype: str
    numel: int
    used_numel: int
    param_nbytes: int
    state_nbytes: int
    trainable: bool
    parameters: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls, spec: ChunkSpec, home: Tier, param_nbytes: int, state_nbytes: int, tensors: Sequence[TensorSpec]
    ) -> "SurveyedChunk":
        """What is told of a chunk.

        Args:
            spec: The chunk.
            home: Where its lists live.
            param_nbytes: See ``SurveyedChunk``.
            state_nbytes: See ``SurveyedChunk``.
            tensors: Its parameters.
        """
        parameters = tuple((tensor.name, tensor.numel) for tensor in tensors)
        used = sum(numel for _, numel in parameters)
        numbers = spec.capacity_numel, used, param_nbytes, state_nbytes
        return cls(spec.index, home.value, spec.types.param, *numbers, spec.trainable, parameters)


@dataclasses.dataclass(frozen=True, slots=True)
class Tide:
    """Bytes on the device at each moment of a step that follows a plan, as the engine reckoned with them.

    All tuples have one entry for each row; a row is a moment, or ``stride`` moments in a row: then bytes are those
    of the fullest one of them, and counts are sums.

    Attributes:
        key: The key of the step's trace.
        limit_nbytes: What may be used of the device's budget.
        fixed_nbytes: Bytes that do not change: chunks at home on the device with all their lists, and scratch space.
        stride: Moments of a row.
        forward_ends: For each outermost forward, the number of moments before its end.
        chunks: The chunk that is visited, at the fullest moment of the row.
        copies: Bytes of copies of chunks.
        gradients: Bytes of gradients that wait for their group.
        others: Bytes of non-model data, as recorded.
        loads: Copies that are started.
        evictions: Copies that are dropped.
    """

    key: str
    limit_nbytes: int
    fixed_nbytes: int
    stride: int
    forward_ends: tuple[int, ...]
    chunks: tuple[int, ...]
    copies: tuple[int, ...]
    gradients: tuple[int, ...]
    others: tuple[int, ...]
    loads: tuple[int, ...]
    evictions: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace, plan: Plan, room: Room, limit_nbytes: int) -> "Tide":
        """The tide of a step.

        Args:
            trace: What the step does.
            plan: What moves.
            room: The memory that the plan was made for.
            limit_nbytes: What may be used of the device's budget.
        """
        stride = -(-len(trace.visits) // MOST_MOMENTS) or 1
        visits, moments = trace.visits, plan.moments
        others = _others(trace, room)
        kinds = list(zip(plan.chunk_nbytes, (visit.gradient_nbytes for visit in visits), others, strict=True))
        groups = (range(len(visits))[place : place + stride] for place in range(0, len(visits), stride))
        fullest = [max(group, key=lambda moment: sum(kinds[moment])) for group in groups]
        return cls(
            key=trace.key,
            limit_nbytes=limit_nbytes,
            fixed_nbytes=limit_nbytes - room.free_nbytes,
            stride=stride,
            forward_ends=trace.forward_ends,
            chunks=tuple(visits[moment].chunk_index for moment in fullest),
            copies=tuple(kinds[moment][0] for moment in fullest),
            gradients=tuple(kinds[moment][1] for moment in fullest),
            others=tuple(kinds[moment][2] for moment in fullest),
            loads=_sums([len(actions.load) for actions in moments], stride),
            evictions=_sums([len(actions.evict) for actions in moments], stride),
        )

    @property
    def totals(self) -> tuple[int, ...]:
        """All bytes on the device, by row."""
        rows = zip(self.copies, self.gradients, self.others, strict=True)
        return tuple(self.fixed_nbytes + sum(row) for row in rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """What is known of an engine between two steps.

    Attributes:
        budgets: Bytes that each tier may hold, by the name of the tier.
        owners: The most bytes of each kind so far, by the name of the tier. These moments need not be the same.
        chunks: The chunks that hold something.
        tides: One for each micro-batch of a step of the optimizer, as far as they follow plans.
        reasons: What was decided when the engine was made, a sentence each.
    """

    budgets: Mapping[str, int]
    owners: Mapping[str, Mapping[str, int]]
    chunks: tuple[SurveyedChunk, ...]
    tides: tuple[Tide, ...]
    reasons: tuple[str, ...]

    @classmethod
    def of(
        cls,
        chunks: Iterable[SurveyedChunk],
        ledger: Ledger,
        followed: Iterable[tuple[Trace, Plan, Room]],
        owners: Mapping[str, Mapping[str, int]],
        reasons: Sequence[str],
    ) -> "Survey":
        """What is told of an engine.

        Args:
            chunks: The chunks that hold something.
            ledger: The book of bytes.
            followed: For each kind of micro-batch its trace, its plan, and the memory that the plan was made for.
            owners: See ``Survey``.
            reasons: What was decided.
        """
        limit = ledger.limit(Tier.DEVICE, cautious=False)
        tides = tuple(Tide.of(trace, plan, room, limit) for trace, plan, room in followed)
        return cls({tier.value: ledger.budget(tier) for tier in Tier}, owners, tuple(chunks), tides, tuple(reasons))

    def to_dict(self) -> dict[str, Any]:
        """The survey as plain data that ``from_dict`` takes back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Survey":
        """Reads a survey.

        Raises:
            ConfigError: If the values are not one.
        """
        try:
            return cls(
                {str(tier): int(nbytes) for tier, nbytes in values["budgets"].items()},
                {tier: {str(k): int(n) for k, n in kinds.items()} for tier, kinds in values["owners"].items()},
                tuple(_read_chunk(chunk) for chunk in values["chunks"]),
                tuple(_read_tide(tide) for tide in values["tides"]),
                tuple(str(reason) for reason in values["reasons"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"this is not a survey of an engine: {type(error).__name__}: {error}; give what Survey.to_dict made"
            ) from error


def take_survey(
    chunks: Iterable[Chunk],
    ledger: Ledger,
    followed: Sequence[tuple[Trace, Plan, Room]],
    reasons: Sequence[str],
) -> Survey:
    """Surveys an engine between two steps; nothing is waited for.

    Args:
        chunks: All chunks.
        ledger: The book of bytes.
        followed: For each kind of micro-batch its trace, its plan, and the memory that the plan was made for.
        reasons: What was decided.
    """
    owners = {
        tier.value: {name: nbytes for name, nbytes in ledger.owner_peaks(tier).items() if name != CACHE_OWNER}
        for tier in Tier
    }
    others = max((nbytes for trace, _, room in followed for nbytes in _others(trace, room)), default=0)
    if others:
        owners[Tier.DEVICE.value][NON_MODEL] = others
    surveyed = [
        SurveyedChunk.of(
            chunk.spec, chunk.home, chunk.param_nbytes, chunk.state_nbytes, [tensor.spec for tensor in chunk.tensors]
        )
        for chunk in chunks
        if not chunk.is_retired
    ]
    return Survey.of(surveyed, ledger, followed, owners, reasons)


def _read_chunk(values: Mapping[str, Any]) -> SurveyedChunk:
    parameters = tuple((str(name), int(numel)) for name, numel in values["parameters"])
    return SurveyedChunk(**{**values, "parameters": parameters})


def _read_tide(values: Mapping[str, Any]) -> Tide:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    tide = Tide(**plain)
    rows = {len(column) for column in (tide.chunks, tide.copies, tide.gradients, tide.others, tide.loads)}
    if rows != {len(tide.evictions)}:
        raise ValueError(f"columns of the tide of '{tide.key}' differ in length")
    return tide


def _others(trace: Trace, room: Room) -> list[int]:
    """Non-model bytes at each moment: no moment has less than is there all the time."""
    return [max(visit.non_model_nbytes, room.floor_nbytes) for visit in trace.visits]


def _sums(values: Sequence[int], stride: int) -> tuple[int, ...]:
    return tuple(sum(values[place : place + stride]) for place in range(0, len(values), stride))
