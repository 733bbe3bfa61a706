"""Files that ``torch.load`` reads, written a piece at a time, and the way back to torch's own optimizer."""

import os
import zipfile
from collections import OrderedDict

import pytest
import torch
from support.checkpoint_files import make_deferred, same_bits, write_training_state
from torch.utils._pytree import tree_map_only

from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.safetensors_file import CHECKSUMS
from hf_patrickstar.checkpoint.torch_state import TorchFile, export, torch_state_dict, verify_files, write_torch
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, SavedState
from hf_patrickstar.errors import CheckpointError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.float8_e4m3fn),
]
W = torch.arange(12.0).view(3, 4)
STATES = {
    "w": {"exp_avg": W, "exp_avg_sq": W + 1, "step": torch.tensor(3.0), "patrickstar_master": W + 2},
    "b": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(1.0)},
    "c": {"patrickstar_master": torch.ones(2)},
}
GROUPS = [{"lr": 0.5, "betas": (0.8, 0.9), "params": ["c", "w"]}, {"lr": 0.25, "betas": (0.8, 0.9), "params": ["b"]}]


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
    chunk = torch.randn(1000)
    value = {
        "state": {0: {"exp_avg": torch.randn(5, 7).t(), "step": torch.tensor(3.0)}, 1: {"part": chunk[10:20]}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "params": [0, 1]}],
        "others": OrderedDict(empty=torch.empty(0, 3), text="x", flag=True),
        "types": [torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    write_torch(tmp_path / "f.pt", value)
    found = torch.load(tmp_path / "f.pt", weights_only=True, mmap=mmap)
    assert same(found, value)
    assert not found["parameter"].requires_grad
    assert os.path.getsize(tmp_path / "f.pt") < 12_000, "of a view its own elements alone"


# Export


def make_optimizer():
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in (("w", (3, 4)), ("b", 2), ("c", 2))}
    groups = [{"params": [parameters[name] for name in group["params"]]} for group in GROUPS]
    return torch.optim.AdamW(groups), parameters


@pytest.mark.parametrize(("world_size", "boundaries"), [(1, {}), (2, {}), (3, {"w": [0, 5, 5, 12]})])
def test_a_state_dict_for_torch(world_size, boundaries, tmp_path):
    write_training_state(tmp_path, STATES, world_size, boundaries, {"b": {"extra": 7}}, param_groups=GROUPS)
    before = set(tmp_path.iterdir())
    (path,) = export(tmp_path)
    assert set(tmp_path.iterdir()) == before | {path} == before | {tmp_path / "optimizer.pt"}
    for state_dict in (torch_state_dict(tmp_path), torch.load(path, weights_only=True)):
        optimizer, parameters = make_optimizer()
        optimizer.load_state_dict(state_dict)
        assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [
            (0.5, (0.8, 0.9)),
            (0.25, (0.8, 0.9)),
        ]
        assert parameters["c"] not in optimizer.state
        for name in ("w", "b"):
            expected = {key: value for key, value in STATES[name].items() if key != "patrickstar_master"}
            expected |= {"extra": 7} if name == "b" else {}
            assert same(dict(optimizer.state[parameters[name]]), expected)


def test_what_is_incomplete_is_not_exported(tmp_path):
    write_training_state(tmp_path, STATES, 2, {"w": [0, 6, 12]}, files=["optimizer-00001-of-00002.safetensors"])
    (tmp_path / "optimizer.pt").write_text("old")
    with pytest.raises(CheckpointError, match="elements 6 to 12 of 'exp_avg' of parameter 'w' are in no file"):
        export(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"optimizer.pt' is there, and no {INDEX_NAME}"):
        export(tmp_path)
    assert (tmp_path / "optimizer.pt").read_text() == "old"
    (tmp_path / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX_NAME}' is missing"):
        export(tmp_path)


def test_the_archive_is_sound(tmp_path):
    """Other readers of zip files find everything, and tensors begin where they can be mapped into memory."""
    values = [torch.randn(numel) for numel in (1, 100, 7, 33)]
    write_torch(tmp_path / "f.pt", values)
    data = (tmp_path / "f.pt").read_bytes()
    assert all(data.find(value.numpy().tobytes()) % 64 == 0 for value in values[1:])
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        names = ["data.pkl", "byteorder", "version", CHECKSUMS]
        assert archive.namelist() == [f"archive/{name}" for name in (*[f"data/{n}" for n in range(4)], *names)]
        assert all(archive.read(f"archive/{name}") for name in names)  # with their CRC32
        assert [archive.getinfo(f"archive/data/{number}").file_size for number in range(4)] == [4, 400, 28, 132]
    for is_mapped in (False, True):
        found = torch.load(tmp_path / "f.pt", weights_only=True, mmap=is_mapped)
        assert all(map(torch.equal, found, values))


def read_all(directory):
    """All that is read of the states in a directory, in either format."""
    if (directory / "optimizer.pt").exists():
        found = tree_map_only(DeferredTensor, Reader().read_whole, TorchFile(directory / "optimizer.pt").value)
        return tree_map_only(torch.Tensor, torch.clone, found)  # what is not deferred is mapped: it follows the file
    saved = SavedState(directory)
    return [saved.optimizer, saved.shapes, saved.optimizers, saved.others, torch_state_dict(directory)]


@pytest.mark.parametrize("form", ["torch", "sharded"])
def test_no_byte_can_be_damaged_unseen(form, tmp_path):
    """Names, settings and scalars neither: what is read is what was saved, or there is an error."""
    write_training_state(tmp_path, {"b": STATES["b"]}, param_groups=[{**GROUPS[1], "scales": torch.ones(3)}])
    if form == "torch":
        value = torch_state_dict(tmp_path)
        for path in tmp_path.iterdir():
            path.unlink()
        write_torch(tmp_path / "optimizer.pt", value)
    before, num_seen = read_all(tmp_path), 0
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        for place in range(0, len(data), 3):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            try:
                assert same(before, read_all(tmp_path)), f"byte {place} of {path.name}"
            except CheckpointError:
                num_seen += 1
                with pytest.raises(CheckpointError):  # which ``hf-patrickstar check`` says, too
                    list(verify_files(tmp_path))
        path.write_bytes(data)
    assert num_seen > 100


def test_tensors_are_read_a_piece_at_a_time(tmp_path):
    deferred, source = make_deferred(torch.randn(10, 10))
    write_torch(tmp_path / "f.pt", [deferred], piece_numel=32)
    assert source.reads == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert torch.equal(torch.load(tmp_path / "f.pt", weights_only=True)[0], source.values)
