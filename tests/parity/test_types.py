"""Types of parameters: those that nobody asked to change train as in plain torch; all are in one plan."""

import copy

import pytest
import torch
from support import inside
from support.covering import pairwise
from support.models import make_batch, make_model
from support.trainers import smallest_budget
from torch import nn

from hf_patrickstar import PatrickStarAccelerator, PatrickStarEngine

WIDTH = 32


class Stack(nn.Module):
    """Some layers, of which each may have its own type; what a layer gets is given its type."""

    def __init__(self, dtypes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtypes[-1])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.norm(x.to(self.norm.weight.dtype)).float().square().mean()


def make_stack(*dtypes):
    torch.manual_seed(0)
    return Stack(dtypes)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def inputs(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train_both(plain, managed, make_optimizer, config, accumulation=1, max_norm=0.05, loss_of=None, steps=3):
    """Trains the same model with and without an engine; everything must be the same, types too."""
    loss_of = loss_of or (lambda model, step: model(inputs(step)))
    optimizer = make_optimizer(plain)
    engine = PatrickStarEngine(
        managed, config, make_optimizer(managed), device="cpu", gradient_accumulation_steps=accumulation
    )
    for step in range(steps):
        losses = []
        for model, used in ((plain, optimizer), (managed, engine.optimizer)):
            for micro in range(accumulation):
                torch.manual_seed(step)
                loss = loss_of(model, 10 * step + micro)
                losses.append((loss.dtype, loss.item()))
                (loss / accumulation).backward()
            if max_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                losses.append((norm.dtype, norm.item()))
            used.step()
            used.zero_grad()
        assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
    expected, found = plain.state_dict(), managed.state_dict()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    states = zip(optimizer.state_dict()["state"].items(), engine.optimizer.state_dict()["state"].items(), strict=True)
    for (key, state), (other, own) in states:
        assert key == other
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert own[name].dtype == value.dtype, name
                assert torch.equal(own[name], value), name
    return engine


def budget_for(model):
    return {"chunk_budget": smallest_budget(copy.deepcopy(model))}


CASES = pairwise(dtype=[torch.bfloat16, torch.float64], make_optimizer=[adamw, sgd, adafactor], accumulation=[1, 3])


@pytest.mark.parametrize(("dtype", "make_optimizer", "accumulation"), [tuple(row.values()) for row in CASES])
def test_a_model_that_nobody_asked_to_change_trains_as_in_plain_torch(dtype, make_optimizer, accumulation):
    model = make_stack(dtype, dtype, dtype)
    config = budget_for(model)
    engine = train_both(model, make_stack(dtype, dtype, dtype), make_optimizer, config, accumulation)
    types = {payload.dtype for chunk in inside.chunks(engine) for payload in (chunk.param, *chunk.lists.values())}
    assert types == {dtype}
    assert engine.stats()["chunk_evictions"] > 0


def test_a_16_bit_model_of_transformers_without_bf16():
    plain, managed = (make_model("t5").to(torch.bfloat16).train() for _ in range(2))

    def loss_of(model, step):
        return model(**make_batch("t5", seed=step)).loss

    train_both(plain, managed, adamw, budget_for(managed), loss_of=loss_of)


def test_types_beside_each_other():
    dtypes = (torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
    engine = train_both(make_stack(*dtypes), make_stack(*dtypes), adamw, budget_for(make_stack(*dtypes)), 3)
    assert {chunk.param.dtype for chunk in inside.chunks(engine)} == set(dtypes)


def types_of(engine):
    return {
        tensor.spec.name: (tensor.spec.types.param, tensor.spec.types.state)
        for tensor in inside.tensors(engine)
        if "bias" not in tensor.spec.name
    }


MIXED, FP32, FP64 = ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")


def engine_of(model, **config):
    return PatrickStarEngine(model, config, adamw(model))


def test_what_keeps_its_type_when_16_bit_was_asked_for():
    model = make_stack(torch.bfloat16, torch.bfloat16, torch.float32, torch.float64)
    engine = engine_of(model, dtype="bf16")
    names = [f"layers.{index}.weight" for index in range(4)]
    assert types_of(engine) == dict(zip([*names, "norm.weight"], [MIXED, MIXED, FP32, FP64, FP64], strict=True))
    engine.detach()
    assert [layer.weight.dtype for layer in model.layers] == [torch.bfloat16] * 2 + [torch.float32, torch.float64]
    assert set(types_of(engine_of(make_stack(torch.bfloat16, torch.float64), dtype="fp32")).values()) == {FP32}


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
    model = make_stack(torch.bfloat16, torch.bfloat16)
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
    engine = PatrickStarEngine(model, {"dtype": "bf16"}, adamw(model))

    def run(called, context):
        x = inputs(0).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            output = torch.utils.checkpoint.checkpoint(called, x, use_reentrant=False, context_fn=context)
        output.float().square().mean().backward()
        return x.grad

    gradient = run(model, torch.utils.checkpoint.noop_context_fn)
    x = inputs(0).requires_grad_()
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
