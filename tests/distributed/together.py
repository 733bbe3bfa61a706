"""Engines of several processes, and what is around them."""

import contextlib
import gc
import logging
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from as_one import make_optimizer, seed_of
from models import make_batch, make_model

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError


def hf_loss(name, size=2, length=8):
    """The loss of one rank's micro-batch, as a function of the model and of where it is."""

    def loss(model, step, micro, rank):
        torch.manual_seed(seed_of(step, micro, rank))  # for dropout
        return model(**make_batch(name, size, seed_of(step, micro, rank), length)).loss

    return loss


@contextlib.contextmanager
def recorded(is_recorded=True):
    """Inside, engines do not estimate their first steps, which are recorded; as the fixture of this name."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if is_recorded:
            monkeypatch.setattr("hf_patrickstar.engine.make_estimator", lambda *_: None)
        yield


@contextlib.contextmanager
def engaged(model, config=None, optimizer=None, accumulation=1, **kwargs):
    """An engine on the CPU tier; what fails leaves it as it is, since the others may be anywhere."""
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    engine = PatrickStarEngine(
        model, config, optimizer, device="cpu", gradient_accumulation_steps=accumulation, **kwargs
    )
    assert engine.collectives.world_size == dist.get_world_size() > 1
    yield engine
    engine.detach()
    gc.collect()


def tight(model, config=None, extra_nbytes=0):
    """The settings with the least ``chunk_budget`` that the engine asks for; all ranks call it."""
    try:
        PatrickStarEngine(model, {**(config or {}), "chunk_budget": 64}, make_optimizer(model), device="cpu")
    except BudgetError as error:
        return {
            **(config or {}),
            "chunk_budget": int(re.search(r"to at least (\d+) bytes", str(error))[1]) + extra_nbytes,
        }
    raise AssertionError("64 bytes were enough")


def prepared(name, checkpointing=False, change=None):
    model = make_model(name)
    if change is not None:
        change(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextlib.contextmanager
def heard():
    """What is logged as a warning."""
    texts = []

    class Keeper(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    keeper = Keeper(logging.WARNING)
    logging.getLogger("hf_patrickstar").addHandler(keeper)
    try:
        yield texts
    finally:
        logging.getLogger("hf_patrickstar").removeHandler(keeper)


def join_again(rank, folder, timeout_s):
    """Makes the default group anew, with a timeout of its own; the workers of a test cannot be used afterwards."""
    world_size, timeout = dist.get_world_size(), timedelta(seconds=timeout_s)
    dist.destroy_process_group()
    address = f"file://{folder}/store of all"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=timeout)


@contextlib.contextmanager
def launched(rank):
    """What a launcher tells its processes; accelerate has no state of before, and leaves none."""
    from accelerate.state import AcceleratorState, GradientState

    world_size = str(dist.get_world_size())
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
