"""``hf_patrickstar.plan(..., arguments=...)``: ``TrainingArguments`` say how a model is trained."""

import pytest
from transformers import TrainingArguments

import hf_patrickstar
from hf_patrickstar import PatrickStarTrainingArguments
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.from_python import asked_by

MODEL = "gpt2:n_layer=2,n_embd=64,n_head=4,vocab_size=256"


def make(tmp_path, kind=PatrickStarTrainingArguments, **settings):
    return kind(output_dir=str(tmp_path), use_cpu=True, **settings)


def test_they_are_asked_for_as_by_name(tmp_path):
    arguments = make(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        gradient_checkpointing=True,
        max_grad_norm=0,
        bf16=True,
        optim="sgd",
        patrickstar=True,
        patrickstar_config={"device_budget": "1GiB", "host_budget": 2**31, "chunk_numel": 8192, "prefetch_depth": 1},
    )
    found = hf_patrickstar.plan(MODEL, "h100", arguments=arguments, length=32)
    by_name = hf_patrickstar.plan(
        MODEL,
        "h100",
        batch_size=2,
        num_micro_batches=3,
        checkpointing=True,
        max_norm=float("inf"),
        dtype="bf16",
        optimizer="SGD",
        device_memory="1GiB",
        host_memory="2GiB",
        settings={"chunk_numel": 8192, "prefetch_depth": 1},
        length=32,
    )
    assert found == by_name
    assert (found.batch_size, found.num_micro_batches, found.checkpointing) == (2, 3, True)
    assert found.tier(Tier.DEVICE).budget_nbytes == 2**30
    assert found.chunks.numel == 8192
    assert found.speed.clipped_seconds is not None, "the Trainer computes the norm all the same"


def test_the_fused_loss_of_liger_is_planned_as_one_in_chunks(tmp_path):
    model = "llama:num_hidden_layers=1,hidden_size=64,intermediate_size=64,num_attention_heads=2,vocab_size=8192"
    found, by_name, stock = (
        hf_patrickstar.plan(model, "h100", arguments=make(tmp_path, use_liger_kernel=is_on), length=512, **more)
        for is_on, more in ((True, {}), (False, {"settings": {"chunked_loss": True}}), (False, {}))
    )
    assert found == by_name
    peaks = [each.tier(Tier.DEVICE).owners["non-model data"] for each in (found, stock)]
    assert peaks[0] < peaks[1] / 2
    other = hf_patrickstar.plan(
        *("bert:num_hidden_layers=1", "h100"),
        arguments=make(tmp_path, use_liger_kernel=True),
        length=64,
        task="sequence-classification",
    )
    assert other.fits, "Liger has no fused loss there"


def test_what_is_given_by_name_wins(tmp_path):
    arguments = make(
        tmp_path, per_device_train_batch_size=2, patrickstar=True, patrickstar_config={"chunk_numel": 8192}
    )
    found = hf_patrickstar.plan(
        MODEL, "h100", arguments=arguments, batch_size=1, length=16, dtype="bf16", settings={"prefetch_depth": 1}
    )
    assert (found.batch_size, found.precision, found.chunks.numel) == (1, "bfloat16", 8192)
    assert dict(found.settings) == {"dtype": "bf16", "chunk_numel": 8192, "prefetch_depth": 1}


@pytest.mark.parametrize(("flags", "dtype"), [({}, "auto"), ({"bf16": True}, "bf16"), ({"fp16": True}, "fp16")])
def test_stock_arguments_say_their_precision(tmp_path, flags, dtype):
    found = asked_by(make(tmp_path, TrainingArguments, **flags))
    assert (found["dtype"], found["optimizer"], found["max_norm"]) == (dtype, "AdamW", 1.0)
    assert (found["device_memory"], found["host_memory"], found["settings"]) == (None, None, {})


@pytest.mark.parametrize("optim", ["adafactor", "galore_adamw"])
def test_an_optimizer_that_is_not_of_torch_gets_a_sentence_unless_another_is_named(tmp_path, optim):
    """torch has an Adafactor, too, which is not that of transformers; GaLore is not installed."""
    arguments = make(tmp_path, optim=optim)
    with pytest.raises(ConfigError, match=rf"--optim {optim} is not in torch\.optim"):
        hf_patrickstar.plan(MODEL, "h100", arguments=arguments, length=16)
    assert hf_patrickstar.plan(MODEL, "h100", arguments=arguments, length=16, optimizer="adamw").fits


def test_other_objects_get_a_sentence():
    with pytest.raises(ConfigError, match="arguments of type dict are not TrainingArguments of transformers"):
        hf_patrickstar.plan(MODEL, "h100", arguments={"batch_size": 1})
