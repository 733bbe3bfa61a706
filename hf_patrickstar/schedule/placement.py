"""Where each chunk is at home, decided from byte counts alone (PatrickStar section 8.2)."""

import dataclasses
from collections.abc import Mapping, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.shortage import Limit, Shortage
from hf_patrickstar.units import format_nbytes, format_need


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The bytes of one chunk over all its lists.

    Attributes:
        chunk_index: Its place in the chunk list.
        param_nbytes: Bytes of its ``param`` payload.
        host_param_nbytes: Bytes that this payload takes on the host, where pinning rounds up.
        state_nbytes: Bytes of masters, optimizer states and accumulated gradients.
        on_host: Whether its home must be the host, because an embedding is looked up there.
    """

    chunk_index: int
    param_nbytes: int
    host_param_nbytes: int
    state_nbytes: int
    on_host: bool = False

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device if it is at home there."""
        return self.param_nbytes + self.state_nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes on the host if it is at home there."""
        return self.host_param_nbytes + self.state_nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class HomePlan:
    """Which chunks are at home on the device, and why; ``spilled`` has those that do not fit the host."""

    device_homed: frozenset[int]
    reason: str
    spilled: frozenset[int] = frozenset()


def plan_homes(
    chunks: Sequence[ChunkBytes],
    device_nbytes: int,
    host_nbytes: int,
    working_set_nbytes: int,
    workspace_nbytes: int,
    *,
    is_copied: bool = False,
    keeps_off: bool = False,
    is_metered: bool = False,
    host_limit: Limit | None = None,
) -> HomePlan:
    """Decides the home of every chunk.

    If all model data fits on the device, all of it lives there and nothing ever moves. Otherwise chunks are at home
    on the host, where the optimizer updates them; if the host is too small, as many as needed move their home to the
    device, last chunks first, as far as the largest working set leaves room.

    Args:
        chunks: The bytes of every chunk.
        device_nbytes: Bytes for chunks on the device.
        host_nbytes: Bytes for chunks on the host.
        working_set_nbytes: Bytes that the most demanding module needs on the device at once.
        workspace_nbytes: Bytes of scratch space that the optimizer needs on each tier where it updates chunks.
        is_copied: Whether the working set needs room beside chunks at home on the device, because it is gathered.
        keeps_off: Whether chunks are at home on the device only if the host has no room for them (debugging).
        is_metered: Whether the device's bytes are for non-model data too: then the error advises a host for all chunks.
        host_limit: The setting that ``host_nbytes`` comes from, for the error.

    Raises:
        BudgetError: If both tiers together cannot hold the model data.
    """
    movable = [chunk for chunk in chunks if not chunk.on_host]
    total = sum(chunk.device_nbytes for chunk in movable)
    fixed = sum(chunk.host_nbytes for chunk in chunks if chunk.on_host)
    fixed_workspace = workspace_nbytes if fixed else 0
    beside = working_set_nbytes if is_copied else 0
    fits = total + workspace_nbytes + beside <= device_nbytes and fixed + fixed_workspace <= host_nbytes
    if fits and not keeps_off:
        return HomePlan(
            frozenset(chunk.chunk_index for chunk in movable),
            f"all model data ({format_nbytes(total)}) is at home on the device: it fits the device budget",
        )
    need = whole = fixed + sum(chunk.host_nbytes for chunk in movable) + workspace_nbytes
    room = device_nbytes - working_set_nbytes - workspace_nbytes
    homed: list[int] = []
    for chunk in reversed(movable):
        if need <= host_nbytes:
            break
        if chunk.device_nbytes <= room:
            room -= chunk.device_nbytes
            need -= chunk.host_nbytes
            homed.append(chunk.chunk_index)
    if need > host_nbytes:
        short = Shortage.of([(host_limit or Limit("host_budget", host_nbytes), whole if is_metered else need)])
        raise BudgetError(_host_too_small(short, (need, host_nbytes), (len(homed), len(movable)), device_nbytes))
    reason = f"model data ({format_nbytes(need)}) is at home on the host, chunks move to the device"
    if homed:
        reason = f"{len(homed)} of {len(movable)} chunks are at home on the device: the host is full"
    return HomePlan(frozenset(homed), reason, frozenset(homed))


def _host_too_small(short: Shortage, nbytes: tuple[int, int], num_homed: tuple[int, int], device_nbytes: int) -> str:
    return (
        f"{short.subject} for the model data: {format_need(nbytes[0])} needed on the host, {format_need(nbytes[1])} "
        f"available, after {num_homed[0]} of {num_homed[1]} chunks were given a home on the device, where chunks may "
        f"take {format_need(device_nbytes)}. "
        + short.advise("raise device_budget and chunk_budget, train fewer parameters, or use more processes")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LookupPlan:
    """Which embeddings are looked up on the CPU, and why."""

    at_home: frozenset[int]
    reason: str


def plan_lookups(
    weight_nbytes: Mapping[int, int], activation_nbytes: Mapping[int, int], too_large: frozenset[int] = frozenset()
) -> LookupPlan:
    """Decides which embeddings are worth being looked up on the host (PatrickStar section 8.2).

    With a lookup on the device, the weight and its gradient cross the bus; with one at home, only the rows do.

    Args:
        weight_nbytes: Bytes of each embedding's weight, by tensor index.
        activation_nbytes: Bytes that were looked up in one micro-batch, by tensor index.
        too_large: Embeddings that do not fit the device beside what else is needed there; they stay at home.
    """
    worth_it = {index for index, nbytes in weight_nbytes.items() if nbytes > activation_nbytes[index]}
    at_home = frozenset(worth_it | too_large)
    weights, rows = sum(weight_nbytes.values()), sum(activation_nbytes.values())
    return LookupPlan(
        at_home,
        f"cpu_embedding=auto: {len(at_home)} of {len(weight_nbytes)} untied embeddings are looked up on the CPU: "
        f"weights of {format_nbytes(weights)} against {format_nbytes(rows)} of rows per micro-batch",
    )
