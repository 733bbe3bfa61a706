"""Updates beside the next forward: everybody sees what an optimizer that is done when its step returns would show.

Each case runs with updates at once, then over two kinds of streams: simulated ones, a real thread that begins late, or
workers that begin late with their tiles, as those of large chunks are computed.
"""

import collections
import contextlib
import functools
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import pytest
import torch
from support import inside
from support.runs import Run
from support.same import assert_same
from support.small import CHUNK_NUMEL, WIDTH, Tied, loss_of
from support.streams import streams_of
from transformers.optimization import Adafactor

from hf_patrickstar.errors import DeviceMemoryError
from hf_patrickstar.memory.streams import Copy
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.adam_kernel import AdamKernel

pytestmark = pytest.mark.own_streams

STREAMS = ["simulated", "simulated:1", "delayed", "pooled"]
WORKERS = "hf_patrickstar-update"


def after_steps(after):
    """A case in which something is done after each of some steps, before gradients are dropped."""

    def case(run):
        for seed in range(3):
            run.step(seed, after)

    return case


def evaluate(run):
    with torch.no_grad():
        run.keep(loss_of(run.model, 9))


def open_all(run):
    with run.engine.full_parameters():
        run.keep(*run.model.parameters())


def write(run):
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.9)


plain = after_steps(lambda run: None)
weights = after_steps(lambda run: run.keep(*run.model.state_dict().values()))
one_weight = after_steps(lambda run: run.keep(next(run.model.parameters()).data))
states = after_steps(lambda run: run.keep_state(run.optimizer.state_dict()))
consumed_gradients = after_steps(lambda run: run.keep(*(p.grad for p in run.model.parameters())))
evaluation, opened, writes = map(after_steps, (evaluate, open_all, write))


def states_of_before(run):
    """They are those of the last step whenever somebody looks."""
    run.step(0)
    held = [tensor for parameter in run.model.parameters() for tensor in run.optimizer.state[parameter].values()]
    for seed in (1, 2):
        run.step(seed, lambda run: run.keep(*held))


def schedule(run):
    """The learning rate changes while chunks are updated with the one of before."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.3**step)
    after_steps(lambda run: scheduler.step())(run)


def micro_batches(run):
    for seed in range(3):
        run.backward(10 + seed)
        run.step(seed)


def unused_gradients(run):
    """Some parameters have no gradient, and their chunks are updated all the same."""
    for seed in range(3):
        run.backward(seed)
        for parameter in list(run.model.parameters())[::3]:
            parameter.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()


def a_second_attempt(run):
    """Memory runs out when a forward has just begun, while chunks are updated."""
    for seed in range(3):
        failed = []

        def fail(*_, failed=failed):
            if not failed:
                failed.append(True)
                raise DeviceMemoryError("full")

        handle = run.model.register_forward_pre_hook(fail)
        run.engine.attempt(lambda seed=seed: run.backward(seed))
        handle.remove()
        run.optimizer.step()
        run.optimizer.zero_grad()


def detaching(run):
    run.step(0)
    run.step(1, lambda run: run.engine.detach())
    run.keep(*run.model.parameters())
    run.keep_state(run.engine.optimizer.inner.state_dict())


def changes_of_the_model(run):
    run.step(0)
    run.step(1)
    run.model.layers[4] = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    torch.nn.init.constant_(run.model.layers[4].weight, 0.01)
    run.step(2)


def fill_rate(run):
    for seed in range(3):
        run.step(seed)
        run.optimizer.param_groups[0]["lr"].fill_(0.1 ** (seed + 1))


def groups(cls, **settings):
    """Some parameters of a chunk are in a group of their own."""

    def make_optimizer(parameters):
        parameters = list(parameters)
        return cls(
            [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01, "weight_decay": 0.1}], **settings
        )

    return make_optimizer


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OTHERS = {
    "momentum": momentum,
    "adafactor": lambda p: Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=True, beta1=0.9),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}
"""Optimizers that update parameters one by one, by a kernel of their own; Adafactor looks at norms of whole tensors."""


def own_states(run):
    """What is kept of a parameter is read from the user's own optimizer."""
    inner = run.optimizer.inner
    for seed in range(4):
        run.step(seed)
        run.keep(*(value for p in list(run.model.parameters())[seed::3] for value in inner.state[p].values()))
    run.keep_state({"state": {id(p): state for p, state in inner.state.items()}})


def momentum_later(run):
    """The optimizer begins to keep something of each parameter when it has had none for some steps."""
    for seed in range(5):
        run.step(seed)
        states = run.optimizer.inner.state
        run.keep(len(states), len(run.optimizer.state), *(len(state) for _, state in list(states.items())))
        if seed == 2:
            given = run.optimizer.param_groups[0]["momentum"]
            if isinstance(given, torch.Tensor):
                given.fill_(0.9)
            else:
                run.optimizer.param_groups[0]["momentum"] = 0.9
    run.keep_state(run.optimizer.state_dict())


def loaded_first(run):
    """A state from before the first step has nothing of any parameter."""
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    for seed in range(3):
        run.step(seed)
        run.keep(len(run.optimizer.inner.state))
        run.keep(run.engine.ledger.owners(Tier.HOST).get("optimizer_state", 0))


def loaded_and_kept(run):
    """What a state was loaded from belongs to the program."""
    for seed in range(3):
        run.step(seed)
        state = run.optimizer.state_dict()
        run.optimizer.load_state_dict(state)
        run.step(seed)
        run.keep_state(state)
        run.optimizer.load_state_dict(state)


def settings_changed_in_place(run):
    for seed in range(4):
        run.step(seed)
        run.optimizer.param_groups[0]["betas"][0] *= 0.5


def dropped_states(run):
    for seed in range(3):
        run.step(seed)
        run.optimizer.inner.state = collections.defaultdict(dict)
        run.keep(len(run.optimizer.inner.state))


def changing_factor(run):
    """The factor of a step is that of the step."""
    factor = torch.tensor(0.5)
    for seed in range(3):
        run.backward(seed)
        run.optimizer.unscale(factor)
        run.optimizer.step()
        factor.mul_(0.9)
        run.optimizer.zero_grad()


def a_step_that_raises_in_the_middle(run):
    """An error of the caller's thread while updates are prepared: none is made, and the step can be done again."""
    plain(run)
    run.backward(1)
    run.keep(run.optimizer.clip_grad_norm_(None, 0.5))
    num_homes = len(inside.homes(run.engine))  # updates of each are prepared together
    fail = mock.Mock(side_effect=[*[None] * (num_homes - 1), MemoryError("in the middle")])
    with mock.patch.object(AdamKernel, "_numbers", fail), pytest.raises(MemoryError):
        run.optimizer.step()
    run.keep_state(run.optimizer.state_dict())
    assert {int(run.optimizer.state[parameter]["step"]) for parameter in run.model.parameters()} == {3}
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step(2)


MARGIN = {"placement": "auto", "chunk_budget": "auto", "device_budget": 25000}

OTHER_CASES = {
    **{name: (plain, {"make_optimizer": make_optimizer}) for name, make_optimizer in OTHERS.items()},
    **{f"{name} in 16-bit": (plain, {"make_optimizer": OTHERS[name], "dtype": "bf16"}) for name in list(OTHERS)[:2]},
    **{
        f"momentum, {name}": (case, {"make_optimizer": momentum})
        for name, case in {
            "states of before": states_of_before,
            "own states": own_states,
            "loaded first": loaded_first,
            "dropped states": dropped_states,
            "unused gradients": unused_gradients,
            "a second attempt": a_second_attempt,
            "detaching": detaching,
            "changes of the model": changes_of_the_model,
        }.items()
    },
    "momentum, accumulation": (micro_batches, {"make_optimizer": momentum, "accumulation": 2, "dtype": "bf16"}),
    "momentum, groups": (schedule, {"make_optimizer": groups(torch.optim.SGD, lr=0.1, momentum=0.9)}),
    "momentum that comes later": (momentum_later, {"make_optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}),
    "a momentum that is a tensor": (
        momentum_later,
        {"make_optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=torch.tensor(0.0))},
    ),
    "a state that was loaded": (loaded_and_kept, {"make_optimizer": lambda p: torch.optim.NAdam(p, lr=1e-2)}),
    "settings changed in place": (
        settings_changed_in_place,
        {"make_optimizer": lambda p: torch.optim.NAdam(p, lr=1e-2, betas=[0.9, 0.99])},
    ),
    # What the thread uses is not what the caller changes.
    "changing factor": (changing_factor, {"dtype": "bf16", "host_threads": 1, "autocast": False}),
    # A step that raises leaves what it leaves at once.
    **{
        f"a step that raises, {settings}": (a_step_that_raises_in_the_middle, settings)
        for settings in ({}, {"dtype": "bf16", "autocast": False}, {"accumulation": 2}, MARGIN)
    },
}
"""Cases with other optimizers, and those in which the caller's thread is in the middle of something."""

CASES = {
    "plain": (plain, {}),
    "16-bit": (plain, {"dtype": "bf16"}),
    "on demand": (plain, {"prefetch_depth": 0}),
    "far ahead": (plain, {"prefetch_depth": 8}),
    "single tensors": (plain, {"make_optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)}),
    "groups": (schedule, {"make_optimizer": groups(torch.optim.Adam, lr=1e-2)}),
    "a rate that is a tensor": (
        fill_rate,
        {"make_optimizer": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True)},
    ),
    "accumulation": (micro_batches, {"accumulation": 2}),
    "margin": (plain, MARGIN),
    "on the CPU": (plain, {"factory": Tied, "cpu_embedding": True, "chunk_budget": 20 * CHUNK_NUMEL}),
    "kept gradients": (consumed_gradients, {"keep_gradients": True}),
    "weights": (weights, {}),
    "one weight": (one_weight, {}),
    "states of before": (states_of_before, {}),
    "evaluation": (evaluation, {}),
    "opened": (opened, {}),
    "schedule": (schedule, {}),
    "unused gradients": (unused_gradients, {}),
    "writes": (writes, {}),
    "a second attempt": (a_second_attempt, {}),
    "detaching": (detaching, {}),
    "changes of the model": (changes_of_the_model, {}),
    **OTHER_CASES,
}


def outcome(streams, case, settings, **others):
    torch.manual_seed(0)
    with streams_of(streams):
        run = Run(**settings, **others)
        case(run)
        return run.end()


@pytest.mark.parametrize(("number", "name"), enumerate(CASES), ids=list(CASES))
def test_nobody_sees_values_of_before(number, name):
    case, settings = CASES[name]
    expected = outcome("threads", case, settings, overlap_optimizer=False)
    assert len(expected) > 3
    assert_same(expected, outcome(STREAMS[number % 2], case, settings))
    if name in OTHER_CASES or name == "margin":
        # Another kernel computes, or the thread of the caller, for a device.
        assert_same(expected, outcome("delayed", case, settings))
        return
    torch.manual_seed(0)
    with streams_of("pooled") as threads:
        run = Run(**settings, host_threads=3)
        case(run)
        found = run.end()
        run.engine.detach()
    assert_same(expected, found)
    assert {thread.rpartition("_")[0] for thread in threads} == {WORKERS}
    assert len(set(threads)) > 1


# That they go on beside


@pytest.fixture
def late():
    with streams_of("delayed") as drivers:
        yield drivers


@pytest.fixture
def gate(monkeypatch):
    """Updates on the host wait until it is set."""
    opened = threading.Event()
    update = AdamKernel._run

    def update_later(*args):
        opened.wait()
        return update(*args)

    monkeypatch.setattr(AdamKernel, "_run", update_later)
    opened.set()
    yield opened
    opened.set()


def test_a_step_returns_before_chunks_are_updated(late, gate):
    run = Run()
    run.step(0)
    gate.clear()

    def look(run):
        run.keep(run.num_under_way)
        gate.set()

    run.step(1, look)
    assert run.found[-1] == len(inside.chunks(run.engine)) > 3


def test_a_forward_begins_when_the_first_chunk_is_updated(monkeypatch):
    """The last one has not been updated by then, and copies begin as their chunks have been."""
    with streams_of("delayed") as drivers:
        run = Run(host_threads=3)
        plain(run)
        run.model.state_dict()  # waits for all updates
        first_module_ran, update, last = threading.Event(), AdamKernel._run, inside.chunks(run.engine)[-1]

        def update_late(kernel, job, segments, *others):
            if segments and segments[-1].chunk is last:
                assert first_module_ran.wait(30)
            return update(kernel, job, segments, *others)

        monkeypatch.setattr(AdamKernel, "_run", update_late)
        run.step(3)
        run.model.layers[0].register_forward_hook(lambda *_: first_module_ran.set())
        run.step(4)
        run.end()
    assert sum(driver.num_late for driver in drivers) > 0


def test_a_second_step_updates_a_chunk_after_the_first_one(monkeypatch):
    """Gradients are kept, so two steps may follow each other; one worker is late with a share of the first step."""

    def train(look=lambda run: None):
        run = Run(host_threads=2, keep_gradients=True)
        plain(run)
        run.model.state_dict()  # waits for all updates
        run.backward(3)
        look(run)
        run.optimizer.step()
        run.optimizer.step()
        run.keep_state(run.optimizer.state_dict())
        return run.end()

    under_way, together, update_share = collections.Counter(), [], AdamKernel._update_share

    def update_share_late(kernel, job, share):
        chunk, is_first = share[0].chunk.spec.index, share[0].step == 3
        under_way[chunk, is_first] += 1
        together.append(not is_first and under_way[chunk, True] > 0)
        if is_first and len(together) < 3:
            time.sleep(0.2)
        update_share(kernel, job, share)
        under_way[chunk, is_first] -= 1

    with streams_of("pooled"):
        found = train(lambda _: monkeypatch.setattr(AdamKernel, "_update_share", update_share_late))
    assert not any(together)
    assert len(together) > 4
    assert_same(train(), found)


class LastFirst(torch.nn.Module):
    """Its modules run in the opposite order of that in which they were made; one never runs."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x).relu()
        return x


def test_chunks_are_updated_in_the_order_in_which_forward_needs_them(late, monkeypatch):
    updated, prepare = [], AdamKernel.prepare

    def note(kernel, chunks, *args, **settings):
        updated.extend(chunk.spec.index for chunk in chunks)
        return prepare(kernel, chunks, *args, **settings)

    monkeypatch.setattr(AdamKernel, "prepare", note)
    run = Run(factory=LastFirst)
    plain(run)
    chunks = [inside.find(run.engine, layer.weight).chunk.spec.index for layer in run.model.layers]
    assert chunks == sorted(chunks)
    assert [index for index in updated[-len(inside.chunks(run.engine)) :] if index in chunks] == chunks[::-1]
    assert run.engine.stats()["diverged_steps"] == 0


def test_without_the_setting_nothing_is_under_way(late):
    run = Run(overlap_optimizer=False)
    run.step(after=lambda run: run.keep(run.num_under_way))
    assert run.found[-1] == 0
    assert sum(driver.num_works for driver in late) == 0


def test_of_states_that_somebody_looks_into_nothing_is_under_way(late, gate):
    run = Run()
    run.step(0)
    run.step(1)
    held = [run.optimizer.state[parameter]["exp_avg"] for parameter in run.model.parameters()]
    gate.clear()
    threading.Timer(0.05, gate.set).start()
    run.step(2, after=lambda run: run.keep(run.num_under_way))
    assert run.found[-1] == 0
    assert len(held) > 3


# Errors, interrupts and the end


@contextlib.contextmanager
def failing(chunk_index, monkeypatch):
    """Inside, the update of a chunk fails."""
    compute = AdamKernel._update_by_script

    def fail(kernel, job, rules, share):
        if any(segment.chunk.spec.index == chunk_index for segment in share):
            raise ArithmeticError("a worker failed")
        compute(kernel, job, rules, share)

    with monkeypatch.context() as patch:
        patch.setattr(AdamKernel, "_update_by_script", fail)
        yield


def rounded_masters(run):
    return {t.spec.name: t.view(t.chunk.lists["master"]).to(t.chunk.dtype).clone() for t in inside.tensors(run.engine)}


@pytest.mark.parametrize(("streams", "dtype"), [("simulated", "bf16"), ("delayed", "fp32"), ("pooled", "bf16")])
def test_an_error_in_a_worker_names_the_chunk_at_the_next_use(streams, dtype, monkeypatch):
    """Values are the masters then, also those of chunks that were not updated: gradients stood in their places."""
    with streams_of(streams):
        run = Run(dtype=dtype, host_threads=3, autocast=False)
        run.step(0)
        with failing(2, monkeypatch):
            run.step(1)
            with pytest.raises(ArithmeticError, match="a worker failed") as caught:
                run.backward(2)
            (note,) = set(caught.value.__notes__)
            assert "while the optimizer updated '" in note
            assert "chunk 2" in note
        masters = rounded_masters(run)
        for tensor in inside.tensors(run.engine):
            assert torch.equal(tensor.view(tensor.chunk.param), masters[tensor.spec.name]), tensor.spec.name
        num_steps = {int(run.optimizer.state[p]["step"]) for p in run.model.parameters()}
        assert num_steps == {1, 2}, "those before the error, and the others"
        state = {key: value.clone() for key, value in run.model.state_dict().items()}
        run.step(3)
        assert any(not torch.equal(value, state[key]) for key, value in run.model.state_dict().items())
        run.engine.detach()


@pytest.mark.parametrize("begins", ["forward", "evaluation", "step"])
def test_an_error_of_a_worker_that_has_ended_is_raised_by_what_begins_next(begins, monkeypatch):
    """Not only where its chunk is used, which may be the last one, or none of an evaluation of a part."""
    with streams_of("delayed"):
        run = Run(host_threads=3)
        run.step(0)
        last = inside.in_order_of_use(run.engine)[-1].spec.index
        with failing(last, monkeypatch):
            run.step(1)
            while run.num_under_way:
                time.sleep(0.001)
        before = run.engine.stats()["chunk_loads"]
        run.model.train(begins == "forward")
        begin = run.optimizer.step if begins == "step" else functools.partial(loss_of, run.model, 2)
        with pytest.raises(ArithmeticError, match="a worker failed") as caught:
            begin()
        assert f"chunk {last}" in caught.value.__notes__[0]
        assert run.engine.stats()["chunk_loads"] == before
        run.model.train()
        run.step(3)
        run.engine.detach()


def test_an_error_of_another_optimizer_names_the_chunk_and_leaves_the_masters(late, monkeypatch):
    run = Run(momentum, dtype="bf16", autocast=False)
    run.step(0)
    before = [value.clone() for value in run.model.state_dict().values()]

    def fail(*_):
        raise ArithmeticError("too large")

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.SGD.step, "__wrapped__", fail)
        run.backward(2)
        with pytest.raises(ArithmeticError) as caught:
            run.optimizer.step()
    assert re.fullmatch(r"while the optimizer updated '.+' \(chunk \d+\)", caught.value.__notes__[0])
    run.optimizer.zero_grad()
    assert_same(before, list(run.model.state_dict().values()))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_failed_counts_for_no_chunk_that_it_left_out(overlap, monkeypatch):
    """On the CPU tier the error comes out of the step, which can be done again."""

    def train(fails, **config):
        torch.manual_seed(0)
        run = Run(**config)
        run.step(0)
        run.backward(1)
        run.keep(run.optimizer.clip_grad_norm_(None, 0.01))
        if fails:
            with failing(0, monkeypatch), pytest.raises(ArithmeticError):
                run.optimizer.step()
        run.optimizer.step()
        run.keep_state(run.optimizer.state_dict())
        return run.end()

    assert_same(train(False), train(True, overlap_optimizer=overlap))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_error_in_one_chunk_leaves_no_other_half_updated(dtype, monkeypatch):
    """Workers are at several chunks when a share fails; the step waits for all of them."""

    def train(index=None):
        torch.manual_seed(0)
        run = Run(dtype=dtype, autocast=False, host_threads=3, overlap_optimizer=False)
        run.step(0)
        run.backward(1)
        first, begun, compute = inside.in_order_of_use(run.engine)[0], threading.Event(), AdamKernel._update_by_script

        def fail(kernel, job, rules, share):
            if share[0].chunk is not first:
                begun.set()
                time.sleep(0.01)
            elif share[0].start == index:
                assert begun.wait(30)
                raise ArithmeticError("a worker failed")
            compute(kernel, job, rules, share)

        with monkeypatch.context() as patch:
            patch.setattr(AdamKernel, "_update_by_script", fail)
            with contextlib.nullcontext() if index is None else pytest.raises(ArithmeticError):
                run.optimizer.step()
        run.optimizer.zero_grad()
        return [[chunk.param.clone(), *map(torch.clone, chunk.lists.values())] for chunk in inside.chunks(run.engine)]

    with streams_of("pooled"):
        done, failed = train(), train(0)
    pairs = enumerate(zip(done, failed, strict=True))
    different = [index for index, pair in pairs if not all(map(torch.equal, *pair))]
    assert len(different) == 1
    (index,) = different
    param, master = failed[index][:2]
    assert torch.equal(param, master.to(param.dtype)), "no gradients stand in the places of values"


def threads_of_engines():
    return {thread for thread in threading.enumerate() if thread.name.startswith("hf_patrickstar")}


@pytest.mark.parametrize("streams", ["simulated", "delayed"])
def test_after_an_error_an_engine_can_be_detached(streams, monkeypatch):
    before = threads_of_engines()
    with streams_of(streams):
        run = Run()
        run.step(0)
        with failing(2, monkeypatch):
            run.step(1)
            with pytest.raises(ArithmeticError, match="a worker failed"):
                run.engine.detach()
        masters = rounded_masters(run)
        run.engine.detach()
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, masters[name]), name
        assert type(parameter) is torch.nn.Parameter
    assert not hasattr(run.model, "patrickstar_engine")
    assert len(run.optimizer.inner.state) == len(masters)
    assert not threads_of_engines() - before


def test_an_interrupted_wait_can_be_repeated(late, gate, monkeypatch):
    expected = outcome("threads", plain, {}, overlap_optimizer=False)
    run = Run()
    for seed in range(2):
        run.step(seed)
    wait = Copy.wait

    def interrupt(ticket):
        monkeypatch.setattr(Copy, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(Copy, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.model.state_dict()
    run.step(2)
    assert_same(expected, run.end())


@pytest.mark.parametrize("end", ["detached", "dropped"])
def test_no_thread_stays_when_an_engine_ends_with_work_under_way(late, end):
    before = threads_of_engines()
    run = Run()
    run.step(0)
    threads = threads_of_engines() - before
    assert threads
    if end == "detached":
        run.engine.detach()
    del run
    late.clear()
    for thread in threads:
        while thread.is_alive():  # the work under way refers to what is to be collected
            gc.collect()
            thread.join(0.01)


EXIT = """
    import atexit, sys, time
    import torch
    from support.streams import streams_of
    from support.runs import Run
    from hf_patrickstar.optim.adam_kernel import AdamKernel

    context = streams_of("pooled")
    threads = context.__enter__()
    run = Run(host_threads=3, dtype="bf16", autocast=False)
    run.step(0)
    update = AdamKernel._update_share
    def update_late(*args, **settings):
        time.sleep(0.02)
        update(*args, **settings)
    AdamKernel._update_share = update_late
    run.step(1)
    assert run.num_under_way > 3
    num_begun = len(threads)

    def save():
        assert len(threads) > num_begun
        torch.save(run.model.state_dict(), sys.argv[1])
    atexit.register(save)
"""


def run_program(text, *arguments):
    """Runs a program that imports these tests, and returns how it ended; it must end well."""
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done


def test_a_program_that_exits_loses_nothing_that_workers_were_at(tmp_path):
    """Workers finish what they have been given, and the thread of the host computes the rest alone."""
    path = tmp_path / "weights.pt"
    run_program(EXIT, str(path))
    torch.manual_seed(0)
    run = Run(overlap_optimizer=False, dtype="bf16", autocast=False)
    for seed in range(2):
        run.step(seed)
    saved = torch.load(path)
    assert saved.keys() == run.model.state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in run.model.state_dict().items())


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="the system has no fork")
def test_a_process_that_is_forked_sees_updates_that_were_under_way(late, gate):
    """Data sets that look at the model, in workers that begin right after a step."""
    run = Run()
    run.step(0)
    gate.clear()
    run.step(1)
    assert run.num_under_way > 3
    threading.Timer(0.1, gate.set).start()

    class Norms(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return [parameter.detach().norm() for parameter in run.model.parameters()][-index]

    found = list(torch.utils.data.DataLoader(Norms(), num_workers=1, timeout=30, multiprocessing_context="fork"))
    norms = [parameter.detach().norm() for parameter in run.model.parameters()]
    assert [value.item() for value in found] == [norms[0].item(), norms[-1].item()]


# What updates share


def test_a_reader_that_has_waited_forgets_no_later_update(late, gate, monkeypatch):
    """Another thread waits for the update of one step while the next step begins."""
    run = Run(host_threads=1)
    run.step(0)
    chunk = inside.chunks(run.engine)[-1]
    waited, go_on = threading.Event(), threading.Event()
    wait = Copy.wait

    def pausing(ticket):
        wait(ticket)
        if threading.current_thread().name == "reader":
            waited.set()
            assert go_on.wait(30)

    monkeypatch.setattr(Copy, "wait", pausing)
    run.backward(1)
    run.optimizer.step()
    reader = threading.Thread(target=lambda: chunk.lists, name="reader")
    reader.start()
    assert waited.wait(30)
    run.optimizer.zero_grad()
    run.backward(2)
    gate.clear()
    run.optimizer.step()
    go_on.set()
    reader.join(30)
    assert chunk.update is not None
    assert not chunk.update.is_done
    gate.set()


@pytest.mark.parametrize(("streams", "background"), [("simulated", False), ("delayed", True)])
def test_a_checkpoint_right_after_a_step_is_of_that_step(streams, background, tmp_path):
    torch.manual_seed(0)
    with streams_of(streams):
        run = Run(background_save=background)
        run.step(0)
        run.step(1, lambda run: run.engine.checkpoints.save(tmp_path))
        run.step(2)
        run.engine.detach()
    torch.manual_seed(0)
    expected, loaded = Run(overlap_optimizer=False), Run()
    for seed in range(2):
        expected.step(seed)
    loaded.engine.checkpoints.load(tmp_path)
    for one in (expected, loaded):
        one.found.clear()
        one.keep_state(one.optimizer.state_dict())
    assert_same(expected.end(), loaded.end())


def test_workspace_goes_when_no_update_uses_it_any_more(late, gate):
    run = Run(dtype="bf16")
    run.step(0)
    gate.clear()
    run.backward(1)
    run.optimizer.step()
    threading.Timer(0.05, gate.set).start()
    assert run.num_under_way > 3
    inside.reserve_anew(run.engine)
    assert run.num_under_way == 0
