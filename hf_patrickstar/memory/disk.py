"""The tier below the host: files with masters and optimizer states, and the ring of buffers through which they pass.

[Note: states on the disk]
Neither the device nor the host has room for the lists of some chunks. Each of these lists is a region of a file. It is
mapped into memory, so whoever asks for it has a tensor like any other, and the system brings and takes back its pages.
Updates do not go that way: threads of ``Ring`` read tiles of all lists into a few buffers, past the page cache, workers
of the host update them there, and the threads write them back. Before that a list is "put away" (``Region.put_away``):
what was written to it is on the drive. Whoever asks for it later waits for the update, and gets it mapped again. A list
into which somebody looks is not put away, and has no checksums: the system keeps both ways alike.

A file has no name: it is removed as it is made. So no other run can use it, and the system frees its space when the
process ends, in whichever way. All of it is allocated before anything else is, so a full disk is an error at once.

Every tile has a checksum, which is compared when it is read: a wrong bit is an error and not a wrong model.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash

from hf_patrickstar.common.interrupts import held_back
from hf_patrickstar.counts import Counts
from hf_patrickstar.errors import BudgetError, ConfigError, EngineError
from hf_patrickstar.memory.driver import Pending
from hf_patrickstar.memory.tiers import HOST_SHARE
from hf_patrickstar.units import MIB, align, format_nbytes

NUM_BUFFERS = 4
"""Tiles that are read, updated or written at the same time; each has a thread."""
PAGE_NBYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
"""Files are read and written in multiples of so many bytes, into memory that begins at multiples of it."""
_STRIPE_NBYTES = 16 * MIB
"""Bytes of a list that follow each other on one drive, where there are several: a tile in fp32."""
_MAP_FIXED = 0x10


class _Drive:
    """A file without a name in a directory.

    Args:
        directory: The directory.

    Raises:
        ConfigError: If no file can be made there.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - as long as this object
        except OSError as error:
            raise ConfigError(
                f"disk_path: no file can be made in '{directory}' ({error.strerror}); name a directory on a local "
                "drive that this process may write to"
            ) from error
        self.mapped = self._file.fileno()
        self.direct = self.mapped
        with contextlib.suppress(OSError, AttributeError):  # some filesystems have no way past the page cache
            self.direct = os.open(f"/proc/self/fd/{self.mapped}", os.O_RDWR | os.O_DIRECT)
            weakref.finalize(self, os.close, self.direct)
        self.nbytes = self.taken_nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Has the filesystem give the file so many bytes.

        Raises:
            BudgetError: If it has not as many.
        """
        if nbytes <= self.nbytes:
            return
        try:
            os.posix_fallocate(self.mapped, 0, nbytes)
        except OSError as error:
            os.ftruncate(self.mapped, self.nbytes)
            found = os.fstatvfs(self.mapped)
            raise BudgetError(
                f"disk_path '{self.directory}' has no {format_nbytes(nbytes)} for optimizer states, of which "
                f"{format_nbytes(found.f_bavail * found.f_frsize + self.nbytes)} are free ({error.strerror}); free "
                "some, name another directory, or several on different drives"
            ) from error
        self.nbytes = nbytes


class Region:
    """A list of a chunk in the files; see [Note: states on the disk].

    Args:
        pieces: Where it is: the drive, the first byte there, and how many bytes, one after the other.
        numel: Its elements.
        dtype: Their type.

    Attributes:
        tensor: The list, mapped into memory.
        is_open: Whether others than updates may use the tensor.
        version: Counts how often it was opened.
        what: What it is, for errors.
    """

    def __init__(self, pieces: Sequence[tuple[_Drive, int, int]], numel: int, dtype: torch.dtype) -> None:
        self.pieces = pieces
        self._pages = mmap.mmap(-1, max(sum(nbytes for *_, nbytes in pieces), 1))
        self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=numel)
        address, system = self.tensor.data_ptr(), ctypes.CDLL(None, use_errno=True)
        system.mmap.restype, begin = ctypes.c_void_p, 0
        for drive, place, nbytes in pieces:
            how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, drive.mapped, ctypes.c_int64(place)
            found = system.mmap(ctypes.c_void_p(address + begin), ctypes.c_size_t(nbytes), *how)
            if found != address + begin:
                raise BudgetError(
                    f"disk_path: {os.strerror(ctypes.get_errno())}, for a list in '{drive.directory}' that is mapped "
                    "into memory; raise vm.max_map_count of the system, or use one directory"
                )
            begin += nbytes
        self.is_open, self.version, self.what = True, 0, "a list"
        self._checksums: dict[int, tuple[int, int]] = {}  # by the first byte: how many bytes, and the checksum

    def read(self, begin: int, buffer: memoryview) -> None:
        """Reads bytes of a list that is put away, and compares them with their checksum.

        Args:
            begin: The first byte.
            buffer: Where they go. It has whole pages; what is behind the list's bytes in the last page has no meaning.

        Raises:
            EngineError: If they cannot be read, or are not those that were written.
        """
        self._transfer("read", begin, buffer)
        nbytes, expected = self._checksums.get(begin, (0, 0))
        if nbytes and xxhash.xxh3_64_intdigest(buffer[:nbytes]) != expected:
            raise self._failed("read", begin, "they are not the bytes that were written: their checksum differs")

    def write(self, begin: int, buffer: memoryview, nbytes: int) -> None:
        """Writes so many bytes of a buffer, and the rest of its last page.

        Raises:
            EngineError: If they cannot be written.
        """
        if not self.is_open:  # else somebody looks into it, who may write, too
            self._checksums[begin] = nbytes, xxhash.xxh3_64_intdigest(buffer[:nbytes])
        self._transfer("written", begin, buffer)

    def _transfer(self, what: str, begin: int, buffer: memoryview) -> None:
        call: Any = os.preadv if what == "read" else os.pwritev
        while buffer.nbytes:
            drive, place, nbytes = self._find(begin)
            try:
                done = call(drive.direct, [buffer[:nbytes]], place)
            except OSError as error:
                raise self._failed(what, begin, error.strerror) from error
            if not done:
                raise self._failed(what, begin, "the file has become shorter")
            if drive.direct == drive.mapped:  # also begins to write what was changed
                os.posix_fadvise(drive.direct, place, done, os.POSIX_FADV_DONTNEED)
            begin, buffer = begin + done, buffer[done:]

    def _find(self, begin: int) -> tuple[_Drive, int, int]:
        """Where a byte is: the drive, the place there, and how many bytes follow it."""
        number, inside = divmod(begin, _STRIPE_NBYTES) if len(self.pieces) > 1 else (0, begin)
        drive, place, nbytes = self.pieces[number]
        return drive, place + inside, nbytes - inside

    def _failed(self, what: str, begin: int, why: str | None) -> EngineError:
        drive, place, _ = self._find(begin)
        return EngineError(
            f"{self.what} cannot be {what} in the file for optimizer states in '{drive.directory}', at byte {place}: "
            f"{why}. Checkpoints are unchanged: start again with the last one, and another disk_path if the drive fails"
        )

    def open(self) -> torch.Tensor:
        """Lets others use the list, from now on, when its checksums have been compared; returns it.

        Raises:
            EngineError: As for ``read``.
        """
        if not self.is_open:
            for begin, (nbytes, _) in self._checksums.items():
                self.read(begin, memoryview(mmap.mmap(-1, align(nbytes, PAGE_NBYTES))))
            self._checksums.clear()  # anybody may write to it
            self.is_open, self.version = True, self.version + 1
        return self.tensor

    def put_away(self) -> None:
        """Ends ``open``: what was written is on the drive, and no memory has it any more."""
        self._pages.madvise(mmap.MADV_DONTNEED)
        try:
            self._pages.flush()
        except OSError as error:
            raise self._failed("written", 0, error.strerror) from error
        for drive, place, nbytes in self.pieces:
            os.posix_fadvise(drive.mapped, place, nbytes, os.POSIX_FADV_DONTNEED)
        self.is_open = False


class Disk:
    """The files of one engine, a file in each directory; see [Note: states on the disk].

    Args:
        directories: The directories; lists are striped over them.
        counts: See ``Ring``.

    Attributes:
        ring: Reads and writes them.
    """

    def __init__(self, directories: Sequence[str], counts: Counts) -> None:
        self.ring = Ring(counts)
        self._directories = directories
        self._regions: dict[int, Region] = {}  # by the address of the storage of its tensor
        self._free: dict[int, list[Sequence[tuple[_Drive, int, int]]]] = {}

    @functools.cached_property
    def _drives(self) -> list[_Drive]:
        """Made late: most trainings have room for all in memory."""
        return [_Drive(directory) for directory in self._directories]

    def reserve(self, nbytes: Iterable[int]) -> None:
        """Has the filesystems give the files room for lists.

        Args:
            nbytes: The bytes of each list.

        Raises:
            BudgetError: If one has no room.
        """
        total, drives = sum(align(size, PAGE_NBYTES) for size in nbytes), self._drives
        whole = _STRIPE_NBYTES if len(drives) > 1 else PAGE_NBYTES
        end = align(-(-(total + sum(drive.taken_nbytes for drive in drives)) // len(drives)), whole)
        for drive in drives:  # all of them, before any room is taken
            drive.reserve(max(end + whole * (len(drives) > 1), drive.taken_nbytes))

    def allocate(self, numel: int, dtype: torch.dtype) -> Region:
        """Makes a list of zeros.

        Raises:
            BudgetError: If a drive has no room.
        """
        nbytes = align(numel * dtype.itemsize, PAGE_NBYTES)
        if kept := self._free.get(nbytes):
            region = Region(kept.pop(), numel, dtype)
            region.tensor.zero_()  # another list was there
        else:
            region = Region(list(self._new_pieces(nbytes)), numel, dtype)
        self._regions[region.tensor.untyped_storage()._cdata] = region
        return region

    def _new_pieces(self, nbytes: int) -> Iterator[tuple[_Drive, int, int]]:
        """Takes new room of the drives, each time of that which has given least."""
        drives, size = self._drives, _STRIPE_NBYTES if len(self._drives) > 1 else nbytes
        self.reserve([nbytes])
        for left in range(nbytes, 0, -size):
            drive, part = min(drives, key=lambda drive: drive.taken_nbytes), min(left, size)
            yield drive, drive.taken_nbytes, part
            drive.taken_nbytes += part

    def release(self, tensor: torch.Tensor) -> None:
        """Takes a list back, if it is one of its own."""
        region = self._regions.pop(tensor.untyped_storage()._cdata, None)
        if region is not None:  # when nobody looks into it any more
            self.ring.forget()
            room = self._free.setdefault(sum(nbytes for *_, nbytes in region.pieces), [])
            weakref.finalize(region._pages, room.append, region.pieces).atexit = False

    def close(self) -> None:
        """Lets go of the files, whose space is free when nobody looks into a list any more."""
        self.ring.close()
        self._regions, self._free = {}, {}
        self.__dict__.pop("_drives", None)

    def find(self, tensor: torch.Tensor) -> Region | None:
        """The region of a list; ``None`` if it is in memory."""
        return self._regions.get(tensor.untyped_storage()._cdata)


def free_nbytes(directories: Iterable[str]) -> int:
    """Bytes that lists which are striped over some directories can take.

    Raises:
        ConfigError: If one cannot be looked at.
    """
    by_drive: dict[int, list[int]] = {}
    for directory in directories:
        try:
            found, device = os.statvfs(directory), os.stat(directory).st_dev
        except OSError as error:
            raise ConfigError(f"disk_path: '{directory}': {error.strerror}; name a directory that is there") from error
        by_drive.setdefault(device, []).append(found.f_bavail * found.f_frsize)
    each = min(min(sizes) // len(sizes) for sizes in by_drive.values())  # directories may share a drive
    return each * sum(map(len, by_drive.values()))


def resolve_disk_budget(directories: Sequence[str], disk_budget: int | str, local_world_size: int) -> int:
    """Turns ``"auto"`` into bytes; see ``resolve_budgets``.

    Raises:
        ConfigError: As for ``free_nbytes``.
    """
    return int(free_nbytes(directories) * HOST_SHARE / local_world_size if disk_budget == "auto" else disk_budget)


Lists = Mapping[str, torch.Tensor]
_Update = Callable[[Lists], None]
_Key = tuple[Region, int]


class Tile(NamedTuple):
    """Some elements of a chunk, over all lists that are on the disk.

    Attributes:
        regions: The lists, and how many elements share an entry, by name.
        start: The first element, a multiple of the pages of every list.
        stop: One after the last.
        fresh: Lists of zeros that nobody has written to.
    """

    regions: Mapping[str, tuple[Region, int]]
    start: int
    stop: int
    fresh: tuple[str, ...] = ()

    @property
    def key(self) -> _Key:
        """A tile of the same elements of the same lists has the same key."""
        return next(iter(self.regions.values()))[0], self.start

    @property
    def versions(self) -> tuple[int, ...]:
        """If they are other ones later, somebody may have written to the lists meanwhile."""
        return tuple(region.version for region, _ in self.regions.values())

    @property
    def spans(self) -> dict[str, tuple[int, int, int]]:
        """Where each list is: the first byte in its file, the bytes, and the first byte in a buffer."""
        spans, place = {}, 0
        for name, (region, block_numel) in self.regions.items():
            begin, end = (-(-at // block_numel) * region.tensor.dtype.itemsize for at in (self.start, self.stop))
            nbytes = end - begin
            spans[name] = begin, nbytes, place
            place += align(nbytes, PAGE_NBYTES)
        return spans

    def lists(self, buffer: torch.Tensor) -> Lists:
        """Its lists in a buffer, by name."""
        found = {}
        for name, (_, nbytes, place) in self.spans.items():
            found[name] = buffer.narrow(0, place, nbytes).view(self.regions[name][0].tensor.dtype)
        return found


_Work = tuple[Tile, _Update]


class Ring:
    """Reads tiles into buffers, has them updated there, and writes them back; see [Note: states on the disk].

    A thread that has nothing else to do reads a tile that the next step will begin with.

    Args:
        counts: Counts the bytes, and the seconds.

    Attributes:
        nbytes: Bytes of its memory.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.nbytes, self._memory = 0, torch.empty(0, dtype=torch.uint8, device="cpu")
        self._buffers: list[torch.Tensor] = []
        self._queue: collections.deque[tuple[Pending, Tile, _Update]] = collections.deque()
        self._next: collections.deque[Tile] = collections.deque()
        self._ahead: dict[_Key, tuple[tuple[int, ...], torch.Tensor]] = {}  # what was read, and of which versions
        self._reading: set[_Key] = set()  # what is being read ahead
        self._busy: set[_Key] = set()
        self._num_at_work, self._process_id = 0, os.getpid()
        self._since = 0.0

    def lend(self, memory: torch.Tensor) -> None:
        """Gives it memory of the host, in bytes; see ``nbytes_of``."""
        begin, size = -memory.data_ptr() % PAGE_NBYTES, (memory.numel() - PAGE_NBYTES) // NUM_BUFFERS
        self._buffers = [memory.narrow(0, begin + number * size, size) for number in range(NUM_BUFFERS)]
        self._memory, self.nbytes = memory, memory.numel()

    @staticmethod
    def nbytes_of(tile_nbytes: int) -> int:
        """Bytes that ``lend`` needs for tiles that take so many bytes, of which each list has whole pages."""
        return NUM_BUFFERS * tile_nbytes + PAGE_NBYTES if tile_nbytes else 0

    def close(self) -> torch.Tensor | None:
        """Waits for what was begun, and returns its memory."""
        self.forget()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        self.forget()
        memory, self._buffers, self.nbytes = self._memory if self.nbytes else None, [], 0
        return memory

    def forget(self) -> None:
        """Forgets what it has read ahead."""
        with self._lock:
            self._next.clear()
            self._buffers += [buffer for _, buffer in self._ahead.values()]
            self._ahead.clear()

    def submit(self, tiles: Iterable[_Work], ahead: Iterable[_Work] = ()) -> Pending:
        """Begins to read, update and write tiles, after those that were submitted before.

        Args:
            tiles: The tiles, each with what updates it in the lists that it is given, by their names.
            ahead: What the next step will submit; the first of it is read as soon as all else is done.

        Returns:
            A ticket that comes when all are written.
        """
        items = list(tiles)
        if items and (not self.nbytes or os.getpid() != self._process_id):
            raise EngineError("states on the disk cannot be updated in a forked process; train in the first one")
        ticket = Pending(len(items))
        with held_back(), self._lock:
            threads = self._threads = self._threads or ThreadPoolExecutor(NUM_BUFFERS, "hf_patrickstar-disk")
            self._queue.extend([(ticket, tile, update) for tile, update in items])
            self._next = collections.deque(tile._replace(fresh=()) for tile, _ in itertools.islice(ahead, NUM_BUFFERS))
            num = min(NUM_BUFFERS - self._num_at_work, len(items))
            self._num_at_work += num
        try:
            with held_back():  # else nobody would do what is in the queue
                for _ in range(num):
                    threads.submit(self._work)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            self._work()  # the program exits, which begins nothing in threads any more
        return ticket

    @torch.no_grad()
    def _work(self) -> None:
        while (ended := self._do_next()) is not None:
            for ticket in ended:
                ticket.count()

    def _do_next(self) -> Sequence[Pending] | None:
        """Does what is next, and returns its ticket if it has one; ``None`` if there is nothing to do.

        Nothing refers to what was done when this returns: its memory is to be free when the ticket comes.
        """
        with self._lock:
            ready = (item for item in self._queue if item[1].key not in self._reading)
            if (item := next(ready, None)) is None:
                while self._next and self._buffers:
                    tile = self._next.popleft()
                    versions = tile.versions  # whoever opens a list from now on makes them void
                    if tile.key not in self._busy | self._reading and not any(
                        region.is_open for region, _ in tile.regions.values()
                    ):
                        self._reading.add(tile.key)
                        break
                else:
                    self._num_at_work -= 1
                    return None
            else:
                self._queue.remove(item)
                ticket, tile, update = item
                if not self._busy:
                    self._since = time.perf_counter()
                self._busy.add(tile.key)
            read, buffer = self._ahead.pop(tile.key, ((), None))
            if buffer is None:
                buffer = self._buffers.pop() if self._buffers else self._ahead.popitem()[1][1]
        if item is None:
            self._read_ahead(tile, buffer, versions)
            return ()
        ticket.do(functools.partial(self._process, tile, update, buffer, is_read=read == tile.versions))
        with self._lock:
            self._buffers.append(buffer)
            self._busy.discard(tile.key)
            if not self._busy:
                self._counts.disk_seconds += time.perf_counter() - self._since
        return (ticket,)

    def _process(self, tile: Tile, update: _Update, buffer: torch.Tensor, *, is_read: bool) -> None:
        if not is_read:
            self._read(tile, buffer)
        update(tile.lists(buffer))
        for name, (begin, nbytes, place) in tile.spans.items():
            tile.regions[name][0].write(begin, _pages(buffer, place, nbytes), nbytes)
            with self._lock:
                self._counts.disk_written_nbytes += nbytes

    def _read_ahead(self, tile: Tile, buffer: torch.Tensor, versions: tuple[int, ...]) -> None:
        is_read = False
        with contextlib.suppress(Exception):  # it is tried again when it is needed
            self._read(tile, buffer)
            is_read = True
        with self._lock:
            self._reading.discard(tile.key)
            if is_read:
                self._ahead[tile.key] = versions, buffer
            else:
                self._buffers.append(buffer)

    def _read(self, tile: Tile, buffer: torch.Tensor) -> None:
        for name, (begin, nbytes, place) in tile.spans.items():
            if name in tile.fresh:
                buffer.narrow(0, place, nbytes).zero_()
                continue
            tile.regions[name][0].read(begin, _pages(buffer, place, nbytes))
            with self._lock:
                self._counts.disk_read_nbytes += nbytes


def _pages(buffer: torch.Tensor, place: int, nbytes: int) -> memoryview:
    """Bytes of a buffer, and the rest of their last page."""
    return buffer.numpy().data[place : place + align(nbytes, PAGE_NBYTES)]
