"""What checkpoints on the disk hold, and whether two hold the same."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch.utils._pytree import keystr, tree_flatten_with_path

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
    """Whether two nested states, of models or optimizers, are the same to the last bit."""
    if isinstance(expected, torch.Tensor):
        return expected.dtype == actual.dtype and torch.equal(expected, actual)
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(same_bits(expected[key], actual[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(actual) and all(map(same_bits, expected, actual))
    return expected == actual
