"""The parity tests on CUDA, with the device budget capped. Run by ``pytest -m gpu`` and scripts/gpu_check.sh.

Bit for bit where both sides run the same kernels: everything resident against plain torch on the device; masters on
the host against a reference whose masters are on the host. Clipping there sums norms on the device in our run and on
the host in the reference, so with clipping the comparison is to 1e-3 of the update.
"""

import gc
import random

import pytest
import torch
from models import make_batch, make_model, make_rows
from trainers import LossRecorder, arguments

from hf_patrickstar import PatrickStarEngine, PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.memory.streams import AcceleratorDriver

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
STEPS = 3
MIB = 2**20


def batch_of(name, seed):
    return {key: value.to(DEVICE) for key, value in make_batch(name, seed=seed).items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


def free():
    gc.collect()
    torch.cuda.empty_cache()


def run_engine(name, config, max_norm=None, checkpointing=False):
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**batch_of(name, step)).loss
        losses.append(loss.item())
        loss.backward()
        if max_norm is not None:
            engine.optimizer.clip_grad_norm_(model.parameters(), max_norm)
        engine.optimizer.step()
        model.zero_grad()
    state_dict, stats = model.state_dict(), engine.stats()
    engine.detach()
    free()
    return losses, state_dict, stats


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "mixtral"])
def test_resident_fp32_is_plain_torch(name):
    model = make_model(name).train().to(DEVICE)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**batch_of(name, step)).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    expected = {key: value.cpu() for key, value in model.state_dict().items()}
    del model, optimizer
    free()
    ours, state_dict, stats = run_engine(name, {}, max_norm=0.3)
    assert stats["chunk_loads"] == 0
    assert ours == losses
    for key, value in expected.items():
        assert torch.equal(state_dict[key], value), key


def run_reference(name, dtype, checkpointing=False, max_norm=None):
    """16-bit weights on the device, fp32 masters and AdamW on the host."""
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    masters = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DEVICE, dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(DEVICE)
    optimizer = adamw(masters.values())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**batch_of(name, step)).loss
        losses.append(loss.item())
        loss.backward()
        for key, parameter in model.named_parameters():
            masters[key].grad = None if parameter.grad is None else parameter.grad.cpu().float()
            parameter.grad = None
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(masters.values()), max_norm)
        optimizer.step()
        for key, parameter in model.named_parameters():
            parameter.data.copy_(masters[key].data)
    del model
    free()
    return losses, masters


@pytest.fixture
def at_home_on_host(monkeypatch):
    """Chunks move, however small the model is; kernels that are loaded lazily are not memory of others."""
    monkeypatch.setattr("hf_patrickstar.decisions.UNMEASURED_SHARE", 0.0)
    monkeypatch.setattr("hf_patrickstar.memory.meters.used_nbytes", lambda device: lambda: 0)


def warm_up():
    """Makes the libraries' workspaces, of the main thread and of autograd's, before memory is measured."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(64, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, x[0]).sum().backward()
    torch.cuda.synchronize()


def capped(name, itemsize):
    """A budget over what is allocated now: chunks of half of the parameters, and room for activations."""
    warm_up()
    numel = sum(p.numel() for p in make_model(name).parameters())
    return {
        "device_budget": int(torch.cuda.memory_allocated() + 2 * MIB + numel * itemsize * 0.5),
        "warmup_fraction": 1.0,
        "chunk_numel": 2048,
        "cpu_embedding": False,
        "placement": "host",  # the reference updates its masters on the host
    }


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_capped_budget_is_the_reference(name, dtype, checkpointing, at_home_on_host):
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    losses, masters = run_reference(name, kinds[dtype], checkpointing)
    config = {**capped(name, kinds[dtype].itemsize), "dtype": dtype, "debug_evict_all": True}
    ours, state_dict, stats = run_engine(name, config, checkpointing=checkpointing)
    assert stats["chunk_evictions"] > 0
    assert ours == losses
    for key, master in masters.items():
        assert torch.equal(state_dict[key], master.data), key


def test_clipping_with_masters_on_the_host(at_home_on_host):
    losses, masters = run_reference("gpt2", torch.bfloat16, max_norm=0.3)
    config = {**capped("gpt2", 2), "dtype": "bf16"}
    ours, state_dict, _ = run_engine("gpt2", config, max_norm=0.3)
    torch.testing.assert_close(ours, losses, rtol=1e-3, atol=1e-3)
    for key, master in masters.items():
        torch.testing.assert_close(state_dict[key], master.data, rtol=1e-3, atol=1e-5)


def test_cpu_embedding_on_the_device(at_home_on_host):
    config = {**capped("llama", 4), "dtype": "fp32"}
    expected, state_dict, _ = run_engine("llama", config)
    ours, other, stats = run_engine("llama", {**config, "cpu_embedding": True})
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for key, value in state_dict.items():
        torch.testing.assert_close(other[key], value, rtol=1e-3, atol=1e-4)
    assert stats["chunk_loads"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
def test_trainer(precision, tmp_path, at_home_on_host):
    recorder = LossRecorder()
    config = {**capped("gpt2", 2 if precision else 4), "debug_evict_all": True}
    args = arguments(
        PatrickStarTrainingArguments,
        tmp_path,
        patrickstar=True,
        patrickstar_config=config,
        use_cpu=False,
        max_steps=8,
        **({precision: True} if precision else {}),
    )
    data = make_rows("gpt2", 32)
    trainer = PatrickStarTrainer(
        model=make_model("gpt2"), args=args, train_dataset=data, eval_dataset=data, callbacks=[recorder]
    )
    trainer.train()
    assert recorder.losses[-1] < recorder.losses[0]
    assert trainer.patrickstar_stats()["chunk_evictions"] > 0
    assert trainer.evaluate()["eval_loss"] < recorder.losses[0]
    assert trainer.model.device.type == "cuda"
    generated = trainer.model.eval().generate(torch.ones(1, 4, dtype=torch.long, device=DEVICE), max_new_tokens=4)
    assert generated.shape[0] == 1


def test_loads_in_flight_survive_a_change_on_the_host(at_home_on_host):
    """The host must not overwrite a chunk's home while an asynchronous copy out of it is still waiting its turn."""
    config = capped("gpt2", 4)
    batch = batch_of("gpt2", 0)
    del batch["labels"]
    outputs = []
    for busy in (False, True):
        model = make_model("gpt2").eval()
        engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
        other = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
        with torch.no_grad():
            if busy:
                torch.cuda._sleep(200_000_000)
            logits = model(**batch).logits
            model.load_state_dict(other)
        outputs.append(logits.cpu())
        engine.detach()
        free()
    assert torch.equal(*outputs)


def slow_copies(monkeypatch):
    """Copies spoil their target and take their time: whoever does not wait reads NaN."""
    chance = random.Random(0)

    def copy(self, source, target, stream):
        with self.inside(stream):
            if not target.is_cpu:
                target.fill_(float("nan"))
            torch.cuda._sleep(chance.randrange(5_000_000))
            target.copy_(source, non_blocking=True)

    monkeypatch.setattr(AcceleratorDriver, "copy", copy)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_slow_copies_change_nothing(name, checkpointing, at_home_on_host, monkeypatch):
    config = {**capped(name, 4), "prefetch_depth": 2}
    expected, values, stats = run_engine(name, config, checkpointing=checkpointing)
    slow_copies(monkeypatch)
    ours, other, _ = run_engine(name, config, checkpointing=checkpointing)
    assert stats["prefetches"] > 0
    assert ours == expected
    for key, value in values.items():
        assert torch.equal(other[key], value), key


class Greedy(torch.autograd.Function):
    """Asks for more than any device has, in backward, which runs in a thread of autograd."""

    failures = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if Greedy.failures:
            Greedy.failures -= 1
            torch.empty(2**50, dtype=torch.uint8, device=gradient.device)
        return gradient


@pytest.mark.parametrize("accumulation", [1, 2])
def test_out_of_memory_in_the_thread_of_autograd(accumulation, at_home_on_host):
    results = []
    for failures in (0, 2):
        model = make_model("gpt2").train()
        model.transformer.h[1].mlp.register_forward_hook(lambda module, args, output: Greedy.apply(output))
        config = capped("gpt2", 4)
        config["device_budget"] *= 2  # each repetition takes a tenth for good
        engine = PatrickStarEngine(
            model, config, adamw(model.parameters()), device=DEVICE, gradient_accumulation_steps=accumulation
        )
        for step in range(STEPS):
            for micro in range(accumulation):
                Greedy.failures = failures if (step, micro) == (1, accumulation - 1) else 0
                batch = batch_of("gpt2", 10 * step + micro)
                engine.attempt(lambda batch=batch, model=model: model(**batch).loss.backward())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        results.append((model.state_dict(), engine.stats()["retries"]))
        engine.detach()
        free()
    assert [retries for _, retries in results] == [0, 2]
    for key, value in results[0][0].items():
        assert torch.equal(results[1][0][key], value), key


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lookups_at_home_tied_and_untied(name, at_home_on_host):
    config = capped(name, 4)
    expected, values, _ = run_engine(name, config, max_norm=0.3)
    ours, other, _ = run_engine(name, {**config, "cpu_embedding": True}, max_norm=0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for key, value in values.items():
        torch.testing.assert_close(other[key], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_margin_is_filled_and_left(dtype, at_home_on_host):
    model = make_model("gpt2").train()
    config = {**capped("gpt2", 4), "dtype": dtype, "placement": "auto"}
    config["device_budget"] += 2 * MIB
    engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
    in_margin = []
    for size in (2, 2, 2, 8, 8):
        batch = {key: value.to(DEVICE) for key, value in make_batch("gpt2", size=size).items()}
        loss = model(**batch).loss
        in_margin.append(engine.stats()["chunks_in_margin"])
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert torch.isfinite(loss)
    assert in_margin[1] > 0
    assert in_margin[3] == 0, "larger inputs: the margin is given up before they are recorded"
    engine.detach()
    free()
