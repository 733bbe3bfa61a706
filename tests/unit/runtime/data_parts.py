"""Small real parts that have values and gradients: chunks with payloads, and all that is made before them."""

import threading

import torch
from unit.dist.ranks import TIMEOUT_S, Exchange, ThreadCollectives
from unit.spec_builders import BF16

from hf_patrickstar.dist.order import Order
from hf_patrickstar.dist.sharing import Sharing
from hf_patrickstar.layout.packing import ChunkSpec
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.memory.lanes import WorkLane
from hf_patrickstar.memory.ledger import Ledger
from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.runtime.chunk import MASTER, Chunk, ManagedParameter, torch_dtype
from hf_patrickstar.runtime.gradients import Gradients
from hf_patrickstar.runtime.mirrors import GradientMirrors, ValueMirrors
from hf_patrickstar.runtime.originals import Originals
from hf_patrickstar.runtime.values import Values
from hf_patrickstar.runtime.writes import Writes

CPU = torch.device("cpu")


class InBackward(torch.autograd.Function):
    """Its backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


class Ticket:
    """A copy under way, which does something when it is waited for."""

    is_done, lane = False, WorkLane.TO_DEVICE

    def __init__(self, when_done=lambda: None):
        self.when_done, self.num_waits = when_done, 0

    def wait(self):
        self.num_waits += 1
        self.when_done()

    join = wait


class Room:
    """In place of ``Reclaim``: writes down what room is asked for, and finds none beyond what there is."""

    def __init__(self):
        self.asked = []

    def make_room(self, nbytes):
        self.asked.append(nbytes)

    def make_room_for_gradients(self, chunk):
        self.asked.append(chunk.copy_nbytes)


class Process:
    """One process with the parts below its chunks.

    The value of tensor i, wherever it is, counts up from 16 * i: exact in any type.

    Args:
        collectives: The processes; by default there is one.
        device_nbytes: The budget of the device.
        host_nbytes: The budget of the host.
    """

    def __init__(self, collectives=None, device_nbytes=4096, host_nbytes=4096):
        self.collectives = collectives or ThreadCollectives()
        self.rank, self.world_size = self.collectives.rank, self.collectives.world_size
        self.ledger = Ledger({Tier.DEVICE: device_nbytes, Tier.HOST: host_nbytes})
        self.streams = Streams(CPU)
        self.pool = PayloadPool(self.ledger, CPU, pinning=None)
        self.events = []
        self.chunks = []
        self.tensors = []
        self.room = Room()
        self.originals = Originals(self.pool)
        self.sharing = Sharing(self.collectives, Order(self.collectives))
        self.values = Values(self.sharing, self.streams, self.originals, self.events.append, set())
        self.num_own = {}
        self.mirrors = ValueMirrors(self.values, self.num_own)

    def add_chunk(
        self,
        *shapes,
        home=Tier.HOST,
        types=BF16,
        trainable=True,
        has_master=None,
        original=torch.float32,
        chunk_numel=None,
        offsets=None,
    ):
        """Makes a chunk of tensors one after the other, with their values in it; returns its tensors.

        Args:
            *shapes: Shapes, or numbers of elements.
            home: Where it lives.
            types: Its types.
            trainable: Whether its tensors get gradients.
            has_master: Whether there is a list of masters; by default if it is trainable.
            original: The type that parameters were loaded in.
            chunk_numel: Elements that each process has; by default just what one needs.
            offsets: Where the tensors are; by default without gaps.
        """
        shapes = [(shape,) if isinstance(shape, int) else shape for shape in shapes]
        first = len(self.tensors)
        specs = [
            TensorSpec(index, f"t{index}", shape, trainable, types=types) for index, shape in enumerate(shapes, first)
        ]
        ends = [sum(spec.numel for spec in specs[:place]) for place in range(len(specs) + 1)]
        numel = chunk_numel or ends[-1]
        indices = tuple(spec.index for spec in specs)
        spec = ChunkSpec(
            *(len(self.chunks), numel * self.world_size, ends[-1], indices, trainable),
            world_size=self.world_size,
            types=types,
        )
        chunk = Chunk(spec, home, self.rank)
        chunk.param = self.pool.allocate(home, numel, torch_dtype(types.param), "param", zero=True)
        if trainable if has_master is None else has_master:
            chunk.lists[MASTER] = self.pool.allocate(home, numel, chunk.state_dtype, MASTER, zero=True)
        for one, offset in zip(specs, offsets or ends[:-1], strict=True):
            parameter = torch.nn.Parameter(self.first_value(one).to(original), requires_grad=trainable)
            placeholder = torch.full((), float("nan"), dtype=chunk.param.dtype).expand(one.shape)
            tensor = ManagedParameter(one, parameter, offset, placeholder)
            tensor.dematerialize()
            chunk.add(tensor)
            tensor.is_filled = True
            self.tensors.append(tensor)
            if tensor.is_owned:
                for payload in (chunk.param, *chunk.lists.values()):
                    tensor.view(payload).copy_(tensor.own(self.first_value(one)))
        self.chunks.append(chunk)
        return list(chunk.tensors)

    @staticmethod
    def first_value(spec):
        """What a tensor has at first."""
        return (torch.arange(spec.numel) + 16.0 * spec.index).view(spec.shape)

    def load(self, chunk):
        """Gives a chunk a copy on the device; that of a group has what its tensors had at first."""
        payload = self.pool.allocate(Tier.DEVICE, chunk.spec.capacity_numel, chunk.param.dtype, "param", zero=True)
        if self.world_size == 1:
            payload.copy_(chunk.param)
        else:
            for tensor in chunk.tensors:
                tensor.view_copy(payload).copy_(self.first_value(tensor.spec))
        chunk.set_compute(payload)

    def make_gradients(self, accumulate=False, keeps="auto"):
        """What finds places for gradients."""
        return Gradients(
            *(self.pool, self.streams, self.events.append, self.room, self.values, self.chunks, accumulate, keeps)
        )

    def make_writes(self, gradients):
        """What takes writes everywhere, and the mirrors of gradients that it knows."""
        mirrors = GradientMirrors(self.values, self.num_own, gradients)
        return Writes(self.values, gradients, self.mirrors, mirrors), mirrors


def values_at(tensor):
    """What a chunk has of a parameter at home: in its own type, and in the master if there is one."""
    lists = tensor.chunk.lists
    return [tensor.view(payload).tolist() for payload in (tensor.chunk.param, lists.get(MASTER)) if payload is not None]


def run_together(world_size, function):
    """Runs a function of a ``Process`` once for each of several processes; returns what came of it, by rank."""
    exchange = Exchange(world_size)
    results = [None] * world_size

    def call(rank):
        try:
            results[rank] = function(Process(ThreadCollectives(rank, exchange)))
        except Exception as error:
            results[rank] = error
            exchange.barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    failed = [result for result in results if isinstance(result, Exception)]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
