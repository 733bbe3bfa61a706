"""Files that ``torch.load`` reads, written a piece at a time."""

import os
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from sources import make_deferred, same_bits

from hf_patrickstar.checkpoint import torch_file
from hf_patrickstar.checkpoint.torch_file import write_torch
from hf_patrickstar.errors import CheckpointError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.float8_e4m3fn),
]


def nested():
    return {
        "state": {0: {"exp_avg": torch.randn(5, 7), "step": torch.tensor(3.0)}, 1: {"step": torch.tensor(1.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "params": [0, 1]}],
        "others": OrderedDict(empty=torch.empty(0, 3), text="x", flag=True),
    }


def same(left, right):
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and same_bits(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_was_written(mmap, tmp_path):
    value = nested()
    write_torch(tmp_path / "f.pt", value)
    assert same(torch.load(tmp_path / "f.pt", weights_only=True, mmap=mmap), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(dtype, tmp_path):
    value = torch.arange(24).view(4, 6).to(dtype)
    write_torch(tmp_path / "f.pt", {"value": value})
    torch.save({"value": value}, tmp_path / "expected.pt")
    found, expected = (torch.load(tmp_path / name, weights_only=True)["value"] for name in ("f.pt", "expected.pt"))
    assert found.shape == expected.shape
    assert same_bits(found, expected)


def test_tensors_are_read_a_piece_at_a_time(tmp_path):
    value = torch.randn(10, 10)
    deferred, source = make_deferred(value)
    write_torch(tmp_path / "f.pt", [deferred, value.t()], piece_numel=32)
    assert source.reads == [(0, 32), (32, 64), (64, 96), (96, 100)]
    found = torch.load(tmp_path / "f.pt", weights_only=True)
    assert torch.equal(found[0], value)
    assert torch.equal(found[1], value.t())
    assert all(part.is_contiguous() for part in found)


def test_a_part_of_a_large_tensor_is_written_alone(tmp_path):
    """States are views of chunk lists: torch.save would write the whole chunk for each."""
    chunk = torch.randn(10_000)
    write_torch(tmp_path / "f.pt", [chunk[10:20]])
    assert os.path.getsize(tmp_path / "f.pt") < 4_000
    assert torch.equal(torch.load(tmp_path / "f.pt", weights_only=True)[0], chunk[10:20])


@pytest.mark.parametrize("is_large", [False, True])
def test_the_archive_is_sound(is_large, tmp_path, monkeypatch):
    """Checksums are right, tensors are aligned, and what is too large for an old zip file says so in time."""
    if is_large:
        monkeypatch.setattr(torch_file, "LARGE_NBYTES", 100)
    values = [torch.randn(numel) for numel in (1, 100, 7, 33)]
    write_torch(tmp_path / "f.pt", values)
    data = (tmp_path / "f.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert archive.testzip() is None
        for number, value in enumerate(values):
            offset = archive.getinfo(f"archive/data/{number}").header_offset
            begin = offset + 30 + sum(struct.unpack_from("<HH", data, offset + 26))
            assert begin % 64 == 0
            assert data[begin:].startswith(value.numpy().tobytes())
    assert all(map(torch.equal, torch.load(tmp_path / "f.pt", mmap=True, weights_only=True), values))


def test_a_disk_that_is_full(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"full' cannot be written: No space left on device; the file needs"):
        write_torch(tmp_path / "full", {"w": torch.ones(100_000)})


def test_an_error_holds_no_view_of_what_was_pickled(tmp_path, monkeypatch):
    """The collector of CPython 3.12.1 does not survive an error that holds a view of ``BytesIO``."""

    def refuse(archive, entry, data):
        views.append(isinstance(data, memoryview))
        raise OSError

    views = []
    monkeypatch.setattr(zipfile.ZipFile, "writestr", refuse)
    with pytest.raises(CheckpointError):
        write_torch(tmp_path / "f", {"w": torch.ones(1)})
    assert views == [False]


def test_other_errors_of_the_disk(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"none/f' cannot be written: No such file or directory; make it writable"
    ):
        write_torch(tmp_path / "none" / "f", {"w": torch.ones(1)})
