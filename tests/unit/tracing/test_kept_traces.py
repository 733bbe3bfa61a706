"""Files of plans in the user's cache."""

import logging
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from hf_patrickstar.tracing import kept_traces


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_traces, "directory", lambda kind: tmp_path)
    return tmp_path


def test_those_used_last_stay(place, monkeypatch):
    monkeypatch.setattr(kept_traces, "_MOST_NBYTES", 30)
    for number, name in enumerate("abc"):
        kept_traces.write("plans", name, bytes(10))
        os.utime(place / name, (number, number))
    kept_traces.read("plans", "a")
    kept_traces.write("plans", "d", bytes(10))
    assert sorted(path.name for path in place.iterdir()) == ["a", "c", "d"]


def test_a_write_that_fails_is_logged_and_leaves_what_was_there(place, monkeypatch, caplog):
    kept_traces.write("plans", "a", b"1")

    def refuse(*paths):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        kept_traces.write("plans", "a", b"2")
    assert "what was planned is not kept: no space left" in caplog.text
    assert kept_traces.read("plans", "a") == b"1"
    assert [path.name for path in place.iterdir()] == ["a"]


def test_other_parts_and_other_code_have_other_names(monkeypatch):
    first = kept_traces.digest([1, "a"])
    assert kept_traces.digest([1, "a"]) == first
    assert kept_traces.digest([1, "b"]) != first
    monkeypatch.setattr(kept_traces, "_versions", lambda: ("other",))
    assert kept_traces.digest([1, "a"]) != first


def computed(**settings):
    config = GPT2Config(**{"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8} | settings)
    with torch.device("meta"):
        return kept_traces.computation_of(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("change", [{"n_head": 4}, {"resid_pdrop": 0.2}, {"activation_function": "relu"}])
def test_other_activations_are_another_computation(change):
    assert computed(**change) != computed()


def test_names_and_tokens_are_no_computation():
    assert computed(use_cache=False, pad_token_id=1, architectures=["A"], id2label={0: "a"}) == computed()


def test_dropout_that_a_script_has_changed_is_another_computation():
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    before = kept_traces.computation_of(model)
    model[0].p = 0.5
    assert kept_traces.computation_of(model) != before
