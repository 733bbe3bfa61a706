"""From the engine to the first step: states cost nothing until somebody writes them, and no write is lost."""

import copy
import logging
import re
import sys
import threading
import weakref

import pytest
import torch
from support import inside
from support.buffers import are_there
from support.pairs import Pair, engine_of
from support.same import assert_same_states
from support.small import WIDTH, Stack, adamw, batch, make, step_of, trainable
from support.streams import simulated_streams
from torch import nn

from hf_patrickstar.memory.pool import PayloadPool
from hf_patrickstar.memory.streams import DeviceStreams
from hf_patrickstar.optim.adam_kernel import AdamKernel
from hf_patrickstar.optim.elementwise import ElementwiseKernel

MOVING = {"device_budget": 26000}
"""Some chunks of ``Stack(10)`` move their homes to the device when the first step is planned."""


def write_state(model, optimizer, value=0.25):
    """Gives every other parameter a state, as if there had been a step."""
    for number, parameter in enumerate(trainable(model)[::2]):
        moments = {name: torch.full_like(parameter, value + number) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}


def load_state(model, optimizer):
    other = adamw(trainable(make(lambda: Stack(10), 5)))
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


def write_through_a_view(model, optimizer):
    """The views are kept, and written to after somebody has looked at the rest."""
    write_state(model, optimizer)
    views = [optimizer.state[parameter]["exp_avg_sq"] for parameter in trainable(model)[::2]]
    optimizer.state_dict()
    for view in views:
        view.add_(1)


def forget(model, optimizer):
    write_state(model, optimizer)
    for parameter in trainable(model)[::4]:
        del optimizer.state[parameter]


WRITES = [write_state, load_state, write_through_a_view, forget]


@pytest.fixture
def garbage(monkeypatch):
    """Memory has whatever was there before, where nobody has asked for zeros."""
    real = PayloadPool.allocate

    def allocate(self, tier, numel, dtype, owner, *, zero=False, **kwargs):
        buffer = real(self, tier, numel, dtype, owner, zero=zero, **kwargs)
        return buffer if zero else buffer.fill_(7)

    monkeypatch.setattr(PayloadPool, "allocate", allocate)


@pytest.mark.parametrize("settings", [MOVING, {"device_budget": 60000}, {}], ids=["margin", "all", "at home"])
@pytest.mark.parametrize("write", [lambda *_: None, *WRITES], ids=lambda write: write.__name__.strip("<>"))
def test_states_that_were_written_before_the_first_step_move_with_their_chunks(garbage, write, settings):
    pair = Pair(lambda: Stack(10), "resident", settings=settings)
    pair.both(lambda model, optimizer: (write(model, optimizer), None)[1])
    pair.train(2)
    assert bool(pair.engine.stats()["chunk_moves"]) == bool(settings)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_move_back_after_a_step_and_again(garbage, dtype):
    """Updates write them: of chunks that move with their first step, and of those that stay."""
    pair = Pair(lambda: Stack(10), "resident", dtype=dtype, settings=MOVING)
    for step, size in enumerate((2, 2, 24, 24, 2, 2)):
        pair.check(step_of, step, size)
    assert pair.engine.stats()["chunk_moves"] > 4


def test_states_of_before_the_engine_and_of_checkpoints_move_with_their_chunks(garbage, tmp_path):
    def made(model):
        optimizer = adamw(trainable(model))
        write_state(model, optimizer)
        return optimizer

    models = [make(lambda: Stack(10)) for _ in range(2)]
    plain, ours = (made(model) for model in models)
    engine = engine_of(models[1], "resident", lambda _: ours, settings=MOVING)
    engine.save_checkpoint(tmp_path / "saved")
    again = engine_of(make(lambda: Stack(10), 4), "resident", settings=MOVING)
    again.load_checkpoint(tmp_path / "saved")
    for optimizer, model in ((plain, models[0]), (engine.optimizer, models[1]), (again.optimizer, again.model)):
        step_of(model, optimizer)
    assert engine.stats()["chunk_moves"] == again.stats()["chunk_moves"] > 0
    assert_same_states(plain, engine.optimizer)
    assert_same_states(plain, again.optimizer)


def test_a_thread_that_looks_at_a_state_takes_nothing_away(garbage):
    """Two ask for the same list at the same time, and one of them writes at once."""
    model = make(lambda: nn.Linear(512, 512))
    engine = engine_of(model, "resident", settings={"chunk_numel": 2**19, "host_threads": 2})
    (chunk,) = inside.chunks(engine)
    both = threading.Barrier(2)

    def write(place):
        both.wait()
        chunk.lists["exp_avg"][place] = place

    threads = [threading.Thread(target=write, args=(place,)) for place in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chunk.lists["exp_avg"][:4].tolist() == [0, 1, 2, 0]
    assert not chunk.lists["exp_avg"][4:].any()


@pytest.mark.own_streams
@pytest.mark.parametrize("looks", [True, False])
def test_values_outlive_a_move_that_is_interrupted(monkeypatch, looks):
    """Masters go by way of the memory of values; also where somebody looks into that."""
    real = DeviceStreams.copy_through

    def interrupt(self, *args):
        real(self, *args)
        raise KeyboardInterrupt

    with simulated_streams():
        pair = Pair(lambda: Stack(10), "resident", dtype="bf16", settings=MOVING)
        chunks = inside.chunks(pair.engine)
        homes = [chunk.home_param.view(-1) for chunk in chunks]  # views count as somebody who looks
        before = [home.tolist() for home in homes]
        if not looks:
            homes = [chunk.home_param for chunk in chunks]
            with monkeypatch.context() as patch:
                patch.setattr(DeviceStreams, "copy_through", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    pair.ours(batch().bfloat16())
            assert before == [chunk.home_param.tolist() for chunk in chunks]
        pair.ours(batch().bfloat16())
        assert bool(pair.engine.stats()["chunk_moves"]) == looks
        assert before == [home.tolist() for home in (homes if looks else (chunk.home_param for chunk in chunks))]
        del homes
        pair.check()
        pair.engine.detach()


@pytest.mark.own_streams
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about pages")
def test_the_system_gives_memory_for_states_when_they_are_needed(monkeypatch):
    """Not for those that move, where they were first; and all of it before an update reads them, in small pages."""
    engine = engine_of(make(lambda: nn.Linear(2048, 1024)), "resident", settings={"chunk_numel": 2**21})
    (chunk,) = [chunk for chunk in inside.chunks(engine) if chunk.spec.chunk_numel >= 2**21]
    states = [payload for name, payload in chunk.held.items() if name.startswith("exp_avg")]

    def share(payload):
        begin = -(-payload.data_ptr() // 4096) * 4096
        pages = are_there(begin, payload.nbytes - 8192)
        return sum(pages) / len(pages)

    found, update = [], AdamKernel._update

    def look_and_update(kernel, job, ranges):
        lists = [segment.part(name) for segment in ranges for name in ("exp_avg", "exp_avg_sq")]
        found.extend(share(payload) for payload in lists if payload.nbytes >= 2**20)
        update(kernel, job, ranges)

    monkeypatch.setattr(AdamKernel, "_update", look_and_update)
    assert max(map(share, states)) < 0.1
    engine.model(torch.randn(2, 2048)).sum().backward()
    engine.optimizer.step()
    assert min(found) > 0.9
    assert min(share(payload) for payload in chunk.payloads.values()) > 0.9


def test_the_log_says_once_how_long_it_took(caplog):
    with caplog.at_level(logging.INFO):
        Pair(Stack, "moving").train(3)
    said = [record.getMessage() for record in caplog.records if "to the end of the first step" in record.getMessage()]
    assert len(said) == 1
    assert re.fullmatch(r"patrickstar: \d+\.\d s from the engine to the end of the first step", said[0])


def test_chunks_stay_while_their_update_is_prepared(monkeypatch):
    """Other code may need memory meanwhile: an update that writes to lists where they were would be lost."""
    real = ElementwiseKernel.prepare

    def prepare(self, chunks, *args, **kwargs):
        updates = real(self, chunks, *args, **kwargs)
        inside.leave_margin(pair.engine)
        return updates

    pair = Pair(lambda: Stack(10), "resident", settings=MOVING)
    monkeypatch.setattr(ElementwiseKernel, "prepare", prepare)
    pair.train(3)
    assert pair.engine.stats()["chunk_moves"]


def test_memory_of_lists_that_move_is_free_at_once(monkeypatch):
    """What updated them has ended: whoever still had it would keep both homes of all that move."""
    real, num_kept = getattr(*inside.MOVE_HOME), []

    def move_home(self, *args, **settings):
        before = [weakref.ref(payload) for payload in self.held.values()]
        real(self, *args, **settings)
        num_kept.append(sum(payload() is not None for payload in before))

    monkeypatch.setattr(*inside.MOVE_HOME, move_home)
    pair = Pair(lambda: Stack(10), "resident", settings=MOVING)
    for step, size in enumerate((2, 2, 24, 24, 2, 2)):
        pair.check(step_of, step, size)
    assert len(num_kept) > 4
    assert set(num_kept) == {0}


class Few(nn.Module):
    """Uses none of its parameters, one module, or both."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x, which="both"):
        if which == "none":
            return self.drop(x) * 2
        x = self.first(x)
        return x if which == "one" else self.second(x)


def evaluate(model, optimizer, which):
    with torch.no_grad():
        return model(batch(), which)


def forward_alone(model, optimizer, which):
    return model(batch(), which).detach()


def learn(model, optimizer, which):
    loss = model(batch().requires_grad_(), which).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("frozen", ["", "first"])
@pytest.mark.parametrize("which", ["none", "one"])
@pytest.mark.parametrize("first", [evaluate, forward_alone, learn])
def test_a_forward_that_uses_little_or_nothing_comes_first(first, which, frozen):
    def make_few():
        model = Few()
        model.first.requires_grad_(frozen != "first")
        return model

    pair = Pair(make_few, "moving")
    for run, uses in [(first, which), (first, which), (learn, "both"), (first, which), (evaluate, "none")]:
        pair.check(run, uses)
