"""Optimizers of bitsandbytes over chunks: losses, norms, weights and states of the stock Trainer, bit for bit."""

import functools

import pytest
import torch
from support import inside
from support.checkpoint_files import same_bits
from support.covering import ids, pairwise
from support.models import make_batch
from support.quantized_states import BLOCK_NUMEL, LEAST_NUMEL, begin_apart, flat, make, trained
from support.trainers import LossRecorder, assert_same_run, assert_same_weights, smallest_budget
from support.watch import non_model_peak
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier

bnb = pytest.importorskip("bitsandbytes")

OPTIMS = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), 2),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), 1),
    **{"paged_adamw_32bit": 2, "lion_32bit": 1},
}
"""The optimizers, and how many states they have of a parameter."""
PRECISIONS = {
    "fp32": (torch.float32, {}),
    "autocast": (torch.float32, {"bf16": True}),
    "bf16": (torch.bfloat16, {}),  # without fp32 masters, as in plain torch
}
"""The type in which the model is loaded, and arguments of the Trainer."""


def train(name, precision, tmp_path, config=None, change=None, **kwargs):
    """Trains apart from other runs; a ``config`` of ``None`` means the stock Trainer."""
    dtype, arguments = PRECISIONS[precision]
    model, recorder = make(name, dtype), LossRecorder()
    if change is not None:
        change(model)
    trainer = trained(tmp_path, model, config, callbacks=[recorder], **arguments, **kwargs)
    return trainer, recorder


@functools.cache
def least_of(name, precision):
    """The same with room for blocks, and for the small tensors of a module, which are in other chunks."""
    dtype, arguments = PRECISIONS[precision]
    return smallest_budget(make(name, dtype), "bf16" if arguments else "no") + 2048


@functools.cache
def activations_of(name, precision):
    """Bytes of non-model data of a step."""
    dtype, arguments = PRECISIONS[precision]

    def step(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(arguments), cache_enabled=False):
            loss = model(**make_batch(name)).loss
        loss.backward()

    return non_model_peak(make(name, dtype).train(), step)


def half_of(name, precision):
    """About half of the bytes of all chunks, if states take one byte each."""
    numel = sum(parameter.numel() for parameter in make(name).parameters())
    return {"fp32": 5, "autocast": 4, "bf16": 3}[precision] * numel


def config_of(memory, name, precision):
    least = least_of(name, precision)
    return {
        "chunks": {"chunk_budget": least, "placement": "host"},
        "evicting": {"chunk_budget": 2 * least, "placement": "host", "debug_evict_all": True},
        "device": {"device_budget": activations_of(name, precision) + 2 * least + half_of(name, precision)},
        "resident": {},
    }[memory]


def assert_moved(engine, memory, config):
    """What the settings are for has happened."""
    stats, homes = engine.stats(), inside.homes(engine)
    if memory == "resident":
        assert stats["chunk_loads"] == 0
        assert homes == {Tier.DEVICE}
    elif memory == "device":
        assert homes == {Tier.DEVICE, Tier.HOST}
        assert stats["device_total_peak_nbytes"] <= config["device_budget"]
    else:
        assert homes == {Tier.HOST}
        assert stats["chunk_evictions"] > 0
        assert stats["device_peak_nbytes"] <= config["chunk_budget"]


def assert_same_states(expected, ours):
    """Every tensor and number that the library keeps of every parameter."""
    left, right = flat(expected.state_dict()), flat(ours.state_dict())
    assert left.keys() == right.keys()
    for number, state in left.items():
        assert state.keys() == right[number].keys(), number
        for key, value in state.items():
            assert same_bits(value, right[number][key]), f"{key} of parameter {number}"


def assert_kinds(trainer, optim, num_states):
    """The case has what makes it one: states of the types and numbers of the library, and tensors of all kinds."""
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    states = flat(trainer.optimizer.state_dict())
    embedding = trainer.model.get_input_embeddings().weight
    assert embedding.numel() >= LEAST_NUMEL
    for parameter, state in zip(parameters, states.values(), strict=True):
        is_small = parameter.numel() < LEAST_NUMEL or parameter is embedding or "32bit" in optim
        assert state["state1"].dtype is (torch.float32 if is_small else torch.uint8)
        assert ("state2" in state) is (num_states == 2)
        assert ("absmax1" in state) is not is_small
    if "8bit" in optim:
        kinds = [state["state1"].dtype for state in states.values()]
        assert {torch.float32, torch.uint8} == set(kinds)
        assert any(p.numel() % BLOCK_NUMEL for p, kind in zip(parameters, kinds, strict=True) if kind is torch.uint8)


CASES = pairwise(
    optim=list(OPTIMS),
    memory=["chunks", "evicting", "device", "resident"],
    precision=list(PRECISIONS),
    accumulation=[1, 3],
    name=["llama", "gpt2"],
)


@pytest.mark.parametrize("case", CASES, ids=map(ids, CASES))
def test_same_run_and_states(case, tmp_path):
    name, optim, precision = case["name"], case["optim"], case["precision"]
    kwargs = {"optim": optim, "gradient_accumulation_steps": case["accumulation"]}
    expected = train(name, precision, tmp_path / "stock", **kwargs)
    assert any(norm > 0.5 for norm in expected[1].norms), "clipping must bite"
    assert_kinds(expected[0], optim, OPTIMS[optim])
    config = config_of(case["memory"], name, precision)
    ours = train(name, precision, tmp_path / "ours", config, **kwargs)
    assert_same_run(expected, ours)
    assert_same_states(expected[0].optimizer, ours[0].optimizer)
    assert_moved(ours[0].patrickstar_engine, case["memory"], config)


# What is less usual


def freeze_some(model):
    """The Trainer tells the library of the embedding all the same."""
    model.get_input_embeddings().weight.requires_grad_(False)
    for parameter in list(model.parameters())[3:7]:
        parameter.requires_grad_(False)


def add_unused(model):
    """It never has a gradient, and so no state."""
    model.unused = nn.Linear(64, 80)


def small_blocks(**settings):
    """Tensors of 256 elements have 8-bit states, too."""
    return {"trainer_kwargs": {"optimizer_cls_and_kwargs": (bnb.optim.AdamW8bit, {"min_8bit_size": 256, **settings})}}


ODD = {
    "frozen": {"optim": "paged_adamw_8bit", "change": freeze_some, "gradient_checkpointing": True},
    "unused": {"optim": "lion_8bit", "change": add_unused},
    "no clipping": {"optim": "adamw_8bit", "max_grad_norm": 0.0, "max_steps": 6},
    "small tensors in 8 bits": small_blocks(lr=5e-3),
    "uneven batches": {"optim": "adamw_8bit", "rows": 22, "max_steps": 6, "gradient_accumulation_steps": 4},
    "ademamix": {"optim": "ademamix_8bit"},
    "no decay": {"optim": "rmsprop_bnb_8bit", "weight_decay": 0.0},
}


@pytest.mark.parametrize(("number", "name"), enumerate(ODD), ids=ODD)
def test_what_is_less_usual(number, name, tmp_path):
    kwargs, precision = ODD[name], ("fp32", "autocast")[number % 2]
    expected = train("llama", precision, tmp_path / "stock", **kwargs)
    config = {"chunk_budget": 6 * least_of("llama", precision), "placement": "host", "frozen_master": True}
    ours = train("llama", precision, tmp_path / "ours", config, **kwargs)
    assert_same_run(expected, ours)
    assert ours[0].patrickstar_stats()["chunk_evictions"] > 0
    assert_same_states(expected[0].optimizer, ours[0].optimizer)


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_32bit"])
def test_the_state_dictionary_is_that_of_the_library(optim, tmp_path):
    """In its order; without the dictionary around quantized tensors, since its older versions do not read it."""
    expected, ours = (
        train("llama", "fp32", tmp_path / str(config), config, optim=optim)[0].optimizer.state_dict()
        for config in (None, {})
    )
    assert list(ours["state"]) == list(expected["state"])
    assert same_bits(flat(expected), ours["state"])
    assert same_bits(expected["param_groups"], ours["param_groups"])


# A bare loop


def loop(optimizer, model, engine=None, steps=3):
    losses = []
    for step in range(steps):
        loss = model(**make_batch("llama", seed=step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def widened(model):
    """A large tensor in the middle of a chunk."""
    return model.model.layers[1].mlp.up_proj.weight


def override(model, first):
    """Lets one parameter have 32-bit states; the library's page says to register all before, which changes nothing."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    if first == "registered":
        manager.register_parameters(model.parameters())
    manager.override_config(widened(model), "optim_bits", 32)
    if first == "overridden":
        manager.register_parameters(model.parameters())


def override_by_name(model, first):
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model.model.layers[1].mlp.up_proj, "weight", {"optim_bits": 32})


def override_rate(model, first):
    """Overrides are not only of bits."""
    bnb.optim.GlobalOptimManager.get_instance().override_config(widened(model), key_value_dict={"lr": 0.1})


OVERRIDES = {
    "registered": (override, "registered"),
    "by module": (override_by_name, None),
    "rate": (override_rate, None),
    "overridden": (override, "overridden"),
}


@pytest.mark.parametrize(
    ("change", "first"),
    OVERRIDES.values(),
    ids=OVERRIDES,
)
def test_what_the_library_was_told_of_a_parameter(change, first):
    found = []
    for is_ours in (False, True):
        begin_apart()
        model = make("llama").train()
        change(model, first)
        optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=5e-3, weight_decay=0.1)
        if is_ours:
            optimizer = PatrickStarEngine(model, config_of("chunks", "llama", "fp32"), optimizer).optimizer
        found.append((loop(optimizer, model), model, optimizer))
    (losses, plain, expected), (our_losses, managed, ours) = found
    assert our_losses == losses
    assert_same_weights(plain, managed)
    assert_same_states(expected, ours)
    number = [id(parameter) for parameter in plain.parameters()].index(id(widened(plain)))
    is_wide = change is not override_rate
    assert flat(expected.state_dict())[number]["state1"].dtype is (torch.float32 if is_wide else torch.uint8)
