"""What all processes must call together, called by some of them alone."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.models import gpt2
from support.processes import Workers
from support.together import heard

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import CollectiveError

LIMIT_S = 1.0
SOON_S = 30.0
"""Much less than any timeout of a process group here."""


def make_engine(limit_s=LIMIT_S):
    dist.barrier()  # a process that is still importing torch has not come, either
    model = gpt2()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return PatrickStarEngine(
        model, {"chunk_numel": 4096, "process_wait_s": limit_s, "prefetch_depth": 2}, inner, device="cpu"
    )


def make_ids(rank):
    return torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(rank))


def learn(engine, rank):
    ids = make_ids(rank)
    engine.model(input_ids=ids, labels=ids).loss.backward()


def meet(name):
    """Waits for all ranks over the store: a rank that gave up has closed the connections of the process group."""
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + SOON_S
    store.add(name, 1)
    while store.add(name, 0) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.01)


# The calls


def read_an_attribute(engine, folder):
    return engine.model.lm_head.weight.float().sum()


def read_all(engine, folder):
    return engine.model.state_dict()


def read_states(engine, folder):
    return engine.optimizer.state_dict()


def save_all(engine, folder):
    engine.save_checkpoint(folder)


CALLS = {
    read_an_attribute: "needs group 0 (gather) for code outside of every forward that ",
    read_all: "reads the value of parameter 'transformer.wte.weight'",
    save_all: "saves a checkpoint",
}


def line_of(call):
    """Where a call stands: the last line of its function, or what the ``with`` statement says."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    number = next(place for place, line in enumerate(lines, 1) if line.startswith(f"def {call.__name__}(")) + 1
    return f"{__file__}:{number} in {call.__name__}: {lines[number - 1].strip()}"


def call_alone(rank, call, alone, folder, limit_s=LIMIT_S):
    """Some call it; the others wait outside of the engine. Then all go on."""
    engine = make_engine(limit_s)
    learn(engine, rank)
    dist.barrier()
    own, warnings, begin = "", [], time.monotonic()
    if rank in alone:
        with heard() as warnings, pytest.raises(CollectiveError) as caught:
            call(engine, folder)
        own = str(caught.value)
    meet("all go on")
    waited_s, begin = time.monotonic() - begin, time.monotonic()
    nexts = []
    for following in (lambda: learn(engine, rank), lambda: engine.model.state_dict(), engine.detach):
        with pytest.raises(CollectiveError) as caught:
            following()
        nexts.append(str(caught.value))
    return own, warnings, nexts, (waited_s, time.monotonic() - begin)


@pytest.mark.parametrize("call", [read_an_attribute, save_all], ids=lambda call: call.__name__)
def test_one_of_two_is_warned_and_gives_up_and_the_other_is_told(tmp_path, call):
    with Workers(2) as workers:
        (own, warnings, nexts, times), (_, _, told, _) = workers.run(call_alone, call, [0], str(tmp_path / "saved"))
    (warning,) = warnings
    what, where = CALLS[call], line_of(call)
    for text in (warning, own):
        assert what in text
        assert where in text
        assert "rank 1 has not come" in text
    assert warning.startswith("patrickstar: rank 0 ")
    assert f"after {LIMIT_S:g} s (process_wait_s)" in warning
    assert re.search(r"rank 0 gave up after \d+ s: ", own)
    for word in ("all processes", "process_wait_s", "last checkpoint"):
        assert word in own
    story = own[own.index("rank 0 gave up") :]
    assert [text.endswith(story) for text in (*nexts, *told)] == [True] * 6
    assert told[0].startswith("begins 'training': ")
    assert LIMIT_S <= times[0] < SOON_S
    assert times[1] < SOON_S


# Waiting that is right


def come_late(rank, limit_s):
    """To a training step, and to what one does longer than others."""
    engine = make_engine(limit_s)
    with heard() as warnings:
        if rank == 1:
            time.sleep(2 * LIMIT_S)
        learn(engine, rank)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if rank == 1:  # the other has begun the step already
            engine.model.transformer.h[1].register_forward_pre_hook(lambda *_: time.sleep(1.5 * LIMIT_S))
        learn(engine, rank)
        with engine.full_parameters():
            if rank == 1:
                time.sleep(1.5 * LIMIT_S)
        with engine.weights.streamed(is_reader=rank == 0):
            if rank == 0:
                time.sleep(1.5 * LIMIT_S)
        engine.model.state_dict()
        engine.detach()
    return warnings


def test_a_step_and_those_that_are_busy_are_waited_for(pair):
    warnings, others = pair.run(come_late, LIMIT_S)  # a busy machine may have more of them
    (first,) = [text for text in warnings if "rank 0 begins 'training'" in text]
    assert re.search(r"in learn: engine.model\(input_ids=ids, ", first)
    (second,) = [text for text in warnings if "leaves full_parameters()" in text]
    assert all("rank 1 has not come" in text and "process group" in text for text in (first, second))
    (other,) = [text for text in others if "follows the processes that save the model" in text]
    assert "rank 0 has not come" in other


def wait_inside_a_step(rank):
    """Rank 0 follows its plan to a gather of all; the other does something else, and then gives up."""
    engine = make_engine()
    for _ in range(2):
        learn(engine, rank)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    if rank == 1:  # before its first gather
        engine.model.transformer.h[0].register_forward_pre_hook(lambda *_: read_states(engine, None))
    with pytest.raises(CollectiveError) as caught:
        learn(engine, rank)
    with pytest.raises(RuntimeError, match=r"clos|reset"):  # what rank 0 sent over this group is given up too
        dist.barrier()
    return str(caught.value)


def test_one_that_waits_for_data_is_told_too():
    with Workers(2) as workers:
        text, own = workers.run(wait_inside_a_step)
    assert re.search(r"rank 1 gave up after \d+ s: it reads the optimizer's state", own)
    assert own in text


def interrupt_a_wait(rank):
    """Ctrl-C comes while rank 0 waits alone."""
    engine = make_engine(0)
    learn(engine, rank)
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            engine.model.state_dict()
        meet("it was interrupted")
        return "", time.monotonic() - begin
    meet("it was interrupted")
    with pytest.raises(CollectiveError) as caught:
        learn(engine, rank)
    return str(caught.value), time.monotonic() - begin


def test_an_interrupt_ends_a_wait_and_the_others_are_told():
    with Workers(2) as workers:
        (_, first_s), (text, second_s) = workers.run(interrupt_a_wait)
    assert "begins 'training': rank 0 was interrupted while it reads the value of parameter " in text
    assert max(first_s, second_s) < 10
