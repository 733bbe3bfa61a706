"""Weights of saved models: found in every layout, checked, refused, and read late."""

import json
import os

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from peft import LoraConfig, get_peft_model
from support.models import MODELS, make_model
from transformers import BertForMaskedLM

from hf_patrickstar import deferred_weights
from hf_patrickstar.checkpoint.deferred import DeferredTensor, Reader
from hf_patrickstar.checkpoint.safetensors_file import FileSource
from hf_patrickstar.checkpoint.weight_files import find_weights, load_torch_file, open_weights
from hf_patrickstar.errors import CheckpointError

STATE = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.arange(4.0).bfloat16(), "empty": torch.empty(0, 2)}
SHARDS = {"a": "one", "b.c": "two", "empty": "two"}


def save_index(directory, save, ending):
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    for shard in ("one", "two"):
        save({name: STATE[name] for name in STATE if SHARDS[name] == shard}, directory / f"{shard}.{ending}")
    path = directory / f"{stem}.{ending}.index.json"
    path.write_text(json.dumps({"weight_map": {name: f"{shard}.{ending}" for name, shard in SHARDS.items()}}))
    return path


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


LAYOUTS = {
    "safetensors": lambda path: safetensors.torch.save_file(STATE, path / "model.safetensors"),
    "safetensors in shards": lambda path: save_index(path, safetensors.torch.save_file, "safetensors"),
    "torch, and what is no tensor": lambda path: torch.save({**STATE, "step": 3}, path / "pytorch_model.bin"),
    "torch in shards": lambda path: save_index(path, torch.save, "bin"),
    "torch of before": lambda path: save_legacy(STATE, path / "pytorch_model.bin"),
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
        assert torch.equal(Reader().read(found[name], 0, min(3, tensor.numel())), tensor.view(-1)[:3])
        assert found[name].recipe.name.startswith(f"'{tmp_path}")


def test_one_file_or_index_and_which_is_preferred(tmp_path):
    torch.save({"a": STATE["a"].t()}, tmp_path / "pytorch_model.bin")
    assert Reader().read(open_weights(tmp_path)["a"], 1, 4).tolist() == [3, 1, 4], "it is not contiguous"
    index = save_index(tmp_path, safetensors.torch.save_file, "safetensors")
    assert set(open_weights(str(index))) == set(open_weights(tmp_path)) == set(STATE)
    assert set(open_weights(tmp_path / "one.safetensors")) == {"a"}


def test_nothing_there(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(CheckpointError, match=f"'{path}' has no weights: none of model.safetensors, .* is there"):
            open_weights(path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": {}}}', "\udcff"])
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"index.json' does not name .* The file is damaged"):
        open_weights(tmp_path)


@pytest.mark.parametrize(("save", "ending"), [(safetensors.torch.save_file, "safetensors"), (torch.save, "bin")])
def test_an_index_that_is_wrong(save, ending, tmp_path):
    index = save_index(tmp_path, save, ending)
    text = index.read_text()
    index.write_text(text.replace("two", "one"))
    with pytest.raises(CheckpointError, match=r"index.json' does not name .*'b\.c'"):
        open_weights(tmp_path)
    index.write_text(text)
    (tmp_path / f"two.{ending}").unlink()
    with pytest.raises(CheckpointError, match=f"two.{ending}' is missing"):
        open_weights(tmp_path)


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_torch_files_that_are_not_loaded(save, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    save({**STATE, "x": Canary(tmp_path / "canary")}, path)
    contents = [path.read_bytes()]
    save(STATE, path)
    contents += [path.read_bytes()[:nbytes] for nbytes in (0, 3, 100, -100, -1)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(
            CheckpointError,
            match=r"(?s)pytorch_model.bin' is damaged, or cannot be loaded safely: .*; use another checkpoint",
        ):
            open_weights(path)
    assert not (tmp_path / "canary").exists(), "nothing is executed"
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match=r"model.bin' has a list, not a dictionary; save the state_dict"):
        load_torch_file(path)
    with pytest.raises(CheckpointError, match=r"gone.pt' is missing"):
        load_torch_file(tmp_path / "gone.pt")


# from_pretrained


def save_torch(model, path, save=torch.save):
    model.config.save_pretrained(path)
    save(model.state_dict(), path / "pytorch_model.bin")


SAVES = {
    "whole": lambda model, path: model.save_pretrained(path),
    "shards": lambda model, path: model.save_pretrained(path, max_shard_size="20KB"),
    "torch": save_torch,
    "torch of before": lambda model, path: save_torch(model, path, save_legacy),
}
NAMES = sorted(MODELS)
PAIRS = [(name, list(SAVES)[place % 4]) for place, name in enumerate(NAMES)]
PAIRS += [("gpt2", "torch"), ("mixtral", "whole"), ("mixtral", "shards"), ("t5", "torch of before")]


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
    return model


@pytest.mark.parametrize(("name", "how"), dict.fromkeys(PAIRS))
def test_models(name, how, tmp_path):
    model = make_model(name)
    SAVES[how](model, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert_loads_as_without(type(model), tmp_path, dtype=dtype)


@pytest.mark.parametrize("difference", [0, 1])
def test_tied_weights_that_the_checkpoint_has_twice(difference, tmp_path):
    """They stay tied if they are equal, as without; transformers has to read them to know."""
    model = make_model("gpt2")
    state = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach() + difference}
    model.config.save_pretrained(tmp_path)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = assert_loads_as_without(type(model), tmp_path)
    assert (model.lm_head.weight is model.transformer.wte.weight) == (not difference)


def patched():
    return transformers.modeling_utils.load_state_dict, transformers.modeling_utils.safe_open


def test_the_library_is_as_it_was_afterwards(tmp_path):
    before = patched()
    make_model("gpt2").save_pretrained(tmp_path)
    with deferred_weights(enabled=False):
        assert patched() == before
        model = MODELS["gpt2"]().from_pretrained(tmp_path)
    assert not any(isinstance(parameter, DeferredTensor) for parameter in model.parameters())
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match=r"model.safetensors' is not a complete"), deferred_weights():
        MODELS["gpt2"]().from_pretrained(tmp_path)
    assert patched() == before


def test_only_what_is_read_is_in_memory(tmp_path, monkeypatch):
    """Reading part of a parameter reads that part of its file, and no more."""
    make_model("bert_mlm").save_pretrained(tmp_path)
    with deferred_weights():
        model = BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    reads, original = [], FileSource.read
    monkeypatch.setattr(FileSource, "read", lambda *args: reads.append(args[1:]) or original(*args))
    Reader().read(model.bert.embeddings.word_embeddings.weight, 5, 9)
    assert reads == [(5, 9)]


@pytest.mark.parametrize("with_embeddings", [False, True])
def test_adapters_name_what_the_model_does_not_have(with_embeddings, tmp_path):
    model = get_peft_model(make_model("gpt2"), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    model.save_pretrained(tmp_path, save_embedding_layers=with_embeddings)
    path = tmp_path / "adapter_model.safetensors"
    saved = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**saved, "base_model.more": torch.ones(1)}, path)
    found = find_weights(model, tmp_path)
    assert found.unexpected_keys == ["base_model.more"]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    embeddings = {f"base_model.model.{name}.weight" for name in ("transformer.wte", "lm_head")}
    assert found.values.keys() == trained | (embeddings if with_embeddings else set())
