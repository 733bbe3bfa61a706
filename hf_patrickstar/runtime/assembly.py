"""Makes the parts of the runtime, each of those before it: the order of the lines below is the order of the layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.order import make_order
from hf_patrickstar.events import Listener
from hf_patrickstar.memory.meters import Meter
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.buckets import Buckets, GroupBuckets, OwnBuckets
from hf_patrickstar.runtime.chunk import Chunk
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.data import Data
from hf_patrickstar.runtime.executor import Executor, MovePolicy, Services
from hf_patrickstar.runtime.forecast import Forecast
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.in_use import ChunksInUse
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.mirrors import MirrorUsers, ValueMirrors
from hf_patrickstar.runtime.originals import Originals
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.phases import Phases
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.reclaim import Reclaim
from hf_patrickstar.runtime.sharing import Sharing
from hf_patrickstar.runtime.steps import DeviceGauges, Steps
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.runtime.turns import Turns
from hf_patrickstar.runtime.values import Values
from hf_patrickstar.runtime.watch import Watch
from hf_patrickstar.runtime.writes import Writes
from hf_patrickstar.schedule.known import KnownTraces
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.prospect import PlacementRules


@dataclasses.dataclass(frozen=True, slots=True)
class Foundation:
    """What the runtime is made of and by which rules.

    Attributes:
        chunks: All chunks, with their payloads allocated; the list may grow.
        chunk_nbytes: The bytes of each, over all lists.
        num_tensors: Parameters under management.
        pool: Gives buffers, and has the ledger.
        meter: Measures what else is on the device.
        streams: How bytes cross.
        collectives: The processes.
        emit: Told of every event.
        policy: How copies come and go.
        placement: What the placement takes into account.
        fills_margin: Whether chunks may move to the device margin; else the first placement stays for ever.
        spilled: Chunks at home on the device because the host has no room for them.
        reserve: Makes the optimizer allocate its workspace on a tier where it will update chunks.
        need_at: Tells the bytes that chunks need at once in the layout for other budgets: of the device, and of chunks.
        num_micro_batches: How many make a step of the optimizer.
        keeps_gradients: Whether gradients stay after a step; see ``keep_gradients`` of the configuration.
        checks_all: Agree on every collective of a plan before it is done (debugging).
        known: Traces of a plan, if there is one.
    """

    chunks: list[Chunk]
    chunk_nbytes: Sequence[ChunkBytes]
    num_tensors: int
    pool: PayloadPool
    meter: Meter
    streams: Streams
    collectives: Collectives
    emit: Listener
    policy: MovePolicy
    placement: PlacementRules
    fills_margin: bool
    spilled: frozenset[int]
    reserve: Callable[[Sequence[Chunk], Tier], None]
    need_at: Callable[[int, int | None], int]
    num_micro_batches: int
    keeps_gradients: bool | Literal["auto"]
    checks_all: bool
    known: KnownTraces


def assemble(given: Foundation) -> ChunkManager:
    """Makes the runtime.

    Args:
        given: What it is made of.
    """
    chunks, pool, ledger, meter = given.chunks, given.pool, given.pool.ledger, given.meter
    streams, emit = given.streams, given.emit
    order = make_order(given.collectives, given.num_tensors, given.checks_all)
    # What a parameter's value is, and what users have of it.
    originals = Originals(pool)
    values = Values(Sharing(given.collectives, order), streams, originals, emit)
    users = MirrorUsers()
    mirrors = ValueMirrors(values, users)
    watch = Watch(values, mirrors)
    # Where chunks are.
    copies = Copies(chunks, pool, streams, emit, watch)
    tracer = Tracer((chunk.copy_nbytes for chunk in chunks), DeviceGauges(meter, ledger), order, emit, given.known)
    forecast = Forecast(chunks, pool, meter, tracer, given.need_at)
    placement = Placement(
        chunks, given.chunk_nbytes, copies, ledger, tracer, given.reserve, given.placement, given.fills_margin
    )
    placement.in_margin |= given.spilled
    placement.settle_lookups(given.known.lookups)
    reclaim = Reclaim(copies, placement, pool, streams, tracer, given.policy.chooser, forecast)
    # Where gradients are.
    accumulates = given.num_micro_batches > 1
    gradients = Gradients(pool, streams, emit, reclaim, values, chunks, accumulates, given.keeps_gradients)
    gradient_mirrors = GradientMirrors(values, gradients, users)
    writes = Writes(values, gradients, mirrors, gradient_mirrors, watch)
    buckets: Buckets = OwnBuckets(gradients, gradient_mirrors)
    if given.collectives.world_size > 1:
        buckets = GroupBuckets(chunks, pool, streams, given.collectives, reclaim)
    # What happens when.
    in_use = ChunksInUse(copies, tracer, values)
    services = Services(chunks, pool, meter, given.collectives, order, copies, reclaim, tracer, in_use, given.policy)
    executor = Executor(services, gradients, gradient_mirrors, buckets, emit)
    steps = Steps(services, executor, given.num_micro_batches)
    data = Data(originals, values, mirrors, gradient_mirrors, watch, gradients, writes, buckets)
    turns = Turns()
    parameters = Parameters(chunks, steps, gradients, writes, turns)
    phases = Phases(services, steps, placement, data, parameters, turns, streams)
    return ChunkManager(services, steps, placement, data, parameters, phases, streams)
