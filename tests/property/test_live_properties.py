"""Whatever is done to a live model, in whatever order, a plain model is the same bit for bit."""

import copy
import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.live import POISONED, ROOMY, TIGHT, assert_same_model, make_adamw, train
from support.live import loss_of as loss_of_tower
from support.live import make_tower as make_large
from support.same import same_bits
from torch import nn

from hf_patrickstar import PatrickStarEngine

DEPTH = 4


def make_tower():
    model = make_large()
    del model.blocks[DEPTH:]
    return model


def weight_of(model, place):
    return list(model.parameters())[place % len(list(model.parameters()))]


class Side:
    """One of two models to which the same is done."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.step = 0
        self.kept = []  # what was handed out, and is still looked at
        self.copies = []

    def train(self, place):
        self.step += 1
        return train(self.model, self.optimizer, 1, first=self.step)

    def accumulate(self, place):
        self.step += 1
        loss = loss_of_tower(self.model, self.step)
        loss.backward()
        return loss.detach()

    def clip(self, place):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def step_and_zero(self, place):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=place % 2 == 0)

    def read(self, place):
        return weight_of(self.model, place).norm().detach()

    def infer(self, place):
        with torch.no_grad():
            return loss_of_tower(self.model, place)

    def keep_data(self, place):
        self.kept.append(weight_of(self.model, place).data)

    def keep_gradient(self, place):
        gradient = weight_of(self.model, place).grad
        if gradient is not None:
            self.kept.append(gradient)

    def let_go(self, place):
        self.kept.clear()

    def look_at_kept(self, place):
        return [tensor.clone() for tensor in self.kept]

    def write_to_kept(self, place):
        for tensor in self.kept:
            tensor.mul_(0.75)

    def write_data(self, place):
        weight_of(self.model, place).data.mul_(0.5)

    @torch.no_grad()
    def write_in_place(self, place):
        weight_of(self.model, place).add_(0.125)

    def assign_data(self, place):
        weight = weight_of(self.model, place)
        weight.data = weight.data * 0.5 + 0.125

    def change_gradient(self, place):
        gradient = weight_of(self.model, place).grad
        if gradient is not None:
            gradient.mul_(2.0)

    def replace_gradient(self, place):
        weight = weight_of(self.model, place)
        weight.grad = torch.full_like(weight, 0.01)

    def drop_gradient(self, place):
        weight_of(self.model, place).grad = None

    def freeze_or_unfreeze(self, place):
        block = self.model.blocks[place % DEPTH]
        block.requires_grad_(not block.linear.weight.requires_grad)

    def replace_module(self, place):
        torch.manual_seed(place)
        block = self.model.blocks[place % DEPTH]
        block.linear = nn.Linear(16, 16)
        self.optimizer.add_param_group({"params": list(block.linear.parameters())})

    def copy(self, place):
        self.copies.append(copy.deepcopy(self.model).state_dict())

    def load(self, place):
        state = {key: value * 0.5 for key, value in self.model.blocks[place % DEPTH].state_dict().items()}
        self.model.blocks[place % DEPTH].load_state_dict(state)


OPERATIONS = sorted(name for name, value in vars(Side).items() if callable(value) and not name.startswith("_"))


@settings(
    max_examples=int(os.environ.get("LIVE_EXAMPLES", 40)),
    deadline=None,
    database=None,
    derandomize="LIVE_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40)), max_size=14),
    st.sampled_from([TIGHT, ROOMY, POISONED]),
)
def test_any_order_of_uses_leaves_what_it_leaves_of_a_plain_model(operations, config):
    plain, ours = make_tower(), make_tower()
    optimizer = PatrickStarEngine(ours, {**config, "keep_gradients": True}, make_adamw(ours)).optimizer
    sides = [Side(plain, make_adamw(plain)), Side(ours, optimizer)]
    for name, place in [*operations, ("train", 0), ("look_at_kept", 0), ("train", 0)]:
        left, right = (getattr(side, name)(place) for side in sides)
        left, right = ([value] if isinstance(value, torch.Tensor) else value or [] for value in (left, right))
        for expected, found in zip(left, right, strict=True):
            assert same_bits(expected, found), name
    assert_same_model(plain, ours)
    for expected, found in zip(sides[0].copies, sides[1].copies, strict=True):
        for key, value in expected.items():
            assert same_bits(value, found[key]), key
