"""How often Python collects while an engine is told what happens."""

import gc

import pytest
import torch
from models import make_batch, make_model

from hf_patrickstar.cli import plan
from hf_patrickstar.cli.main import main
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.optim.optimizer import ChunkedOptimizer
from hf_patrickstar.virtual.garbage import no_collections, objects_set_aside, rare_collections
from hf_patrickstar.virtual.recording import record_step


@pytest.fixture(autouse=True)
def threshold():
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*usual)


def test_collections_are_rare_inside_alone():
    with rare_collections():
        assert gc.get_threshold()[0] >= 10_000
        assert gc.get_threshold()[1:] == (10, 10)
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_leaves_them_as_they_were():
    with pytest.raises(ValueError, match="inside"), rare_collections():
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("number", [0, 100_000])
def test_they_become_no_more_often_than_the_caller_wants(number):
    gc.set_threshold(number, 10, 10)
    with rare_collections():
        assert gc.get_threshold() == (number, 10, 10)
    assert gc.get_threshold() == (number, 10, 10)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_none_are_made_while_libraries_are_loaded(is_enabled):
    if not is_enabled:
        gc.disable()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


@pytest.fixture
def unfrozen():
    gc.unfreeze()
    yield
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("unfrozen")
def test_objects_are_set_aside_inside_alone():
    with objects_set_aside():
        assert gc.get_freeze_count() > 1000
        with objects_set_aside():
            pass
        assert gc.get_freeze_count() > 1000, "the outer block goes on"
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("unfrozen")
def test_the_command_plans_with_the_objects_of_libraries_set_aside(monkeypatch):
    seen = []

    def tell(options, subject, circumstances, plan, recording):
        seen.append((gc.get_freeze_count() > 1000, gc.isenabled()))
        return 1

    monkeypatch.setattr(plan, "_tell", tell)
    assert main(["plan", "gpt2:n_layer=2,n_embd=32,n_head=2", "--device-memory", "1GiB"]) == 1
    assert seen == [(True, True)]


def test_a_model_runs_with_collections_as_usual_and_an_optimizer_with_rare_ones(monkeypatch):
    seen = {"model": set(), "optimizer": set()}
    step = ChunkedOptimizer.step

    def seen_step(optimizer):
        seen["optimizer"].add(gc.get_threshold()[0])
        return step(optimizer)

    def compute_loss(model, inputs):
        seen["model"].add(gc.get_threshold()[0])
        return model(**inputs).loss

    monkeypatch.setattr(ChunkedOptimizer, "step", seen_step)
    record_step(
        lambda: make_model("gpt2").train(),
        lambda: {key: torch.zeros_like(value) for key, value in make_batch("gpt2", seed=0).items()},
        MACHINES["h100"],
        config={"dtype": "bf16", "chunk_numel": 700, "device_budget": "1GiB"},
        compute_loss=compute_loss,
    )
    assert seen["model"] == {700}
    assert min(seen["optimizer"], default=0) >= 10_000
