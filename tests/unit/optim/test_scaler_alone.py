"""The loss scaler: torch's own, over an optimizer that is stood in for, and one small real one."""

import pytest
import torch
from unit.optim.updates import PlainKernel, add_lists, firsts, give, make_parts, masters

from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.optim.scaler import ChunkedGradScaler


class Answering(ChunkedOptimizer):
    """Answers with a norm, and writes down what it is told."""

    def __init__(self, norm):
        self.__dict__.update(norm=torch.tensor(norm), told=[], param_groups=[])

    def unscale(self, inverse_scale):
        self.told.append(("unscale", inverse_scale.item()))
        return self.norm

    def step(self, *args, **kwargs):
        self.told.append(("step", *args, *kwargs.values()))
        return "result"

    def skip_step(self):
        self.told.append(("skip",))


class Fused(torch.optim.SGD):
    """It says that its step removes the scale itself."""

    _step_supports_amp_scaling = True


def make_scaler(**options):
    """A scaler that has scaled a loss, by 8."""
    scaler = ChunkedGradScaler("cpu", init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, **options)
    assert scaler.scale(torch.tensor(1.0)).item() == 8.0
    return scaler


def test_a_step_unscales_once_and_steps():
    scaler, optimizer = make_scaler(), Answering(3.0)
    assert scaler.step(optimizer) == "result"
    assert optimizer.told == [("unscale", 0.125), ("step",)]


def test_what_was_unscaled_before_the_step_is_not_unscaled_again():
    scaler, optimizer = make_scaler(), Answering(3.0)
    scaler.unscale_(optimizer)
    assert optimizer.told == [("unscale", 0.125)]
    scaler.step(optimizer)
    assert optimizer.told == [("unscale", 0.125), ("step",)]
    with pytest.raises(RuntimeError, match="has already been called since the last update"):
        scaler.step(optimizer)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_step_whose_gradients_overflowed_is_skipped_and_the_scale_falls(norm):
    scaler, optimizer = make_scaler(), Answering(norm)
    assert scaler.step(optimizer) is None
    assert optimizer.told == [("unscale", 0.125), ("skip",)]
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_the_scale_grows_after_enough_steps():
    scaler, optimizer = make_scaler(growth_interval=2), Answering(3.0)
    scales = []
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 16.0]


def test_each_optimizer_overflows_alone():
    scaler, good, bad = make_scaler(), Answering(3.0), Answering(float("inf"))
    scaler.step(good)
    scaler.step(bad)
    assert (good.told[-1], bad.told[-1]) == (("step",), ("skip",))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_scaler_that_is_off_only_steps():
    scaler, optimizer = ChunkedGradScaler("cpu", enabled=False), Answering(float("inf"))
    assert scaler.step(optimizer) == "result"
    assert optimizer.told == [("step",)]


@pytest.mark.parametrize(("gradient", "value"), [(16.0, -2.0), (float("inf"), 0.0)])
def test_an_optimizer_that_is_not_ours_is_torchs_matter(gradient, value):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([gradient])
    make_scaler().step(optimizer)
    assert parameter.item() == value


def make_optimizer(cls=torch.optim.SGD):
    parts = make_parts((1, 1))
    add_lists(parts, "last")
    inner = cls([tensor.parameter for tensor in parts.tensors], lr=1.0)
    parts.emitted = []
    kernel = PlainKernel(inner, parts)
    return parts, ChunkedOptimizer(inner, kernel, parts.manager, parts.emitted.append)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Fused])
def test_an_update_is_by_gradients_without_the_scale(cls):
    parts, optimizer = make_optimizer(cls)
    give(parts, t0=24, t1=32)
    scaler = make_scaler()
    scaler.unscale_(optimizer)
    assert optimizer.clip_grad_norm_(None, 2.5).item() == 5.0
    scaler.step(optimizer)
    assert firsts(masters(parts)) == pytest.approx([-1.5, 14.0], abs=1e-5)
    assert [event.skipped for event in parts.emitted] == [False]


def test_an_overflow_changes_no_value():
    parts, optimizer = make_optimizer()
    give(parts, t0=24, t1=float("inf"))
    make_scaler().step(optimizer)
    assert firsts(masters(parts)) == [0.0, 16.0]
    assert [event.skipped for event in parts.emitted] == [True]
    assert not parts.gradients.has(parts.tensors[0])
