"""Training states on the disk: what is read back, and what is refused before anything changes."""

import json
import threading

import pytest
import torch
from support.checkpoint_files import write_index, write_training_state
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.checkpoint.deferred import Reader
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, SavedState, shard_name
from hf_patrickstar.errors import CheckpointError

W = torch.arange(12.0).view(3, 4)
STATES = {
    "w": {"exp_avg": W, "exp_avg_sq": W + 100, "step": torch.tensor(3.0)},
    "b/c": {"exp_avg": torch.arange(2.0), "patrickstar_master": torch.arange(2.0) - 1, "row": torch.ones(4)},
    "frozen once": {},
}
SHARD = shard_name(0, 1)


# SavedState


def change_index(path, change):
    index = json.loads((path / INDEX_NAME).read_text())
    change(index)
    write_index(path, index)


def change_metadata(path, **metadata):
    write_safetensors(path / SHARD, {"exp_avg/w": W}, {"parts": "{}", "literals": "{}", **metadata})


FORMAT = "hf_patrickstar.training_state"
NO_INDEX = "index.json' is not the index of a training state"
NO_PART = "safetensors' is not a part of a training state"
BROKEN = {
    "garbage": (lambda path: (path / INDEX_NAME).write_bytes(b"\xff{"), NO_INDEX),
    "another format": (
        lambda path: change_index(path, lambda index: index.update(format="theirs")),
        "index.json' is version 3 of theirs; this package reads version 3 of hf_patrickstar.training_state",
    ),
    "a newer version": (
        lambda path: change_index(path, lambda index: index.update(version=4)),
        "index.json' is version 4 of hf_patrickstar.training_state; this package reads version 3",
    ),
    "an older version, whose index has no checksum": (
        lambda path: (path / INDEX_NAME).write_text(json.dumps({"format": FORMAT, "version": 2})),
        "index.json' is version 2 of hf_patrickstar.training_state; this package reads version 3",
    ),
    "half a file": (
        lambda path: (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1]),
        f"{SHARD}' is not a complete safetensors file",
    ),
    "parts that are a list": (lambda path: change_metadata(path, parts="[]"), NO_PART),
    "values that are a list": (lambda path: change_metadata(path, literals="[1]"), NO_PART),
    "values that are no literals": (lambda path: change_metadata(path, literals="print()"), NO_PART),
    "no bytes of torch.save": (
        lambda path: write_safetensors(
            path / SHARD, {"pickled": torch.zeros(9, dtype=torch.uint8)}, {"literals": "{}"}
        ),
        f"{SHARD}' is damaged, or cannot be loaded safely",
    ),
    "a part of another size": (
        lambda path: change_metadata(path, parts='{"exp_avg/w": [0, 13]}'),
        f"{SHARD}': 'exp_avg/w' should have elements 0 to 13, and has 12",
    ),
    "a part before the first element": (
        lambda path: change_metadata(path, parts='{"exp_avg/w": [-1, 11]}'),
        f"{SHARD}': 'exp_avg/w' should have elements -1 to 11",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_damaged(damage, message, tmp_path):
    damage(write_training_state(tmp_path, STATES))
    with pytest.raises(CheckpointError, match=message):
        SavedState(tmp_path)


@pytest.mark.parametrize("is_missing", [True, False])
@pytest.mark.parametrize(("kept", "first"), [([1, 2], 0), ([0, 2], 4), ([0, 1], 8)], ids=["begin", "middle", "end"])
def test_elements_that_are_in_no_file(kept, first, is_missing, tmp_path):
    """Files that are missing may be on other machines: what is in the others can be read."""
    write_training_state(tmp_path, STATES, 3, {"w": [0, 4, 8, 12]})
    if is_missing:
        for rank in {0, 1, 2} - set(kept):
            (tmp_path / shard_name(rank, 3)).unlink()
    else:
        change_index(tmp_path, lambda index: index.update(files=[shard_name(rank, 3) for rank in kept]))
    saved = SavedState(tmp_path)
    ending = "; .*safetensors is missing" if is_missing else r"\. Copy the files of all"
    with pytest.raises(CheckpointError, match=f"elements {first} to 12 of 'exp_avg' of parameter 'w' .*{ending}"):
        saved.check_complete("w", 0, 12)
    for rank in kept:
        part = 4 * rank, 4 * rank + 4
        saved.check_complete("w", *part)
        assert torch.equal(Reader().read(saved.state_of("w")["exp_avg"], *part), W.view(-1)[slice(*part)])


def test_a_parameter_that_is_in_no_file(tmp_path):
    write_training_state(tmp_path, STATES)
    SavedState(tmp_path).check_complete("frozen once", 0, 1)
    (tmp_path / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD}' is missing; parameter 'w' is in no other file"):
        SavedState(tmp_path).check_complete("w", 0, 12)


# TrainingState, in an engine


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.b = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.w, self.b + self.frozen)


class Counting(torch.optim.SGD):
    """An optimizer with states that are no tensors."""

    extra = ("text", None, True)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                    self.state[parameter]["extra"] = self.extra
                    self.state[parameter]["row"] = parameter.detach().reshape(-1)[:2].clone()
        return super().step(closure)


def make_engine(make=torch.optim.AdamW, dtype=torch.float32, seed=0, config=None):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    groups = [{"params": [p], "lr": 0.1 * n} for n, p in enumerate((model.w, model.b), 1)]
    return PatrickStarEngine(model, config or {}, make(groups, 0.1))


def train(engine, steps=2):
    for step in range(steps):
        engine.model(torch.full((2, 4), step + 1.0, dtype=engine.model.w.dtype)).square().sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def save(engine, path):
    file = engine.training_state.begin_save(path, with_index=True)
    file.start(5)
    assert file.join() is None


def load(engine, path):
    with torch.no_grad():
        engine.training_state.open(path)[0]()


def assert_same_state(left, right):
    ours, theirs = left.optimizer.state_dict(), right.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in ours["state"].items():
        other = theirs["state"][number]
        assert state.keys() == other.keys()
        for key, value in state.items():
            same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
            assert same, (number, key)


def test_what_cannot_be_pickled(tmp_path, monkeypatch):
    monkeypatch.setattr(Counting, "extra", threading.Lock())
    train(in_state := make_engine(Counting))
    in_group = make_engine()
    in_group.optimizer.param_groups[0]["extra"] = threading.Lock()
    for engine in (in_state, in_group):
        with pytest.raises(CheckpointError, match=r"cannot be pickled \(.*lock' object\); .*save_only_model"):
            engine.training_state.begin_save(tmp_path, with_index=True)


MISFITS = {
    "a group more": (
        lambda index: index["param_groups"].append({"params": []}),
        "has 3 param groups, this optimizer 2; make the same",
    ),
    "another parameter": (
        lambda index: index["param_groups"][0].update(params=["a"]),
        "param group 0 has 1 parameters, and 1 here; 'a' is only in one",
    ),
    "frozen before": (
        lambda index: [index["parameters"].pop("b"), index["param_groups"][1]["params"].remove("b")],
        "param group 1 has 0 parameters, and 1 here; 'b' is only in one",
    ),
    "another shape": (
        lambda index: index["parameters"]["w"].update(shape=[4, 3]),
        r"parameter 'w' has shape \(4, 3\), in the model \(3, 4\)",
    ),
    "another optimizer": (
        lambda index: index.update(optimizer="Adagrad"),
        "was saved by Adagrad, this is AdamW; resume with the same",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_a_state_of_something_else(change, message, tmp_path):
    engine, other = make_engine(), make_engine()
    for one in (engine, other):
        train(one)
    save(engine, tmp_path)
    change_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"index.json'.*{message}"):
        engine.training_state.open(tmp_path)
    assert_same_state(engine, other)


def test_a_tensor_of_another_shape_or_none(tmp_path):
    engine = make_engine()
    train(engine)
    save(engine, tmp_path)
    states = {"w": {"exp_avg": W, "exp_avg_sq": W[:2], "step": torch.tensor(1.0)}, "b": {"exp_avg": torch.ones(3)}}
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    for message in (r"'exp_avg_sq' of parameter 'w' has shape \(2, 4\), .* \(3, 4\)", "'b' has no 'exp_avg_sq'"):
        write_training_state(tmp_path, states)
        (tmp_path / INDEX_NAME).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=f"{message}.*; make the optimizer with the same options"):
            engine.training_state.open(tmp_path)
        states["w"]["exp_avg_sq"] = W


def test_a_damaged_master_is_found_before_anything_changes(tmp_path):
    """Of other states an optimizer that has none finds out when it loads them."""
    engine, other = (make_engine(dtype=torch.bfloat16, seed=seed, config={"dtype": "bf16"}) for seed in range(2))
    train(engine)
    save(engine, tmp_path)
    with open(tmp_path / SHARD, "r+b") as file:
        file.seek(SafetensorsFile(tmp_path / SHARD).entries["patrickstar_master/w"].start)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="'patrickstar_master/w' has other bytes than were saved"):
        other.training_state.open(tmp_path)


class Projector:
    def __init__(self, matrix):
        self.matrix = matrix


def test_objects_are_loaded_if_their_type_is_safe(tmp_path, monkeypatch):
    """As torch does it: in states, and in param groups."""
    engine, other = make_engine(Counting), make_engine(Counting)
    monkeypatch.setattr(Counting, "extra", Projector(torch.ones(3)))
    train(engine)
    save(engine, tmp_path)
    engine.optimizer.param_groups[0]["mine"] = Projector(torch.ones(2))
    (tmp_path / "groups").mkdir()
    save(engine, tmp_path / "groups")
    for folder, file in ((tmp_path, "00001"), (tmp_path / "groups", "others")):
        safe = r"add_safe_globals\(\[test_training_state\.Projector\]\)"
        with pytest.raises(
            CheckpointError, match=f"(?s){file}.safetensors' is damaged, or cannot be loaded safely: .*{safe}"
        ):
            other.training_state.open(folder)
    with torch.serialization.safe_globals([Projector]):
        load(other, tmp_path / "groups")
    found = next(iter(other.optimizer.inner.state.values()))["extra"], other.optimizer.param_groups[0]["mine"]
    assert [value.matrix.tolist() for value in found] == [[1] * 3, [1] * 2]
