"""Safetensors files: what is refused, what is read and written, and whose function writes it."""

import errno
import importlib
import json
import os
import shutil
import struct

import pytest
import safetensors.torch
import torch
from support.checkpoint_files import make_deferred

from hf_patrickstar.checkpoint.safetensors_file import (
    CHECKSUMS,
    SAVE_FILE,
    SafetensorsFile,
    streamed_writing,
    write_safetensors,
)
from hf_patrickstar.checkpoint.storage import NewFile
from hf_patrickstar.checkpoint.weight_files import LOAD_STATE_DICT, SAFE_OPEN
from hf_patrickstar.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4), "c": torch.tensor(2.5), "e": torch.empty(0, 3)}


def header_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def count_descriptors():
    return len(os.listdir("/proc/self/fd"))


BROKEN = {
    "empty": b"",
    "another format": b"PK\x03\x04 and whatever follows",
    "a list": header_of([1]),
    "truncated data": header_of({"v": entry([2], 0, 8), "w": entry([2], 8, 16)}, b"12345678"),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_damaged(content, tmp_path):
    (tmp_path / "f").write_bytes(content)
    before = count_descriptors()
    with pytest.raises(CheckpointError, match=f"'{tmp_path}/f' .*The file is damaged: copy it again") as caught:
        SafetensorsFile(tmp_path / "f")
    del caught
    assert count_descriptors() == before


@pytest.mark.parametrize("numel", [11, 2500])
def test_checksums_find_every_damaged_byte_in_the_pieces_that_are_read(numel, tmp_path):
    piece_numel, values = (4, 1025)[numel > 11], torch.randn(numel)
    write_safetensors(tmp_path / "f", {"a": torch.ones(3), "w": values}, {CHECKSUMS: ""}, piece_numel=piece_numel)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "f")["w"], values)
    file, whole = SafetensorsFile(tmp_path / "f"), (tmp_path / "f").read_bytes()
    ranges = [(start, stop) for start in range(0, numel, numel // 11) for stop in range(start, numel, numel // 7)]
    assert all(torch.equal(file.read("w", start, stop), values[start:stop]) for start, stop in ranges)
    for place in (0, numel // 3, numel - 1):
        at = file.entries["w"].start + 4 * place + 3
        (tmp_path / "f").write_bytes(whole[:at] + bytes([whole[at] ^ 128]) + whole[at + 1 :])
        for start, stop in ranges:
            if start < stop and start // piece_numel <= place // piece_numel <= (stop - 1) // piece_numel:
                with pytest.raises(CheckpointError, match="f': tensor 'w' has other bytes than were saved"):
                    file.read("w", start, stop)
            else:
                assert torch.equal(file.read("w", start, stop), values[start:stop])


def test_missing_and_directory(tmp_path):
    with pytest.raises(CheckpointError, match="gone' is missing; copy it there"):
        SafetensorsFile(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=f"'{tmp_path}' cannot be read: .*; make it readable"):
        SafetensorsFile(tmp_path)


def test_a_file_that_cannot_be_read_any_more(tmp_path, monkeypatch):
    write_safetensors(tmp_path / "f", {"w": torch.ones(1000)})
    file = SafetensorsFile(tmp_path / "f")
    with pytest.MonkeyPatch.context() as patch:
        original = os.preadv
        patch.setattr(os, "preadv", lambda descriptor, views, offset: original(descriptor, [views[0][:7]], offset))
        assert torch.equal(file.read("w", 3, 900), torch.ones(897)), "the system may give less than was asked for"
        patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(CheckpointError, match=r"f': tensor 'w' cannot be read: .*Input/output error"):
            file.read("w", 0, 1000)
    os.truncate(tmp_path / "f", 2000)
    with pytest.raises(CheckpointError, match="f' ends at byte 2000, inside of tensor 'w'"):
        file.read("w", 0, 1000)


def test_tensors_are_written_in_pieces_and_in_order(tmp_path):
    tensor, source = make_deferred(torch.randn(4, 6))
    names, sizes = [], []

    def note(name):
        names.append(name)
        sizes.append((tmp_path / "_f.partial").stat().st_size)

    write_safetensors(tmp_path / "f", {"c": tensor, "a": tensor.half()}, piece_numel=10, on_written=note)
    assert names == ["c", "a"]
    assert sizes[1] - sizes[0] == 48, "what is told of is in the file"
    assert source.reads == [(0, 10), (10, 20), (20, 24)] * 2


def test_a_type_that_cannot_be_held(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'w': .*complex128.*; convert it to another type"):
        write_safetensors(tmp_path / "f", {"w": torch.ones(2, dtype=torch.complex128)})
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk(call, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(NewFile if call == "write" else os, call, fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 12345, 12345))
    message = r"f.st' cannot be written: .*; the file needs .*\(4072 bytes\), .*\(12345 bytes\) are left. Make room"
    with pytest.raises(CheckpointError, match=message):
        write_safetensors(tmp_path / "f.st", {"w": torch.ones(1000)})


# Other libraries


@pytest.mark.parametrize(("module", "name"), [*SAVE_FILE, *SAFE_OPEN, *LOAD_STATE_DICT])
def test_the_libraries_have_what_is_replaced(module, name):
    """And no other name for it, by which they would write or read deferred tensors."""
    found = vars(importlib.import_module(module))
    wanted = {"safe_open": safetensors.safe_open, "load_state_dict": found[name]}.get(name, safetensors.torch.save_file)
    assert [key for key, value in found.items() if value is wanted] == [name]


def test_ordinary_tensors_go_to_the_library(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *args, **kwargs: calls.append((args, kwargs)))
    with streamed_writing(10):
        safetensors.torch.save_file({"w": TENSORS["a"]}, tmp_path / "f", metadata={"format": "pt"})
    assert calls == [(({"w": TENSORS["a"]}, tmp_path / "f"), {"metadata": {"format": "pt"}})]
