"""Training states on the disk: what is read back, and what is refused before anything changes."""

import json
import threading

import pytest
import torch
from sources import write_training_state
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.checkpoint.training_state import INDEX_NAME, SavedState, shard_name
from hf_patrickstar.errors import CheckpointError

W = torch.arange(12.0).view(3, 4)
STATES = {
    "w": {"exp_avg": W, "exp_avg_sq": W + 100, "step": torch.tensor(3.0)},
    "b/c": {"exp_avg": torch.arange(2.0), "master": torch.arange(2.0) - 1},
    "frozen once": {},
}
SPREAD = {"w": [0, 5, 5, 12]}
SHARD = shard_name(0, 1)


# SavedState


@pytest.mark.parametrize(("world_size", "boundaries"), [(1, {}), (2, {}), (3, SPREAD), (3, {"w": [0, 0, 12, 12]})])
def test_what_was_saved(world_size, boundaries, tmp_path):
    saved = SavedState(write_training_state(tmp_path, STATES, world_size, boundaries, {"w": {"decay": 0.5}}))
    assert saved.optimizer == "AdamW"
    assert saved.shapes == {"w": (3, 4), "b/c": (2,), "frozen once": ()}
    assert saved.groups == [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(STATES)}]
    assert saved.values == {"w": {"decay": 0.5}}
    assert saved.keys("unknown") == set()
    for name, state in STATES.items():
        assert saved.keys(name) == set(state)
        saved.check_complete(name, 0, torch.Size(saved.shapes[name]).numel())
        for key, value in state.items():
            assert torch.equal(saved.read(key, name, 0, value.numel()), value.reshape(-1))
    for start, stop in ((0, 12), (2, 4), (4, 7), (6, 12), (5, 5)):
        assert torch.equal(saved.read("exp_avg", "w", start, stop), W.view(-1)[start:stop])
        saved.read_into("exp_avg_sq", "w", start, into := torch.empty(stop - start, dtype=torch.bfloat16))
        assert torch.equal(into, (W + 100).bfloat16().view(-1)[start:stop])


@pytest.mark.parametrize("boundaries", [{}, SPREAD])
def test_shapes(boundaries, tmp_path):
    states = {"w": {**STATES["w"], "row": torch.ones(4)}} if not boundaries else {"w": STATES["w"]}
    saved = SavedState(write_training_state(tmp_path, states, 3, boundaries))
    assert saved.shape("exp_avg", "w") == (3, 4)
    assert saved.shape("step", "w") == ()
    assert boundaries or saved.shape("row", "w") == (4,)


def change_index(path, change):
    index = json.loads((path / INDEX_NAME).read_text())
    change(index)
    (path / INDEX_NAME).write_text(json.dumps(index))


def change_metadata(path, **metadata):
    tensors = {"exp_avg/w": W}
    write_safetensors(path / SHARD, tensors, {"parts": "{}", "values": "{}", **metadata})


NO_INDEX = "index.json' is not the index of a training state"
NO_PART = "safetensors' is not a part of a training state"
BROKEN = {
    "no index": (lambda path: (path / INDEX_NAME).unlink(), "index.json' is missing"),
    "garbage": (lambda path: (path / INDEX_NAME).write_bytes(b"\xff{"), NO_INDEX),
    "a list": (lambda path: (path / INDEX_NAME).write_text("[]"), NO_INDEX),
    "no groups": (lambda path: change_index(path, lambda index: index.pop("param_groups")), NO_INDEX),
    "no shape": (lambda path: change_index(path, lambda index: index["parameters"].update(w={})), NO_INDEX),
    "another format": (
        lambda path: change_index(path, lambda index: index.update(format="theirs")),
        "index.json' is version 1 of theirs; this package reads version 1 of hf_patrickstar.training_state",
    ),
    "a newer version": (
        lambda path: change_index(path, lambda index: index.update(version=2)),
        "index.json' is version 2 of hf_patrickstar.training_state; this package reads version 1",
    ),
    "half a file": (
        lambda path: (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1]),
        "optimizer-00001-of-00001.safetensors' is truncated",
    ),
    "another file": (lambda path: write_safetensors(path / SHARD, {}), f"{NO_PART}: 'parts'"),
    "parts that are text": (lambda path: change_metadata(path, parts="{"), NO_PART),
    "parts that are a list": (lambda path: change_metadata(path, parts="[]"), NO_PART),
    "a part without an end": (lambda path: change_metadata(path, parts='{"exp_avg/w": [3]}'), NO_PART),
    "values that are a list": (lambda path: change_metadata(path, values="[1]"), NO_PART),
    "a value of nothing": (lambda path: change_metadata(path, values='{"w": 3}'), NO_PART),
    "a part of another size": (
        lambda path: change_metadata(path, parts='{"exp_avg/w": [0, 13]}'),
        "00001.safetensors': 'exp_avg/w' should be elements 0 to 13, it has 12 elements",
    ),
    "a part before the first element": (
        lambda path: change_metadata(path, parts='{"exp_avg/w": [-1, 11]}'),
        "00001.safetensors': 'exp_avg/w' should be elements -1 to 11",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_damaged(damage, message, tmp_path):
    damage(write_training_state(tmp_path, STATES))
    with pytest.raises(CheckpointError, match=message):
        SavedState(tmp_path)


@pytest.mark.parametrize("is_missing", [True, False])
@pytest.mark.parametrize(
    ("kept", "first"), [([1, 2], 0), ([0, 2], 4), ([0, 1], 8), ([0], 4)], ids=["begin", "middle", "end", "one alone"]
)
def test_elements_that_are_in_no_file(kept, first, is_missing, tmp_path):
    """Files that are missing may be on other machines: what is in the others can be read."""
    write_training_state(tmp_path, STATES, 3, {"w": [0, 4, 8, 12]})
    if is_missing:
        for rank in {0, 1, 2} - set(kept):
            (tmp_path / shard_name(rank, 3)).unlink()
    else:
        change_index(tmp_path, lambda index: index.update(files=[shard_name(rank, 3) for rank in kept]))
    saved = SavedState(tmp_path)
    message = f"index.json': elements {first} to 12 of 'exp_avg' of parameter 'w' are in no file"
    with pytest.raises(
        CheckpointError, match=message + ("; .*safetensors is missing" if is_missing else r"\. Copy the files")
    ):
        saved.check_complete("w", 0, 12)
    for rank in kept:
        saved.check_complete("w", 4 * rank, 4 * rank + 4)
        assert torch.equal(saved.read("exp_avg", "w", 4 * rank, 4 * rank + 4), W.view(-1)[4 * rank : 4 * rank + 4])


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


def make_engine(make=torch.optim.AdamW, dtype=torch.float32, seed=0, **groups):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make([{"params": [p], "lr": 0.1 * n} for n, p in enumerate(trainable, 1)] if groups else trainable, 0.1)
    return PatrickStarEngine(model, {}, optimizer)


def train(engine, steps=2):
    for step in range(steps):
        engine.model(torch.full((2, 4), step + 1.0, dtype=engine.model.w.dtype)).square().sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def load(engine, path):
    engine.training_state.open(path).apply()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, Counting])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_comes_back(steps, make, dtype, tmp_path):
    engine, other = make_engine(make, dtype), make_engine(make, dtype, seed=1)
    train(engine, steps)
    train(other, 1)
    engine.training_state.save(tmp_path, with_index=True)
    # In fp32 masters are what the model's own file has; in less, that is rounded and the state has them.
    other.model.load_state_dict({key: value.to(dtype) for key, value in engine.model.state_dict().items()})
    load(other, tmp_path)
    assert_same_state(engine, other)
    train(engine)
    train(other)
    assert_same_state(engine, other)


def test_states_that_are_no_tensors(tmp_path):
    engine = make_engine(Counting)
    train(engine)
    engine.training_state.save(tmp_path, with_index=True)
    saved = SavedState(tmp_path)
    assert saved.values["w"] == {"count": 2}
    assert saved.keys("w") == {"row", "extra"}
    assert saved.read_whole("extra", "w") == ("text", None, True), "JSON would make a list of it"
    assert saved.shape("row", "w") == (2,)


class Projector:
    def __init__(self, matrix):
        self.matrix = matrix


@pytest.mark.parametrize("in_background", [False, True])
def test_states_that_are_objects(in_background, tmp_path, monkeypatch):
    """As torch does it: what is pickled is loaded again if the program says that the type is safe."""
    engine, other = make_engine(Counting), make_engine(Counting)
    monkeypatch.setattr(Counting, "extra", Projector(torch.ones(3)))
    train(engine)
    if in_background:
        engine.training_state.save_in_background(tmp_path, with_index=True).join()
    else:
        engine.training_state.save(tmp_path, with_index=True)
    with pytest.raises(CheckpointError, match=r"'extra' is .*add_safe_globals\(\[test_training_state\.Projector\]\)"):
        other.training_state.open(tmp_path)
    with torch.serialization.safe_globals([Projector]):
        other.training_state.open(tmp_path).apply()
    found = next(iter(other.optimizer.inner.state.values()))["extra"]
    assert torch.equal(found.matrix, torch.ones(3))


def test_states_that_cannot_be_pickled(tmp_path, monkeypatch):
    engine = make_engine(Counting)
    monkeypatch.setattr(Counting, "extra", threading.Lock())
    train(engine)
    message = "state 'extra' of parameter '[wb]' is a lock, which cannot be pickled"
    for save in (engine.training_state.save, engine.training_state.save_in_background):
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path, with_index=False)


def test_a_directory_that_is_not_there(tmp_path):
    engine = make_engine()
    for save, name in (
        (engine.training_state.save, SHARD),
        (engine.training_state.save_in_background, INDEX_NAME),
    ):
        with pytest.raises(CheckpointError, match=f"gone/{name}' cannot be written: No such file or directory"):
            save(tmp_path / "gone", with_index=True)


def drop(*path):
    def change(index):
        for key in path[:-1]:
            index = index[key]
        del index[path[-1]]

    return change


MISFITS = {
    "a group more": (
        lambda index: index["param_groups"].append({"params": []}),
        "has 2 param groups, this optimizer 1; make it with the same groups",
    ),
    "a parameter less": (
        lambda index: index["param_groups"][0].update(params=["w"]),
        "param group 0 was saved with 1 parameters and has 2 here; 'b' is the first",
    ),
    "another parameter": (
        lambda index: index["param_groups"][0].update(params=["w", "a"]),
        "param group 0 was saved with 2 parameters and has 2 here; 'a' is the first",
    ),
    "frozen before": (drop("parameters", "b"), "has no parameter 'b': it was frozen when the state was saved"),
    "another shape": (
        lambda index: index["parameters"]["w"].update(shape=[4, 3]),
        r"parameter 'w' has shape \(4, 3\), in the model \(3, 4\)",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_a_state_of_something_else(change, message, tmp_path):
    engine, other = make_engine(), make_engine()
    for one in (engine, other):
        train(one)
    engine.training_state.save(tmp_path, with_index=True)
    change_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"index.json'.*{message}"):
        engine.training_state.open(tmp_path)
    assert_same_state(engine, other)


def test_a_state_of_another_optimizer(tmp_path):
    engine = make_engine(torch.optim.Adagrad)
    train(engine)
    engine.training_state.save(tmp_path, with_index=True)
    with pytest.raises(CheckpointError, match="was saved by Adagrad, this is AdamW; resume with the same"):
        make_engine().training_state.open(tmp_path)


def test_a_tensor_of_another_shape(tmp_path):
    full = torch.ones(3, 4)
    states = {"w": {"exp_avg": full, "exp_avg_sq": full, "step": torch.tensor(1.0)}, "b": {"exp_avg": torch.ones(3)}}
    states["b"] |= {"exp_avg_sq": torch.ones(3), "step": torch.tensor(1.0)}
    engine = make_engine()
    write_training_state(tmp_path, states)
    engine.training_state.open(tmp_path)
    states["w"]["exp_avg_sq"] = torch.ones(2, 4)
    write_training_state(tmp_path, states)
    message = r"'exp_avg_sq' of parameter 'w' has shape \(2, 4\), not that of the parameter, \(3, 4\)"
    with pytest.raises(CheckpointError, match=message):
        engine.training_state.open(tmp_path)


def test_groups_come_back(tmp_path):
    engine, other = make_engine(by_parameter=True), make_engine(by_parameter=True)
    engine.optimizer.param_groups[1].update(lr=0.7, betas=(0.5, 0.6), note="text", rows=[torch.ones(2)])
    train(engine)
    engine.training_state.save(tmp_path, with_index=True)
    load(other, tmp_path)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.7]
    assert other.optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert other.optimizer.param_groups[1]["note"] == "text"
    (row,) = other.optimizer.param_groups[1]["rows"]
    assert row.tolist() == [1.0, 1.0]
    assert "rows" not in other.optimizer.param_groups[0]
    assert [len(group["params"]) for group in other.optimizer.param_groups] == [1, 1]


def test_an_object_in_a_group_is_loaded_if_its_type_is_safe(tmp_path):
    engine, other = make_engine(), make_engine()
    engine.optimizer.param_groups[0]["extra"] = Projector(torch.ones(3))
    engine.training_state.save(tmp_path, with_index=True)
    with pytest.raises(CheckpointError, match=r"others.safetensors': 'extra' is an object .*test_training_state.Proj"):
        other.training_state.open(tmp_path)
    with torch.serialization.safe_globals([Projector]):
        load(other, tmp_path)
    assert torch.equal(other.optimizer.param_groups[0]["extra"].matrix, torch.ones(3))
    engine.optimizer.param_groups[0]["extra"] = threading.Lock()
    with pytest.raises(CheckpointError, match="state 'extra' of a param group is a lock, which cannot be pickled"):
        engine.training_state.save(tmp_path, with_index=True)


def test_in_the_background_the_same_is_written(tmp_path):
    engine = make_engine(dtype=torch.bfloat16)
    train(engine)
    names = [INDEX_NAME, SHARD]
    for folder, save in (("a", engine.training_state.save), ("b", engine.training_state.save_in_background)):
        (tmp_path / folder).mkdir()
        write = save(tmp_path / folder, with_index=True)
        if write is not None:
            write.join()
            assert write.error is None
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
