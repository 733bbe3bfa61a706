"""What checkpoints on the disk hold, whether two hold the same, and training states and deferred tensors for tests."""

import itertools
import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch.utils._pytree import keystr, tree_flatten_with_path

from hf_patrickstar.checkpoint.deferred import DeferredTensor, Source
from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.checkpoint.state_files import pack
from hf_patrickstar.checkpoint.storage import text_checksum
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, shard_name

STATE_INDEX = "optimizer.index.json"


def names_in(directory):
    """The files below a directory, as relative paths."""
    return {path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file()}


def tensors_in(directory):
    """All tensors of weights and optimizers in the files below a directory, by file's kind and name."""
    found = {}
    for path in sorted(Path(directory).rglob("*.safetensors")):
        kind = path.name.split("-")[0].split(".")[0]
        with safe_open(path, "pt") as file:
            found |= {f"{kind}:{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            values = json.loads((file.metadata() or {}).get("values", "{}"))  # of states that are no tensors
            found |= {f"{kind}:{name}:{key}": torch.tensor(v) for name, of in values.items() for key, v in of.items()}
    for path in Path(directory).rglob("optimizer*.pt"):
        leaves, _ = tree_flatten_with_path({**torch.load(path, weights_only=True), "param_groups": []})
        found |= {f"{path.stem}:{keystr(place)}": torch.as_tensor(value) for place, value in leaves}
    return found


def assert_same_tensors(expected, actual, only=""):
    """The same names, types and bits in two directories, however they are spread over files."""
    left, right = tensors_in(expected), tensors_in(actual)
    left, right = ({name: v for name, v in found.items() if name.startswith(only)} for found in (left, right))
    assert left, expected
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


def assert_same_files(expected, actual, apart_from=()):
    """The same files with the same bytes, below two directories."""
    expected, actual = Path(expected), Path(actual)
    left, right = names_in(expected), names_in(actual)
    assert left == right, (expected, sorted(left ^ right))
    for name in names_in(expected) - set(apart_from):
        assert (expected / name).read_bytes() == (actual / name).read_bytes(), name


def snapshot(directory):
    """Every file below a directory with its bytes."""
    return {name: (Path(directory) / name).read_bytes() for name in names_in(directory)}


def trainer_state(directory):
    return json.loads((Path(directory) / "trainer_state.json").read_text())


def same_bits(expected, actual):
    """Whether two nested states, of models or optimizers, are the same to the last bit, also of what is no number."""
    if isinstance(expected, torch.Tensor):
        left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, actual))
        return (expected.dtype, expected.shape) == (actual.dtype, actual.shape) and torch.equal(left, right)
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(same_bits(expected[key], actual[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(actual) and all(map(same_bits, expected, actual))
    return expected == actual


class RecordingSource(Source):
    """A tensor in memory; ``reads`` has the bounds of every part that was asked for."""

    def __init__(self, values):
        super().__init__(tuple(values.shape), values.dtype)
        self.values, self.reads = values, []

    def read(self, start, stop):
        self.reads.append((start, stop))
        return self.values.reshape(-1)[start:stop]


def make_deferred(values, *, is_loadable=False):
    source = RecordingSource(values)
    return DeferredTensor.make(source, is_loadable=is_loadable), source


def write_training_state(directory, states, world_size=1, boundaries=None, values=None, **changes):
    """A training state as ``world_size`` processes write it.

    ``states`` has tensors by parameter and key; ``boundaries`` where the parts of a parameter begin and end, for those
    that are spread over processes. Others go to the processes in turn.
    """
    boundaries, values = boundaries or {}, values or {}
    files = [({}, {}) for _ in range(world_size)]
    turn = itertools.cycle(range(world_size))
    for name, state in states.items():
        owner = next(turn)
        for key, value in state.items():
            if name not in boundaries:
                files[owner][0][f"{key}/{name}"] = value
                continue
            for (tensors, parts), (start, stop) in zip(files, itertools.pairwise(boundaries[name]), strict=True):
                if value.dim() == 0:
                    tensors[f"{key}/{name}"] = value
                elif stop > start:
                    tensors[f"{key}/{name}"] = value.reshape(-1)[start:stop]
                    parts[f"{key}/{name}"] = [start, stop]
    for rank, (tensors, parts) in enumerate(files):
        metadata = {**pack(values if rank == 0 else {})[1], "parts": json.dumps(parts)}
        write_safetensors(directory / shard_name(rank, world_size), tensors, metadata)
    groups = changes.pop("param_groups", [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(states)}])
    names = [group["params"] for group in groups]
    settings = {f"group.{n}": {k: v for k, v in group.items() if k != "params"} for n, group in enumerate(groups)}
    write_safetensors(directory / "optimizer-others.safetensors", *pack(settings))
    shapes = {name: next((list(v.shape) for v in state.values() if v.dim()), []) for name, state in states.items()}
    index = {
        "format": "hf_patrickstar.training_state",
        "version": 3,
        "optimizer": "AdamW",
        "files": [shard_name(rank, world_size) for rank in range(world_size)],
        "param_groups": [{"params": own} for own in names],
        "optimizers": [names],
        "parameters": {name: {"shape": shape, "dtype": "float32"} for name, shape in shapes.items()},
        **changes,
    }
    write_index(directory, index)
    return directory


def write_index(directory, index):
    """Writes the index of a training state with its checksum."""
    index = {key: value for key, value in index.items() if key != "checksum"}
    (directory / INDEX_NAME).write_text(json.dumps({**index, "checksum": text_checksum(index)}))
