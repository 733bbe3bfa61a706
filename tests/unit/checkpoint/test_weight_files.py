"""Weights of saved models: found in every layout, checked, refused, and read late."""

import json
import os
import pickle

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from models import MODELS, make_model
from transformers import BertForMaskedLM, BertForSequenceClassification

from hf_patrickstar import deferred_weights
from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.safetensors_file import SafetensorsFile
from hf_patrickstar.checkpoint.weight_files import load_torch_file, open_weights
from hf_patrickstar.errors import CheckpointError

STATE = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.arange(4.0).bfloat16(), "empty": torch.empty(0, 2)}


def save_index(directory, save, ending, shards=None):
    shards = shards or {"a": "one", "b.c": "two", "empty": "two"}
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    for shard in set(shards.values()):
        tensors = {name: tensor for name, tensor in STATE.items() if shards.get(name) == shard}
        save(tensors, directory / f"{shard}.{ending}")
    path = directory / f"{stem}.{ending}.index.json"
    path.write_text(json.dumps({"weight_map": {name: f"{shard}.{ending}" for name, shard in shards.items()}}))
    return path


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


LAYOUTS = {
    "safetensors": lambda path: safetensors.torch.save_file(STATE, path / "model.safetensors"),
    "safetensors in shards": lambda path: save_index(path, safetensors.torch.save_file, "safetensors"),
    "torch": lambda path: torch.save(STATE, path / "pytorch_model.bin"),
    "torch in shards": lambda path: save_index(path, torch.save, "bin"),
    "torch, and what is no tensor": lambda path: torch.save({**STATE, "step": 3}, path / "pytorch_model.bin"),
    "torch of before": lambda path: save_legacy(STATE, path / "pytorch_model.bin"),
    "torch of before in shards": lambda path: save_index(path, save_legacy, "bin"),
}


@pytest.mark.parametrize("save", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(save, tmp_path):
    save(tmp_path)
    found = open_weights(tmp_path)
    assert set(found) == set(STATE)
    for name, tensor in STATE.items():
        assert isinstance(found[name], DeferredTensor)
        assert (found[name].shape, found[name].dtype, found[name].device.type) == (tensor.shape, tensor.dtype, "cpu")
        assert torch.equal(Reader().read(found[name]), tensor.view(-1))
        stop = min(3, tensor.numel())
        assert torch.equal(Reader().read(found[name], 0, stop), tensor.view(-1)[:stop])
        assert str(found[name].recipe).startswith(f"'{tmp_path}")


def test_one_file_or_index(tmp_path):
    safetensors.torch.save_file(STATE, tmp_path / "other.safetensors")
    torch.save(STATE, tmp_path / "other.bin")
    index = save_index(tmp_path, safetensors.torch.save_file, "safetensors")
    for path in (tmp_path / "other.safetensors", str(tmp_path / "other.bin"), index):
        assert set(open_weights(path)) == set(STATE)


def test_safetensors_are_preferred(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors")
    assert set(open_weights(tmp_path)) == set(STATE)


def test_tensors_in_a_torch_file_that_are_not_contiguous(tmp_path):
    torch.save({"t": STATE["a"].t(), "p": torch.nn.Parameter(STATE["a"])}, tmp_path / "pytorch_model.bin")
    found = open_weights(tmp_path)
    assert Reader().read(found["t"], 1, 4).tolist() == [3, 1, 4]
    assert Reader().read(found["p"], 1, 4).tolist() == [1, 2, 3]


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match=f"'{tmp_path}' has no weights: none of model.safetensors, .* is there"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        open_weights(tmp_path / "gone")


@pytest.mark.parametrize(("save", "ending"), [(safetensors.torch.save_file, "safetensors"), (torch.save, "bin")])
def test_an_index_that_is_wrong(save, ending, tmp_path):
    index = save_index(tmp_path, save, ending)
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "b.c": f"one.{ending}"}}))
    message = f"index.json' says that tensor 'b.c' is in 'one.{ending}', but it is not"
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / f"two.{ending}").unlink()
    with pytest.raises(CheckpointError, match=f"two.{ending}' is missing"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "3", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": {}}}', "\udcff"],
)
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"index.json' is not the index of a checkpoint"):
        open_weights(tmp_path)


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_nothing_is_executed(save, tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path / "proof")))
    assert (tmp_path / "proof").is_dir()
    save({**STATE, "x": Canary(tmp_path / "canary")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin' cannot be loaded safely"):
        open_weights(tmp_path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("nbytes", [0, 3, 100, -100, -1])
@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_truncated_torch_files(save, nbytes, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    save(STATE, path)
    os.truncate(path, nbytes % path.stat().st_size if nbytes else 0)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin' cannot be loaded safely"):
        open_weights(path)


def test_torch_files_that_hold_something_else(tmp_path):
    path = tmp_path / "scheduler.pt"
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match=r"scheduler.pt' holds a list, not a dictionary"):
        load_torch_file(path)
    torch.save({"last_epoch": 3, "lrs": [0.1]}, path)
    assert load_torch_file(path) == {"last_epoch": 3, "lrs": [0.1]}
    with pytest.raises(CheckpointError, match=r"gone.pt' is missing"):
        load_torch_file(tmp_path / "gone.pt")


# from_pretrained


def save_torch(model, path):
    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")


def save_old_torch(model, path):
    model.config.save_pretrained(path)
    save_legacy(model.state_dict(), path / "pytorch_model.bin")


SAVES = {
    "whole": lambda model, path: model.save_pretrained(path),
    "shards": lambda model, path: model.save_pretrained(path, max_shard_size="20KB"),
    "torch": save_torch,
    "torch of before": save_old_torch,
}


def assert_loads_as_without(cls, path, **kwargs):
    plain = cls.from_pretrained(path, **kwargs)
    with deferred_weights():
        model = cls.from_pretrained(path, **kwargs)
    expected, reader = dict(plain.named_parameters()), Reader()
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.data, DeferredTensor), name
        assert isinstance(parameter, torch.nn.Parameter), name
        assert (parameter.shape, parameter.dtype) == (expected[name].shape, expected[name].dtype)
        assert parameter.requires_grad == expected[name].requires_grad
        assert torch.equal(reader.read(parameter), expected[name].view(-1)), name
    for (name, buffer), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(reader.read(buffer), other.reshape(-1)), name
    assert model.training == plain.training
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, save, dtype, tmp_path):
    model = make_model(name)
    save(model, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or save is not SAVES["shards"]
    assert_loads_as_without(type(model), tmp_path, dtype=dtype)


@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_a_model_in_16_bit_keeps_its_type(name, tmp_path):
    model = make_model(name).bfloat16()
    model.save_pretrained(tmp_path)
    assert assert_loads_as_without(type(model), tmp_path, dtype="auto").dtype is torch.bfloat16


@pytest.mark.parametrize("difference", [0, 1])
def test_tied_weights_that_the_checkpoint_has_twice(difference, tmp_path):
    """They stay tied if they are equal, as without; transformers has to read them to know."""
    model = make_model("gpt2")
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach() + difference}
    model.config.save_pretrained(tmp_path)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = assert_loads_as_without(type(model), tmp_path)
    assert (model.lm_head.weight is model.transformer.wte.weight) == (not difference)


def test_a_head_that_is_not_in_the_checkpoint_is_initialised(tmp_path):
    make_model("bert_mlm").save_pretrained(tmp_path)
    with deferred_weights():
        torch.manual_seed(3)
        model, info = BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    missing = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert set(info["missing_keys"]) == missing
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DeferredTensor) == (name not in missing), name
    assert 0 < model.classifier.weight.std() < 0.1
    assert model.classifier.bias.count_nonzero() == 0


def patched():
    library = transformers.modeling_utils
    return library.load_state_dict, library.safe_open


@pytest.mark.parametrize("error", [None, KeyError])
def test_the_library_is_as_it_was_afterwards(error):
    before = patched()
    assert before[1] is safetensors.safe_open

    def use():
        with deferred_weights():
            assert all(now is not old for now, old in zip(patched(), before, strict=True))
            with deferred_weights():
                pass
            assert all(now is not old for now, old in zip(patched(), before, strict=True))
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert patched() == before


def test_not_enabled(tmp_path):
    before = patched()
    make_model("gpt2").save_pretrained(tmp_path)
    with deferred_weights(enabled=False):
        assert patched() == before
        model = MODELS["gpt2"]().from_pretrained(tmp_path)
    assert not any(isinstance(parameter, DeferredTensor) for parameter in model.parameters())


@pytest.mark.parametrize("name", ["bert_mlm", "mixtral"])
def test_truncated_weights(name, tmp_path):
    make_model(name).save_pretrained(tmp_path)
    path, before = tmp_path / "model.safetensors", patched()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model.safetensors' is truncated: tensor"), deferred_weights():
        MODELS[name]().from_pretrained(tmp_path)
    assert patched() == before


def test_only_what_is_read_is_in_memory(tmp_path, monkeypatch):
    """Reading part of a parameter reads that part of its file, and no more."""
    make_model("bert_mlm").save_pretrained(tmp_path)
    with deferred_weights():
        model = BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    parameter = model.bert.embeddings.word_embeddings.weight
    reads, original = [], SafetensorsFile.read

    def note(file, name, start, stop):
        reads.append((start, stop))
        return original(file, name, start, stop)

    monkeypatch.setattr(SafetensorsFile, "read", note)
    Reader().read(parameter, 5, 9)
    assert reads == [(5, 9)]
