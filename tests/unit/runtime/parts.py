"""Parts of the runtime on small chunks, each made when a test asks for it, of real ones or of what the test gives."""

import functools

import torch
from unit.runtime.data_parts import CPU, Process

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.dist.order import make_order
from hf_patrickstar.events import (
    ChunkEvicted,
    ChunkInvalidated,
    ChunkLoaded,
    ChunkRehomed,
    ChunkVisited,
    GradientStored,
    StepDiverged,
    StepRecorded,
    ValueRestored,
)
from hf_patrickstar.machine import ACCELERATOR
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.report.statistics import Statistics
from hf_patrickstar.runtime.buckets import GroupBuckets, OwnBuckets
from hf_patrickstar.runtime.copies import Copies
from hf_patrickstar.runtime.data import Data
from hf_patrickstar.runtime.executor import Executor, MovePolicy, Services
from hf_patrickstar.runtime.forecast import Forecast
from hf_patrickstar.runtime.gradient_mirrors import GradientMirrors
from hf_patrickstar.runtime.in_use import ChunksInUse
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameters import Parameters
from hf_patrickstar.runtime.phases import Phases
from hf_patrickstar.runtime.placement import Placement
from hf_patrickstar.runtime.reclaim import Reclaim
from hf_patrickstar.runtime.steps import DeviceGauges, Steps
from hf_patrickstar.runtime.tracer import Tracer
from hf_patrickstar.runtime.turns import Turns
from hf_patrickstar.runtime.writes import Writes
from hf_patrickstar.schedule.placement import ChunkBytes
from hf_patrickstar.schedule.prospect import PlacementRules
from hf_patrickstar.shortage import Limit, Shortage


class Fake:
    """Writes down what it is told, and answers with what it was given, or ``None``.

    Args:
        log: Where it writes: the name of the method, and what it was called with.
        **answers: What methods return; one that can be called is called with the same. A method that is in none of
            both lists is a mistake of the test.
        silent: Methods that return ``None``.
    """

    is_last_micro_batch = True  # of steps

    def __init__(self, log, *silent, **answers):
        self._log = log
        self._answers = {**dict.fromkeys(silent), **answers}

    def __getattr__(self, name):
        if name.startswith("_") or name not in self._answers:
            raise AttributeError(name)

        def call(*args, **kwargs):
            self._log.append((name, *args, *kwargs.values()))
            answer = self._answers[name]
            return answer(*args, **kwargs) if callable(answer) else answer

        return call


class Named:
    """A list of what one part is told.

    Args:
        told: The list of what all parts are told.
        part: The name of the part.
    """

    def __init__(self, told, part):
        self.told, self.part = told, part

    def append(self, item):
        name, *arguments = item
        self.told.append((f"{self.part}.{name}", *arguments))


class OneOfTwo:
    """The first of two processes; the other never says anything."""

    rank, world_size = 0, 2


class Others:
    """What else is on the device: as many bytes as a test says. A meter that writes down what it is told.

    Attributes:
        nbytes: Those that are there now.
        peak_nbytes: The most since ``restart``; by default as many as there are.
        floor_nbytes: Those that stay.
        num_readings: How often it was asked what is there now.
        told: What it was told.
    """

    measures = True

    def __init__(self, nbytes=0):
        self.nbytes, self.peak_nbytes, self.floor_nbytes = nbytes, None, 0
        self.num_readings = 0
        self.told = []

    def live(self, booked):
        self.num_readings += 1
        return self.nbytes

    def peak(self, booked):
        return self.nbytes if self.peak_nbytes is None else self.peak_nbytes

    def floor(self, booked):
        return self.floor_nbytes

    def restart(self):
        self.told.append("restart")

    def start(self, tensors):
        self.told.append(("start", len(tuple(tensors))))

    def pause(self):
        self.told.append("pause")

    def stop(self):
        self.told.append("stop")


def short_of(nbytes):
    """What a forecast says: ``device_budget`` is too small for so many bytes."""
    return Shortage.of([(Limit("device_budget", 0), nbytes)])


class NoForecast:
    """In place of ``Forecast``: what is needed is what is in use."""

    def __init__(self, names=()):
        self.names, self.asked = set(names), []

    def shortage(self, in_use_nbytes):
        self.asked.append(in_use_nbytes)
        return short_of(in_use_nbytes)

    def names_in_use(self):
        return self.names


class Parts(Process):
    """A process, and what is made of its chunks: add these first.

    Every part is made of those below it when it is asked for, so that a test that asks for one has no others above.

    Args:
        collectives: The processes; by default there is one.
        device_nbytes: The budget of the device.
        host_nbytes: The budget of the host.
        device_fraction: The part of the device's budget that may be used while the ledger is cautious.
        chunk_budget: Bytes of chunks on the device, or ``None``.
        chooser: The policy by which copies leave.
        prefetch_depth: Loads that may be under way ahead.
        evict_all: See ``MovePolicy``.
        num_micro_batches: How many make a step.
        keeps: Whether gradients stay after a step.
        fills_margin: Whether chunks may move to the margin.
        machine: Its rates decide.
        **instead: What stands in for parts, by their names.
    """

    def __init__(
        self,
        collectives=None,
        device_nbytes=4096,
        host_nbytes=4096,
        *,
        device_fraction=1.0,
        chunk_budget=None,
        chooser="belady",
        prefetch_depth=0,
        evict_all=False,
        num_micro_batches=1,
        keeps="auto",
        fills_margin=True,
        machine=ACCELERATOR,
        **instead,
    ):
        super().__init__(collectives, device_nbytes, host_nbytes)
        self.others = Others()
        self.statistics = Statistics()
        self.ledger = Ledger(
            {Tier.DEVICE: device_nbytes, Tier.HOST: host_nbytes},
            self.others.live,
            device_fraction=device_fraction,
            chunk_budget=chunk_budget,
        )
        self.pool = PayloadPool(self.ledger, CPU, pinning=None)
        config = PatrickStarConfig(eviction=chooser, prefetch_depth=prefetch_depth, debug_evict_all=evict_all)
        self.policy = MovePolicy.of(config, self.collectives.world_size, prefetch_depth)
        self.num_micro_batches, self.keeps = num_micro_batches, keeps
        self.fills_margin, self.machine = fills_margin, machine
        self.reserved = []
        self.reserve = lambda chunks, tier: self.reserved.append(tier)
        self.__dict__.update(instead)

    # What a test asks about

    def tell(self, event):
        """Counts an event; those that say that something moved are kept for ``moved``, too."""
        self.statistics.record(event)
        if not isinstance(event, ChunkVisited | StepRecorded | StepDiverged):
            self.events.append(event)

    def count(self, name):
        """A number of ``Statistics``."""
        return self.statistics.summary()[name]

    def moved(self):
        """What happened since the last call, in words and numbers of chunks."""
        told, self.events[:] = [_told(event) for event in self.events], []
        return told

    def readings(self):
        """How often it was measured what others take, since the last call."""
        num, self.others.num_readings = self.others.num_readings, 0
        return num

    def on_device(self):
        """The numbers of the chunks with a copy."""
        return sorted(chunk.spec.index for chunk in self.copies)

    def use(self, index):
        """Somebody looks into the copy of a chunk, as long as the result is alive."""
        return self.chunks[index].compute[:1]

    # The parts

    @functools.cached_property
    def order(self):
        return make_order(self.collectives, len(self.tensors), checks_all=False)

    @functools.cached_property
    def copies(self):
        return Copies(self.chunks, self.pool, self.streams, self.tell, self.watch)

    @functools.cached_property
    def tracer(self):
        gauges = DeviceGauges(self.others, self.ledger)
        return Tracer((chunk.copy_nbytes for chunk in self.chunks), gauges, self.order, self.tell)

    @functools.cached_property
    def forecast(self):
        return Forecast(self.chunks, self.pool, self.others, self.tracer, lambda device, chunks: 0)

    @functools.cached_property
    def chunk_nbytes(self):
        """The bytes of every chunk over all lists."""
        return [
            ChunkBytes(
                chunk.spec.index,
                chunk.param_nbytes,
                chunk.param_nbytes,
                sum(payload.nbytes for payload in chunk.lists.values()),
            )
            for chunk in self.chunks
        ]

    @functools.cached_property
    def placement(self):
        return Placement(
            self.chunks,
            self.chunk_nbytes,
            self.copies,
            self.ledger,
            self.tracer,
            self.reserve,
            PlacementRules(0, 0, self.policy.prefetch_depth, self.policy.chooser.name, self.machine, True, True),
            self.fills_margin,
        )

    @functools.cached_property
    def reclaim(self):
        return Reclaim(
            *(self.copies, self.placement, self.pool, self.streams),
            *(self.tracer, self.policy.chooser, self.forecast),
        )

    @functools.cached_property
    def gradients(self):
        return self.make_gradients(self.num_micro_batches > 1, self.keeps)

    @functools.cached_property
    def gradient_mirrors(self):
        return GradientMirrors(self.values, self.gradients, self.users)

    @functools.cached_property
    def writes(self):
        return Writes(self.values, self.gradients, self.mirrors, self.gradient_mirrors, self.watch)

    @functools.cached_property
    def buckets(self):
        if self.collectives.world_size == 1:
            return OwnBuckets(self.gradients, self.gradient_mirrors)
        return GroupBuckets(self.chunks, self.pool, self.streams, self.collectives, self.reclaim)

    @functools.cached_property
    def services(self):
        return Services(
            *(self.chunks, self.pool, self.others, self.collectives, self.order),
            *(self.copies, self.reclaim, self.tracer),
            *(ChunksInUse(self.copies, self.tracer, self.values), self.policy),
        )

    @functools.cached_property
    def executor(self):
        return Executor(self.services, self.gradients, self.gradient_mirrors, self.buckets, self.tell)

    @functools.cached_property
    def steps(self):
        return Steps(self.services, self.executor, self.num_micro_batches)

    @functools.cached_property
    def data(self):
        return Data(
            *(self.originals, self.values, self.mirrors, self.gradient_mirrors),
            *(self.watch, self.gradients, self.writes, self.buckets),
        )

    @functools.cached_property
    def parameters(self):
        return Parameters(self.chunks, self.steps, self.gradients, self.writes, self.turns)

    @functools.cached_property
    def turns(self):
        return Turns()

    @functools.cached_property
    def phases(self):
        return Phases(self.services, self.steps, self.placement, self.data, self.parameters, self.turns, self.streams)

    @functools.cached_property
    def manager(self):
        return ChunkManager(
            *(self.services, self.steps, self.placement, self.data, self.parameters, self.phases, self.streams)
        )


def _told(event):
    match event:
        case ChunkLoaded(index, _, ahead):
            return ("ahead" if ahead else "load", index)
        case ChunkEvicted(index, _):
            return ("evict", index)
        case ChunkInvalidated(index, _):
            return ("invalidate", index)
        case ChunkRehomed(index, to_device, _):
            return ("to device" if to_device else "to host", index)
        case GradientStored(index, tensor, _):
            return ("gradient", index, tensor)
        case ValueRestored(index, tensor, _):
            return ("restore", index, tensor)
    raise AssertionError(event)


def narrow(*values):
    """A tensor in bf16."""
    return torch.tensor(values, dtype=torch.bfloat16)
