"""Where each chunk is at home, decided from byte counts alone (PatrickStar section 8.2)."""

import dataclasses
from collections.abc import Mapping, Sequence

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import Machine
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
    device_workspace_nbytes: int | None = None,
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
        workspace_nbytes: Bytes of scratch space that the optimizer needs on the host if it updates chunks there.
        device_workspace_nbytes: Bytes of it that it needs on the device; by default, as many.
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
    scratch_there = workspace_nbytes if device_workspace_nbytes is None else device_workspace_nbytes
    on_device = total + scratch_there + (working_set_nbytes if is_copied else 0)
    on_host = fixed + (workspace_nbytes if fixed else 0)
    if on_device <= device_nbytes and on_host <= host_nbytes and not keeps_off:
        return HomePlan(
            frozenset(chunk.chunk_index for chunk in movable),
            f"all model data ({format_nbytes(total)}) is at home on the device: it fits the device budget",
        )
    need = whole = fixed + sum(chunk.host_nbytes for chunk in movable) + workspace_nbytes
    homed, need = _homed(movable, device_nbytes - working_set_nbytes - scratch_there, need, host_nbytes)
    if need > host_nbytes:
        limit = host_limit or Limit("host_budget", host_nbytes), whole if is_metered else need
        sizes = host_nbytes, device_nbytes, working_set_nbytes, workspace_nbytes, scratch_there
        raise BudgetError(_host_too_small(chunks, homed, need, limit, sizes))
    reason = f"model data ({format_nbytes(need)}) is at home on the host, chunks move to the device"
    if homed:
        reason = f"{len(homed)} of {len(movable)} chunks are at home on the device: the host is full"
    return HomePlan(frozenset(homed), reason, frozenset(homed))


def _homed(movable: Sequence[ChunkBytes], room: int, need: int, host_nbytes: int) -> tuple[list[int], int]:
    """Which chunks move their home to the room on the device because the host is full, and what it then needs."""
    homed: list[int] = []
    for chunk in reversed(movable):
        if need <= host_nbytes:
            break
        if chunk.device_nbytes <= room:
            room -= chunk.device_nbytes
            need -= chunk.host_nbytes
            homed.append(chunk.chunk_index)
    return homed, need


def _host_too_small(
    chunks: Sequence[ChunkBytes],
    homed: Sequence[int],
    need: int,
    limit: tuple[Limit, int],
    sizes: tuple[int, int, int, int, int],
) -> str:
    short, (host_nbytes, device_nbytes, *_) = Shortage.of([limit]), sizes
    num_movable = sum(not chunk.on_host for chunk in chunks)
    return (
        f"{short.subject} for the model data: {format_need(need)} needed on the host, {format_need(host_nbytes)} "
        f"available, after {len(homed)} of {num_movable} chunks were given a home on the device, where chunks may "
        f"take {format_need(device_nbytes)}. "
        + short.advise("raise device_budget and chunk_budget, train fewer parameters, or use more processes")
        + "\n"
        + _table(chunks, homed, *sizes)
    )


def _table(
    chunks: Sequence[ChunkBytes],
    homed: Sequence[int],
    host_nbytes: int,
    device_nbytes: int,
    working_set_nbytes: int,
    workspace_nbytes: int,
    device_workspace_nbytes: int,
) -> str:
    """What would be on each tier, in the form in which the ledger shows what is there."""
    on_host = [chunk for chunk in chunks if chunk.chunk_index not in homed]
    params = sum(chunk.host_param_nbytes for chunk in on_host)
    states = sum(chunk.state_nbytes for chunk in on_host)
    on_device = sum(chunk.device_nbytes for chunk in chunks if chunk.chunk_index in homed)
    rows = (
        ("host", "param", params),
        ("host", "masters and states", states),
        ("host", "workspace", workspace_nbytes),
        ("host", "total", params + states + workspace_nbytes),
        ("host", "usable now", host_nbytes),
        ("device", "chunks at home", on_device),
        ("device", "working set", working_set_nbytes),
        ("device", "workspace", device_workspace_nbytes),
        ("device", "total", on_device + working_set_nbytes + device_workspace_nbytes),
        ("device", "usable now", device_nbytes),
    )
    lines = [f"{tier:8}{owner:24}{format_nbytes(nbytes):>14}" for tier, owner, nbytes in rows]
    return "\n".join([f"{'tier':8}{'owner':24}{'need':>14}", *lines])


@dataclasses.dataclass(frozen=True, slots=True)
class LookupPlan:
    """Which embeddings are looked up on the CPU, and why."""

    at_home: frozenset[int]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Lookups:
    """What one micro-batch does with an embedding.

    Attributes:
        weight_nbytes: Bytes of its weight.
        rows_nbytes: Bytes of the rows that were looked up.
        is_trained: Whether it has a gradient.
    """

    weight_nbytes: int
    rows_nbytes: int
    is_trained: bool

    def at_home_ns(self, machine: Machine) -> int:
        """Nanoseconds if rows are looked up on the host: they cross, and so do their gradients.

        torch makes the gradient of the whole weight, zeros and all, in one thread, and the engine takes it home.
        """
        rows_ns = machine.copy_ns(self.rows_nbytes, to_device=True)
        if not self.is_trained:
            return rows_ns
        gradient_ns = machine.num_cores * machine.host_ns(0, self.weight_nbytes)
        gradient_ns += machine.host_ns(0, 2 * self.weight_nbytes)
        return rows_ns + machine.copy_ns(self.rows_nbytes, to_device=False) + gradient_ns

    def on_device_ns(self, machine: Machine) -> int:
        """Nanoseconds if the weight is brought to the device, and its gradient comes back."""
        weight_ns = machine.copy_ns(self.weight_nbytes, to_device=True)
        if not self.is_trained:
            return weight_ns
        gradient_ns = machine.kernel_ns(0, 3 * self.weight_nbytes, "")
        return weight_ns + machine.copy_ns(self.weight_nbytes, to_device=False) + gradient_ns


def plan_lookups(
    lookups: Mapping[int, Lookups], machine: Machine, too_large: frozenset[int] = frozenset()
) -> LookupPlan:
    """Decides which embeddings are worth being looked up on the host (PatrickStar section 8.2), by time.

    Args:
        lookups: What a micro-batch does with each embedding, by tensor index.
        machine: Its rates.
        too_large: Embeddings that do not fit the device beside what else is needed there; they stay at home.
    """
    at_home_ns = {index: found.at_home_ns(machine) for index, found in lookups.items()}
    on_device_ns = {index: found.on_device_ns(machine) for index, found in lookups.items()}
    at_home = frozenset(index for index in lookups if at_home_ns[index] < on_device_ns[index]) | too_large
    forced = f" ({len(too_large)} of them because the device has no room)" if too_large else ""
    return LookupPlan(
        at_home,
        f"cpu_embedding=auto: {len(at_home)} of {len(lookups)} untied embeddings are looked up on the CPU{forced}: by "
        f"the rates of '{machine.name}' a micro-batch takes {sum(at_home_ns.values()) / 1e6:.2f} ms for it on the CPU, "
        f"{sum(on_device_ns.values()) / 1e6:.2f} ms on the device",
    )
