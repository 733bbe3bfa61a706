"""Bit for bit the stock Trainer: losses, norms with clipping that bites, and weights, in fp32 and with ``--bf16``.

Two param groups, a cosine schedule and evaluations in between, in every architecture of ``models.py``.
"""

import pytest
from support import inside
from support.covering import ids, pairwise
from support.models import MODELS, make_model
from support.trainers import assert_same_run, smallest_budget, train
from test_budget import budget_of
from torch import nn


def tight(name, precision="no", checkpointing=False):
    return {"chunk_budget": smallest_budget(make_model(name), precision, checkpointing)}


def config_of(memory, name, precision, checkpointing):
    """Settings for one kind of little memory."""
    least = tight(name, precision, checkpointing)
    if memory == "looked up":
        return {"chunk_budget": int(1.5 * least["chunk_budget"]), "cpu_embedding": True}
    if memory == "device":
        dtype = "fp32" if precision == "no" else precision
        return {"device_budget": budget_of(name, dtype, checkpointing, [16], factor=2)}
    return least


CASES = pairwise(
    name=sorted(MODELS),
    memory=["chunks", "looked up", "device"],
    bf16=[False, True],
    accumulation=[1, 3],
    checkpointing=[False, True],
)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_same_run(case, tmp_path):
    name, memory, checkpointing = case["name"], case["memory"], case["checkpointing"]
    is_bf16 = case["bf16"] and name != "mixtral"  # autocast does not round what experts multiply; the engine does
    kwargs = {"gradient_accumulation_steps": case["accumulation"], "gradient_checkpointing": checkpointing}
    kwargs |= {"bf16": is_bf16, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    expected = train(name, tmp_path / "plain", **kwargs)
    assert any(norm > 0.5 for norm in expected[1].norms), "clipping must bite"
    config = config_of(memory, name, "bf16" if is_bf16 else "no", checkpointing)
    ours = train(name, tmp_path / "ours", config, **kwargs)
    assert_same_run(expected, ours)
    stats, engine = ours[0].patrickstar_stats(), ours[0].patrickstar_engine
    assert stats["chunk_loads"] > 0
    if memory == "device":
        assert 0 < stats["device_total_peak_nbytes"] <= config["device_budget"]
    else:
        assert stats["chunk_evictions"] > 0
        assert stats["device_peak_nbytes"] <= config["chunk_budget"]
    if memory == "looked up":
        assert any(tensor.is_looked_up for tensor in inside.tensors(engine))


def freeze_some(model):
    model.get_input_embeddings().weight.requires_grad_(False)
    for parameter in list(model.parameters())[3:9]:
        parameter.requires_grad_(False)


def add_unused(model):
    model.unused = nn.Linear(16, 16)


ODD = {
    "small chunks": ({"chunk_numel": 64, "chunk_budget": "1MiB"}, {}),
    "one chunk": ({"chunk_numel": 10**7, "chunk_budget": "1MiB"}, {}),
    "no clipping": (tight("gpt2"), {"max_grad_norm": 0.0, "max_steps": 6}),
    "uneven batches": (
        tight("gpt2"),
        {"rows": 22, "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4},
    ),
    "frozen": (
        {**tight("gpt2", checkpointing=True), "debug_evict_all": True},
        {"change": freeze_some, "gradient_checkpointing": True},
    ),
    "unused": (tight("gpt2"), {"change": add_unused}),
    **{
        optim: (tight("gpt2"), {"optim": optim, "gradient_accumulation_steps": accumulation})
        for accumulation, optim in enumerate(("adamw_torch", "adafactor"), 1)
    },
}


@pytest.mark.parametrize(("config", "kwargs"), ODD.values(), ids=ODD)
def test_what_is_less_usual(config, kwargs, tmp_path):
    ours = train("gpt2", tmp_path / "ours", config, **kwargs)
    assert_same_run(train("gpt2", tmp_path / "plain", **kwargs), ours)
    assert (ours[0].patrickstar_stats()["chunk_loads"] == 0) is (config.get("chunk_budget") == "1MiB")
