"""Safetensors files: what is refused and how, what is written, and whose function writes it."""

import errno
import json
import os
import shutil
import struct

import pytest
import safetensors.torch
import torch
from sources import make_deferred, same_bits

from hf_patrickstar.checkpoint import pieces, safetensors_file
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, streamed_writing, write_safetensors
from hf_patrickstar.errors import CheckpointError

DTYPES = list(safetensors_file.DTYPES.values())


def some_tensors():
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int64), "c": torch.tensor(2.5)}


def make_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def count_descriptors():
    return len(os.listdir("/proc/self/fd"))


# Reading


def test_reads_what_the_library_wrote(tmp_path):
    tensors = {**some_tensors(), "empty": torch.empty(0, 3), "half": torch.randn(5).half()}
    safetensors.torch.save_file(tensors, tmp_path / "f.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "f.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        deferred = file.deferred(name)
        assert (deferred.shape, deferred.dtype, deferred.device.type) == (tensor.shape, tensor.dtype, "cpu")
        assert torch.equal(file.read(name, 0, tensor.numel()), tensor.view(-1))
        file.read_into(name, 0, into := torch.empty_like(tensor))
        assert torch.equal(into, tensor)
    assert torch.equal(file.read("a", 2, 5), torch.tensor([2.0, 3.0, 4.0]))
    assert file.read("a", 3, 3).shape == (0,)


def test_what_is_read_is_nobody_elses_memory(tmp_path):
    write_safetensors(tmp_path / "f", some_tensors())
    file = SafetensorsFile(tmp_path / "f")
    file.read("a", 0, 6).fill_(-1)
    assert torch.equal(file.read("a", 0, 6), torch.arange(6.0))


F32 = entry([2], 0, 8)
DAMAGED = {
    "empty": (b"", "is truncated: it has 0 bytes, not even a header"),
    "a few bytes": (b"abc", "is truncated: it has 3 bytes"),
    "half a header": (struct.pack("<Q", 100) + b"{}", "is truncated: its header ends at byte 108, the file at 10"),
    "another format": (b"PK\x03\x04 and whatever follows", "is not a safetensors file: its header would have"),
}
HEADERS = {
    "garbage": (b"\xff\xfe{", b"", "is not a safetensors file"),
    "a list": ([F32], b"", "is not a safetensors file"),
    "a number": (3, b"", "is not a safetensors file"),
    "deep nesting": (b"[" * 100_000, b"", "is not a safetensors file"),
    "an entry that is none": ({"w": 3}, b"", "is not a safetensors file"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, b"", "is not a safetensors file: 'data_offsets'"),
    "one offset": ({"w": {**F32, "data_offsets": [0]}}, b"", "is not a safetensors file"),
    "an infinite size": (b'{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,0]}}', b"", "is not a safetensors"),
    "metadata that are a text": ({"__metadata__": "x"}, b"", "is not a safetensors file"),
    "metadata that are numbers": ({"__metadata__": {"x": 1}}, b"", "is not a safetensors file"),
    "truncated data": ({"v": F32, "w": entry([2], 8, 16)}, b"12345678", "is truncated: tensor 'w' ends at byte"),
    "a hole": ({"v": F32, "w": entry([2], 9, 17)}, b"1" * 17, "tensor 'w' begins at byte"),
    "an overlap": ({"v": F32, "w": entry([2], 4, 12)}, b"1" * 12, "tensor 'w' begins at byte"),
    "a hole at the beginning": ({"w": entry([2], 1, 9)}, b"1" * 9, "tensor 'w' begins at byte"),
    "too few bytes": ({"w": entry([3], 0, 8)}, b"1" * 8, r"tensor 'w' of shape \(3,\) in F32 should have 12 bytes, it"),
    "bytes in the wrong order": ({"w": entry([2], 8, 0)}, b"1" * 8, "tensor 'w' of shape .* it has -8"),
    "trailing bytes": ({"w": F32}, b"1" * 9, "bytes, its tensors end at byte"),
    "an unknown type": ({"w": entry([2], 0, 8, "F4")}, b"1" * 8, "tensor 'w' has type F4, which is not supported"),
    "negative sizes": ({"w": entry([-2, -1], 0, 8)}, b"1" * 8, r"tensor 'w' has shape \(-2, -1\)"),
    "sizes that overflow": ({"w": entry([2**62, 4], 0, 0)}, b"", "tensor 'w' of shape"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_no_header(content, message, tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"broken.safetensors' {message}"):
        SafetensorsFile(path)


@pytest.mark.parametrize(("header", "data", "message"), HEADERS.values(), ids=HEADERS)
def test_damaged(header, data, message, tmp_path):
    path = make_file(tmp_path / "broken.safetensors", header, data)
    before = count_descriptors()
    with pytest.raises(CheckpointError, match=f"broken.safetensors'.*{message}") as caught:
        SafetensorsFile(path)
    del caught
    assert count_descriptors() == before


def test_missing_and_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone.safetensors' is missing"):
        SafetensorsFile(tmp_path / "gone.safetensors")
    before = count_descriptors()
    with pytest.raises(CheckpointError, match=f"'{tmp_path}' cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)
    assert count_descriptors() == before


def test_empty_tensors_stand_in_any_order(tmp_path):
    header = {"b": F32, "a": entry([0], 0, 0), "c": entry([0, 4], 8, 8)}
    file = SafetensorsFile(make_file(tmp_path / "f", header, b"\0" * 8))
    assert file.read("b", 0, 2).tolist() == [0, 0]
    assert safetensors.torch.load_file(tmp_path / "f").keys() == file.entries.keys()


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    write_safetensors(tmp_path / "f", {"w": torch.ones(1000)})
    file = SafetensorsFile(tmp_path / "f")
    os.truncate(tmp_path / "f", 2000)
    with pytest.raises(CheckpointError, match="f' ends at byte 2000, in the middle of tensor 'w'"):
        file.read("w", 0, 1000)


def test_a_file_that_cannot_be_read_any_more(tmp_path, monkeypatch):
    write_safetensors(tmp_path / "f", {"w": torch.ones(1000)})
    file = SafetensorsFile(tmp_path / "f")

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="f': tensor 'w' cannot be read: Input/output error"):
        file.read("w", 0, 1000)


def test_reads_that_come_in_parts(tmp_path, monkeypatch):
    tensors = some_tensors()
    write_safetensors(tmp_path / "f", tensors)
    file = SafetensorsFile(tmp_path / "f")
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: original(descriptor, [views[0][:7]], offset))
    for name, tensor in tensors.items():
        assert torch.equal(file.read(name, 0, tensor.numel()), tensor.view(-1))


def test_a_file_stays_open_as_long_as_somebody_needs_it(tmp_path):
    before = count_descriptors()
    write_safetensors(tmp_path / "f", some_tensors())
    tensor = SafetensorsFile(tmp_path / "f").deferred("a").bfloat16()
    (tmp_path / "f").unlink()
    assert count_descriptors() == before + 1
    assert tensor.recipe.read(0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    del tensor
    assert count_descriptors() == before


# Writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_their_order_are_the_librarys(dtype, tmp_path):
    tensors = {f"t{place}": torch.ones(3, 2).to(other) for place, other in enumerate(DTYPES)}
    tensors["a"] = torch.ones(5).to(dtype)
    nbytes = write_safetensors(tmp_path / "ours", tensors, {"format": "pt"}, piece_numel=4)
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert nbytes == (tmp_path / "ours").stat().st_size
    name = SafetensorsFile.name_of(dtype)
    with safetensors.safe_open(tmp_path / "theirs", "pt") as file:
        assert file.get_slice("a").get_dtype() == name
    assert same_bits(SafetensorsFile(tmp_path / "ours").read("a", 0, 5), tensors["a"])


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"text": 'a"\\\n\x01\x7fé☃'}], ids=str)
def test_names_and_metadata_are_written_as_by_the_library(metadata, tmp_path):
    tensors = {"": torch.ones(1), 'quote" slash\\ é\n\t\x01\x7f☃😀': torch.ones(2), "a.b/c": torch.ones(3)}
    write_safetensors(tmp_path / "ours", tensors, metadata)
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_tensors(tmp_path):
    write_safetensors(tmp_path / "ours", {})
    safetensors.torch.save_file({}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert SafetensorsFile(tmp_path / "ours").entries == {}


def test_tensors_that_are_not_contiguous_and_share_memory(tmp_path):
    base = torch.randn(4, 6)
    tensors = {"t": base.t(), "part": base[1:3, ::2], "expanded": base[:1].expand(3, 6), "one": base[:1, :1]}
    tensors["one of many"] = base[:, 0][::4]
    write_safetensors(tmp_path / "f", tensors, piece_numel=5)
    loaded = safetensors.torch.load_file(tmp_path / "f")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_deferred_tensors(tmp_path):
    values = torch.randn(4, 6)
    tensor, source = make_deferred(values)
    write_safetensors(tmp_path / "ours", {"a": tensor, "b": tensor.bfloat16()}, piece_numel=10)
    assert source.reads == [(0, 10), (10, 20), (20, 24)] * 2
    safetensors.torch.save_file({"a": values, "b": values.bfloat16()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_are_told_of_in_the_order_in_which_they_are_written(tmp_path):
    tensors = {"c": torch.ones(2), "a": torch.ones(3), "b": torch.ones(1, dtype=torch.float64)}
    sorted_names, names, sizes = [], [], []

    def note(name):
        names.append(name)
        sizes.append((tmp_path / "f").stat().st_size)

    write_safetensors(tmp_path / "f", tensors, on_written=sorted_names.append)
    assert sorted_names == ["b", "a", "c"]
    nbytes = write_safetensors(tmp_path / "f", tensors, is_sorted=False, on_written=note)
    assert names == ["c", "a", "b"]
    assert sizes == [nbytes - 20, nbytes - 8, nbytes]  # all of it is in the file by then
    loaded = safetensors.torch.load_file(tmp_path / "f")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_type_that_cannot_be_held(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'w' has type torch.complex128, which safetensors cannot hold"):
        write_safetensors(tmp_path / "f", {"w": torch.ones(2, dtype=torch.complex128)})
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write_all", "fsync"])
def test_a_full_disk(number, call, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*(os, "fsync", fail) if call == "fsync" else (pieces, call, fail))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 12345, 12345))
    message = r"f.st' cannot be written: .*; the file needs .*\(4072 bytes\), .*\(12345 bytes\) are left. Make room"
    with pytest.raises(CheckpointError, match=message):
        write_safetensors(tmp_path / "f.st", {"w": torch.ones(1000)})


def test_a_disk_that_is_full_in_the_middle(tmp_path):
    """A real one: Linux has a file that never has room."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "full").symlink_to("/dev/full")
    told = []
    with pytest.raises(CheckpointError, match=r"full' cannot be written: No space left on device; the file needs"):
        write_safetensors(tmp_path / "full", {"w": torch.ones(1000)}, on_written=told.append)
    assert told == []


def test_other_errors_of_the_disk(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"none/f' cannot be written: No such file or directory; make it writable"
    ):
        write_safetensors(tmp_path / "none" / "f", {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"cannot be written: Is a directory; make it writable"):
        write_safetensors(tmp_path, {"w": torch.ones(1)})


# Other libraries


def test_streamed_writing_of_deferred_and_of_ordinary_tensors(tmp_path, monkeypatch):
    values, calls = torch.randn(4, 6), []
    tensor, source = make_deferred(values)
    original = safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *args, **kw: calls.append(args) or original(*args, **kw))
    with streamed_writing(10):
        safetensors.torch.save_file({"w": values}, tmp_path / "ordinary", metadata={"format": "pt"})
        assert len(calls) == 1
        safetensors.torch.save_file({"w": tensor}, filename=tmp_path / "deferred", metadata={"format": "pt"})
        assert len(calls) == 1
    assert source.reads == [(0, 10), (10, 20), (20, 24)]
    assert (tmp_path / "ordinary").read_bytes() == (tmp_path / "deferred").read_bytes()
