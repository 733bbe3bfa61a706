"""Which changes are tried, and in which order they are named."""

import pytest

from hf_patrickstar import plan_cache
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner import advice as module
from hf_patrickstar.planner.advice import MOST, advise, changes
from hf_patrickstar.planner.planning import arrange, plan_if_fits
from hf_patrickstar.units import MIB

MODEL = "gpt2:n_layer=1,n_embd=64,n_head=2,vocab_size=128,n_positions=32"
GIVEN = {
    **{"task": None, "batch_size": 2, "length": 32, "num_micro_batches": 1, "world_size": 1, "checkpointing": False},
    **{"dtype": "bf16", "optimizer": "adamw", "max_norm": 1.0, "settings": None},
    **{"device_memory": 8 * MIB, "host_memory": 64 * MIB},
}


@pytest.fixture(scope="module")
def fitting():
    subject, given = arrange(MODEL, "8xh100", **GIVEN)
    return subject, given, plan_if_fits(subject, given)


def test_every_kind_of_change_is_tried(fitting):
    texts = " ".join(change.text for change in changes(*fitting))
    for word in (
        "--gradient-checkpointing --batch-size 4",
        "twice the batch (--batch-size 4)",
        "--accumulation 4",
        "without --device-memory: 76.00 GiB",
        "without --host-memory: 230.40 GiB",
        "--processes 8",
        "--lora r=16,targets=all-linear",
    ):
        assert word in texts


def test_a_change_is_what_it_says(fitting):
    found = {change.text.partition("(")[2]: change for change in changes(*fitting)}
    (eight,) = [change for text, change in found.items() if "--processes" in text]
    assert eight.training.world_size == 8
    (device,) = [change for text, change in found.items() if "--device-memory" in text]
    assert device.training.machine.device_nbytes == int(0.95 * 80 * 1024 * MIB)
    assert device.training.machine.host_nbytes == 64 * MIB
    (lora,) = [change for text, change in found.items() if "--lora" in text]
    assert lora.subject.adapters["r"] == 16
    assert not lora.subject.can_have_adapters


@pytest.mark.parametrize(
    ("batch", "size", "parts"), [(1000, 100, 10), (20, 2, 10), (32, 2, 16), (7, 1, 7), (34, 3, 12)]
)
def test_a_batch_that_does_not_fit_is_divided_into_equal_parts(batch, size, parts):
    subject, given = arrange(MODEL, "8xh100", **{**GIVEN, "batch_size": batch, "num_micro_batches": 3})
    refused = type("Refused", (), {"fits": False})()
    (small,) = [change for change in changes(subject, given, refused) if "smaller micro-batches" in change.text]
    assert (small.subject.batch_size, small.training.num_micro_batches) == (size, 3 * parts)
    assert small.subject.checkpointing
    assert f"(--gradient-checkpointing --batch-size {size} --accumulation {3 * parts})" in small.text
    is_same = size * parts == batch
    assert small.text.startswith(
        "the same tokens in " if is_same else "about the same tokens (36 sequences for 34) in "
    )


def test_the_three_with_the_largest_effect_are_named_in_their_order(fitting):
    subject, given, plan = fitting
    found = advise(subject, given, plan)
    assert len(found) == MOST
    gains = [advice.gain for advice in found]
    assert gains == sorted(gains, reverse=True)
    assert "--processes 8" in found[0].text


def test_a_change_that_the_model_does_not_support_is_left_out(fitting, monkeypatch):
    subject, given, plan = fitting

    def refuse(self, *args):
        raise ConfigError("this model does not support activation checkpointing")

    monkeypatch.setattr(type(subject.make_model()), "gradient_checkpointing_enable", refuse)
    monkeypatch.setattr(plan_cache, "read", lambda *args: None)  # others have planned the same
    of_activations = {change.text for change in changes(*fitting) if "--gradient-checkpointing" in change.text}
    found = {advice.text for advice in advise(subject, given, plan)}
    assert found
    assert not found & of_activations


def test_without_peft_adapters_are_not_tried(fitting, monkeypatch):
    monkeypatch.setattr(module, "has_peft", lambda: False)
    assert not any("--lora" in change.text for change in changes(*fitting))


def test_a_change_that_the_model_cannot_have_is_left_out(fitting, monkeypatch):
    subject, given, plan = fitting

    def plan_unless_adapted(changed, training):
        if changed.adapters is not None:
            raise ConfigError("these adapters cannot be added")
        return plan_if_fits(changed, training)

    monkeypatch.setattr(module, "plan_if_fits", plan_unless_adapted)
    assert all("--lora" not in advice.text for advice in advise(subject, given, plan))
