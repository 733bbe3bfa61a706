"""bf16 and fp16: bit for bit the independent reference, on the budgeted CPU tier."""

import pytest
import torch
from support import inside
from support.covering import ids, pairwise
from support.models import make_batch, make_model
from support.reference import Reference
from support.trainers import smallest_budget

from hf_patrickstar import PatrickStarAccelerator
from hf_patrickstar.optim import adam_script, elementwise, workers

LR = 3e-3


def groups(named):
    """Two param groups, as the Trainer makes them, with different betas."""
    decay = [p for name, p in named if p.dim() > 1]
    rest = [p for name, p in named if p.dim() <= 1]
    return [
        {"params": decay, "weight_decay": 0.1, "lr": LR},
        {"params": rest, "weight_decay": 0.0, "lr": LR / 2, "betas": (0.8, 0.95)},
    ]


def adamw(parameters):
    return torch.optim.AdamW(groups(parameters.items()), fused=True)


def sgd_groups_only(named):
    return [{key: value for key, value in group.items() if key != "betas"} for group in groups(named)]


def run_ours(name, precision, steps, accumulation, config, make_optimizer, max_norm, checkpointing=False, scale=None):
    model = make_model(name)
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = make_optimizer(dict(model.named_parameters()))
    accelerator = PatrickStarAccelerator(
        cpu=True,
        patrickstar_config=config,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
    )
    if scale is not None:
        accelerator.scaler._init_scale = scale["init_scale"]
        accelerator.scaler.set_growth_interval(scale["growth_interval"])
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model
    losses, norms, done = [], [], []
    model.train()
    for step in range(steps):
        for micro in range(accumulation):
            with accelerator.accumulate(model):
                torch.manual_seed(step * 10 + micro)
                loss = model(**make_batch(name, seed=step * 10 + micro)).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and max_norm is not None:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
                optimizer.step()
                if accelerator.sync_gradients:
                    done.append(not accelerator.optimizer_step_was_skipped)
                optimizer.zero_grad()
    return model, losses, norms, done


def run_reference(
    name, precision, steps, accumulation, make_optimizer, max_norm, checkpointing=False, scale=None, autocast=True
):
    model = make_model(name)
    if checkpointing:
        model.gradient_checkpointing_enable()
    scaler = torch.amp.GradScaler("cpu", **scale) if scale else None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    reference = Reference(model, dtype, make_optimizer, max_norm, scaler, autocast)
    losses, done = [], []
    model.train()
    for step in range(steps):
        seeds = [step * 10 + micro for micro in range(accumulation)]
        step_losses, finished = reference.step([make_batch(name, seed=seed) for seed in seeds], seeds)
        losses += step_losses
        done.append(finished)
    return reference, losses, done


def compare(name, precision, config=None, steps=3, accumulation=1, make_optimizer=adamw, max_norm=0.3, **kwargs):
    reference, losses, done = run_reference(name, precision, steps, accumulation, make_optimizer, max_norm, **kwargs)
    if config is None:
        config = {"chunk_budget": smallest_budget(make_model(name), precision)}
    config = {**config, "autocast": kwargs.pop("autocast", True)}
    model, our_losses, norms, our_done = run_ours(
        name, precision, steps, accumulation, config, make_optimizer, max_norm, **kwargs
    )
    assert our_losses == losses
    assert [str(norm) for norm in norms] == [str(norm) for norm in reference.norms]  # so that NaN equals NaN
    assert our_done == done
    state_dict = model.state_dict()
    for key, master in reference.masters.items():
        assert state_dict[key].dtype == torch.float32
        assert torch.equal(state_dict[key], master.data), key
    return model.patrickstar_engine, done


def sgd_two_groups(parameters):
    return torch.optim.SGD(sgd_groups_only(parameters.items()), momentum=0.9, nesterov=True)


CASES = pairwise(
    name=["gpt2", "mixtral", "t5"],
    memory=["chunks", "evicting", "looked up", "resident"],
    autocast=[True, False],
    accumulation=[1, 3],
    checkpointing=[False, True],
    max_norm=[0.3, None],
    make_optimizer=[adamw, sgd_two_groups],
)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: ids({**case, "make_optimizer": case["make_optimizer"].__name__})
)
def test_bf16(case):
    case = dict(case)
    name, memory, autocast = case.pop("name"), case.pop("memory"), case["autocast"]
    least = smallest_budget(make_model(name), "bf16", case["checkpointing"], autocast=autocast)
    configs = {
        "chunks": {"chunk_budget": least},
        "evicting": {"chunk_budget": least, "debug_evict_all": True},
        "looked up": {"chunk_budget": int(1.5 * least), "cpu_embedding": True},
        "resident": {},
    }
    engine, _ = compare(name, "bf16", configs[memory], **case)
    assert (engine.stats()["chunk_evictions"] > 0) is (memory != "resident")
    if not autocast:
        assert {chunk.param.dtype for chunk in inside.chunks(engine)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "accumulation", "leaves"), [("gpt2", 1, False), ("bert", 2, False), ("gpt2", 2, True)]
)
def test_fp16_with_overflows(name, accumulation, leaves):
    scale = {"init_scale": 2.0**24, "growth_interval": 2}
    config = {"chunk_budget": smallest_budget(make_model(name), "fp16"), "activation_offload": leaves}
    engine, done = compare(name, "fp16", config, steps=14, accumulation=accumulation, scale=scale)
    assert (engine.stats()["offloaded_nbytes"] > 0) is leaves
    assert False in done, "no step overflowed"
    assert True in done, "no step was done"


def test_fp16_overflow_without_clipping_restores_parameters():
    scale = {"init_scale": 2.0**24, "growth_interval": 1000}
    engine, done = compare("gpt2", "fp16", steps=12, scale=scale, max_norm=None)
    assert done.count(False) == engine.stats()["skipped_steps"] > 0
    for tensor in inside.tensors(engine):
        value = tensor.view(tensor.chunk.param)
        assert torch.equal(value, tensor.view(tensor.chunk.lists["master"]).to(value.dtype))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("t5", {"accumulation": 3}),
        ("mixtral", {"autocast": False, "checkpointing": True}),
    ],
)
def test_activations_that_leave(name, case):
    config = {"chunk_budget": int(1.5 * smallest_budget(make_model(name), "bf16")), "activation_offload": True}
    engine, _ = compare(name, "bf16", config, **case)
    assert engine.stats()["offloaded_nbytes"] > 0


def default_adamw(parameters):
    return torch.optim.AdamW(groups(parameters.items()))


@pytest.mark.own_streams  # simulated ones have a mode of operators, and so no workers
@pytest.mark.parametrize(("make_optimizer", "host_threads"), [(adamw, 1), (default_adamw, 3)])
def test_workers_change_no_bit(make_optimizer, host_threads, monkeypatch):
    begun = small_tiles(monkeypatch)
    config = {"host_threads": host_threads, "chunk_budget": 60000}
    compare("gpt2", "bf16", config, make_optimizer=make_optimizer)
    scale = {"init_scale": 2.0**24, "growth_interval": 2}
    _, done = compare("gpt2", "fp16", config, steps=14, scale=scale, make_optimizer=make_optimizer)
    assert {True, False} == set(done), "some steps overflowed"
    assert (len(begun) > 0) is (host_threads > 1 or torch.get_num_threads() > 1)


def small_tiles(monkeypatch):
    """Lets workers have small tiles; what they were given is in the list that is returned."""
    begun, submit = [], workers.HostWorkers.submit

    def counted(self, work, items):
        items = list(items)
        begun.extend(items)
        return submit(self, work, items)

    monkeypatch.setattr(workers.HostWorkers, "submit", counted)
    for place in (elementwise, workers):
        monkeypatch.setattr(place, "SMALL_NUMEL", 64)
    monkeypatch.setattr(elementwise, "SHARE_NUMEL", 2 * 192)
    monkeypatch.setattr(adam_script, "TILE_NUMEL", 192)
    return begun
