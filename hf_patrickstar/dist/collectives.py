"""Data and messages between the processes that train one model together.

[Note: messages of any length]
gloo ends a process that gets more bytes than it expects. Processes that do different things send different messages,
and how long a message is may depend on what only one process knows. So the first row of every message has the same
length. It says what the message is about, and how long it is. The row has room for most messages; what does not fit
follows in a second row, which is as long as the longest message of all processes needs. Processes whose messages are
about different things then say what they do, and raise an error.
"""

import atexit
import contextlib
import functools
import os
import pickle
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.tickets import DeviceTicket, GlooTicket
from hf_patrickstar.dist.watchdog import Watchdog
from hf_patrickstar.errors import CollectiveError, ConfigError
from hf_patrickstar.memory.lanes import Ticket
from hf_patrickstar.units import ALIGNMENT_NUMEL, KIB, MIB

ROW_NBYTES = 2048
"""Messages about a model of 10,000 parameters fit."""
_DOES = "says what it does"
"""The subject of the messages of processes that have found out that they do not do the same."""
_HEADER = struct.Struct("=Qq")
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
_NUM_PAUSES, _PAUSE_S = 20, 0.005
"""On a busy system one long pause may end before the other threads ran; several short ones give them several turns."""


class Collectives:
    """Sends data and messages between the processes that train one model together.

    All ranks call the same methods in the same order. A failed call raises ``CollectiveError``, which names the missing
    ranks; the process group cannot be used afterwards. With one process, messages and tensors stay where they are, and
    there are no slices.

    Make one with ``connect``.

    Args:
        rank: The rank of this process.
        world_size: The number of processes.
        device: The compute device.
        group: The process group for data; ``None`` for one process.
        counts: Counts collectives with other processes; by default nobody reads it.
        reduce_dtype: ``"fp32"`` if a backend of a device adds 16-bit gradients in fp32, ``"auto"`` if in their type.

    Attributes:
        rank: The rank of this process.
        world_size: The number of processes.
        local_world_size: The number of processes on this host.
        num_core_sharers: How many of these may run on a core of this process.
        control: The process group for messages on the host, which so never mix with data; ``None`` for one process, and
            after ``close``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        group: "dist.ProcessGroup | None" = None,
        counts: Counts | None = None,
        reduce_dtype: str = "auto",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_world_size = self.num_core_sharers = 1
        self.control: dist.ProcessGroup | None = None
        self._device = device
        self._group = self._reductions = self._users = group
        self._counts = Counts() if counts is None else counts
        self._widens = reduce_dtype == "fp32"
        self._last_reduction: Ticket | None = None
        self._is_cut_off = False
        self._is_gloo = group is not None and _backend(group, device).name() == "gloo"
        self._watchdog: Watchdog | None = None
        self._is_over = threading.Event()

    @classmethod
    def connect(
        cls,
        group: "dist.ProcessGroup | None",
        device: torch.device,
        wait_s: float | None = 60.0,
        counts: Counts | None = None,
        reduce_dtype: str = "auto",
    ) -> "Collectives":
        """Joins the other processes; all of them must call this.

        Args:
            group: The processes, or ``None`` for the default group, if there is one.
            device: The compute device.
            wait_s: How long to wait for a message, in seconds; see [Note: how long a rank waits].
            counts: See the class.
            reduce_dtype: See the class.

        Returns:
            The collectives. Their groups are new ones with the timeout of ``group``, so that the user's collectives
            never meet theirs; only if ``group`` is a gloo subgroup of the default group, they use ``group`` itself.
            Members of a subgroup with another backend must have made equally many groups before: torch names the new
            ones by their number.

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
        collectives = cls(rank, world_size, device, data, counts, reduce_dtype)
        if device.type != "cpu" and collectives._is_gloo:
            raise ConfigError(
                f"collectives: gloo cannot send from {device}; initialise torch.distributed with the backend of the "
                "device, for example nccl"
            )
        collectives._join(data, wait_s)
        leave_at_exit(destroys=collectives._is_gloo)  # messages go over gloo in any case
        atexit.register(collectives._is_over.set)  # before those, so that the thread does not meet the end of Python
        arguments = weakref.ref(collectives), collectives._watchdog, collectives._is_over
        threading.Thread(target=_look, args=arguments, name="hf_patrickstar-look", daemon=True).start()
        return collectives

    def _join(self, group: "dist.ProcessGroup", wait_s: float | None) -> None:
        """Meets the other ranks, and makes groups beside that for data."""
        # A private name of torch; ``None`` is torch's default.
        timeout = getattr(getattr(_backend(group, self._device), "options", None), "_timeout", None)
        timeout_s = (timeout or dist.constants.default_pg_timeout).total_seconds()
        ranks, is_part = dist.get_process_group_ranks(group), group is not dist.group.WORLD
        new_group = functools.partial(dist.new_group, ranks, timeout, use_local_synchronization=is_part)
        self._watchdog = watchdog = Watchdog(self.rank, ranks, wait_s, timeout_s)
        try:
            watchdog.meet()
            # Processes outside of a subgroup do not come to make another group of it.
            self.control = group if is_part and self._is_gloo else new_group("gloo")
            if not (is_part and self._is_gloo):
                # The user's collectives may come before ours on one rank, and after them on another.
                self._group = self._reductions = new_group(dist.get_backend(group))
                # A rank that closes its connections now would break those that another one is still making.
                with self._guarded("connects"):
                    self._gather_rows(b"\0", "connects", False)
            if not self._is_gloo:
                # A communicator runs one collective after the other: gathers that were started ahead do not stand in
                # the way of reductions that have one of their own.
                self._reductions = new_group(dist.get_backend(group))
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise watchdog.explain("connects", error) from error
        own, processes = watchdog.processes[self.rank], watchdog.processes.values()
        local = [process for process in processes if process.host == own.host]
        self.local_world_size = len(local)
        # A launcher may have given each process cores of its own.
        self.num_core_sharers = sum(not set(own.cores).isdisjoint(process.cores) for process in local)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a reduction overlaps with the computation after it; on gloo it does not."""
        return self.world_size > 1 and not self._is_gloo

    # Data of the model

    def all_gather(self, buffer: torch.Tensor, what: str) -> Ticket:
        """Starts an all-gather, which fills the slices of the other ranks.

        Args:
            buffer: One slice per rank, one after the other, this rank's slice filled; contiguous, in one dimension. The
                caller must not touch the buffer before it has waited for the ticket.
            what: What the data is, for error messages.

        Returns:
            The ticket to wait for.
        """
        ticket = GlooTicket(what, self._wait, buffer)  # before the slices, which it would count as users of the buffer
        slices = self._slices(buffer)
        with self._guarded(what):
            self._counts.all_gathers += 1
            self._counts.sent_nbytes += (self.world_size - 1) * slices[0].nbytes
            if not self._is_gloo:
                return DeviceTicket(self._gather(buffer, slices[self.rank]), self._device, what, self._failure)
            ticket.works = self._broadcast(slices)
            return ticket

    def staging_numel(self, slice_numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """How much scratch space ``reduce_scatter`` needs.

        Args:
            slice_numel: Elements of one rank's slice.
            dtype: The type of the buffer.

        Returns:
            Elements of the buffer's type, and elements of fp32.
        """
        is_narrow = dtype.itemsize < torch.float32.itemsize
        if self.world_size == 1:
            return 0, 0
        if not self._is_gloo:
            return 0, self.world_size * slice_numel if self._widens and is_narrow else 0
        piece_numel = self._piece_numel(slice_numel, dtype)
        num_rounds = min(2, -(-slice_numel // max(1, piece_numel)))
        return num_rounds * (self.world_size - 1) * piece_numel, 2 * min(_TILE_NUMEL, piece_numel) if is_narrow else 0

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
        own = self._slices(buffer)[self.rank]
        numels = self.staging_numel(own.numel(), own.dtype)
        spaces = zip(staging, numels, strict=True)
        narrow, wide = (own[:0] if space is None else space[:numel] for space, numel in spaces)
        if (narrow.numel(), wide.numel()) != numels:
            raise CollectiveError(f"{what}: needs scratch space of {numels[0]} elements and {numels[1]} of fp32")
        if not self._is_gloo:
            return self._reduce_concurrently(buffer, own, wide, what)
        with self._guarded(what, is_blocking=True):
            self._counts.reduce_scatters += 1
            self._counts.sent_nbytes += (self.world_size - 1) * own.nbytes
            self._reduce_in_rounds(self._slices(buffer), narrow, wide)
        return GlooTicket(what, self._wait)

    def _reduce_concurrently(self, buffer: torch.Tensor, own: torch.Tensor, wide: torch.Tensor, what: str) -> Ticket:
        """Reduces on a stream of the backend; what comes after its sum is done by the stream that joins the ticket."""
        terms, total = buffer, own
        if wide.numel():
            if self._last_reduction is not None:
                self._last_reduction.join()  # it is in the same scratch space
            terms = wide.copy_(buffer)
            total = self._slices(terms)[self.rank]

        def finish() -> None:
            # By a tensor: a device multiplies with the rounded inverse of a number.
            total.div_(total.new_full((), self.world_size))
            if total is not own:
                own.copy_(total)

        with self._guarded(what):
            self._counts.reduce_scatters += 1
            self._counts.sent_nbytes += (self.world_size - 1) * total.nbytes
            ticket = DeviceTicket(self._scatter(total, terms), self._device, what, self._failure, finish)
        self._last_reduction = ticket if wide.numel() else None
        return ticket

    def _reduce_in_rounds(self, slices: Sequence[torch.Tensor], narrow: torch.Tensor, wide: torch.Tensor) -> None:
        """Adds the received pieces while the next piece of every other rank arrives."""
        own = slices[self.rank]
        piece_numel = self._piece_numel(own.numel(), own.dtype)
        starts = range(0, own.numel(), max(1, piece_numel))
        rounds = narrow.view(-1, self.world_size - 1, piece_numel) if narrow.numel() else narrow
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
                sends.append(self._send(slices[target][start : start + piece_numel], target))
        for index, start in enumerate(starts):
            terms = {self.rank: own[start : start + piece_numel]}
            for source, piece, work in pending.pop(0):
                work.wait()
                terms[source] = piece
            _average([terms[rank] for rank in range(self.world_size)], self.rank, wide)
            if index + 2 < len(starts):
                pending.append(receive(index + 2))
        for work in sends:
            work.wait()

    # What torch does; simulated processes do it in virtual time

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

    # Messages, and other tensors

    def exchange(self, value: Any, what: str, *, subject: str | None = None, is_prompt: bool = False) -> list[Any]:
        """Sends a value to all ranks, and waits for theirs; see [Note: messages of any length].

        Args:
            value: The value; pickle must accept it.
            what: What this rank is about to do, as a verb phrase, for warnings and errors.
            subject: What the message is about, the same on all ranks; by default ``what``.
            is_prompt: Whether all ranks should send it at once; see [Note: how long a rank waits].

        Returns:
            The values by rank.

        Raises:
            CollectiveError: If the messages of other ranks are about something else.
        """
        if self.world_size == 1:
            return [value]
        self._counts.messages += 1
        with self._guarded(what):
            return self._swap(value, subject or what, what, is_prompt)

    def disagreement(self, what: str) -> CollectiveError:
        """The error of processes that have found out that they do not do the same; all of them call this.

        Args:
            what: What this rank is about to do, as a verb phrase.
        """
        return _disagreement(self.exchange(what, _DOES))

    def _swap(self, value: Any, subject: str, what: str, is_prompt: bool) -> list[Any]:
        text = pickle.dumps(value)
        text = _HEADER.pack(zlib.crc32(subject.encode()), len(text)) + text
        rows = self._gather_rows(text[:ROW_NBYTES].ljust(ROW_NBYTES, b"\0"), what, is_prompt)
        subjects, sizes = zip(*(_HEADER.unpack_from(row) for row in rows), strict=True)
        if len(set(subjects)) > 1:
            raise _disagreement(self._swap(what, _DOES, what, is_prompt))
        if (rest_nbytes := _HEADER.size + max(sizes) - ROW_NBYTES) > 0:
            rest = self._gather_rows(text[ROW_NBYTES:].ljust(rest_nbytes, b"\0"), what, is_prompt)
            rows = [first + second for first, second in zip(rows, rest, strict=True)]
        return [pickle.loads(row[_HEADER.size :]) for row in rows]  # pickle knows where it ends

    def _gather_rows(self, row: bytes, what: str, is_prompt: bool) -> list[bytes]:
        """The rows of all ranks, which have one length."""
        assert self._watchdog is not None
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = [own.clone() for _ in range(self.world_size)]
        # Direct sends to each rank would be twice as fast on idle cores, and many times slower on busy ones.
        work = dist.all_gather(rows, own, group=self.control, async_op=True)
        self._watchdog.wait(work, what, is_message=True, is_prompt=is_prompt)
        return [row.numpy().tobytes() for row in rows]

    def begin_broadcast(self, tensor: torch.Tensor, source: int, what: str) -> Callable[[], None]:
        """Begins to overwrite a tensor with that of one rank.

        Args:
            tensor: A tensor of the same shape and type on every rank, on the host or on the device.
            source: The rank whose values all get.
            what: What the data is, for error messages.

        Returns:
            A function that waits until the values have arrived.
        """
        return self._begin_in_place(tensor, what, dist.broadcast, as_bytes=True, group_src=source)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrites a tensor with its sum over all ranks, and waits for it; the backend chooses the order of addition.

        Args:
            tensor: A tensor of the same shape and type on every rank, on the host or on the device.
            what: What the data is, for error messages.
        """
        self._begin_in_place(tensor, what, dist.all_reduce)()

    def _begin_in_place(
        self, tensor: torch.Tensor, what: str, collective: Callable[..., Any], *, as_bytes: bool = False, **options: Any
    ) -> Callable[[], None]:
        if self.world_size == 1 or not tensor.numel():
            return lambda: None
        target = _without_repeats(tensor.detach())
        packed, is_on_host = target.contiguous(), tensor.device.type == "cpu"
        sent = packed.view(-1).view(torch.uint8) if as_bytes else packed  # no backend supports every type
        with self._guarded(what):
            work = collective(sent, group=self.control if is_on_host else self._group, async_op=True, **options)

        def wait() -> None:
            if is_on_host:
                self._wait(work, what)
            else:
                DeviceTicket(work, self._device, what, self._failure).join()
            if not target.is_contiguous():
                target.copy_(packed)

        return wait

    # Failures, and the end

    def _wait(self, work: Any, what: str) -> None:
        """Waits for data that is under way on gloo."""
        with self._guarded(what) as watchdog:
            watchdog.wait(work, what)

    @contextlib.contextmanager
    def _guarded(self, what: str, *, is_blocking: bool = False) -> Iterator[Watchdog]:
        """Turns torch's errors inside the block into errors that say what failed, and which ranks are missing.

        What ends the block with an error also ends what other ranks wait for: this rank closes its connections.
        """
        watchdog = self._watchdog
        if self.control is None or watchdog is None:
            raise CollectiveError(
                f"{what}: the collectives of rank {self.rank} are closed; make a new engine, or restart the processes"
            )
        if watchdog.verdict:
            raise CollectiveError(f"{what}: {watchdog.verdict}")
        try:
            with watchdog.watched(what) if is_blocking else contextlib.nullcontext():
                yield watchdog
        except torch.OutOfMemoryError:
            raise
        except CollectiveError:
            if watchdog.verdict:
                time.sleep(2 * watchdog.poll_s)  # others log it before their collectives fail
                self._hang_up()
            raise
        except RuntimeError as error:
            raise self._failure(what, error) from error
        except (KeyboardInterrupt, SystemExit):
            watchdog.judge(f"rank {self.rank} was interrupted while it {what}; restart from the last checkpoint")
            self._hang_up()
            raise

    def _failure(self, what: str, error: Exception) -> CollectiveError:
        self._hang_up()
        assert self._watchdog is not None
        return self._watchdog.explain(what, error)

    def _hang_up(self) -> None:
        """Closes this rank's connections, so that what is under way fails, on this rank and on those that wait for it.

        Else the others would wait on, and so would the threads of this process that work on it when Python ends.
        """
        if self._is_cut_off:
            return
        self._is_cut_off = True
        for group in {self.control, *((self._group, self._users) if self._is_gloo else ())} - {None}:
            for other in set(range(self.world_size)) - {self.rank}:
                nothing = torch.zeros(1, dtype=torch.int64, device="cpu")
                with contextlib.suppress(RuntimeError):  # gloo closes all connections when a receive times out
                    work: Any = dist.irecv(nothing, group=group, group_src=other, tag=_NOBODY_SENDS)
                    work.wait(_AT_ONCE)
        if not self._is_gloo:
            thread = threading.Thread(target=self._abort, name="hf_patrickstar-abort", daemon=True)
            thread.start()
            thread.join(_ABORT_S)

    def _abort(self) -> None:
        """Ends what is under way on a device's backend: its kernels wait for ranks that are gone, and so would exit."""
        for group in (self._reductions, self._group, self._users):
            if group is not None:
                with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                    group.abort()

    def close(self) -> None:
        """Destroys the groups that ``connect`` made; the group for data stays."""
        self._is_over.set()
        # In the same order on all ranks: communicators may wait for each other.
        groups = dict.fromkeys((self._reductions, self._group, self.control))
        made = [group for group in groups if group not in (self._users, None)]
        self.control, self._group, self._reductions = None, self._users, self._users
        self._last_reduction = None
        # Where the default group was destroyed, these groups were destroyed with it.
        for group in made if dist.is_initialized() else ():
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


def _look(collectives: "weakref.ref[Collectives]", watchdog: Watchdog, is_over: threading.Event) -> None:
    """Looks for other ranks that wait, as long as there are collectives; see [Note: how long a rank waits]."""
    while not is_over.wait(watchdog.poll_s) and collectives() is not None:
        try:
            watchdog.look()
        except (RuntimeError, OSError):  # or the store is gone
            is_over.wait(3 * watchdog.poll_s)  # the rank that gave up raises first
            if watchdog.verdict and (found := collectives()) is not None:
                found._hang_up()
            return


def _average(terms: Sequence[torch.Tensor], rank: int, wide: torch.Tensor) -> None:
    """Adds terms in the order of the ranks and writes the average over the term of one rank; others may change too.

    Args:
        terms: The terms by rank.
        rank: Whose term becomes the average.
        wide: Scratch space of fp32 for two tiles; empty where terms are added in their own type.
    """
    own, world_size = terms[rank], len(terms)
    if not wide.numel():
        total = terms[0]
        for other in range(1, world_size):
            total = torch.add(total, terms[other], out=own if other >= rank else total)
        own.div_(world_size)
        return
    tile_numel = wide.numel() // 2
    for start in range(0, own.numel(), tile_numel):
        tiles = [term[start : start + tile_numel] for term in terms]
        total, widened = (half[: tiles[0].numel()] for half in wide.split(tile_numel))
        total.copy_(tiles[0])
        for tile in tiles[1:]:
            total.add_(widened.copy_(tile))
        tiles[rank].copy_(total.div_(world_size))


def _disagreement(doings: Sequence[str]) -> CollectiveError:
    listing = "; ".join(f"rank {rank} {doing}" for rank, doing in enumerate(doings))
    return CollectiveError(
        f"the processes do not do the same: {listing}. Forward, backward, the optimizer's step, evaluation, saving "
        "and reading of parameters must be called by all of them, in the same order and equally often"
    )


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The distinct elements of an expanded tensor, which cannot be written to as a whole."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# Process groups


@functools.cache
def leave_at_exit(*, destroys: bool) -> None:
    """Has the process groups destroyed when Python ends, and gives the threads of gloo time before Python is gone.

    A thread of gloo drops the tensors of a collective after it has said that the collective is done, and takes Python's
    lock for it. Where Python has ended meanwhile, that aborts the process: "terminate called without an active
    exception" (pytorch/pytorch issue 190489). ``destroy_process_group`` waits for these threads only if nobody else
    holds the group; an engine that lives until the program ends holds it, as torch's ``DistributedDataParallel`` does.

    The first call counts, and others like it do nothing: what the program has registered since then (``atexit``) runs
    before, and may still use the groups.

    Args:
        destroys: Whether the groups that are left are destroyed.
    """
    atexit.register(_leave, destroys, os.getpid())


def _leave(destroys: bool, pid: int) -> None:
    if os.getpid() != pid:
        return  # a process that was forked from the one that talks to the others
    try:
        if destroys and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        for _ in range(_NUM_PAUSES):
            time.sleep(_PAUSE_S)


def _backend(group: "dist.ProcessGroup", device: torch.device) -> Any:
    """The backend of a process group for tensors on a device."""
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise ConfigError(
            f"collectives: the process group has no backend for {device}; initialise torch.distributed with one, for "
            "example nccl or gloo"
        ) from error
