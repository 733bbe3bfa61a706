"""The way back: what torch's own optimizer loads."""

import pytest
import torch
from sources import write_training_state

from hf_patrickstar.checkpoint.export import export, torch_state_dict
from hf_patrickstar.checkpoint.training_state import INDEX_NAME
from hf_patrickstar.errors import CheckpointError

W = torch.arange(12.0).view(3, 4)
STATES = {
    "w": {"exp_avg": W, "exp_avg_sq": W + 1, "step": torch.tensor(3.0), "master": W + 2},
    "b": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(1.0)},
    "c": {"master": torch.ones(2)},
}
GROUPS = [
    {"lr": 0.5, "betas": [0.8, 0.9], "params": ["c", "w"]},
    {"lr": 0.25, "betas": [0.8, 0.9], "params": ["b"]},
]


def make_optimizer():
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in (("w", (3, 4)), ("b", 2), ("c", 2))}
    groups = [{"params": [parameters[name] for name in group["params"]]} for group in GROUPS]
    return torch.optim.AdamW(groups), parameters


@pytest.mark.parametrize(("world_size", "boundaries"), [(1, {}), (2, {}), (3, {"w": [0, 5, 5, 12]})])
def test_a_state_dict_for_torch(world_size, boundaries, tmp_path):
    write_training_state(tmp_path, STATES, world_size, boundaries, {"b": {"extra": 7}}, param_groups=GROUPS)
    optimizer, parameters = make_optimizer()
    optimizer.load_state_dict(torch_state_dict(tmp_path))
    assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [
        (0.5, (0.8, 0.9)),
        (0.25, (0.8, 0.9)),
    ]
    assert parameters["c"] not in optimizer.state
    for name in ("w", "b"):
        state = optimizer.state[parameters[name]]
        expected = {key: value for key, value in STATES[name].items() if key != "master"}
        assert state.keys() == expected.keys() | ({"extra"} if name == "b" else set())
        for key, value in expected.items():
            assert torch.equal(state[key], value)
            assert state[key].shape == value.shape
    assert optimizer.state[parameters["b"]]["extra"] == 7


def test_a_file(tmp_path):
    write_training_state(tmp_path, STATES, param_groups=GROUPS)
    before = set(tmp_path.iterdir())
    (path,) = export(tmp_path)
    assert path == tmp_path / "optimizer.pt"
    assert set(tmp_path.iterdir()) == before | {path}
    make_optimizer()[0].load_state_dict(torch.load(path, weights_only=True))


def test_another_name(tmp_path):
    write_training_state(tmp_path, STATES)
    (tmp_path / "other.pt").write_text("old")
    assert export(str(tmp_path), str(tmp_path / "other.pt")) == [tmp_path / "other.pt"]
    assert set(torch.load(tmp_path / "other.pt", weights_only=True)) == {"state", "param_groups"}
    assert not (tmp_path / "optimizer.pt").exists()


@pytest.mark.parametrize("output", ["gone/optimizer.pt", "directory"])
def test_a_file_that_cannot_be_written(output, tmp_path):
    write_training_state(tmp_path, STATES)
    (tmp_path / "directory").mkdir()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=f"{output}' cannot be written"):
        export(tmp_path, tmp_path / output)
    assert set(tmp_path.rglob("*")) == before


def test_a_part_that_is_missing(tmp_path):
    write_training_state(tmp_path, STATES, 2, {"w": [0, 6, 12]}, files=["optimizer-00001-of-00002.safetensors"])
    (tmp_path / "optimizer.pt").write_text("old")
    with pytest.raises(CheckpointError, match="elements 6 to 12 of 'exp_avg' of parameter 'w' are in no file"):
        export(tmp_path)
    assert (tmp_path / "optimizer.pt").read_text() == "old"


def test_no_training_state(tmp_path):
    with pytest.raises(CheckpointError, match=f"{INDEX_NAME}' is missing"):
        export(tmp_path)
    assert list(tmp_path.iterdir()) == []
