"""Optimizers that keep what they like: states of any shape under Adam's names, objects, and a counter under a name."""

import enum

import numpy
import pytest
import torch
from support.checkpoint_files import same_bits
from support.models import make_batch, make_model
from support.trainers import assert_same_weights

from hf_patrickstar import CheckpointError, PatrickStarEngine
from hf_patrickstar.checkpoint.torch_state import torch_state_dict


class Plain(torch.optim.Optimizer):
    """Keeps nothing; has settings of any kind."""

    def __init__(self, params, lr=1e-2, **settings):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def begin(self):
        pass

    def update(self, parameter, gradient, state, group):
        parameter.sub_(gradient, alpha=group["lr"])


class WithMaster(Plain):
    """Its average has the name that the engine's own fp32 values have in files."""

    def update(self, parameter, gradient, state, group):
        state.setdefault("master", torch.zeros_like(parameter)).lerp_(gradient, 0.3)
        parameter.sub_(state["master"], alpha=group["lr"])


class WithSmallMaster(Plain):
    """The same with one number per row."""

    def update(self, parameter, gradient, state, group):
        state.setdefault("master", torch.zeros(parameter.shape[:1])).lerp_(
            gradient.flatten(1).mean(1) if gradient.dim() > 1 else gradient, 0.3
        )
        parameter.sub_(state["master"].view(-1, *[1] * (parameter.dim() - 1)), alpha=group["lr"])


class Odd(WithMaster):
    """Keeps tuples, which JSON has as lists, under odd keys: of parameters, of groups, and of nothing.

    Keys have a slash, are numbers, or tuples, or look like a key that is written as Python does.
    """

    keys = ("a/b", 0, ("a/b", 1), "=0", "\\/'", "")

    def begin(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group.setdefault("running", torch.zeros(2)).add_(1.5)
            group.setdefault("scale", torch.zeros(())).add_(1)
            group.setdefault("seen", []).append(group["k"])
            group.setdefault("inner", {"n": 0, "pair": (1, [2])})["n"] += 1
            group[0] = (group.get(0, (0, (1, 2)))[0] + 1, (1, 2))
            assert type(group["inner"]["pair"]) is type(group[0][1]) is tuple
        kept = self.state["all/norms"]
        kept["t/1"] = kept.get("t/1", 0) + 1
        kept.setdefault(2, torch.zeros(3)).add_(0.5)
        self.state[("odd", 1)] = (self.state[("odd", 1)] or (0,))[0] + 1, 0

    def update(self, parameter, gradient, state, group):
        super().update(parameter, gradient, state, group)
        state.setdefault("exp_avg", torch.zeros(2, 2)).lerp_(gradient.sum(), 0.5)  # not as Adam has these
        state.setdefault("exp_avg_sq", torch.zeros(3)).add_(gradient.square().mean())
        parameter.sub_(state["exp_avg"].mean() / (1 + state["exp_avg_sq"].sum()), alpha=group["lr"])
        number, half = state.get("pair", (0, 0.0))
        state["pair"] = (number + 1, half + 0.5)
        state.setdefault("nested", [(1, 2)]).append((number,))
        assert all(type(item) is tuple for item in [state["pair"], *state["nested"]])
        state["t/n"] = state.get("t/n", 0) + 1
        state[3] = state.get(3, 0) + 1
        kept = self.state["all/norms"]
        counts = state["t/n"] + state[3] + state["pair"][0] + len(state["nested"])
        counts += group["k"] + len(group["seen"]) + group["inner"]["n"] + group[0][0]
        counts += group["running"].sum().item() + group["scale"].item()
        counts += kept["t/1"] + kept[2].sum().item() + self.state[("odd", 1)][0]
        for number, key in enumerate(self.keys, 1):
            state.setdefault(key, torch.zeros_like(parameter)).lerp_(gradient, 0.1 * number)
            parameter.sub_(state[key], alpha=group["lr"] / counts)


ODD = [WithSmallMaster, Odd]


def train(model, optimizer, backward, steps):
    for step in steps:
        torch.manual_seed(step)
        backward(model(**make_batch("gpt2", 2, step + 1, 8)).loss)
        optimizer.step()
        optimizer.zero_grad()


def plain(cls, steps):
    model = make_model("gpt2")
    optimizer = cls(model.parameters())
    train(model, optimizer, torch.Tensor.backward, range(steps))
    return model, optimizer


def engine_of(cls, steps=range(0), seed=0, format_name="sharded", dtype=torch.float32, **settings):
    model = make_model("gpt2", seed).to(dtype)
    precision = "fp32" if dtype is torch.float32 else "bf16"
    config = {"chunk_numel": 2048, "optimizer_format": format_name, "dtype": precision}
    engine = PatrickStarEngine(model, config, cls(model.parameters(), **settings), device="cpu")
    train(model, engine.optimizer, engine.backward, steps)
    return engine


def assert_same_states(expected, actual):
    """Plain torch has an empty state of a parameter for which nothing is kept."""
    left, right = ({key: value for key, value in found["state"].items() if value} for found in (expected, actual))
    assert same_bits(left, right)
    assert same_bits(expected["param_groups"], actual["param_groups"])


@pytest.mark.parametrize("cls", ODD)
@pytest.mark.parametrize("way", ["state_dict", "sharded", "torch"])
def test_what_comes_back_is_what_was_kept(way, cls, tmp_path):
    whole, optimizer = plain(cls, 4)
    engine = engine_of(cls, range(2), format_name="torch" if way == "torch" else "sharded")
    if way == "state_dict":
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    else:
        engine.save_checkpoint(tmp_path / "c")
        if way == "sharded":
            assert_same_states(plain(cls, 2)[1].state_dict(), torch_state_dict(tmp_path / "c"))
        engine = engine_of(cls, seed=3)
        engine.load_checkpoint(tmp_path / "c")
    train(engine.model, engine.optimizer, engine.backward, range(2, 4))
    assert_same_weights(whole, engine.model)
    assert_same_states(optimizer.state_dict(), engine.optimizer.state_dict())


@pytest.mark.parametrize("way", ["state_dict", "sharded", "torch"])
def test_a_master_of_the_optimizer_beside_the_one_of_the_engine(way, tmp_path):
    """A model that was loaded in bf16 and has fp32 masters."""
    settings = {"dtype": torch.bfloat16}
    whole, engine = engine_of(WithMaster, range(4), **settings), engine_of(WithMaster, range(2), **settings)
    other = engine_of(WithMaster, seed=3, **settings)
    if way == "state_dict":
        other.model.load_state_dict(engine.model.state_dict())
        other.optimizer.load_state_dict(engine.optimizer.state_dict())
    else:
        engine = engine_of(WithMaster, range(2), format_name=way, **settings)
        engine.save_checkpoint(tmp_path / "c")
        other.load_checkpoint(tmp_path / "c")
    train(other.model, other.optimizer, other.backward, range(2, 4))
    assert same_bits(other.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_same_weights(whole.model, other.model)


class Kind(enum.Enum):
    FIRST = 1

    def __reduce_ex__(self, protocol):
        """As later versions of Python have it: those before 3.11.4 ask for ``getattr``, which torch never loads."""
        return Kind, (self.value,)


class Text(enum.StrEnum):
    SECOND = "second"


def test_a_key_of_any_type(tmp_path):
    """Torch does not load one of a type that nobody has called safe."""
    engine = engine_of(Plain, range(1))
    engine.optimizer.state[engine.model.lm_head.weight][Kind.FIRST] = torch.ones(2)
    engine.optimizer.param_groups[0][Kind.FIRST] = numpy.float32(0.5)
    engine.optimizer.param_groups[0][Text.SECOND] = (1,)
    engine.save_checkpoint(tmp_path / "c")
    other = engine_of(Plain, seed=3)
    with pytest.raises(CheckpointError, match=r"(?s)cannot be loaded safely: .*add_safe_globals.*Kind"):
        other.load_checkpoint(tmp_path / "c")
    with torch.serialization.safe_globals([Kind]):
        other.load_checkpoint(tmp_path / "c")
    assert torch.equal(other.optimizer.state[other.model.lm_head.weight][Kind.FIRST], torch.ones(2))
    assert repr(other.optimizer.param_groups[0][Kind.FIRST]) == "0.5", "a number of Python"
    assert [type(key) for key in other.optimizer.param_groups[0] if key == "second"] == [str]


def test_a_tensor_in_a_group_is_filled_and_not_replaced(tmp_path):
    engine = engine_of(Plain, lr=torch.tensor(0.5), weights=torch.tensor([1.0, 2.0]))
    engine.save_checkpoint(tmp_path / "c")
    other = engine_of(Plain, lr=torch.tensor(0.25), weights=torch.zeros(2))
    before = dict(other.optimizer.param_groups[0])
    other.load_checkpoint(tmp_path / "c")
    after = other.optimizer.param_groups[0]
    assert all(after[key] is before[key] for key in ("lr", "weights"))
    assert (after["lr"].item(), after["weights"].tolist()) == (0.5, [1.0, 2.0])
