"""Compares what plain models and those in chunks have, to the last bit."""

import copy

import torch


def copied(tensor):
    return None if tensor is None else tensor.detach().clone()


def gradients_of(model):
    return [copied(parameter.grad) for parameter in model.parameters()]


def same_bits(left, right):
    """Whether two tensors are the same, NaN where NaN is."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def assert_same(left, right, where="result"):
    """Compares results with whatever is in them."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), where
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert same_bits(left.detach(), right.detach()), f"{where} differs"
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        assert left == right or left is right or (left != left and right != right), (
            f"{where}: {left!r} became {right!r}"
        )


def assert_same_values(plain, ours):
    left, right = plain.state_dict(), ours.state_dict()
    assert_same({key: value.clone() for key, value in left.items()}, {key: right[key].clone() for key in right})


def assert_same_states(plain, ours):
    left, right = plain.state_dict(), ours.state_dict()
    assert_same(left["param_groups"], right["param_groups"])
    assert sorted(left["state"]) == sorted(right["state"])
    for key, state in left["state"].items():
        for name, value in state.items():
            assert_same(value, right["state"][key][name], f"state {key} {name}")


def values_of(model):
    """Copies of all values by name."""
    return {key: value.clone() for key, value in copy.copy(model.state_dict()).items()}
