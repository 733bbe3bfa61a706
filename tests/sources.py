"""Sources of deferred tensors that remember what was read, and training states on the disk."""

import itertools
import json

import torch

from hf_patrickstar.checkpoint.deferred import DeferredTensor, Source
from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.checkpoint.state_files import pack
from hf_patrickstar.checkpoint.storage import text_checksum
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, shard_name


class RecordingSource(Source):
    """A tensor in memory; ``reads`` has the bounds of every part that was asked for."""

    def __init__(self, values):
        self.values, self.reads = values, []
        self.shape, self.dtype = tuple(values.shape), values.dtype

    def read(self, start, stop):
        self.reads.append((start, stop))
        return self.values.reshape(-1)[start:stop]


def make_deferred(values, *, is_loadable=False):
    source = RecordingSource(values)
    return DeferredTensor.make(source, is_loadable=is_loadable), source


def same_bits(left, right):
    """Whether two flat tensors have the same type and bytes; NaN and types that cannot be compared too."""
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


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
