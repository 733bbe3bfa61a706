"""Chunks that workers fill: the same bits and errors as in one thread, and the same model after a failure."""

import pytest
import torch
from support import inside
from support.checkpoint_files import same_bits

from hf_patrickstar import CheckpointError, PatrickStarEngine
from hf_patrickstar.checkpoint import first_values
from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.checkpoint.weight_files import open_weights
from hf_patrickstar.model.live_parameter import raw_data
from hf_patrickstar.optim.workers import SMALL_NUMEL

WIDTH, DEPTH = 256, 6
assert WIDTH**2 > SMALL_NUMEL
CHUNKS = {"host_threads": 3, "chunk_numel": 2**17}
MIXED = {"dtype": "bf16", "autocast": False, **CHUNKS}


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch):
    """Every weight is filled in several pieces."""
    real = first_values.FirstValues.__post_init__

    def init(self):
        real(self)
        self.piece_numel = 2**14

    monkeypatch.setattr(first_values.FirstValues, "__post_init__", init)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]).to(dtype)


def make_engine(model, config=None):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return PatrickStarEngine(model, config or MIXED, torch.optim.AdamW(trainable), device="cpu")


def values_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(left, right):
    assert all(same_bits(one, other) for one, other in zip(left, right, strict=True))


def defer(model, folder):
    """Writes a model's values to a file, and gives it deferred ones."""
    path = folder / "model.safetensors"
    write_safetensors(path, model.state_dict())
    model.load_state_dict(dict(open_weights(path)), assign=True)
    assert all(isinstance(parameter, DeferredTensor) for parameter in model.parameters())
    return path


def fail_at(monkeypatch, model, *names):
    """Pieces of these parameters cannot be filled."""
    recipes = {id(getattr(model.get_parameter(name), "recipe", None)): name for name in names}
    storages = {model.get_parameter(name).untyped_storage()._cdata: name for name in names}

    fill = Reader.fill

    def fail(self, values, tensor, start=0, *args):
        is_deferred = isinstance(tensor, DeferredTensor)
        key = id(tensor.recipe) if is_deferred else tensor.untyped_storage()._cdata
        if key in (found := recipes if is_deferred else storages):
            raise CheckpointError(f"cannot read {found[key]} from {start}")
        fill(self, values, tensor, start, *args)

    monkeypatch.setattr(Reader, "fill", fail)


def note_moves(monkeypatch, see):
    """Calls ``see`` with each parameter that is moved into its chunk, and the storage that it had before."""
    real = first_values.ManagedParameter.move_in

    def move_in(self):
        storage = raw_data(self.parameter).untyped_storage()
        real(self)
        see(self, storage)

    monkeypatch.setattr(first_values.ManagedParameter, "move_in", move_in)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [{}, {"dtype": "bf16", "autocast": False, "frozen_master": True}])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_same_bits_with_any_number_of_workers(tmp_path, is_deferred, config, dtype):
    found = []
    for threads in (1, 3):
        model = make_model(dtype)
        model[1].requires_grad_(False)
        expected = values_of(model)
        if is_deferred:
            defer(model, tmp_path)
        engine = make_engine(model, {**CHUNKS, **config, "host_threads": threads})
        found.append([payload.clone() for chunk in inside.chunks(engine) for payload in chunk.payloads.values()])
        for chunk in inside.chunks(engine):
            for tensor in chunk.tensors:
                for payload in (chunk.param, *(chunk.lists[name] for name in chunk.lists if name == "master")):
                    assert same_bits(tensor.view(payload), expected[tensor.spec.name].to(payload.dtype))
        engine.detach()
        assert_same(values_of(model).values(), expected.values())
    assert_same(*found)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_the_error_is_that_of_the_first_parameter(tmp_path, monkeypatch, is_deferred):
    """Parameters before it were moved in, later ones were not, and the model is whole and can be managed again."""
    model = make_model()
    expected = values_of(model)
    if is_deferred:
        defer(model, tmp_path)
    parameters = list(model.parameters())
    moved = []
    with monkeypatch.context() as patches:
        fail_at(patches, model, "2.weight", "3.weight", "4.weight")
        note_moves(patches, lambda tensor, _: moved.append(tensor.spec.name))
        with pytest.raises(CheckpointError, match=r"cannot read 2\.weight from 0$"):
            make_engine(model)
    assert moved == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(left is right for left, right in zip(parameters, model.parameters(), strict=True))
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DeferredTensor) == (is_deferred and name not in moved)
    engine = make_engine(model)
    engine.detach()
    assert_same(values_of(model).values(), expected.values())


def test_frozen_parameters_keep_their_memory_until_all_others_are_moved_in(monkeypatch):
    model = make_model()
    model[0].requires_grad_(False)
    before, expected = model[0].weight.detach(), values_of(model)
    fail_at(monkeypatch, model, f"{DEPTH - 1}.weight")
    with pytest.raises(CheckpointError, match="cannot read"):
        make_engine(model)
    assert model[0].weight.data_ptr() == before.data_ptr()
    assert_same(values_of(model).values(), expected.values())


def test_memory_is_freed_when_a_parameter_is_moved_in(monkeypatch):
    """Nobody else holds it, however far ahead workers are."""
    order, counts = [], []

    def see(tensor, storage):
        if tensor.spec.name.endswith("weight"):
            order.append(tensor.spec.name)
            counts.append(torch._C._storage_Use_Count(storage._cdata))

    note_moves(monkeypatch, see)
    make_engine(make_model())
    assert order == [f"{place}.weight" for place in range(DEPTH)]
    assert max(counts) == 1  # only the one here
