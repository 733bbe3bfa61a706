"""Adapters over weights that bitsandbytes has packed: bit for bit the stock Trainer, a quarter of the bytes there."""

import pytest
import torch
from peft import prepare_model_for_kbit_training
from support import inside, trainers
from support.covering import ids, pairwise
from support.quantized import KINDS, load, packed, packed_nbytes, saved, with_adapter, without_packing
from support.trainers import assert_same_run, logged, smallest_budget

pytest.importorskip("bitsandbytes")


def train(model, tmp_path, config=None, **kwargs):
    """Trains; ``config`` of ``None`` means the stock Trainer."""
    return trainers.train("llama", tmp_path, config, model=model, **{"rows": 32, **kwargs})


CASES = pairwise(
    kind=sorted(KINDS),
    bf16=[False, True],
    accumulation=[1, 2],
    checkpointing=[False, True],
    evaluates=[False, True],
)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_same_run(case, tmp_path):
    kwargs = {"gradient_accumulation_steps": case["accumulation"], "bf16": case["bf16"], "max_steps": 3}
    if case["evaluates"]:
        kwargs |= {"eval_strategy": "steps", "eval_steps": 1}
    if case["checkpointing"]:
        kwargs |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    stock, ours = (with_adapter(load(case["kind"], saved(5).name)) for _ in range(2))
    config = {"chunk_budget": packed_nbytes(ours) // 4}
    if case["checkpointing"]:  # a layer that is computed again needs all its weights at once
        precision = "bf16" if case["bf16"] else "no"
        config = {"chunk_budget": max(config["chunk_budget"], smallest_budget(ours, precision, checkpointing=True))}
    expected = train(without_packing(stock), tmp_path / "stock", **kwargs)
    actual = train(ours, tmp_path / "ours", config, **kwargs)
    assert_same_run(expected, actual)
    assert logged(actual[0], "eval_loss") == logged(expected[0], "eval_loss")
    stats, engine = actual[0].patrickstar_stats(), actual[0].patrickstar_engine
    moved = {inside.find(engine, weight).chunk.spec.index for weight in packed(ours).values()}
    assert len(moved) > 10
    assert not any(inside.chunks(engine)[index].is_static for index in moved)
    assert stats["chunk_evictions"] > 3 * len(moved)
    assert stats["device_peak_nbytes"] <= config["chunk_budget"]
    assert stats["diverged_steps"] == 0
    # How many outliers the inputs of an 8-bit layer have in an evaluation, no tensor without bytes can tell.
    assert stats["recorded_steps"] == (case["kind"] == "int8" and case["evaluates"])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_device_that_has_no_room_for_the_base(kind, tmp_path):
    """With activations beside chunks, the device has less than the packed weights take."""
    stock, ours = (with_adapter(load(kind, saved(14).name)) for _ in range(2))
    config = {"device_budget": int(0.9 * packed_nbytes(ours))}
    kwargs = {"max_steps": 3, "per_device_train_batch_size": 1, "bf16": True, "gradient_checkpointing": True}
    kwargs["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    assert_same_run(
        train(stock, tmp_path / "stock", **kwargs), (run := train(ours, tmp_path / "ours", config, **kwargs))
    )
    stats = run[0].patrickstar_stats()
    assert 0 < stats["device_total_peak_nbytes"] <= config["device_budget"]
    assert stats["chunk_evictions"] > 0
    assert stats["recorded_steps"] == stats["diverged_steps"] == 0


def test_prepared_for_kbit_training(tmp_path):
    """``prepare_model_for_kbit_training`` makes what is not packed fp32, and lets inputs require gradients."""
    models = []
    for _ in range(2):
        base = load("nf4, double", saved(4).name, torch.bfloat16)
        base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
        models.append(with_adapter(base))
    config = {"chunk_budget": smallest_budget(models[1], "bf16", checkpointing=True)}
    kwargs = {"bf16": True, "max_steps": 3}
    assert_same_run(
        train(models[0], tmp_path / "stock", **kwargs), train(models[1], tmp_path / "ours", config, **kwargs)
    )
