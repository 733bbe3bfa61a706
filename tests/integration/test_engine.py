"""The engine with models of transformers: names, threads of updates, tensors without bytes; see also tests/engine."""

import copy
import threading

import pytest
import torch
from models import make_batch, make_model
from torch import nn

from hf_patrickstar import PatrickStarConfig, PatrickStarEngine
from hf_patrickstar.optim import adam_kernel, workers

HARSH = {"chunk_budget": 4000, "chunk_numel": 64, "debug_evict_all": True}


def adamw(model, **kwargs):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True, **kwargs)


def assert_equal(plain, managed):
    state_dict = managed.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, state_dict[key]), key


def test_metadata_stays_truthful():
    model = make_model("gpt2")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    count = model.num_parameters()
    engine = PatrickStarEngine(model, {"dtype": "bf16", "autocast": False}, adamw(model))
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert model.num_parameters() == count
    assert model.dtype is torch.bfloat16 is engine.dtype
    held = [tensor.placeholder for tensor in engine.manager.tensors]
    assert all(value.isnan().all() for value in held), "code that goes around torch's functions gets NaN, loudly"
    assert all(value.untyped_storage().nbytes() <= 4 for value in held)
    assert not any(p.isnan().any() for p in model.parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_group_counters_advance_once_per_step():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-group["lr"] * group["count"])

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    managed = copy.deepcopy(model)
    plain_optimizer = Counting(model.parameters(), lr=0.1)
    engine = PatrickStarEngine(managed, HARSH, Counting(managed.parameters(), lr=0.1))
    for _ in range(3):
        batch = torch.randn(3, 8)
        for network, step in ((model, plain_optimizer), (managed, engine.optimizer)):
            network(batch).sum().backward()
            step.step()
            network.zero_grad()
    assert engine.optimizer.param_groups[0]["count"] == 3
    assert_equal(model, managed)


@pytest.mark.usefixtures("recorded")  # as the engine of tensors without bytes does it
def test_one_step_under_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    numel = sum(p.numel() for p in make_model("gpt2").parameters())
    with FakeTensorMode():
        model = make_model("gpt2")
        config = PatrickStarConfig(chunk_budget=numel, dtype="bf16")
        engine = PatrickStarEngine(model, config, adamw(model))
        batch = {key: torch.zeros(2, 16, dtype=torch.long) for key in ("input_ids", "labels")}
        for _ in range(2):
            loss = model(**batch).loss
            engine.backward(loss)
            engine.optimizer.clip_grad_norm_(model.parameters(), 1.0)
            engine.optimizer.step()
            model.zero_grad()
    real = make_model("gpt2")
    real_engine = PatrickStarEngine(real, config, adamw(real))
    for _ in range(2):
        real(**{key: torch.zeros(2, 16, dtype=torch.long) for key in batch}).loss.backward()
        real_engine.optimizer.step()
        real.zero_grad()
    differing = {"host_budget_nbytes", "device_budget_nbytes", "late_prefetches", "chunk_hits"}
    fake, stats = engine.stats(), real_engine.stats()
    differing |= {key for key in fake if key.endswith("_seconds")}
    assert {key: fake[key] for key in fake.keys() - differing} == {key: stats[key] for key in stats.keys() - differing}
    assert fake["chunk_evictions"] > 0
    assert fake["prefetches"] > 0
    assert fake["chunk_hits"] + fake["late_prefetches"] == stats["chunk_hits"] + stats["late_prefetches"]


@pytest.mark.own_streams  # others have smaller tiles, and modes of operators
def test_updates_on_the_host_use_the_workers_that_were_asked_for_and_nothing_else_does(monkeypatch):
    monkeypatch.setattr(workers, "SMALL_NUMEL", 64)
    monkeypatch.setattr(adam_kernel, "SMALL_NUMEL", 64)
    together, seen = threading.Barrier(3, timeout=60), {"update": set(), "else": set()}
    update_share = adam_kernel.AdamKernel._update_share

    def counted(*args):
        found = (threading.current_thread().name, torch.get_num_threads())
        if found not in seen["update"]:
            seen["update"].add(found)
            together.wait()  # so that no worker takes what there is for all
        return update_share(*args)

    monkeypatch.setattr(adam_kernel.AdamKernel, "_update_share", counted)
    before, threads = torch.get_num_threads(), set(threading.enumerate())
    model = make_model("gpt2").train()
    model.lm_head.register_forward_hook(lambda *args: seen["else"].add(torch.get_num_threads()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = PatrickStarEngine(model, {"host_threads": 3}, optimizer)
    model(**make_batch("gpt2")).loss.backward()
    engine.optimizer.clip_grad_norm_(None, 0.5)
    engine.optimizer.step()
    names = {f"hf_patrickstar-update_{number}" for number in range(3)}
    assert seen == {"update": {(name, 1) for name in names}, "else": {before}}
    assert torch.get_num_threads() == before
    engine.detach()
    started = set(threading.enumerate()) - threads
    assert not [thread.name for thread in started if thread.name in names]
