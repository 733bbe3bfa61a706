"""Data and messages between the processes that train one model together; only this module uses torch.distributed."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_patrickstar.cores import usable_cores
from hf_patrickstar.errors import CollectiveError, ConfigError
from hf_patrickstar.events import Listener, MessageExchanged, SlicesGathered, SlicesReduced, tell_nobody
from hf_patrickstar.memory.lanes import Ticket
from hf_patrickstar.dist.arrival import Arrival, announce
from hf_patrickstar.dist.averages import average, without_repeats
from hf_patrickstar.dist.complaints import complain
from hf_patrickstar.dist.departure import leave_at_exit
from hf_patrickstar.dist.liveness import Liveness, Member, describe_self, own_client
from hf_patrickstar.dist.messages import swap_messages
from hf_patrickstar.dist.tickets import DeviceTicket, GlooTicket, Users
from hf_patrickstar.dist.vigil import Patience, Vigil
from hf_patrickstar.units import ALIGNMENT_NUMEL, KIB, MIB

_ROUND_NBYTES = 2 * MIB
"""What a rank receives at a time in ``reduce_scatter``, from all others together."""
_MIN_PIECE_NBYTES = 16 * KIB
_NUM_PIECES = 2
"""The least number of pieces of a slice: one piece arrives while another is added. More pieces cost more waits."""
_TILE_NUMEL = 2**16
"""Elements that are widened to fp32 at a time."""
_AT_ONCE = timedelta(milliseconds=1)
_ABORT_S = 10.0
"""Seconds that a backend may take to end what is under way."""
_NOBODY_SENDS = 2**31 - 1
"""A tag that no rank sends a message with."""


class Collectives:
    """Sends data and messages between the processes that train one model together.

    All ranks call the same methods in the same order. A failed call raises ``CollectiveError``, which names the missing
    ranks; the process group cannot be used afterwards. With one process, methods send nothing and count nothing.

    Make one with ``connect``.

    Args:
        rank: The rank of this process.
        world_size: The number of processes.
        device: The compute device.
        group: The process group for data; ``None`` for one process.
        control: A group of the same processes for messages on the host, which so never mix with data.
        emit: Told of every collective with other processes.
        reductions: A group of the same processes for ``reduce_scatter``, so that gathers that were started ahead do not
            stand in its way; by default that for data.
        reduce_dtype: ``"fp32"`` if a backend of a device adds 16-bit gradients in fp32, ``"auto"`` if in their type.

    Attributes:
        rank: The rank of this process.
        world_size: The number of processes.
        local_world_size: The number of processes on this host.
        num_core_sharers: How many of these may run on a core of this process.
        control: The process group for messages; ``None`` for one process, and after ``close``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        group: "dist.ProcessGroup | None" = None,
        control: "dist.ProcessGroup | None" = None,
        emit: Listener = tell_nobody,
        reductions: "dist.ProcessGroup | None" = None,
        reduce_dtype: str = "auto",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_world_size = self.num_core_sharers = 1
        self._device = device
        self._group = group
        self.control = control
        self._emit = emit
        self._reductions = reductions or group
        self._widens = reduce_dtype == "fp32"
        self._last_reduction: Ticket | None = None
        self._is_aborted = False
        self._is_gloo = group is not None and _backend(group, device).name() == "gloo"
        self._liveness: Liveness | None = None
        self._vigil: Vigil | None = None

    @classmethod
    def connect(
        cls,
        group: "dist.ProcessGroup | None",
        device: torch.device,
        patience: Patience | None = None,
        emit: Listener = tell_nobody,
        reduce_dtype: str = "auto",
    ) -> "Collectives":
        """Joins the other processes; all of them must call this.

        Args:
            group: The processes, or ``None`` for the default group, if there is one.
            device: The compute device.
            patience: How long to wait for the others.
            emit: Told of every collective with other processes.
            reduce_dtype: See the class.

        Returns:
            The collectives. Their group for messages is a new one with the timeout of ``group``; only if ``group`` is
            a gloo subgroup of the default group, messages go over ``group`` too. Members of a subgroup with another
            backend must have made equally many groups before: torch names the new one by their number.

        Raises:
            ConfigError: If this process is not in the group, or the group cannot send from the device.
            CollectiveError: If the others cannot be reached.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(0, 1, device)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ConfigError(
                "collectives: this process is not in the group that it is to train with; use another group"
            )
        if world_size == 1:
            return cls(0, 1, device)
        data = dist.group.WORLD if group is None else group
        assert data is not None
        is_gloo = _backend(data, device).name() == "gloo"
        if device.type != "cpu" and is_gloo:
            raise ConfigError(
                f"collectives: gloo cannot send from {device}; initialise torch.distributed with the backend of the "
                "device, for example nccl"
            )
        is_part = data is not dist.group.WORLD
        patience = patience or Patience()
        try:
            timeout = _timeout_of(data, device) or dist.constants.default_pg_timeout
            ranks = dist.get_process_group_ranks(data)
            Arrival(dist.get_rank(), ranks, _arrivals(), patience, timeout.total_seconds()).wait()
            # Processes outside of a subgroup do not come to make another group of it.
            control = data if is_part and is_gloo else _new_group(data, device, is_part, "gloo")
            # A communicator runs one collective after the other.
            reductions = None if is_gloo else _new_group(data, device, is_part, dist.get_backend(data))
        except RuntimeError as error:
            raise CollectiveError(complain("connects", rank, world_size, "", error)) from error
        collectives = cls(rank, world_size, device, data, control, emit, reductions, reduce_dtype)
        leave_at_exit(_destroy_groups if is_gloo else None)  # messages go over gloo in any case
        collectives._introduce(patience)
        return collectives

    def _introduce(self, patience: Patience) -> None:
        """Tells the other ranks which process this is, and makes what finds missing ranks later."""
        cores = usable_cores()
        told = self._swap((tuple(describe_self()), uuid.uuid4().hex, cores), "connects", "connects")
        members = [Member(*member) for member, _, _ in told]
        are_local = [member.host == members[self.rank].host for member in members]
        self.local_world_size = sum(are_local)
        # A launcher may have given each process cores of its own.
        self.num_core_sharers = sum(
            is_local and bool(cores & others) for is_local, (_, _, others) in zip(are_local, told, strict=True)
        )
        # The number that rank 0 drew keeps the keys apart from those of every other connection over this store.
        store = own_client(dist.distributed_c10d._get_default_store())
        store = dist.PrefixStore(f"hf_patrickstar/liveness/{told[0][1]}", store)
        self._liveness = Liveness(self.rank, members, store, patience.answer_s)
        self._vigil = Vigil(self.rank, self._liveness, store, patience, self._hang_up, looks=True)

    def all_gather(self, buffer: torch.Tensor, what: str) -> Ticket:
        """Starts an all-gather, which fills the slices of the other ranks.

        Args:
            buffer: One slice per rank, one after the other, this rank's slice filled; contiguous, in one dimension. The
                caller must not touch the buffer before it has waited for the ticket.
            what: What the data is, for error messages.

        Returns:
            The ticket to wait for.
        """
        if self.world_size == 1:
            return GlooTicket((), what, self._wait)
        users, slices = Users(buffer), self._slices(buffer)
        with self._naming(what):
            self._emit(SlicesGathered((self.world_size - 1) * _nbytes(slices[0])))
            if self._is_gloo:
                return GlooTicket(self._broadcast(slices), what, self._wait, users)
            return DeviceTicket(self._gather(buffer, slices[self.rank]), self._device, what, self._failure)

    def _broadcast(self, slices: Sequence[torch.Tensor]) -> list[Any]:
        """Begins to fill the slices of all ranks on gloo, whose own all-gather copies, at a third of the speed."""
        group = self._group
        return [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(slices)]

    def _receive(self, piece: torch.Tensor, source: int) -> Any:
        """Begins to receive a piece of another rank on gloo."""
        return dist.irecv(piece, group=self._group, group_src=source)

    def _send(self, piece: torch.Tensor, target: int) -> Any:
        """Begins to send a piece to another rank on gloo."""
        return dist.isend(piece, group=self._group, group_dst=target)

    def _gather(self, buffer: torch.Tensor, own: torch.Tensor) -> Any:
        """Begins to fill a buffer with the slices of all ranks, on the backend of a device."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(buffer, own, group=self._group, async_op=True)

    def _scatter(self, total: torch.Tensor, terms: torch.Tensor) -> Any:
        """Begins to add this rank's slice of the terms of all ranks, on the backend of a device."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(total, terms, op=dist.ReduceOp.SUM, group=self._reductions, async_op=True)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a reduction overlaps with the computation after it; on gloo it does not."""
        return self.world_size > 1 and not self._is_gloo

    def staging_numel(self, slice_numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """How much scratch space ``reduce_scatter`` needs.

        Args:
            slice_numel: Elements of one rank's slice.
            dtype: The type of the buffer.

        Returns:
            Elements of the buffer's type, and elements of fp32.
        """
        if self.world_size == 1:
            return 0, 0
        if not self._is_gloo:
            return 0, self.world_size * slice_numel if self._is_widened(dtype) else 0
        piece_numel = self._piece_numel(slice_numel, dtype)
        num_rounds = min(2, _ceil_div(slice_numel, max(1, piece_numel)))
        widened = 2 * min(_TILE_NUMEL, piece_numel) if dtype.itemsize < torch.float32.itemsize else 0
        return num_rounds * (self.world_size - 1) * piece_numel, widened

    def reduce_scatter(
        self, buffer: torch.Tensor, staging: tuple[torch.Tensor | None, torch.Tensor | None], what: str
    ) -> Ticket:
        """Starts a reduce-scatter: this rank's slice becomes the average of that slice over all ranks.

        On gloo, slices are added in the order of the ranks, 16-bit slices in fp32 and rounded once. So each element has
        the bits that one process gets when it adds the gradients of micro-batches 0, 1, ... in this order and divides
        by their number. Other backends add in an order of their own, in the type of ``reduce_dtype``; the sum is
        divided, since the average that nccl offers multiplies each term with a rounded 1/p.

        Args:
            buffer: One slice per rank, one after the other; contiguous, in one dimension. The slices of other ranks
                have undefined content afterwards.
            staging: Scratch space in the buffer's type and in fp32, of at least ``staging_numel`` elements.
            what: What the data is, for error messages.

        Returns:
            The ticket to wait for; on gloo it is done.
        """
        if self.world_size == 1:
            return GlooTicket((), what, self._wait)
        slices = self._slices(buffer)
        with self._naming(what):
            if not self._is_gloo:
                return self._reduce_beside(buffer, slices[self.rank], staging[1], what)
            self._emit(SlicesReduced((self.world_size - 1) * _nbytes(slices[0])))
            self._reduce_in_rounds(slices, staging)
            return GlooTicket((), what, self._wait)

    def _is_widened(self, dtype: torch.dtype) -> bool:
        return self._widens and dtype.itemsize < torch.float32.itemsize

    def _reduce_beside(
        self, buffer: torch.Tensor, own: torch.Tensor, wide: torch.Tensor | None, what: str
    ) -> DeviceTicket:
        """Reduces on a stream of the backend; what comes after its sum is done by the stream that joins the ticket."""
        terms, total = buffer, own
        if self._is_widened(buffer.dtype):
            if wide is None or wide.numel() < buffer.numel():
                raise CollectiveError(f"{what}: needs scratch space of {buffer.numel()} elements of fp32")
            if self._last_reduction is not None:
                self._last_reduction.join()  # it is in the same scratch space
            terms = wide[: buffer.numel()].copy_(buffer)
            total = self._slices(terms)[self.rank]
        self._emit(SlicesReduced((self.world_size - 1) * _nbytes(total)))

        def finish() -> None:
            # By a tensor: a device multiplies with the rounded inverse of a number.
            total.div_(total.new_full((), self.world_size))
            if total is not own:
                own.copy_(total)

        ticket = DeviceTicket(self._scatter(total, terms), self._device, what, self._failure, finish)
        self._last_reduction = ticket if terms is not buffer else None
        return ticket

    def _reduce_in_rounds(
        self, slices: Sequence[torch.Tensor], staging: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> None:
        """Adds the received pieces while the next piece of every other rank arrives."""
        own = slices[self.rank]
        piece_numel = self._piece_numel(own.numel(), own.dtype)
        starts = range(0, own.numel(), max(1, piece_numel))
        narrow_numel, wide_numel = self.staging_numel(own.numel(), own.dtype)
        narrow, wide = (
            space[:numel] if space is not None else own[:0]
            for space, numel in zip(staging, (narrow_numel, wide_numel), strict=True)
        )
        if narrow.numel() < narrow_numel or wide.numel() < wide_numel:
            raise CollectiveError(f"reduce_scatter: needs scratch space of {(narrow_numel, wide_numel)} elements")
        rounds = narrow.view(-1, self.world_size - 1, piece_numel) if narrow_numel else narrow
        distances = range(1, self.world_size)

        def receive(index: int) -> list[tuple[int, torch.Tensor, Any]]:
            numel = min(piece_numel, own.numel() - starts[index])
            received = []
            for distance in distances:
                source = (self.rank - distance) % self.world_size
                target = rounds[index % 2, distance - 1, :numel]
                received.append((source, target, self._receive(target, source)))
            return received

        # Receives are started before sends: a piece that is expected needs no second round trip.
        pending = [receive(index) for index in range(min(2, len(starts)))]
        sends: list[Any] = []
        for start in starts:
            for distance in distances:
                target = (self.rank + distance) % self.world_size
                piece = slices[target][start : start + piece_numel]
                sends.append(self._send(piece, target))
        for index, start in enumerate(starts):
            terms = {self.rank: own[start : start + piece_numel]}
            for source, piece, work in pending.pop(0):
                work.wait()
                terms[source] = piece
            average([terms[rank] for rank in range(self.world_size)], self.rank, wide)
            if index + 2 < len(starts):
                pending.append(receive(index + 2))
        for work in sends:
            work.wait()

    def exchange(
        self, message: Sequence[int], what: str, *, subject: str | None = None, is_patient: bool = True
    ) -> list[list[int]]:
        """Sends integers to all ranks, and waits for theirs.

        Args:
            message: The integers.
            what: What this rank is about to do, as a verb phrase, for warnings and errors.
            subject: What the message is about, the same on all ranks; by default ``what``.
            is_patient: Whether to wait until the timeout of the process group; else this rank gives up earlier.

        Returns:
            The messages by rank.

        Raises:
            CollectiveError: If the messages of other ranks are about something else.
        """
        if self.world_size == 1:
            return [list(message)]
        self._emit(MessageExchanged())
        return self._swap(list(message), subject or what, what, is_patient)

    def exchange_objects(self, value: Any, what: str) -> list[Any]:
        """Sends an object to all ranks, and waits for theirs until the timeout of the process group.

        Args:
            value: The object; pickle must accept it.
            what: What this rank is about to do, as a verb phrase; the same on all ranks.

        Returns:
            The values by rank.

        Raises:
            CollectiveError: If the messages of other ranks are about something else.
        """
        if self.world_size == 1:
            return [value]
        self._emit(MessageExchanged())
        return self._swap(value, what, what)

    def _swap(self, value: Any, subject: str, what: str, is_patient: bool = True) -> list[Any]:
        """Sends a value to all ranks, and waits for theirs."""

        def gather(rows: list[torch.Tensor], own: torch.Tensor) -> None:
            # Direct sends to each rank would be twice as fast on idle cores, and many times slower on busy ones.
            work = dist.all_gather(rows, own, group=self.control, async_op=True)
            if self._vigil is None:
                work.wait()
            else:
                self._vigil.wait(work, what, is_message=True, is_patient=is_patient)

        with self._naming(what):
            return swap_messages(value, subject, what, self.world_size, gather)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Overwrites a tensor with that of one rank, and waits until it has arrived.

        Args:
            tensor: A tensor of the same shape and type on every rank, on the host or on the device.
            source: The rank whose values all get.
            what: What the data is, for error messages.
        """

        def operate(packed: torch.Tensor, group: "dist.ProcessGroup | None") -> None:
            # As bytes: no backend supports every type.
            dist.broadcast(packed.view(-1).view(torch.uint8), group=group, group_src=source)

        self._in_place(tensor, what, operate)

    def begin_broadcast(self, tensor: torch.Tensor, source: int, what: str) -> Callable[[], None]:
        """Begins to overwrite a tensor with that of one rank.

        Args:
            tensor: A contiguous tensor of the same shape and type on every rank, on the host.
            source: The rank whose values all get.
            what: What the data is, for error messages.

        Returns:
            A function that waits until the values have arrived.
        """
        if self.world_size == 1 or not tensor.numel():
            return lambda: None
        with self._naming(what):
            work = dist.broadcast(
                tensor.view(-1).view(torch.uint8), group=self.control, group_src=source, async_op=True
            )

        def wait() -> None:
            with self._naming(what):
                self._wait(work, what)

        return wait

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrites a tensor with its sum over all ranks, and waits for it; the backend chooses the order of addition.

        Args:
            tensor: A tensor of the same shape and type on every rank, on the host or on the device.
            what: What the data is, for error messages.
        """
        self._in_place(tensor, what, lambda packed, group: dist.all_reduce(packed, group=group))

    def _in_place(
        self, tensor: torch.Tensor, what: str, operate: "Callable[[torch.Tensor, dist.ProcessGroup | None], Any]"
    ) -> None:
        if self.world_size == 1 or not tensor.numel():
            return
        with self._naming(what), torch.no_grad():
            tensor = without_repeats(tensor.detach())
            packed = tensor.contiguous()
            operate(packed, self.control if tensor.device.type == "cpu" else self._group)
            if not tensor.is_contiguous():
                tensor.copy_(packed)

    def _hang_up(self, with_data: bool) -> None:
        """Closes this rank's connections for messages: messages under way fail, on this rank and on the others.

        Args:
            with_data: Close the connections for data too.
        """
        if with_data:
            self._abort()
        for group in (self.control, self._group if with_data and self._is_gloo else None):
            others = range(self.world_size) if group is not None else ()
            for other in set(others) - {self.rank}:
                nothing = torch.zeros(1, dtype=torch.int64, device="cpu")
                with contextlib.suppress(RuntimeError):  # gloo closes all connections when a receive times out
                    work: Any = dist.irecv(nothing, group=group, group_src=other, tag=_NOBODY_SENDS)
                    work.wait(_AT_ONCE)

    def _abort(self) -> None:
        """Ends what is under way on a device's backend: its kernels wait for ranks that are gone, and so would exit."""
        if self._is_gloo or self._is_aborted or self._group is None:
            return
        self._is_aborted = True
        groups = [group for group in (self._reductions, self._group) if group is not None]

        def abort() -> None:
            for group in groups:
                with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                    group.abort()

        thread = threading.Thread(target=abort, name="hf_patrickstar-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def close(self) -> None:
        """Destroys the groups that ``connect`` made; the group for data stays."""
        if self._vigil is not None:
            self._vigil.close()
        made = [group for group in (self.control, self._reductions) if group not in (None, self._group)]
        self.control, self._reductions = None, self._group
        self._last_reduction = None
        for group in made:
            # Where the default group was destroyed, these groups were destroyed with it.
            if dist.is_initialized():
                with contextlib.suppress(ValueError, RuntimeError):
                    dist.destroy_process_group(group)

    def _slices(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The slices of a buffer, by the rank that owns each."""
        if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() % self.world_size:
            raise CollectiveError(
                f"a buffer of shape {tuple(buffer.shape)} is not {self.world_size} equal slices one after the other"
            )
        return list(buffer.view(self.world_size, -1).unbind())

    def _piece_numel(self, slice_numel: int, dtype: torch.dtype) -> int:
        """Elements that one rank sends to another at a time."""
        nbytes = min(_ROUND_NBYTES // (self.world_size - 1), slice_numel * dtype.itemsize // _NUM_PIECES)
        nbytes = max(_MIN_PIECE_NBYTES, nbytes)
        return min(slice_numel, nbytes // dtype.itemsize // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL)

    def _wait(self, work: Any, what: str) -> None:
        """Waits for data that is under way on gloo."""
        try:
            if self._vigil is None:
                work.wait()
            else:
                self._vigil.wait(work, what)
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._failure(what, error) from error

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turns torch's errors inside the block into errors that say what failed, and which ranks are missing."""
        if self.control is None:
            raise CollectiveError(
                f"{what}: the collectives of rank {self.rank} are closed; make a new engine, or restart the processes"
            )
        if self._vigil is not None and self._vigil.verdict:
            raise CollectiveError(f"{what}: {self._vigil.verdict}")
        try:
            with contextlib.nullcontext() if self._vigil is None else self._vigil.watched(what):
                yield
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> CollectiveError:
        if self._vigil is not None and self._vigil.ask():
            self._hang_up(False)  # others may wait for this rank alone
            self._abort()
            return CollectiveError(f"{what}: {self._vigil.verdict}")
        finding = "" if self._liveness is None else self._liveness.hold()
        self._abort()
        return CollectiveError(complain(what, self.rank, self.world_size, finding, error))


def announce_self() -> None:
    """Lets other processes notice if this one ends before it makes an engine; see ``dist/arrival.py``."""
    if dist.is_available() and dist.is_initialized():
        announce(dist.get_rank(), _arrivals())


def _arrivals() -> Any:
    """The keys of ``Arrival``."""
    return dist.PrefixStore("hf_patrickstar/arrival", dist.distributed_c10d._get_default_store())


def _destroy_groups() -> None:
    """Destroys the process groups that are left."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(group: "dist.ProcessGroup", device: torch.device) -> Any:
    """The backend of a process group for tensors on a device."""
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise ConfigError(
            f"collectives: the process group has no backend for {device}; initialise torch.distributed with one, for "
            "example nccl or gloo"
        ) from error


def _new_group(group: "dist.ProcessGroup", device: torch.device, is_part: bool, backend: str) -> "dist.ProcessGroup":
    """Makes another group of the same processes."""
    return dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout_of(group, device),
        backend=backend,
        use_local_synchronization=is_part,
    )


def _timeout_of(group: "dist.ProcessGroup", device: torch.device) -> timedelta | None:
    """The timeout of a group, from private names of torch; ``None``, torch's default, if these are not there."""
    return getattr(getattr(_backend(group, device), "options", None), "_timeout", None)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
