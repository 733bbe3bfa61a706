"""Which changes are tried, alone and in pairs, and what is said of them."""

import dataclasses

import pytest

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner import advice as module
from hf_patrickstar.planner.advice import MOST, advise, changes
from hf_patrickstar.planner.planning import arrange, plan_and_simulate, plan_if_fits
from hf_patrickstar.planner.screen import describe_changes
from hf_patrickstar.units import MIB

MODEL = "gpt2:n_layer=1,n_embd=64,n_head=2,vocab_size=128,n_positions=32"
GIVEN = {"batch_size": 2, "length": 32, "device_memory": 8 * MIB, "host_memory": 64 * MIB}


@pytest.fixture(scope="module")
def fitting():
    subject, given = arrange(MODEL, "8xh100", **GIVEN)
    return subject, given, plan_if_fits(subject, given)


def test_every_kind_of_change_is_tried_and_is_what_it_says(fitting):
    found = {change.option: change.apply(fitting[:2]) for change in changes(*fitting)}
    assert found["--gradient-checkpointing"][0].checkpointing
    subject, _ = found["--gradient-checkpointing --batch-size 4"]
    assert (subject.checkpointing, subject.batch_size) == (True, 4)
    assert found["--batch-size 4"][0].batch_size == 4
    assert found["--accumulation 4"][1].num_micro_batches == 4
    assert found["--processes 8"][1].world_size == 8
    machine = found["without --device-memory"][1].machine
    assert (machine.device_nbytes, machine.host_nbytes) == (int(0.95 * 80 * 1024 * MIB), 64 * MIB)
    assert found["without --host-memory"][1].machine.host_nbytes == int(0.9 * 256 * 1024 * MIB)
    lora, _ = found["--lora r=16,targets=all-linear"]
    assert lora.adapters["r"] == 16
    assert not lora.can_have_adapters
    assert len(found) == 8


@pytest.mark.parametrize(("batch", "size", "parts"), [(32, 2, 16), (7, 1, 7), (34, 3, 12)])
def test_a_batch_that_does_not_fit_is_divided_into_equal_parts(batch, size, parts):
    setup = arrange(MODEL, "8xh100", **{**GIVEN, "batch_size": batch, "num_micro_batches": 3})
    refused = type("Refused", (), {"fits": False})()
    (small,) = [change for change in changes(*setup, refused) if "--batch-size" in change.option]
    assert small.option == f"--batch-size {size} --accumulation {3 * parts}"
    subject, training = small.apply(setup)
    assert (subject.batch_size, training.num_micro_batches) == (size, 3 * parts)


def test_the_three_with_the_largest_effect_are_named_in_their_order(fitting):
    found = advise(*fitting)
    assert (len(found.changes), found.failed) == (MOST, ())
    gains = [change.gain for change in found.changes]
    assert gains == sorted(gains, reverse=True)
    assert "--processes 8" in found.changes[0].text


WORDS = "llama:num_hidden_layers=1,hidden_size=64,intermediate_size=64,num_attention_heads=2,vocab_size=8192"


def test_a_loss_in_chunks_is_advised_where_logits_take_the_device():
    told = {"batch_size": 2, "length": 256, "host_memory": 64 * MIB}
    subject, given = arrange(WORDS, "h100", **told, device_memory=16 * MIB)
    plan, _ = plan_and_simulate(subject, given)
    assert not plan.fits
    found = {change.option: change.apply((subject, given)) for change in changes(subject, given, plan)}
    asked = found["--set chunked_loss=true"]
    assert plan_if_fits(*asked).fits
    for other in (asked, arrange(WORDS, "h100", **told)):  # it is on, or logits are small beside the device
        options = [change.option for change in changes(*other, plan_if_fits(*other))]
        assert not [option for option in options if "chunked_loss" in option]


def test_activations_are_advised_to_leave_where_the_setting_forbids_it():
    model = "llama:num_hidden_layers=4,hidden_size=64,intermediate_size=64,num_attention_heads=2,vocab_size=64"
    told = {"batch_size": 2, "length": 512, "host_memory": 64 * MIB, "device_memory": 6 * MIB}
    subject, given = arrange(model, "h100", **told, settings={"activation_offload": False})
    plan, _ = plan_and_simulate(subject, given)
    assert not plan.fits
    found = {change.option: change.apply((subject, given)) for change in changes(subject, given, plan)}
    assert plan_if_fits(*found["--set activation_offload=auto"]).fits
    assert not [change for change in changes(*arrange(model, "h100", **told), plan) if "offload" in change.option]


def test_a_loss_in_chunks_is_advised_with_larger_batches():
    subject, given = arrange(WORDS, "h100", batch_size=2, length=256, device_memory=64 * MIB, host_memory=64 * MIB)
    found = {
        change.option: change.apply((subject, given))
        for change in changes(subject, given, plan_if_fits(subject, given))
    }
    assert found["--set chunked_loss=true"][1].settings["chunked_loss"] is True
    larger, training = found["--set chunked_loss=true --batch-size 4"]
    assert (larger.batch_size, training.settings["chunked_loss"]) == (4, True)


def refused_by(monkeypatch, fits):
    """A plan that does not fit, and plans of changes that fit where ``fits`` says so of a subject and a machine."""
    setup = arrange(MODEL, "rtx4090", **{**GIVEN, "batch_size": 1, "device_memory": "64KiB"})
    refused, _ = plan_and_simulate(*setup)
    assert not refused.fits
    good = plan_if_fits(*arrange(MODEL, "rtx4090", **GIVEN))
    monkeypatch.setattr(module, "plan_if_fits", lambda *setup: good if fits(*setup) else None)
    return dataclasses.replace(refused, changes=None), advise(*setup, refused)


def test_pairs_are_tried_where_no_single_change_fits_and_what_failed_is_named(monkeypatch):
    _, found = refused_by(monkeypatch, lambda subject, _: subject.checkpointing and subject.adapters)
    (change,) = found.changes
    assert change.text.endswith("(--gradient-checkpointing --lora r=16,targets=all-linear)")
    assert {"--gradient-checkpointing", "--lora r=16,targets=all-linear", "without --device-memory"} < {*found.failed}
    assert "--gradient-checkpointing without --device-memory" in found.failed


def test_no_pair_is_tried_where_a_single_change_fits(monkeypatch):
    _, found = refused_by(monkeypatch, lambda subject, _: subject.checkpointing)
    assert [change.text for change in found.changes] == ["recompute activations (--gradient-checkpointing)"]
    assert not any(option.count("--") > 1 for option in found.failed)


def test_the_memory_that_is_enough_is_advice_that_was_tried(monkeypatch):
    refused, found = refused_by(monkeypatch, lambda _, given: 64 * 1024 < given.machine.device_nbytes < 8 * MIB)
    (change,) = found.changes
    need = -(-refused.tiers["device"].need_nbytes // MIB)
    assert change.text.endswith(f"(--device-memory {need}MiB)")


def test_where_nothing_fits_everything_that_was_tried_is_named(monkeypatch):
    refused, found = refused_by(monkeypatch, lambda *setup: False)
    assert found.changes == ()
    screen = describe_changes(dataclasses.replace(refused, changes=found.changes, failed=found.failed))
    assert screen.startswith("No change was found that fits.\nThese do not fit: --gradient-checkpointing; ")


def test_changes_that_the_model_does_not_support_are_left_out(monkeypatch):
    def fits(subject, _):
        if subject.checkpointing:
            raise ConfigError("this model does not support activation checkpointing")
        return subject.adapters

    _, found = refused_by(monkeypatch, fits)
    assert found.changes
    assert "--gradient-checkpointing" not in found.failed
