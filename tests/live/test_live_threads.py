"""What changes a whole model, while another thread computes with it or reads it all the time."""

import contextlib
import copy
import threading
import time

import pytest
import torch
from support import inside
from support.live import Tower, make_ids, train
from support.threads import beside, read_parameters, read_state
from torch import nn

from hf_patrickstar import EngineError, PatrickStarEngine

CONFIG = {"chunk_budget": 16384, "chunk_numel": 400}
DEPTH = 6


def make():
    torch.manual_seed(0)
    return Tower(DEPTH)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@torch.no_grad()
def compute(model):
    assert not model(make_ids()).isnan().any(), "a forward gave NaN"


class Plain:
    """Does in plain torch what an engine does."""

    def __init__(self, model, config, optimizer):
        self.model, self.optimizer = model, optimizer

    def detach(self):
        pass

    def stats(self):
        return {"chunk_moves": 100}

    def save_checkpoint(self, directory):
        self.saved = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def load_checkpoint(self, directory):
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(self.saved[1])

    @contextlib.contextmanager
    def full_parameters(self):
        yield


def attach_and_detach(model, make_engine, directory):
    for _ in range(4):
        engine = make_engine(model, CONFIG, adamw(model))
        train(model, engine.optimizer)
        engine.detach()


def freeze_and_unfreeze(model, make_engine, directory):
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = make_engine(model, CONFIG, optimizer).optimizer
    for turn in range(4):
        for block in model.blocks[: 1 + turn]:
            block.requires_grad_(True)
        train(model, optimizer)
        for block in model.blocks[: 1 + turn]:
            block.requires_grad_(False)


def replace_and_reshape(model, make_engine, directory):
    optimizer = make_engine(model, CONFIG, adamw(model)).optimizer
    for turn in range(4):
        block = model.blocks[turn]
        block.linear.bias = nn.Parameter(torch.full((16,), 0.25))
        optimizer.add_param_group({"params": [block.linear.bias]})
        weight = model.embedding.weight
        weight.data = torch.cat([weight.detach(), torch.full((2, 16), 0.1)])
        optimizer.state.pop(weight, None)
        train(model, optimizer)


def save_and_load(model, make_engine, directory):
    engine = make_engine(model, CONFIG, adamw(model))
    train(model, engine.optimizer)
    engine.save_checkpoint(directory)
    saved = copy.deepcopy(model.state_dict())
    for _ in range(3):
        train(model, engine.optimizer, 2)
        engine.load_checkpoint(directory)
        train(model, engine.optimizer)
        model.load_state_dict(saved)


def open_parameters(model, make_engine, directory):
    engine = make_engine(model, CONFIG, adamw(model))
    for _ in range(4):
        train(model, engine.optimizer)
        with engine.full_parameters(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            read_state(model)


def move_homes(model, make_engine, directory):
    """Larger inputs than any before need the device margin, where chunks live meanwhile."""
    engine = make_engine(model, {"device_budget": 100000, "chunk_numel": 400}, adamw(model))
    if make_engine is PatrickStarEngine:
        inside.estimate_never(engine)  # what is estimated moves once
    for size in range(1, 6):
        train(model, engine.optimizer, 3, loss=lambda model, step, size=size: loss_of(model, step, size))
    assert engine.stats()["chunk_moves"] > 10, engine.stats()["chunk_moves"]


def loss_of(model, step, size):
    ids = make_ids(step, size)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


CHANGES = [attach_and_detach, freeze_and_unfreeze, replace_and_reshape, save_and_load, open_parameters, move_homes]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_other_threads_use_the_model(change, tmp_path):
    plain, ours = make(), make()
    change(plain, Plain, tmp_path / "plain")
    with beside(compute, ours), beside(read_state, ours), beside(read_parameters, ours):
        change(ours, PatrickStarEngine, tmp_path / "ours")
    for (name, value), found in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(value, found), name


class Stop(nn.Module):
    """Stops in its forward."""

    def __init__(self):
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def forward(self, x):
        self.begun.set()
        assert self.may_end.wait(30)
        return x


def test_a_forward_that_does_not_end_is_named(monkeypatch):
    """No engine is attached meanwhile, and one can be attached later."""
    inside.shorten_waits(monkeypatch, 0.1)
    model = make()
    model.norm = nn.Sequential(model.norm, Stop())
    stop = model.norm[1]
    thread = threading.Thread(target=compute, args=(model,), name="demo", daemon=True)
    thread.start()
    assert stop.begun.wait(30)
    with pytest.raises(EngineError, match=r"thread 'demo' has been inside of a forward"):
        PatrickStarEngine(model, CONFIG, adamw(model))
    stop.may_end.set()
    thread.join(30)
    assert "patrickstar_engine" not in model.__dict__
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    engine = PatrickStarEngine(model, CONFIG, adamw(model))
    train(model, engine.optimizer)


LOOKS = {
    "grad_norm": lambda optimizer: optimizer.grad_norm(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(None, 0.1),
    "clip_grad_value_": lambda optimizer: optimizer.clip_grad_value_(1e-3),
    "unscale": lambda optimizer: optimizer.unscale(torch.tensor(0.5)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_forward_of_another_thread_cannot_move_gradients_that_are_looked_at(look, monkeypatch):
    found = []
    for is_interrupted in (False, True):
        model = make()
        engine = PatrickStarEngine(model, CONFIG, adamw(model))
        loss_of(model, 0, 4).backward()
        thread = threading.Thread(target=compute, args=(model,), daemon=True)
        gradients = inside.gradients(engine)

        def interrupted(tensor, of=gradients.of, thread=thread):
            gradient = of(tensor)
            if thread.ident is None:
                thread.start()
                thread.join(0.3)  # it ends if nothing keeps it out
            return gradient

        if is_interrupted:
            monkeypatch.setattr(gradients, "of", interrupted)
        norm = look(engine.optimizer)
        engine.optimizer.step()
        engine.detach()
        assert thread.ident is not None or not is_interrupted
        found.append([norm, *model.parameters()])
    for value, other in zip(*found, strict=True):
        assert value is other is None or torch.equal(value, other)


def test_a_state_dict_of_another_thread_has_values_while_the_model_is_saved():
    """The thread that saves gets tensors that are read piece by piece, while they are written."""
    model = make()
    engine = PatrickStarEngine(model, CONFIG, adamw(model))
    before, found = copy.deepcopy(model.state_dict()), []
    with engine.weights.streamed(is_reader=True):
        thread = threading.Thread(target=lambda: found.append(model.state_dict()), daemon=True)
        thread.start()
        thread.join(30)
        assert {type(value) for value in found[0].values()} == {torch.Tensor}
        assert {type(value) for value in model.state_dict().values()} != {torch.Tensor}
    for name, value in before.items():
        assert torch.equal(found[0][name], value)


def test_an_engine_is_detached_when_a_call_has_begun(monkeypatch):
    """As by another thread, just after torch has looked at the class of the parameter."""
    model = make()
    engine = PatrickStarEngine(model, CONFIG, adamw(model))
    weight = model.blocks[1].linear.weight
    before, written = weight.detach().clone(), getattr(*inside.OPERATOR_WRITES)

    def detach_first(*args):
        engine.detach()
        return written(*args)

    monkeypatch.setattr(*inside.OPERATOR_WRITES, detach_first)
    assert torch.equal(weight * 1, before)
    assert type(weight) is nn.Parameter


def test_detach_inside_of_full_parameters_does_not_wait_for_those_that_wait_for_it():
    model = make()
    engine = PatrickStarEngine(model, CONFIG, adamw(model))
    thread = threading.Thread(target=compute, args=(model,), daemon=True)
    with engine.full_parameters():
        thread.start()
        deadline = time.monotonic() + 30
        while thread not in inside.waiting_threads(engine):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(EngineError, match=r"is open in full_parameters\(\); detach after the block has ended"):
            engine.detach()
    thread.join(30)
    assert not thread.is_alive()
    engine.detach()


def test_who_was_asked_before_a_parameter_went_to_another_chunk_answers_with_its_value():
    """So it is in a thread that has asked, and waits until the parameter is unfrozen."""
    model = make()
    weight = model.blocks[1].linear.weight.requires_grad_(False)
    engine = PatrickStarEngine(model, CONFIG, torch.optim.AdamW(model.parameters(), lr=1e-2))
    before, value = weight._live, weight.detach().clone()
    weight.requires_grad_(True)
    engine.follow_model()
    assert weight._live is not before
    assert torch.equal(before.value_for_state_dict(), value)
    assert torch.equal(before.copied_value(), value)


@pytest.mark.parametrize("settings", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "autocast": False}])
def test_a_forward_that_has_waited_for_detach_is_that_of_the_plain_model(settings):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), torch.randn(2, 16)
    expected = model(inputs).detach()
    engine = PatrickStarEngine(model, {**CONFIG, **settings}, adamw(model))
    found = []

    @torch.no_grad()
    def work():
        found.append(model(inputs))

    thread = threading.Thread(target=work, daemon=True)
    with inside.held(engine):
        thread.start()
        deadline = time.monotonic() + 30
        while thread not in inside.waiting_threads(engine):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        engine.detach()
    thread.join(30)
    assert torch.equal(found[0], expected)
