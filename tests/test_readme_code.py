"""Blocks of Python in README.md and some pages run, each with the names that it takes for granted."""

import copy
import dataclasses
import types

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from test_documented_code import PYTHON
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_patrickstar

PAGES = ("README.md", "live_model.md", "checkpoints.md")
README = [block for block in PYTHON if block.page.name in PAGES or "class MyTrainer" in block.text]


class Layers(torch.nn.Module):
    """A model with the parts that the blocks name."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.layer = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.encoder.layer[3].requires_grad_(False)

    def forward(self, x):
        for layer in self.encoder.layer:
            x = torch.tanh(layer(x))
        return types.SimpleNamespace(loss=x.square().mean())


def live():
    model, optimizer = hf_patrickstar.initialize_engine(Layers, {"chunk_budget": "64KiB"})
    return {"model": model, "optimizer": optimizer, "batch": {"x": torch.randn(2, 16)}, "copy": copy, "torch": torch}


def opened():
    names = live()
    names["model"](**names["batch"]).loss.backward()
    return names | {"engine": names["model"].patrickstar_engine}


def classes():
    names = ("PatrickStarTrainerMixin", "PatrickStarArgumentsMixin")
    return {
        **{name: getattr(hf_patrickstar, name) for name in names},
        **{name: getattr(transformers, name) for name in ("Seq2SeqTrainer", "Seq2SeqTrainingArguments")},
        "dataclass": dataclasses.dataclass,
    }


def deferred():
    training_args = types.SimpleNamespace(patrickstar=True)
    return {
        "hf_patrickstar": hf_patrickstar,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "training_args": training_args,
        "name": "gpt2",
    }


TAKEN_FOR_GRANTED = {
    "from hf_patrickstar import": dict,
    "class MyTrainer": classes,
    ".clamp_(-1, 1)": live,
    "engine.full_parameters(": opened,
    "deferred_weights(": deferred,
}


@pytest.fixture(autouse=True)
def _own_accelerate():
    """What a block makes Accelerate remember is forgotten after it."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.parametrize("block", README, ids=str)
def test_every_block_of_the_readme_runs(block, tmp_path, monkeypatch):
    (make_names,) = [make for part, make in TAKEN_FOR_GRANTED.items() if part in block.text]
    monkeypatch.chdir(tmp_path)  # with a model of the name that the hub has
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=32)).save_pretrained("gpt2")
    names = {"__name__": "readme", **make_names()}
    exec(compile("\n" * (block.line - 1) + block.text, block.page.name, "exec"), names)
