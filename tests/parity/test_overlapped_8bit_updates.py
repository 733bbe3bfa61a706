"""Updates by bitsandbytes beside the next forward: nobody sees values of before, and errors name parameters.

Weights of the models are one block, and have 8-bit states; biases have fp32 states.
"""

import functools
import threading

import pytest
import test_overlapped_updates as overlapped
import torch
from support import inside
from support.quantized_states import begin_apart
from support.runs import Run
from support.same import assert_same
from support.small import WIDTH
from support.streams import streams_of
from test_overlapped_updates import outcome

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.own_streams

IN_8_BITS = {"min_8bit_size": WIDTH * WIDTH}
OPTIMIZERS = {
    "adamw": functools.partial(bnb.optim.AdamW8bit, lr=1e-2, **IN_8_BITS),
    "lion": functools.partial(bnb.optim.Lion8bit, lr=1e-2, **IN_8_BITS),
    "rmsprop": functools.partial(bnb.optim.RMSprop8bit, lr=1e-2, **IN_8_BITS),
    "adamw in 32 bits": functools.partial(bnb.optim.AdamW32bit, lr=1e-2),
}


@pytest.fixture(autouse=True)
def _apart():
    begin_apart()
    yield
    begin_apart()


def states_of_before(run):
    """They are those of the last step whenever somebody looks; of each parameter, what it has."""
    run.step(0)
    held = [
        value
        for parameter in run.model.parameters()
        for value in run.optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor)
    ]
    assert any(value.dtype is torch.uint8 for value in held)
    for seed in (1, 2):
        run.step(seed, lambda run: run.keep(*held))


def written_states(run):
    """What somebody writes into states has effect."""
    for seed in range(3):
        run.step(seed)
        with torch.no_grad():
            for parameter in run.model.parameters():
                state = run.optimizer.state[parameter]
                state["absmax1" if "absmax1" in state else "state1"].mul_(0.5)
    run.keep_state(run.optimizer.state_dict())


def begun_anew(run):
    """A parameter whose state is dropped begins anew."""
    for seed in range(3):
        run.step(seed)
        if seed == 1:
            for parameter in list(run.model.parameters())[::3]:
                del run.optimizer.state[parameter]
    run.keep_state(run.optimizer.state_dict())


CASES = {
    **{name: (overlapped.plain, {"make_optimizer": maker}) for name, maker in OPTIMIZERS.items()},
    "16-bit": (overlapped.plain, {"dtype": "bf16"}),
    "16-bit without autocast": (overlapped.plain, {"dtype": "bf16", "autocast": False}),
    "accumulation": (overlapped.micro_batches, {"accumulation": 2, "dtype": "bf16"}),
    "groups": (overlapped.schedule, {"make_optimizer": overlapped.groups(bnb.optim.AdamW8bit, lr=1e-2, **IN_8_BITS)}),
    "margin": (overlapped.plain, {"placement": "auto", "chunk_budget": "auto", "device_budget": 10**6}),
    "tied": (overlapped.plain, {"factory": overlapped.Tied, "chunk_budget": 20 * overlapped.CHUNK_NUMEL}),
    "states of before": (states_of_before, {}),
    "written states": (written_states, {}),
    "begun anew": (begun_anew, {}),
    **{
        name.replace("_", " "): (getattr(overlapped, name), {})
        for name in (
            *("states", "writes", "unused_gradients", "a_second_attempt"),
            *("detaching", "changes_of_the_model", "loaded_and_kept"),
        )
    },
}


@pytest.mark.parametrize(("number", "name"), enumerate(CASES), ids=list(CASES))
def test_nobody_sees_values_of_before(number, name):
    case, settings = CASES[name]
    settings = {"make_optimizer": OPTIMIZERS["adamw"], **settings}
    expected = outcome("threads", case, settings, overlap_optimizer=False)
    assert len(expected) > 3
    for streams in (("simulated", "simulated:1")[number % 2], "delayed"):
        begin_apart()
        assert_same(expected, outcome(streams, case, settings))


def patched(monkeypatch, change):
    """Calls ``change`` with the values of a state whenever the library quantizes them, in whatever thread."""
    quantize = torch.ops.bitsandbytes.quantize_blockwise

    def changed(values, *args):
        change(values)
        return quantize(values, *args)

    monkeypatch.setattr(torch.ops.bitsandbytes, "quantize_blockwise", changed)


def test_a_step_returns_before_chunks_are_updated(monkeypatch):
    opened, threads = threading.Event(), []

    def wait(values):
        threads.append(threading.current_thread())
        assert threading.current_thread() is threading.main_thread() or opened.wait(30)

    with streams_of("delayed"):
        run = Run(OPTIMIZERS["adamw"])
        opened.set()
        run.step(0)
        run.model.state_dict()  # waits for all updates
        threads.clear()
        opened.clear()
        patched(monkeypatch, wait)

        def look(run):
            run.keep(run.num_under_way)
            opened.set()

        run.step(1, look)
        chunks = {inside.find(run.engine, layer.weight).chunk.spec.index for layer in run.model.layers}
        assert run.found[-1] >= len(chunks) > 3
        run.end()
        assert threads
        assert threading.main_thread() not in threads
        run.engine.detach()


def step_and_go_on(run):
    run.step(1)
    run.backward(2)


@pytest.mark.parametrize("streams", ["threads", "delayed"])
def test_an_error_in_an_update_names_the_parameter(streams, monkeypatch):
    """And values are the masters afterwards, as with Adam."""
    with streams_of(streams):
        run = Run(OPTIMIZERS["adamw"], dtype="bf16", autocast=False)
        run.step(0)
        run.model.state_dict()
        before = [value.clone() for value in run.model.state_dict().values()]

        def fail(values):
            raise ArithmeticError("the library failed")

        with monkeypatch.context() as inside:
            patched(inside, fail)
            with pytest.raises(ArithmeticError, match="the library failed") as caught:
                step_and_go_on(run)
        (note,) = set(caught.value.__notes__)
        assert "while the optimizer updated 'layers." in note
        run.optimizer.zero_grad()
        run.step(3)
        after = run.model.state_dict().values()
        assert not any(torch.equal(value, found) for value, found in zip(before, after, strict=True))
        run.engine.detach()
