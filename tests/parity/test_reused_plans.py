"""A run that follows what a plan has recorded, from its first step on: the bits of a run that records it itself."""

import copy
import dataclasses
import logging
import re

import pytest
import torch
from support import inside
from transformers import AutoConfig, AutoModelForCausalLM

from hf_patrickstar import PatrickStarEngine, plan
from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.schedule.trace import Activation, KnownTraces, Trace, Visit
from hf_patrickstar.tracing import kept_traces as kept_files
from hf_patrickstar.units import MIB, parse_nbytes

pytestmark = [pytest.mark.own_streams, pytest.mark.usefixtures("recorded")]

GPT2 = AutoConfig.for_model(
    "gpt2", n_layer=3, n_embd=64, n_head=2, vocab_size=200, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
LLAMA = AutoConfig.for_model(
    "llama",
    **{"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"intermediate_size": 128, "vocab_size": 5000},
)
BUDGETS = {"host_budget": 64 * MIB, "chunk_numel": 20_000, "dtype": "fp32"}


def device_budget(config):
    """Less than the model data takes."""
    return 3 * MIB if config.model_type == "gpt2" else 8 * MIB


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "directory", lambda kind: _made(tmp_path / kind))


def _made(path):
    path.mkdir(exist_ok=True)
    return path


def plan_it(config, num_micro_batches=1, **settings):
    found = plan(
        config,
        dataclasses.replace(CPU_TIER, device_nbytes=2**50, host_nbytes=2**50),
        **{"batch_size": 2, "length": 32, "dtype": "fp32", "num_micro_batches": num_micro_batches},
        device_memory=device_budget(config),
        host_memory=BUDGETS["host_budget"],
        settings={"chunk_numel": BUDGETS["chunk_numel"], **settings},
    )
    assert found.fits
    return found


class FourSteps:
    """Four steps of a model with the weights of a seed; what it has seen."""

    def __init__(self, config, num_micro_batches=1, length=32, more=lambda tokens: {}, **settings):
        self.more = more
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config).train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.engine = PatrickStarEngine(
            self.model,
            {**BUDGETS, "device_budget": device_budget(config), **settings},
            optimizer,
            device=torch.device("cpu"),
            gradient_accumulation_steps=num_micro_batches,
        )
        self.recorded, self.losses = [], []
        torch.manual_seed(1)
        for _ in range(4):
            for _ in range(num_micro_batches):
                tokens = torch.randint(0, config.vocab_size, (2, length))
                self.losses.append(self.engine.attempt(lambda tokens=tokens: self.train(tokens)))
            self.engine.optimizer.clip_grad_norm_(None, 1.0)
            self.engine.optimizer.step()
            self.engine.optimizer.zero_grad()
            self.recorded.append(self.engine.stats()["recorded_steps"])
        self.stats = self.engine.stats()
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def train(self, tokens):
        loss = self.model(input_ids=tokens, **self.more(tokens), labels=tokens).loss
        loss.backward()
        return loss.item()


def assert_same(ours, theirs):
    assert ours.losses == theirs.losses
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(("config", "num_micro_batches"), [(GPT2, 3), (LLAMA, 1)], ids=["gpt2", "llama"])
def test_no_step_is_recorded_first(config, num_micro_batches, caplog):
    before = FourSteps(config, num_micro_batches)
    assert before.recorded[0] > 0
    plan_it(config, num_micro_batches)
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        after = FourSteps(config, num_micro_batches)
    assert after.recorded == [0, 0, 0, 0]
    assert after.stats["diverged_steps"] == 0
    assert "reuse_plan: the first steps follow a plan made before" in caplog.text
    assert_same(after, before)
    assert after.stats["device_total_step_peak_nbytes"] <= device_budget(config)


def test_a_loss_in_chunks_follows_the_plan_of_one():
    before = FourSteps(GPT2, chunked_loss=True)
    plan_it(GPT2)
    assert FourSteps(GPT2, chunked_loss=True).recorded[0] > 0, "that plan has whole logits"
    plan_it(GPT2, chunked_loss=True)
    after = FourSteps(GPT2, chunked_loss=True)
    assert after.recorded == [0, 0, 0, 0]
    assert after.stats["diverged_steps"] == 0
    assert_same(after, before)
    assert after.stats["device_total_step_peak_nbytes"] <= device_budget(GPT2)


def test_chunks_that_the_host_has_no_room_for_are_chosen_by_what_steps_need(monkeypatch):
    """From the start: the first layers live on the device, where without a plan it would be the last ones."""
    monkeypatch.setitem(BUDGETS, "host_budget", 3 * MIB)
    config = copy.deepcopy(GPT2)
    config.tie_word_embeddings = False  # a second gradient would need a list of its own
    before = FourSteps(config)
    plan_it(config)
    after = FourSteps(config)
    spilled = inside.spilled(after.engine)
    assert after.recorded == [0, 0, 0, 0]
    assert_same(after, before)
    assert spilled == inside.in_margin(after.engine)
    assert inside.spilled(before.engine) != spilled
    assert after.stats["device_total_step_peak_nbytes"] <= device_budget(config)


def mask_and_number(tokens):
    """What the Trainer adds to a batch of a usual data collator."""
    return {"attention_mask": torch.ones_like(tokens), "num_items_in_batch": torch.tensor(tokens.numel())}


def test_batches_of_usual_collators_are_those_of_a_plan():
    plan_it(LLAMA)
    run = FourSteps(LLAMA, more=mask_and_number)
    assert run.recorded == [0, 0, 0, 0]
    assert inside.lookups(run.engine) == kept_traces().lookups != {}


def padded(tokens):
    mask = torch.ones_like(tokens)
    mask[1, -5:] = 0
    return {"attention_mask": mask}


def test_a_first_batch_with_padding_is_not_that_of_a_plan(caplog):
    """It has a mask of all pairs of tokens, which the plan knows nothing of."""
    before = FourSteps(LLAMA, more=padded)
    plan_it(LLAMA)
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        after = FourSteps(LLAMA, more=padded)
    assert after.recorded[0] > 0
    assert "the batches of the plan have no padding, and the first one here has" in caplog.text
    assert_same(after, before)


def test_a_run_says_what_it_needs_with_the_activations_of_the_plan(caplog):
    def least(words):
        (found,) = re.findall(rf"on the device, {words} activations, ([\d.]+ \w+) of", caplog.text)
        caplog.clear()
        return parse_nbytes(found, "bytes")

    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        FourSteps(GPT2)
        chunks = least("beside")
        plan_it(GPT2)
        run = FourSteps(GPT2)
        everything = least("with")
    assert chunks < everything <= run.stats["device_total_step_peak_nbytes"]


def kept_traces():
    """What a plan has left for a run."""
    with torch.serialization.safe_globals([KnownTraces, Trace, Visit, Activation]):
        return torch.load(next(kept_files.directory("traces").iterdir()), weights_only=True)


OTHERS = [
    *[({}, {"reuse_plan": False}), ({}, {"num_micro_batches": 2}), ({}, {"chunk_numel": 30_000})],
    *[({"n_head": 4}, {}), ({"attn_pdrop": 0.1}, {})],
]


@pytest.mark.parametrize(("model", "training"), OTHERS)
def test_plans_of_other_trainings_and_activations_or_unwanted_ones_are_not_followed(model, training):
    """All parameters have the same shapes."""
    plan_it(GPT2)
    other = copy.deepcopy(GPT2)
    other.update(model)
    run = FourSteps(other, **training)
    assert run.recorded[0] > 0
    assert run.stats["device_total_step_peak_nbytes"] <= device_budget(GPT2)


def test_a_model_that_was_saved_under_another_name_follows_its_plan(tmp_path):
    plan_it(GPT2)
    other = copy.deepcopy(GPT2)
    other.update({"architectures": ["GPT2LMHeadModel"], "use_cache": False, "pad_token_id": 3, "name_or_path": "mine"})
    other.save_pretrained(tmp_path / "mine")
    assert FourSteps(AutoConfig.from_pretrained(tmp_path / "mine")).recorded == [0, 0, 0, 0]


def test_larger_batches_are_recorded():
    plan_it(GPT2)
    before = FourSteps(GPT2, length=48, reuse_plan=False)
    after = FourSteps(GPT2, length=48)
    assert after.recorded[0] > 0
    assert_same(after, before)


def test_a_plan_that_is_wrong_costs_time_and_no_bits():
    """It visits the chunks in another order, and expects no activations."""
    before = FourSteps(GPT2)
    plan_it(GPT2)
    known = kept_traces()
    traces = {
        key: dataclasses.replace(
            trace, visits=tuple(dataclasses.replace(visit, non_model_nbytes=0) for visit in reversed(trace.visits))
        )
        for key, trace in known.traces.items()
    }
    kept_files.keep_traces(dataclasses.replace(known, traces=traces))
    after = FourSteps(GPT2)
    assert after.stats["diverged_steps"] > 0
    assert after.recorded[-1] > 0
    assert_same(after, before)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04"])
def test_a_damaged_file_is_no_plan(damage):
    plan_it(GPT2)
    next(kept_files.directory("traces").iterdir()).write_bytes(damage)
    assert FourSteps(GPT2).recorded[0] > 0
