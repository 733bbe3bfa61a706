"""Engines that are told what torch told another one do what they do with the model, to the last byte and operator."""

import dataclasses
import functools
import gc
import logging
import re
import weakref

import pytest
import torch
from models import make_batch, make_model
from test_recording import CASES, NODE, SMALL, TOGETHER
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from trainers import smallest_budget

from hf_patrickstar.errors import BudgetError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.script import ThreadWork
from hf_patrickstar.tracing.fake import FakeTensors
from hf_patrickstar.tracing.micro_batch import trace
from hf_patrickstar.virtual.recording import record_step
from hf_patrickstar.virtual.training import Training, make_adamw

H100 = MACHINES["h100"]


def compute_loss(model, inputs):
    return model(**inputs).loss


def make_training(name="gpt2", checkpointing=False, num_micro_batches=1, change=lambda model: None, **settings):
    def make():
        model = make_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        change(model)
        return model

    def make_inputs():
        return {key: torch.zeros_like(value) for key, value in make_batch(name, seed=0).items()}

    def make_optimizer(parameters):
        return make_adamw([parameter for parameter in parameters if parameter.requires_grad])

    config = {**SMALL, "device_budget": "1GiB", **settings}
    return Training(make, make_inputs, make_optimizer, compute_loss, config, num_micro_batches)


def record(training, machine, notes, max_norm=1.0, world_size=1):
    return record_step(
        training.make_model,
        training.make_inputs,
        machine,
        config=training.config,
        make_optimizer=training.make_optimizer,
        compute_loss=training.compute_loss,
        max_norm=max_norm,
        num_micro_batches=training.num_micro_batches,
        world_size=world_size,
        notes=notes,
    )


def traced(training, machine=H100, looked_up=()):
    """What a micro-batch of a training does, or ``None``."""
    with FakeTensors():
        return trace(training.micro_batch, looked_up=looked_up, has_accelerator=machine.has_accelerator)


def noted(training, machine=H100):
    """Finds notes, which there must be."""

    @functools.cache
    def find(looked_up):
        micro_batch = traced(training, machine, looked_up)
        assert micro_batch is not None
        return micro_batch

    return find


def without_addresses(recording):
    """A recording without what depends on addresses: single numbers that another one may have left in the cache."""
    script = [
        dataclasses.replace(
            entry, operators=tuple((work.name, work.nbytes if work.nbytes > 8 else 0) for work in entry.operators)
        )
        if isinstance(entry, ThreadWork)
        else entry
        for entry in recording.script
    ]
    fields = {field.name: getattr(recording, field.name) for field in dataclasses.fields(recording)}
    return {**fields, "script": script, "timeline": None}


def check(how, chunk_nbytes):
    how = dict(how)
    of_step = {key: how.pop(key) for key in ("max_norm", "world_size") if key in how}
    machine = how.pop("machine", H100)
    training = make_training(**how, chunk_budget=chunk_nbytes)
    expected = record(training, machine, None, **of_step)
    found = record(training, machine, noted(training, machine), **of_step)
    left, right = without_addresses(found), without_addresses(expected)
    assert [name for name in left if left[name] != right[name]] == []
    assert found.timeline.duration_ns == pytest.approx(expected.timeline.duration_ns, abs=100)


PLAIN = {
    name: CASES[name]
    for name in (
        *("gpt2", "llama", "t5", "bert", "recomputation", "no clipping", "fp32", "on the CPU", "slow bus"),
        *("two micro-batches", "accumulation with recomputation"),
    )
}


@pytest.mark.parametrize("how", PLAIN.values(), ids=PLAIN)
def test_an_engine_does_the_same_without_the_model(how):
    how = {"placement": "host", **how}
    check(how, int(1.3 * smallest_budget(make_model(how.get("name", "gpt2")), "bf16", checkpointing=True)))


@pytest.mark.parametrize("name", ["two", "eight that reshard", "two micro-batches"])
def test_one_of_several_processes_does_the_same(name):
    check({"placement": "host", "machine": NODE, **TOGETHER[name]}, 80_000)


def test_chunks_in_the_margin_do_the_same():
    check({"overlap_optimizer": "backward", "max_norm": None}, 200_000)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_parameters_do_the_same(checkpointing):
    def freeze(model):
        model.transformer.h[0].requires_grad_(False)
        model.enable_input_require_grads()

    check({"change": freeze, "checkpointing": checkpointing, "placement": "host"}, 80_000)


@pytest.mark.parametrize(
    "how",
    [
        {"name": "llama"},
        {"name": "bert", "checkpointing": True},
        {"name": "t5", "num_micro_batches": 2},
        {"change": lambda model: model.transformer.wte.requires_grad_(False)},
    ],
    ids=["llama", "recomputation", "two micro-batches", "frozen"],
)
def test_embeddings_that_are_looked_up_at_home_do_the_same(how):
    check({"cpu_embedding": True, "placement": "host", **how}, 120_000)


def test_lookups_that_are_decided_after_a_step_do_the_same():
    """One is read at home and its table is too small for it, the other one goes on."""

    def enlarge(model):
        model.transformer.wpe = torch.nn.Embedding(5000, 32)
        model.transformer.wte = torch.nn.Embedding(60_000, 32)
        model.lm_head = torch.nn.Linear(32, 60_000, bias=False)
        model.config.vocab_size = 60_000

    asked = []
    training = make_training(change=enlarge, placement="host", chunk_budget=5_000_000, cpu_embedding="auto")
    notes = noted(training)

    def find(looked_up):
        asked.append(looked_up)
        return notes(looked_up)

    found, expected = (without_addresses(record(training, H100, given)) for given in (find, None))
    assert [name for name in found if found[name] != expected[name]] == []
    assert len(set(asked)) == 2, "before and after the decision"


def test_an_embedding_that_writes_to_its_rows_is_not_told_again():
    def limit(model):
        model.transformer.wpe.max_norm = 1.0

    assert traced(make_training(change=limit, placement="host"), H100, ["transformer.wpe.weight"]) is None


def test_experts_do_the_same():
    check({"name": "mixtral", "placement": "host"}, 120_000)


@pytest.mark.parametrize("device_nbytes", [60_000, 420_000])
def test_a_device_that_is_too_small_is_refused_too(device_nbytes):
    """After as many retries, and for the same bytes; what would do is foreseen by a model that runs, better."""
    training = make_training(chunk_budget="auto")
    notes = noted(training)
    training = dataclasses.replace(training, config={**training.config, "device_budget": device_nbytes})
    said = []
    for given in (notes, None):
        with pytest.raises(BudgetError, match=r"failed 4 times.* device_budget is too small") as caught:
            record(training, H100, given)
        said.append(re.split("at least", str(caught.value))[0])
    assert said[0] == said[1]


def test_chunks_that_leave_the_device_in_a_step_do_the_same(caplog):
    """By their own bytes all chunks fit on the device, and are at home there until activations need the room."""
    training = make_training(chunk_budget="auto", placement="auto", device_budget=2_800_000)
    training = dataclasses.replace(training, make_inputs=lambda make=training.make_inputs: repeated(make(), 4))
    notes = noted(training)
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        found, expected = (without_addresses(record(training, H100, given)) for given in (notes, None))
    assert [name for name in found if found[name] != expected[name]] == []
    left = [record for record in caplog.records if "a step ran out of memory" in record.getMessage()]
    assert len(left) == 2, "one with each recording"


@pytest.mark.parametrize("is_told", [False, True])
def test_nothing_of_an_engine_stays(is_told):
    """A search makes many plans, and Python looks for cycles among all that is left of those before."""
    training, models = make_training(placement="host"), []

    def make_model():
        models.append(training.make_model())
        return models[-1]

    noted_training = dataclasses.replace(training, make_model=make_model)
    record(noted_training, H100, noted(noted_training) if is_told else None)
    left = list(map(weakref.ref, models))
    models.clear()
    gc.collect()
    assert len(left) >= 1 + is_told
    assert [model() for model in left] == [None] * len(left)


def repeated(batch, num):
    return {key: torch.cat([value] * num) for key, value in batch.items()}


def test_a_model_that_is_evaluated_in_its_loss_is_not_told_again():
    def compute(model, inputs):
        with torch.no_grad():
            expected = model(**inputs).logits
        return (model(**inputs).logits - expected).square().mean()

    training = dataclasses.replace(make_training(), compute_loss=compute)
    assert traced(training, H100) is None


@pytest.mark.parametrize("loss", [compute_loss, None], ids=["told", "run"])
def test_no_mode_of_operators_stays(loss):
    def compute(model, inputs):
        with torch.no_grad():
            model(**inputs)
        return compute_loss(model, inputs)

    traced(dataclasses.replace(make_training(), compute_loss=loss or compute), H100)
    assert not _get_current_dispatch_mode_stack()


def test_what_a_model_does_the_first_time_alone_is_not_told_again():
    made = []

    def compute(model, inputs):
        if not made:
            made.append(torch.ones(8, 8, device="cpu") @ torch.ones(8, 8, device="cpu"))
        return compute_loss(model, inputs)

    assert traced(dataclasses.replace(make_training(), compute_loss=compute), H100) is None


def test_a_model_that_runs_other_layers_each_time_is_not_told_again():
    calls = []

    def compute(model, inputs):
        calls.append(None)
        hidden = model.transformer.wte(inputs["input_ids"])
        block = model.transformer.h[len(calls) % len(model.transformer.h)]
        found = block(hidden)
        return (found[0] if isinstance(found, tuple) else found).square().mean()

    assert traced(dataclasses.replace(make_training(), compute_loss=compute), H100) is None


def test_the_model_runs_twice_and_no_more():
    calls = []

    def compute(model, inputs):
        calls.append(None)
        return compute_loss(model, inputs)

    assert traced(dataclasses.replace(make_training(), compute_loss=compute), H100) is not None
    assert len(calls) == 2, "the third time nothing of the model runs"
