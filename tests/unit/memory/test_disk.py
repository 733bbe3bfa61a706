"""Lists in files: updates and whoever opens a list see the same bytes, faults of drives are errors, nothing is left."""

import collections
import concurrent.futures
import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import weakref

import pytest
import torch
from support.processes import ENVIRONMENT

from hf_patrickstar.counts import Counts
from hf_patrickstar.errors import BudgetError, ConfigError, EngineError
from hf_patrickstar.memory import disk as disk_module
from hf_patrickstar.memory.disk import NUM_BUFFERS, PAGE_NBYTES, Disk, Ring, Tile, free_nbytes, resolve_disk_budget
from hf_patrickstar.runtime.chunk import Lists
from hf_patrickstar.units import format_nbytes

pytestmark = [
    pytest.mark.own_streams,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux says of files and memory"),
]

TYPES = {"master": (torch.float32, 1), "exp_avg": (torch.bfloat16, 1), "exp_avg_sq": (torch.uint8, 1)}
WITH_SCALES = {**TYPES, "absmax": (torch.float32, 256)}
TILE_NUMEL, TILE_NUMEL_WITH_SCALES = 4 * PAGE_NBYTES, 64 * PAGE_NBYTES
"""Whole pages of each list."""
STRIPE_NBYTES = 6 * PAGE_NBYTES
"""Tiles end in the middle of stripes."""
TIMEOUT_S = 30
EIO = OSError(errno.EIO, "Input/output error")
SHM = "/dev/shm"


def wait(ticket, timeout_s=TIMEOUT_S):
    concurrent.futures.wait([ticket.future], timeout_s)
    assert ticket.future.done(), "hangs"
    ticket.wait()


def until(condition):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.001)


class OnDisk:
    """The lists of a chunk on the disk, and what is in them, in memory.

    Args:
        disk: Where they are.
        numel: Elements of the parameters.
        kinds: The types of the lists, and how many elements share an entry, by name.

    Attributes:
        regions: The lists in the files.
        expected: What they have to have.
        updated: The tiles that were updated, one entry for each time.
        hold: Is called with the number of a tile before that is updated.
    """

    def __init__(self, disk, numel=6 * TILE_NUMEL + 777, kinds=TYPES):
        self.disk = disk
        self.tile_numel = TILE_NUMEL if kinds is TYPES else TILE_NUMEL_WITH_SCALES
        self.numel, self.num_tiles = numel, -(-numel // self.tile_numel)
        shapes = {name: (-(-numel // block_numel), dtype) for name, (dtype, block_numel) in kinds.items()}
        self.regions = {name: disk.allocate(*shape) for name, shape in shapes.items()}
        self.expected = {name: torch.zeros(num, dtype=dtype) for name, (num, dtype) in shapes.items()}
        self.blocks = {name: block_numel for name, (_, block_numel) in kinds.items()}
        self.updated, self.hold = [], lambda number: None
        for name, region in self.regions.items():
            region.what = f"'{name}' of chunk 3"

    def write(self, *names):
        """Other values, by hand."""
        for name in names or self.regions:
            values = torch.randint(0, 60, self.expected[name].shape)
            self.expected[name].copy_(values)
            self.regions[name].open().copy_(values)
        return self

    def put_away(self):
        for region in self.regions.values():
            region.put_away()
        return self

    def tiles(self, numbers=None, fresh=()):
        lists = {name: (region, self.blocks[name]) for name, region in self.regions.items()}
        for number in range(self.num_tiles) if numbers is None else numbers:
            start = number * self.tile_numel
            tile = Tile(lists, start, min(start + self.tile_numel, self.numel), fresh)
            yield tile, functools.partial(self.update, number)

    def update(self, number, lists):
        self.hold(number)
        for name in lists:
            lists[name].add_(1 + number % 3)  # none has more than 255, which are exact in each type
        self.updated.append(number)

    def begin(self, numbers=None, ahead=(), fresh=()):
        return self.disk.ring.submit(self.tiles(numbers, fresh), ahead)

    def step(self, numbers=None, ahead=()):
        """An update of some tiles, by default of all."""
        wait(self.begin(numbers, ahead))
        return self

    def part(self, name, number):
        """The part of a list that is in a tile."""
        numel = self.tile_numel // self.blocks[name]
        return slice(number * numel, (number + 1) * numel)

    def nbytes(self, numbers=None, names=None):
        """Bytes of some tiles."""
        numbers = range(self.num_tiles) if numbers is None else numbers
        return sum(self.expected[name][self.part(name, n)].nbytes for n in numbers for name in names or self.regions)

    def note_updates(self):
        while self.updated:
            number = self.updated.pop()
            for name, expected in self.expected.items():
                expected[self.part(name, number)].add_(1 + number % 3)

    def check(self):
        """Opens the lists: all have what they have to have."""
        self.note_updates()
        for name, region in self.regions.items():
            assert torch.equal(region.open(), self.expected[name]), name

    def place(self, name, begin):
        """The drive with a byte of a list, and its place in the file there."""
        for drive, place, nbytes in self.regions[name].pieces:
            if begin < nbytes:
                return drive, place + begin
            begin -= nbytes
        raise AssertionError("no byte of the list")


@pytest.fixture
def disk_in(monkeypatch):
    """Makes disks in directories, with memory for their ring."""
    monkeypatch.setattr(disk_module, "_STRIPE_NBYTES", STRIPE_NBYTES)
    made = weakref.WeakSet()

    def make(*directories, tile_nbytes=7 * TILE_NUMEL):
        counts = Counts()
        disk = Disk([str(directory) for directory in directories], counts)
        disk.counts = counts
        disk.ring.lend(torch.empty(Ring.nbytes_of(tile_nbytes) + 1, dtype=torch.uint8)[1:])  # begins anywhere
        made.add(disk)
        return disk

    yield make
    for disk in made:
        disk.ring.close()


@pytest.fixture
def three(tmp_path):
    """Three directories."""
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    return directories


def refuse_direct(monkeypatch):
    """No filesystem has a way past the page cache; returns how often one was asked for it."""
    refused, system_open = [], os.open

    def instead(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", instead)
    return refused


# The same bytes both ways


@pytest.fixture(params=["one directory", "three", "through the page cache", "no such flag", "memory"])
def anywhere(request, disk_in, tmp_path, three, monkeypatch):
    """A disk with scales in its tiles."""
    refused, directories, kind = None, [tmp_path], request.param
    in_memory = contextlib.nullcontext(None)
    if kind == "three":
        directories = three
    elif kind == "through the page cache":
        refused = refuse_direct(monkeypatch)
    elif kind == "no such flag":
        monkeypatch.delattr(os, "O_DIRECT")
    elif kind == "memory":
        if not os.access(SHM, os.W_OK):
            pytest.skip("no tmpfs")
        in_memory = tempfile.TemporaryDirectory(dir=SHM)
    with in_memory as found:
        directories = [found] if found else directories
        yield disk_in(*directories, tile_nbytes=7 * TILE_NUMEL_WITH_SCALES + PAGE_NBYTES)
        assert not (found and os.listdir(found))
    assert refused != []


NUMEL = 5 * TILE_NUMEL_WITH_SCALES + 777
"""More tiles than buffers, and an odd one."""


def test_updates_find_what_those_before_have_written(anywhere):
    lists = OnDisk(anywhere, NUMEL, WITH_SCALES).write().put_away()
    for _ in range(3):
        lists.step()
    moved = anywhere.counts.disk_read_nbytes, anywhere.counts.disk_written_nbytes
    lists.check()
    assert moved == (3 * lists.nbytes(), 3 * lists.nbytes())
    assert anywhere.counts.disk_seconds > 0


def test_updates_and_whoever_opens_a_list_see_what_the_other_has_written(anywhere):
    lists = OnDisk(anywhere, NUMEL, WITH_SCALES).put_away().step()
    for names in ([], ["exp_avg", "absmax"]):
        lists.check()
        lists.write(*names).put_away().step()
    lists.check()


def test_lists_are_striped_over_all_directories(disk_in, three):
    lists = OnDisk(disk_in(*three)).write()
    for region in lists.regions.values():
        shares = collections.Counter()
        for drive, _, nbytes in region.pieces:
            shares[drive.directory] += nbytes
        assert set(shares) == set(map(str, three))
        assert max(shares.values()) - min(shares.values()) <= STRIPE_NBYTES
    lists.put_away().step().check()


def test_lists_of_several_chunks_are_updated_together(disk_in, three):
    disk = disk_in(*three)
    chunks = [OnDisk(disk, (2 + number) * TILE_NUMEL - 99).write().put_away() for number in range(3)]
    for _ in range(2):
        for ticket in [chunk.begin() for chunk in chunks]:
            wait(ticket)
    for chunk in chunks:
        chunk.check()


@pytest.mark.parametrize("num", [1, 3])
def test_a_list_gets_room_that_another_one_had_and_begins_with_zeros(disk_in, three, num):
    disk = disk_in(*three[:num])
    others, gone = OnDisk(disk).write().put_away(), OnDisk(disk).write().put_away().step()
    files = {drive: os.fstat(drive.mapped).st_size for drive, *_ in gone.regions["master"].pieces}
    for region in gone.regions.values():
        disk.release(region.tensor)
    del gone, region
    new = OnDisk(disk)
    assert {drive: os.fstat(drive.mapped).st_size for drive in files} == files
    others.step()
    new.put_away().step().check()
    new.write().put_away().step()
    others.step().check()
    new.check()


def test_a_tensor_is_found_by_its_memory_until_it_is_given_back(disk_in, tmp_path):
    disk, stranger = disk_in(tmp_path), torch.zeros(5)
    region = disk.allocate(5, torch.float32)
    assert disk.find(region.tensor[2:]) is region
    assert disk.find(stranger) is None
    disk.release(stranger)
    disk.release(region.tensor)
    assert disk.find(region.tensor) is None


def cached_nbytes(region):
    """Bytes of a list that are in the page cache."""
    num = -(-region.tensor.nbytes // mmap.PAGESIZE)
    found, system = (ctypes.c_ubyte * num)(), ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(region.tensor.data_ptr()), ctypes.c_size_t(num * mmap.PAGESIZE)
    assert system.mincore(address, nbytes, found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def test_no_memory_has_a_list_that_is_put_away(disk_in, tmp_path):
    disk = disk_in(tmp_path)
    lists = OnDisk(disk, 40 * TILE_NUMEL).write()
    drive, *_ = lists.regions["master"].pieces[0]
    in_memory = os.path.ismount(SHM) and os.stat(tmp_path).st_dev == os.stat(SHM).st_dev
    if drive.direct == drive.mapped or in_memory:
        pytest.skip("this filesystem has no way past the page cache")
    assert all(cached_nbytes(region) >= region.tensor.nbytes for region in lists.regions.values())
    lists.put_away()
    assert sum(map(cached_nbytes, lists.regions.values())) == 0
    lists.step()
    assert sum(map(cached_nbytes, lists.regions.values())) == 0
    lists.check()


def test_as_many_tiles_as_there_are_buffers_are_under_way_at_a_time(disk_in, tmp_path):
    lists = OnDisk(disk_in(tmp_path), 2 * NUM_BUFFERS * TILE_NUMEL).write().put_away()
    together = threading.Barrier(NUM_BUFFERS, timeout=TIMEOUT_S)
    lists.hold = lambda number: together.wait()
    lists.step().check()


def test_the_memory_of_the_ring_comes_back_when_all_is_written(disk_in, tmp_path):
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk).write().put_away() for _ in range(2))
    for numbers in (None, []):
        read_ahead(lists, others)
        ticket, nbytes = others.begin(numbers, ahead=others.tiles()), disk.ring.nbytes
        memory = disk.ring.close()
        assert ticket.future.done()
        assert (memory.numel(), disk.ring.nbytes) == (nbytes, 0)
        memory.fill_(77)  # it is for something else meanwhile
        assert not [thread for thread in threading.enumerate() if "-disk" in thread.name]
        disk.ring.lend(memory)
        lists.step()
    lists.check()
    others.step().check()
    assert disk.ring.close() is not None
    assert disk.ring.close() is None


def test_a_ring_without_tiles_needs_no_memory_and_is_done_at_once(tmp_path):
    disk = Disk([str(tmp_path)], Counts())
    assert (disk.ring.nbytes, disk.ring.close(), Ring.nbytes_of(0)) == (0, None, 0)
    wait(disk.ring.submit([]))


# Lists of zeros


def test_fresh_lists_are_zeros_and_are_not_read(disk_in, tmp_path):
    disk = disk_in(tmp_path)
    lists, others = OnDisk(disk).write().put_away(), OnDisk(disk).write().put_away()
    others.step()  # buffers have something of them
    before = disk.counts.disk_read_nbytes
    wait(lists.begin(fresh=("exp_avg", "exp_avg_sq")))
    assert disk.counts.disk_read_nbytes - before == lists.nbytes(names=["master"])
    for name in ("exp_avg", "exp_avg_sq"):
        lists.expected[name].zero_()
    lists.step()
    assert disk.counts.disk_read_nbytes - before == lists.nbytes(names=["master"]) + lists.nbytes()
    read_ahead(lists, others, fresh=("exp_avg",))  # as it was then
    lists.step().check()


def test_tiles_that_nobody_has_updated_are_zeros(disk_in, three):
    lists = OnDisk(disk_in(*three)).put_away()
    wait(lists.begin([1, 4], fresh=tuple(TYPES)))
    lists.step([0, 4, 5]).check()


# Reading ahead


def read_ahead(lists, others, fresh=()):
    """Updates others, and has the first tiles of lists read ahead; returns how many bytes."""
    counts = lists.disk.counts
    nbytes = lists.nbytes(range(NUM_BUFFERS))
    expected = counts.disk_read_nbytes + others.nbytes() + nbytes
    others.step(ahead=lists.tiles(fresh=fresh))
    until(lambda: counts.disk_read_nbytes >= expected)
    assert counts.disk_read_nbytes == expected
    return nbytes


@pytest.mark.parametrize("num", [1, 3])
def test_what_was_read_ahead_is_not_read_again(disk_in, three, num):
    disk = disk_in(*three[:num])
    lists, others = (OnDisk(disk).write().put_away() for _ in range(2))
    for _ in range(3):
        nbytes, before = read_ahead(lists, others), disk.counts.disk_read_nbytes
        assert 0 < nbytes < lists.nbytes()
        lists.step()
        assert disk.counts.disk_read_nbytes - before == lists.nbytes() - nbytes
    lists.check()
    others.check()


@pytest.mark.parametrize("name", TYPES)
def test_what_somebody_may_have_changed_since_is_read_anew(disk_in, tmp_path, name):
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk).write().put_away() for _ in range(2))
    read_ahead(lists, others)
    before = disk.counts.disk_read_nbytes
    lists.write(name).put_away().step()
    assert disk.counts.disk_read_nbytes - before == lists.nbytes()
    lists.check()


def test_other_tiles_get_the_buffers_of_what_was_read_ahead(disk_in, tmp_path):
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk).write().put_away() for _ in range(2))
    read_ahead(lists, others)
    others.step()
    lists.step().check()
    others.check()


def test_a_tile_that_is_being_read_ahead_is_waited_for(disk_in, tmp_path, monkeypatch):
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk).write().put_away() for _ in range(2))
    is_reading, gate = threading.Event(), threading.Event()
    _, place = lists.place("exp_avg", 0)

    def fault(fd, begin, call):
        if begin == place and not is_reading.is_set():
            is_reading.set()
            assert gate.wait(TIMEOUT_S)
        return call()

    let(monkeypatch, "preadv", fault)
    others.step(ahead=lists.tiles([0]))
    assert is_reading.wait(TIMEOUT_S)
    ticket = lists.begin([0, 3])
    others.step()
    assert not ticket.future.done()
    gate.set()
    wait(ticket)
    lists.step().check()
    others.check()


def test_a_tile_that_is_being_updated_is_not_read_ahead(disk_in, tmp_path):
    disk, gate = disk_in(tmp_path), threading.Event()
    lists = OnDisk(disk).write().put_away()
    lists.hold = lambda number: number or gate.wait(TIMEOUT_S)
    ticket = lists.begin([0, 1], ahead=lists.tiles([0, 1]))
    until(lambda: disk.counts.disk_read_nbytes == lists.nbytes([0, 1, 1]))
    gate.set()
    wait(ticket)
    lists.step().check()


def test_open_lists_are_not_read_ahead(disk_in, tmp_path):
    """Whoever has them may write to them at any moment."""
    disk = disk_in(tmp_path)
    lists, coming, others = (OnDisk(disk).write() for _ in range(3))
    for put_away in (*coming.regions.values(), *others.regions.values(), lists.regions["master"]):
        put_away.put_away()
    expected = disk.counts.disk_read_nbytes + others.nbytes() + coming.nbytes([0])
    others.step(ahead=[*lists.tiles([0, 1]), *coming.tiles([0])])
    until(lambda: disk.counts.disk_read_nbytes >= expected)
    lists.write("exp_avg_sq").put_away().step()
    assert disk.counts.disk_read_nbytes == expected + lists.nbytes()
    for each in (lists, coming.step(), others):
        each.check()


def test_a_list_never_gets_what_was_read_ahead_of_one_that_is_gone(disk_in, tmp_path, monkeypatch):
    """Even if Python gives it the same place."""
    disk, kinds = disk_in(tmp_path), {"master": TYPES["master"]}
    others, gone = (OnDisk(disk, TILE_NUMEL, kinds).write().put_away() for _ in range(2))
    nbytes = others.nbytes() + gone.nbytes()
    others.step(ahead=gone.tiles())
    until(lambda: disk.counts.disk_read_nbytes == nbytes)
    (region,) = gone.regions.values()
    address, before = id(region), weakref.ref(region)
    disk.release(region.tensor)
    del gone, region
    gc.collect()
    if before() is None:
        monkeypatch.setattr(disk_module, "id", lambda region: address, raising=False)
    OnDisk(disk, TILE_NUMEL, kinds).write().put_away().step().check()


@pytest.mark.parametrize(("error", "fails_again"), [(EIO, False), (EIO, True), (MemoryError(), False)])
def test_a_read_ahead_that_fails_is_tried_again_when_it_is_needed(disk_in, tmp_path, monkeypatch, error, fails_again):
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk).write().put_away().step() for _ in range(2))
    has_failed = threading.Event()

    def fault(drive, place, call):
        if any(begin <= place < begin + nbytes for _, begin, nbytes in lists.regions["exp_avg"].pieces):
            has_failed.set()
            raise error
        return call()

    with monkeypatch.context() as patch:
        let(patch, "preadv", fault)
        for _ in range(2):
            has_failed.clear()
            others.step(ahead=lists.tiles())
            assert has_failed.wait(TIMEOUT_S)
        if fails_again:
            with pytest.raises(EngineError, match="'exp_avg' of chunk 3 cannot be read"):
                lists.step()
    others.step().check()
    lists.step().check()


@pytest.mark.parametrize("seed", range(3))
def test_updates_reads_ahead_and_changes_in_any_order_come_to_the_same(disk_in, three, seed):
    choose = random.Random(seed)
    disk = disk_in(*three[: 1 + seed % 2])
    chunks = [
        OnDisk(disk, numel).write().put_away() for numel in (12 * TILE_NUMEL + 777, 3 * TILE_NUMEL, 5 * TILE_NUMEL + 1)
    ]
    for _ in range(25):
        under_way = []
        for lists in choose.sample(chunks, choose.randint(1, 3)):
            kind = choose.choice(["open", "write", "put away", "put away"])
            if kind == "open":
                lists.note_updates()
                choose.choice([*lists.regions.values()]).open()
            elif kind == "write":
                lists.note_updates()
                lists.write(choose.choice([*TYPES]))
            for region in lists.regions.values():
                region.put_away()
            numbers = sorted(choose.sample(range(lists.num_tiles), choose.randint(1, lists.num_tiles)))
            coming = choose.choice(chunks)
            ahead = [*coming.tiles(choose.sample(range(coming.num_tiles), choose.randint(0, coming.num_tiles)))]
            under_way.append(lists.begin(numbers, ahead))
        for ticket in under_way:
            wait(ticket)
        for lists in chunks:  # else there may be more than 255 soon
            lists.note_updates()
            if max(expected.max() for expected in lists.expected.values()) > 200:
                lists.write().put_away()
    for lists in chunks:
        lists.check()


# Faults


def let(patch, name, fault):
    """Has ``os.preadv`` or ``os.pwritev`` do as ``fault(fd, place, call)``; ``call`` moves at most some bytes."""
    system_call = getattr(os, name)

    def instead(fd, buffers, place):
        def call(most=sys.maxsize):
            return system_call(fd, [buffer[:most] for buffer in buffers], place)

        return fault(fd, place, call)

    patch.setattr(os, name, instead)


@pytest.mark.parametrize(("most", "is_direct"), [(PAGE_NBYTES, True), (5 * PAGE_NBYTES, True), (512, False)])
@pytest.mark.parametrize("num", [1, 3])
def test_reads_and_writes_that_end_early_go_on(disk_in, three, monkeypatch, most, is_direct, num):
    if not is_direct:
        refuse_direct(monkeypatch)
    lists, seen = OnDisk(disk_in(*three[:num]), TILE_NUMEL + 5000).write().put_away(), collections.Counter()

    def fault(name, fd, place, call):
        seen[name] += 1
        return call(most)

    for name in ("preadv", "pwritev"):
        let(monkeypatch, name, functools.partial(fault, name))
    lists.step().step().check()
    assert min(seen["preadv"], seen["pwritev"]) > lists.nbytes() // most


FAULTS = {
    "bad sector": ("preadv", errno.EIO, "read", "Input/output error"),
    "end of the file": ("preadv", None, "read", "the file has become shorter"),
    "full": ("pwritev", errno.ENOSPC, "written", "No space left on device"),
    "nothing written": ("pwritev", None, "written", "the file has become shorter"),
}


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_an_error_says_which_list_cannot_be_read_or_written_and_where(disk_in, three, monkeypatch, name, num):
    function, number, what, why = FAULTS[name]
    disk, failed = disk_in(*three[:num]), []
    before, lists, after = (OnDisk(disk).write().put_away().step() for _ in range(3))
    drive, place = lists.place("exp_avg", 3 * STRIPE_NBYTES)  # tile 2 begins in the stripe before
    inode = os.fstat(drive.mapped).st_ino

    def fault(fd, begin, call):
        most = place - begin if begin < place else sys.maxsize
        if begin == place and os.fstat(fd).st_ino == inode:
            failed.append(place)
            if number is None:
                return 0
            raise OSError(number, os.strerror(number))
        return call(most)  # so that it fails just there

    with monkeypatch.context() as patch:
        let(patch, function, fault)
        tickets = [each.begin() for each in (before, lists, after)]
        wait(tickets[0])
        message = f"'exp_avg' of chunk 3 cannot be {what} in the file .* in '{drive.directory}', at byte {place}: {why}"
        with pytest.raises(EngineError, match=message) as caught:
            wait(tickets[1])
        wait(tickets[2])
    assert failed == [place]
    assert (number is None) == (caught.value.__cause__ is None)
    for each in (before, after):
        each.step().check()
    if what == "read":
        lists.step().check()
        return
    well = [0, 1, 3, 4, 5, 6]
    lists.step(well).note_updates()
    for tile in well:
        part = lists.part("master", tile)
        assert torch.equal(lists.regions["master"].open()[part], lists.expected["master"][part])
    with pytest.raises(EngineError, match="'exp_avg' of chunk 3 cannot be read"):
        lists.regions["exp_avg"].open()


def test_an_update_that_fails_writes_nothing(disk_in, tmp_path):
    disk = disk_in(tmp_path)
    lists = OnDisk(disk).write().put_away().step()
    written = disk.counts.disk_written_nbytes

    def fail(lists):
        for values in lists.values():
            values.fill_(0)
        raise ZeroDivisionError

    tiles = [(tile, fail) for tile, _ in lists.tiles()]
    with pytest.raises(ZeroDivisionError):
        wait(disk.ring.submit(tiles))
    assert disk.counts.disk_written_nbytes == written
    lists.step().check()


@pytest.mark.parametrize("finds_out", ["an update", "opening", "an update that was read ahead"])
@pytest.mark.parametrize(("name", "element"), [("master", 0), ("exp_avg", -1), ("exp_avg_sq", 2 * TILE_NUMEL)])
def test_a_wrong_bit_is_an_error(disk_in, three, finds_out, name, element):
    disk = disk_in(*three)
    lists, others = (OnDisk(disk).write().put_away().step() for _ in range(2))
    drive, place = lists.place(name, (element % lists.numel) * TYPES[name][0].itemsize)
    (byte,) = os.pread(drive.mapped, 1, place)
    os.pwrite(drive.mapped, bytes([byte ^ 16]), place)
    region = lists.regions[name]
    message = f"'{name}' of chunk 3 cannot be read .* checksum differs.*start again with the last one"
    for _ in range(2):
        if finds_out == "an update that was read ahead":
            others.step(ahead=lists.tiles())
        with pytest.raises(EngineError, match=message):
            region.open() if finds_out == "opening" else lists.step()
    assert not region.is_open
    os.pwrite(drive.mapped, bytes([byte]), place)  # the error has changed nothing
    lists.step().check()
    others.check()


# Directories


def test_a_directory_may_vanish(disk_in, three):
    disk = disk_in(*three)
    before = OnDisk(disk).write().put_away().step()
    for directory in three:
        shutil.rmtree(directory)
    after = OnDisk(disk).write().put_away()
    for lists in (before, after):
        lists.step().check()


@pytest.mark.parametrize("kind", ["missing", "a file", "refused", "of the system"])
@pytest.mark.parametrize("use", ["allocate", "reserve"])
def test_a_directory_that_takes_no_file_is_named(tmp_path, monkeypatch, kind, use):
    directory, system_open = tmp_path / "drive", os.open
    if kind == "a file":
        directory.write_text("")
    elif kind == "refused":
        directory.mkdir()

        def instead(path, *args, **kwargs):  # root may write everywhere
            if str(path).startswith(str(directory)):
                raise PermissionError(errno.EACCES, "Permission denied")
            return system_open(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", instead)
    elif kind == "of the system":
        directory = pathlib.Path("/proc")
    disk = Disk([str(tmp_path), str(directory)], Counts())  # it is asked late: most trainings need no disk
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"disk_path: no file can be made in '{directory}' \(.+\); name a dir"):
            disk.allocate(1, torch.float32) if use == "allocate" else disk.reserve([1])


def let_drives_have(patch, most, free=0, full=None):
    """Filesystems, or that of one file, give a file at most so many bytes, and say that so many are free."""
    system_call, found = os.posix_fallocate, types.SimpleNamespace(f_bavail=free, f_frsize=1)

    def instead(fd, begin, nbytes):
        if begin + nbytes > most and full in (None, fd):
            if most:
                system_call(fd, begin, most)  # some leave what they have found
            raise OSError(errno.ENOSPC, "No space left on device")
        system_call(fd, begin, nbytes)

    patch.setattr(os, "posix_fallocate", instead)
    patch.setattr(os, "fstatvfs", lambda path: found)


def test_a_full_drive_is_an_error_with_what_is_needed_and_what_is_free(disk_in, tmp_path, monkeypatch):
    disk = disk_in(tmp_path)
    lists = OnDisk(disk, 2 * TILE_NUMEL).write().put_away().step()
    drive, *_ = lists.regions["master"].pieces[0]
    taken = os.fstat(drive.mapped).st_size
    assert taken == 7 * 2 * TILE_NUMEL
    need, free = (re.escape(format_nbytes(taken + nbytes)) for nbytes in (10 * 2**20, 3 * 2**20))
    message = rf"disk_path '{tmp_path}' has no {need} .* of which {free} are free \(No space left on device\)"
    with monkeypatch.context() as patch:
        let_drives_have(patch, taken + 3 * 2**20, 3 * 2**20)
        for ask in (lambda: disk.allocate(10 * 2**20, torch.uint8), lambda: disk.reserve([2**20] * 9 + [2**20 - 1])):
            with pytest.raises(BudgetError, match=message) as caught:
                ask()
            assert isinstance(caught.value.__cause__, OSError)
            assert os.fstat(drive.mapped).st_size == taken, "it gives back what it did not get wholly"
        small = OnDisk(disk, TILE_NUMEL).write().put_away().step()
        small.check()
    lists.step().check()


def test_a_list_for_which_one_drive_has_no_room_takes_none_of_the_others(disk_in, three, monkeypatch):
    sizes = []
    for num_failures in (0, 3):
        disk = disk_in(*three)
        drives = [drive for drive, *_ in disk.allocate(3 * STRIPE_NBYTES, torch.uint8).pieces]
        with monkeypatch.context() as patch:
            let_drives_have(patch, 0, full=drives[2].mapped)
            for _ in range(num_failures):
                with pytest.raises(BudgetError, match=f"disk_path '{three[2]}' has no"):
                    disk.allocate(9 * STRIPE_NBYTES, torch.uint8)
        disk.allocate(9 * STRIPE_NBYTES, torch.uint8)
        sizes.append([os.fstat(drive.mapped).st_size for drive in drives])
    assert sizes[0] == sizes[1]


def test_room_that_was_reserved_is_there(disk_in, tmp_path, monkeypatch):
    disk, sizes = disk_in(tmp_path), [(5 * TILE_NUMEL + 1) * dtype.itemsize for dtype, _ in TYPES.values()]
    disk.allocate(1000, torch.uint8)
    disk.reserve([])
    disk.reserve(sizes * 2)
    let_drives_have(monkeypatch, 0)
    for _ in range(2):
        lists = OnDisk(disk, 5 * TILE_NUMEL + 1)
    lists.write().put_away().step().check()


def test_what_is_reserved_takes_space_of_the_drive(disk_in, tmp_path):
    """Else another program could take it."""
    disk = disk_in(tmp_path)
    region = disk.allocate(1, torch.uint8)
    disk.reserve([2**20])
    found = os.fstat(region.pieces[0][0].mapped)
    assert found.st_blocks * 512 >= 2**20


@pytest.mark.parametrize(
    ("drives", "free", "expected"),
    [
        ({"a": 1}, {1: 100}, 100),
        ({"a": 1, "b": 1}, {1: 100}, 100),
        ({"a": 1, "b": 2}, {1: 100, 2: 70}, 140),  # as much on each, since lists are striped
        ({"a": 1, "b": 1, "c": 2}, {1: 100, 2: 30}, 90),
        ({"a": 1, "b": 1, "c": 2}, {1: 60, 2: 100}, 90),
    ],
)
def test_directories_on_one_drive_share_what_is_free(monkeypatch, drives, free, expected):
    page = 4096
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: types.SimpleNamespace(st_dev=drives[path]))
        patch.setattr(
            os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=free[drives[path]], f_bfree=1000, f_frsize=page)
        )
        assert free_nbytes(drives) == expected * page


def test_real_directories_of_one_drive_have_no_more_free_than_one(three, tmp_path):
    one, found = free_nbytes([tmp_path]), free_nbytes(three)
    assert found < 1.5 * one, "others may use the drive, too"
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=f"disk_path: '{missing}': No such file or directory; name a directory"):
        free_nbytes([tmp_path, missing])


def test_each_process_may_take_its_part_of_nine_tenths_of_what_is_free(monkeypatch, three):
    found = types.SimpleNamespace(f_bavail=1000, f_frsize=4096)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: found)
        assert resolve_disk_budget(three[:1], "auto", 2) == 450 * 4096
        assert resolve_disk_budget(three[:1], 5 * 4096, 2) == 5 * 4096, "what was asked for is of each process"


# Nothing is left


def holders(directory):
    """What of this process keeps files in a directory, by their names or without: open files, and memory."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = re.findall(r"/.*", pathlib.Path("/proc/self/maps").read_text())
    return [path for path in (*files, *maps) if path.startswith(f"{directory}/")]


def test_no_file_ever_has_a_name(disk_in, three):
    seen = []
    disk = disk_in(*three)
    lists = OnDisk(disk).write()
    assert holders(three[2])

    def look(update, found):
        seen.append([path.name for directory in three for path in directory.iterdir()])
        update(found)

    for _ in range(2):
        wait(disk.ring.submit((tile, functools.partial(look, update)) for tile, update in lists.put_away().tiles()))
        lists.check()
    assert seen == [[]] * 2 * lists.num_tiles


def test_space_is_free_when_nobody_has_the_disk_any_more(disk_in, tmp_path):
    """Even with updates that failed, reads ahead, and a list that somebody looks into, until he does so no more."""
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk).write().put_away() for _ in range(2))
    read_ahead(lists, others)
    with pytest.raises(KeyError):
        wait(disk.ring.submit([(tile, lambda found: found["?"]) for tile, _ in lists.tiles()]))
    lists.check()
    view, expected = lists.regions["master"].tensor[5:9], lists.expected["master"][5:9]
    assert len(holders(tmp_path)) >= 3
    del disk, lists, others
    gc.collect()
    until(lambda: not [thread for thread in threading.enumerate() if "-disk" in thread.name])
    assert torch.equal(view, expected)
    view.fill_(1)
    assert len(holders(tmp_path)) == 1
    del view
    assert not holders(tmp_path)


def test_a_process_that_is_killed_leaves_nothing(three):
    script = """
        import sys
        import torch
        from hf_patrickstar.counts import Counts
        from hf_patrickstar.memory.disk import Disk, Ring, Tile

        disk = Disk(sys.argv[1:], Counts())
        region = disk.allocate(20 * 2**20, torch.float32)
        disk.ring.lend(torch.empty(Ring.nbytes_of(2**22), dtype=torch.uint8))
        region.tensor[:100] = 1
        region.put_away()
        while True:
            tiles = [Tile({"master": (region, 1)}, start, start + 2**20) for start in range(0, 20 * 2**20, 2**20)]
            ticket = disk.ring.submit([(tile, lambda lists: lists["master"].add_(1)) for tile in tiles])
            print("begun", flush=True)
            ticket.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, three)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}, text=True)
    try:
        for _ in range(2):
            assert process.stdout.readline() == "begun\n"
        assert process.poll() is None
        held = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
        assert {directory for directory in three for path in held if path.startswith(f"{directory}/")} == set(three)
    finally:
        process.kill()
        process.communicate()
    assert not [path for directory in three for path in directory.iterdir()]


# Lists of a chunk


def lists_of(chunk):
    lists = Lists()
    lists.update({name: region.tensor for name, region in chunk.regions.items()})
    lists.regions.update(chunk.regions)
    return lists


def test_a_list_into_which_somebody_looks_stays_open_and_shows_what_updates_write(disk_in, three):
    chunk = OnDisk(disk_in(*three)).write()
    lists = lists_of(chunk)
    view = lists["exp_avg"][TILE_NUMEL - 5 : -3]
    for _ in range(2):
        lists.put_away(TYPES)
        assert {name: region.is_open for name, region in chunk.regions.items()} == {
            "master": False,
            "exp_avg": True,
            "exp_avg_sq": False,
        }
        assert list(lists) == ["exp_avg"]
        chunk.step()
        chunk.note_updates()
        assert torch.equal(view, chunk.expected["exp_avg"][TILE_NUMEL - 5 : -3])
    del view
    lists.put_away(TYPES)
    assert not any(region.is_open for region in chunk.regions.values())
    chunk.step().note_updates()
    for name, expected in chunk.expected.items():
        assert torch.equal(lists[name], expected)


def test_whoever_looks_into_a_list_may_write_to_it_between_updates(disk_in, tmp_path):
    chunk = OnDisk(disk_in(tmp_path)).write()
    lists = lists_of(chunk)
    view = lists["exp_avg"][5:9]
    for _ in range(2):
        lists.put_away(TYPES)
        chunk.step().note_updates()
        view.zero_()
        chunk.expected["exp_avg"][5:9] = 0
    del view
    lists.put_away(TYPES)
    chunk.step().check()


def test_lists_that_are_put_away_are_there_for_whoever_asks(disk_in, tmp_path):
    chunk = OnDisk(disk_in(tmp_path)).write("master")
    lists = lists_of(chunk)
    for name in ("exp_avg", "exp_avg_sq"):
        lists.fresh[name] = lists.pop(name)
    lists["grad"] = torch.zeros(3)
    lists.put_away(["master", "exp_avg", "grad"])
    assert (set(lists), set(lists.fresh)) == ({"grad"}, {"exp_avg_sq"}), "others stay as they are"
    assert set(lists.held) == {*TYPES, "grad"}
    assert [lists.held[name] for name in TYPES] == [region.tensor for region in chunk.regions.values()]
    assert [region.is_open for region in chunk.regions.values()] == [False, False, True]
    for name in TYPES:
        assert torch.equal(lists[name], chunk.expected[name])
    assert all(region.is_open for region in chunk.regions.values())
    assert not lists.fresh
    assert lists.get("scales") is None


# Rare cases


def test_what_is_opened_while_it_is_read_ahead_is_read_anew(disk_in, tmp_path, monkeypatch):
    disk = disk_in(tmp_path)
    lists, others = (OnDisk(disk, TILE_NUMEL).write().put_away() for _ in range(2))
    begin, has_read = Ring._read_ahead, threading.Event()

    def begin_late(*args):
        lists.regions["master"].open()
        begin(*args)
        has_read.set()

    monkeypatch.setattr(Ring, "_read_ahead", begin_late)
    others.step(ahead=lists.tiles())
    assert has_read.wait(TIMEOUT_S)
    lists.write("master").put_away().step().check()


def test_a_list_that_somebody_still_looks_into_keeps_its_room(disk_in, tmp_path):
    disk = disk_in(tmp_path)
    gone = OnDisk(disk).write().put_away().step()
    gone.note_updates()
    view = gone.regions["master"].open()[5:9]
    disk.release(gone.regions["master"].tensor)
    del gone.regions["master"]
    new = OnDisk(disk).write()
    assert torch.equal(view, gone.expected["master"][5:9])
    view.fill_(-1)
    new.check()


def test_room_that_was_reserved_on_several_drives_is_there(disk_in, three, monkeypatch):
    disk, nbytes = disk_in(*three[:2]), STRIPE_NBYTES * 3 // 2
    disk.reserve([nbytes] * 10)
    let_drives_have(monkeypatch, 0)
    for _ in range(10):
        disk.allocate(nbytes, torch.uint8)


def test_a_full_drive_is_the_same_error_when_its_directory_has_vanished(disk_in, tmp_path, monkeypatch):
    directory = tmp_path / "gone"
    directory.mkdir()
    disk = disk_in(directory)
    disk.allocate(1, torch.uint8)
    directory.rmdir()
    let_drives_have(monkeypatch, 0)
    with pytest.raises(BudgetError):
        disk.allocate(2**20, torch.uint8)


def test_tiles_are_updated_while_the_program_exits(disk_in, tmp_path, monkeypatch):
    """Then no thread begins anything."""

    class Ended(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *args):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(disk_module, "ThreadPoolExecutor", Ended)
    OnDisk(disk_in(tmp_path)).write().put_away().step().check()


def test_a_tile_is_read_ahead_once_at_a_time(disk_in, tmp_path, monkeypatch):
    """What a second reader had read before the update would be taken for what is there after it."""
    disk = disk_in(tmp_path)
    region = disk.allocate(TILE_NUMEL, torch.float32)
    region.put_away()
    disk.ring.lend(torch.empty(Ring.nbytes_of(4 * TILE_NUMEL), dtype=torch.uint8))
    work = Tile({"master": (region, 1)}, 0, TILE_NUMEL), lambda lists: lists["master"].add_(1)
    delays, read = random.Random(0), os.preadv

    def late(*args):
        found = read(*args)
        time.sleep(delays.random() * 0.002)
        return found

    monkeypatch.setattr(os, "preadv", late)
    for _ in range(300):
        wait(disk.ring.submit([work], [work]))
        time.sleep(delays.random() * 0.001)
    assert region.open().unique().tolist() == [300.0]


def test_a_process_that_was_forked_cannot_update(disk_in, tmp_path, monkeypatch):
    """It has none of the threads, and would write to the files of the other one."""
    lists = OnDisk(disk_in(tmp_path)).write().put_away().step()
    process_id = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process_id + 1)
    with pytest.raises(EngineError, match="forked"):
        lists.begin()
