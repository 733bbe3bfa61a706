"""Types of parameters: those that nobody asked to change train as in plain torch; all are in one plan."""

import copy

import pytest
import torch
from support import inside
from support.covering import pairwise
from support.models import make_batch, make_model
from support.pairs import Pair
from support.small import WIDTH, adamw, batch, sgd
from torch import nn

from hf_patrickstar import PatrickStarAccelerator, PatrickStarEngine


class Typed(nn.Module):
    """Some layers, of which each may have its own type; what a layer gets is given its type."""

    def __init__(self, *dtypes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtypes[-1])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.norm(x.to(self.norm.weight.dtype))


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=1e-2)


CASES = pairwise(dtype=[torch.bfloat16, torch.float64], make_optimizer=[adamw, sgd, adafactor], accumulation=[1, 3])


def train_both(dtypes, make_optimizer=adamw, accumulation=1):
    """Trains a model whose types nobody asked to change with and without an engine; they must be the same, too."""
    how = {
        "dtype": "auto",
        "settings": {"chunks": max(dtype.itemsize for dtype in dtypes)},
        "gradient_accumulation_steps": accumulation,
    }
    pair = Pair(lambda: Typed(*dtypes), "moving", make_optimizer, **how)
    pair.train(3, micro=accumulation, max_norms=(0.05,))
    return pair.engine


@pytest.mark.parametrize(("dtype", "make_optimizer", "accumulation"), [tuple(row.values()) for row in CASES])
def test_a_model_that_nobody_asked_to_change_trains_as_in_plain_torch(dtype, make_optimizer, accumulation):
    engine = train_both([dtype] * 9, make_optimizer, accumulation)
    types = {payload.dtype for chunk in inside.chunks(engine) for payload in (chunk.param, *chunk.lists.values())}
    assert types == {dtype}
    assert engine.stats()["chunk_evictions"] > 0


def test_types_beside_each_other():
    dtypes = (torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
    engine = train_both(dtypes, accumulation=3)
    assert {chunk.param.dtype for chunk in inside.chunks(engine)} == set(dtypes)


def types_of(engine):
    return {
        tensor.spec.name: (tensor.spec.types.param, tensor.spec.types.state)
        for tensor in inside.tensors(engine)
        if "bias" not in tensor.spec.name
    }


MIXED, FP32, FP64 = ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")


def engine_of(model, **config):
    return PatrickStarEngine(model, config, adamw(model.parameters()))


def test_what_keeps_its_type_when_16_bit_was_asked_for():
    model = Typed(torch.bfloat16, torch.bfloat16, torch.float32, torch.float64)
    engine = engine_of(model, dtype="bf16")
    names = [f"layers.{index}.weight" for index in range(4)]
    assert types_of(engine) == dict(zip([*names, "norm.weight"], [MIXED, MIXED, FP32, FP64, FP64], strict=True))
    engine.detach()
    assert [layer.weight.dtype for layer in model.layers] == [torch.bfloat16] * 2 + [torch.float32, torch.float64]
    assert set(types_of(engine_of(Typed(torch.bfloat16, torch.float64), dtype="fp32")).values()) == {FP32}


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [("auto", ("wte", "wpe", "ln_")), (["*.ln_1.*"], ("ln_1",)), (["auto", "*.ln_9.*"], ("wte", "wpe", "ln_"))],
)
def test_what_autocast_does_not_round_stays_fp32_unless_patterns_replace_that(patterns, kept, caplog):
    model = make_model("gpt2")
    with caplog.at_level("WARNING", "hf_patrickstar"):
        engine = engine_of(model, dtype="bf16", keep_fp32=patterns)
    for name, types in types_of(engine).items():
        assert types == (FP32 if any(f".{part}" in name for part in kept) else MIXED), name
    assert model.state_dict()["transformer.wte.weight"].dtype is torch.float32
    told = [record.getMessage() for record in caplog.records if "keep_fp32" in record.getMessage()]
    if "*.ln_9.*" in patterns:
        (text,) = told
        assert "no parameter of GPT2LMHeadModel has a name like '*.ln_9.*'; names are, for example, '" in text
        assert ".ln_" in text.partition("for example")[2]
    else:
        assert not told
    model(**make_batch("gpt2")).loss.backward()
    engine.optimizer.step()
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 2), 10**6))
    assert not torch.is_autocast_enabled("cpu"), "a forward that fails leaves it"


def test_what_transformers_keeps_in_fp32():
    model = make_model("t5").to(torch.bfloat16)
    kept = [name for name, types in types_of(engine_of(model, dtype="fp16")).items() if types == FP32]
    assert kept
    assert all(".wo." in name for name in kept)
    assert model(**make_batch("t5")).loss.isfinite()


def test_an_adapter_in_fp32_beside_a_16_bit_body():
    """It is computed with in fp32, as PEFT makes it, and rounded by autocast alone."""
    model = Typed(torch.bfloat16, torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.adapter = nn.Parameter(torch.full((WIDTH, 2), 1e-4 + 1e-9))
    optimizer = torch.optim.AdamW([model.adapter])
    PatrickStarEngine(model, {"dtype": "bf16"}, optimizer)
    assert model.adapter.dtype is torch.float32
    assert torch.equal(model.adapter, torch.full((WIDTH, 2), 1e-4 + 1e-9))


@pytest.mark.parametrize("is_inside", [True, False])
def test_checkpointing_around_the_whole_model(is_inside):
    """The recomputation gets the autocast that the forward had, also where checkpointing began outside of it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    engine = PatrickStarEngine(model, {"dtype": "bf16"}, adamw(model.parameters()))

    def run(called, context):
        x = batch().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            output = torch.utils.checkpoint.checkpoint(called, x, use_reentrant=False, context_fn=context)
        output.float().square().mean().backward()
        return x.grad

    gradient = run(model, torch.utils.checkpoint.noop_context_fn)
    x = batch().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = plain(x)
    output.float().square().mean().backward()
    assert torch.equal(gradient, x.grad)
    engine.optimizer.step()


def test_frozen_16_bit_parameters_need_no_master():
    model = make_model("gpt2").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.bias = nn.Parameter(torch.zeros(model.config.vocab_size))
    engine = PatrickStarEngine(model, {"dtype": "bf16", "frozen_master": True}, torch.optim.SGD([model.lm_head.bias]))
    frozen = [chunk for chunk in inside.chunks(engine) if not chunk.spec.trainable]
    assert frozen
    assert not any(chunk.lists for chunk in frozen)


@pytest.mark.parametrize(
    ("asked", "dtype", "computed"),
    [
        ("bf16", "fp32", torch.float32),
        ("bf16", "fp16", torch.float16),
        ("no", "bf16", torch.bfloat16),
        ("no", "auto", torch.float32),
        ("bf16", "auto", torch.bfloat16),
    ],
)
def test_autocast_of_the_accelerator_is_that_of_the_model(asked, dtype, computed):
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision=asked, patrickstar_config={"dtype": dtype})
    assert accelerator.mixed_precision == asked
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is computed
