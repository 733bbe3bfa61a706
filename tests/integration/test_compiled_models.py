"""A model that is compiled as a whole trains where it all stays on the device, and is refused where it does not."""

import contextlib

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from support.trainers import assert_same_weights, make_model, tight, train
from test_compiled_parts import MOVING, Model, Training

from hf_patrickstar import (
    ConfigError,
    DeviceMemoryError,
    PatrickStarAccelerator,
    PatrickStarEngine,
    get_engine,
    initialize_engine,
)
from hf_patrickstar.runtime.rest import Rest


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(make=Model, backend="eager"):
    model = make()
    model.compile(backend=backend)
    return model


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("rests", [True, False])
def test_it_trains_and_rests(backend, rests, monkeypatch):
    monkeypatch.setattr(Rest, "_chunks_to_rest", Rest._chunks_to_rest if rests else lambda *_: (frozenset(), False))
    plain, ours = Training(False, lambda: compiled(backend=backend)), Training(False, Model)
    engine = PatrickStarEngine(ours.model, {}, ours.optimizer, device="cpu")
    ours.optimizer = engine.optimizer
    ours.model.compile(backend=backend)  # after the engine was made, as well as before
    for _ in range(4):
        plain.step()
        ours.step()
    assert ours.losses == plain.losses
    for name, value in plain.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name
    assert engine.manager.device.is_resting is rests
    engine.detach()
    assert ours.model(torch.arange(8).view(2, 4)).item() == plain.model(torch.arange(8).view(2, 4)).item()


def test_it_is_refused_where_chunks_move():
    with pytest.raises(ConfigError, match=r"compiled as a whole.* \d+ of its \d+ chunks.*block\.compile\(\)"):
        initialize_engine(compiled, MOVING, optimizer_of)
    model, _ = initialize_engine(Model, MOVING, optimizer_of)
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match="compiled as a whole"):
        model(torch.arange(8).view(2, 4))


def test_a_wrapper_is_refused_with_a_remedy():
    model = torch.compile(Model(), backend="eager")
    with pytest.raises(ConfigError, match=r"pass the model itself, .*model\.compile\(\)"):
        PatrickStarEngine(model, {}, optimizer_of(model.parameters()), device="cpu")


def test_torch_compile_of_the_trainer(tmp_path):
    told = {"torch_compile_backend": "eager", "max_steps": 4}
    stock, expected = train("gpt2", tmp_path / "stock", **told)
    ours, found = train("gpt2", tmp_path / "ours", {}, **told)
    assert found.losses == expected.losses
    assert ours.model._compiled_call_impl is not None
    assert get_engine(ours.model).manager.device.is_resting
    assert_same_weights(getattr(stock.model, "_orig_mod", stock.model), ours.model)
    with pytest.raises(ConfigError, match="compiled as a whole"):
        train("gpt2", tmp_path / "moving", tight(), **told)


def test_compilers_of_accelerate():
    model = make_model("gpt2")
    accelerator = PatrickStarAccelerator(cpu=True, dynamo_backend="eager")
    prepared, _ = accelerator.prepare(model, optimizer_of(model.parameters()))
    assert prepared is model
    assert model._compiled_call_impl is not None


def test_compiled_regions_of_accelerate():
    """Blocks are compiled one by one, also where chunks move; one that has no room leaves nothing in force."""
    ids = torch.arange(8).view(1, 8)
    for factor in (3.0, 8.0):
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        model = make_model("gpt2")
        accelerator = PatrickStarAccelerator(cpu=True, dynamo_plugin=plugin, patrickstar_config=tight(factor=factor))
        accelerator.prepare(model, optimizer_of(model.parameters()))
        assert model._compiled_call_impl is None
        assert all(block._compiled_call_impl is not None for block in model.transformer.h)
        with contextlib.nullcontext() if factor > 3 else pytest.raises(DeviceMemoryError, match=r"transformer\.h\.0"):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert get_engine(model).stats()["chunk_loads"]
