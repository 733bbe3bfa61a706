"""Models as people write them, and their batches."""

import dataclasses
import json

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.subject import TASKS, find_subject

SMALL = {"batch_size": 2, "length": 8, "checkpointing": False}


def find(model, task=None, **changes):
    return find_subject(model, task=task, **{**SMALL, **changes})


def test_a_type_with_settings():
    subject = find("gpt2:n_layer=3, n_embd=32,n_head=2,activation_function=relu,scale_attn_weights=false")
    config = subject.config
    assert isinstance(config, GPT2Config)
    assert (config.n_layer, config.n_embd, config.activation_function) == (3, 32, "relu")
    assert config.scale_attn_weights is False
    assert (subject.task, subject.num_tokens) == ("causal-lm", 16)
    assert type(subject.make_model()).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("is_file", [False, True])
def test_a_directory_and_a_file(is_file, tmp_path):
    LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    path = tmp_path / "config.json" if is_file else tmp_path
    assert find(str(path)).config.hidden_size == 16


def test_what_a_configuration_was_saved_for(tmp_path):
    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    assert find(config).task == "masked-lm", "what is usual for the type"
    config.architectures = ["BertForSequenceClassification"]
    assert find(config).task == "sequence-classification"
    assert find(config, task="masked-lm").task == "masked-lm"


TINY = {
    "causal-lm": "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=32",
    "masked-lm": "bert:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16,vocab_size=32",
    "seq2seq-lm": "t5:num_layers=1,d_model=16,d_ff=16,num_heads=2,d_kv=8,vocab_size=32",
    "sequence-classification": "distilbert:n_layers=1,dim=16,n_heads=2,hidden_dim=16,vocab_size=32",
    "image-classification": "vit:num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16,"
    "image_size=16,patch_size=8",
}


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_gives_a_loss(task):
    subject = find(TINY[task], task=task)
    loss = subject.make_model()(**subject.make_inputs()).loss
    assert loss.shape == ()
    loss.backward()
    assert subject.num_tokens == (2 if task == "image-classification" else 16)
    larger = dataclasses.replace(subject, batch_size=3, length=4)
    assert {len(value) for value in larger.make_inputs().values()} == {3}
    assert larger.config is subject.config


def test_the_usual_length_is_what_a_model_has_positions_for():
    assert find("gpt2:n_positions=64", length=None).length == 64
    assert find("llama:", length=None).length == 2048
    assert find("llama:max_position_embeddings=131072", length=None).length == 4096


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("gpt3:n_layer=2", {}, r"model 'gpt3:': 'gpt3' is not a model type of transformers; near are .*gpt"),
        ("gpt2:n_layers=2", {}, r"model 'gpt2': its configuration has no 'n_layers'; near are n_layer"),
        ("gpt2:n_layer", {}, "'n_layer' is no setting; write KEY=VALUE"),
        ("gpt2:n_layer=0", {}, "model 'gpt2:n_layer=0': n_layer is 0; it must be at least 1"),
        ("gpt2:", {"length": 0}, "sequence length: must be at least 1, got 0"),
        ("gpt2:", {"length": 2000}, "sequence length 2000: 'gpt2:' has 1024 positions"),
        ("gpt2:", {"task": "translation"}, "task 'translation' is not known; known are seq2seq-lm, causal-lm"),
        ("gpt2:", {"task": "masked-lm"}, "task 'masked-lm': transformers has no such model of type 'gpt2'"),
        ("timesformer:", {}, "model type 'timesformer': transformers has no class of it"),
        ("gpt2:n_layer=abc", {}, "model 'gpt2': TypeError: Field 'n_layer' expected int, got str"),
        ("llama:num_attention_heads=3", {}, r"'llama': ValueError: .*\(3\); change the settings after 'llama:'"),
    ],
)
def test_what_makes_no_sense_gets_a_sentence(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        find(model, **changes)


def test_a_file_that_is_no_configuration_gets_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"layers": 3}))
    with pytest.raises(ConfigError, match="the file or directory cannot be read as a configuration"):
        find(str(tmp_path))


def test_a_name_that_cannot_be_reached_gets_a_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable was read already
    with pytest.raises(ConfigError, match=r"it is no file or directory here, and the hub .* need no network"):
        find("no-such-organization/no-such-model")


def test_a_configuration_of_the_caller_stays_as_it_is():
    config = T5Config(num_layers=1, d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=20)
    before = config.to_dict()
    found = find(config)
    assert not found.config.use_cache
    assert found.config.decoder_start_token_id == 0
    assert config.to_dict() == before
