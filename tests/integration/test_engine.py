"""The engine by itself: calls in any order, parameters used anywhere, the live model, FakeTensor."""

import copy
import gc
import threading

import pytest
import torch
from models import make_batch, make_model
from torch import nn

from hf_patrickstar import ConfigError, EngineError, PatrickStarConfig, PatrickStarEngine, initialize_engine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim import adam_kernel, workers
from hf_patrickstar.runtime.chunk import GradientPlace

HARSH = {"chunk_budget": 4000, "chunk_numel": 64, "debug_evict_all": True}


def adamw(model, **kwargs):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True, **kwargs)


def twins(model, config=None, **kwargs):
    """A plain model with its optimizer, and the same under management."""
    managed = copy.deepcopy(model)
    optimizer = adamw(model)
    engine = PatrickStarEngine(managed, HARSH if config is None else config, adamw(managed), **kwargs)
    return model, optimizer, managed, engine


def assert_equal(plain, managed):
    state_dict = managed.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, state_dict[key]), key


class Borrower(nn.Module):
    """Uses parameters outside their modules, views of them, one in several places, one without its gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.position = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, ids):
        position = self.position[:, : ids.shape[1]]
        x = self.embedding(ids) + position
        x = nn.functional.linear(x, self.second.weight.t(), self.first.bias)
        x = torch.tanh(self.first(x)) * self.scale
        x = self.second(x) + position
        # A use whose backward needs the value after, or before, the parameter's own gradient is complete.
        x = nn.functional.linear(x, self.first.weight.detach())
        return nn.functional.linear(x, self.embedding.weight).square().mean()


def ids():
    return torch.randint(0, 12, (3, 4))


@pytest.mark.parametrize("config", [None, {}, {"device_budget": "1MiB", "chunk_numel": 64}])
def test_parameters_used_anywhere(config):
    plain, optimizer, managed, engine = twins(Borrower(), config)
    for _ in range(4):
        batch = ids()
        loss, managed_loss = plain(batch), managed(batch)
        assert torch.equal(loss, managed_loss)
        loss.backward()
        engine.backward(managed_loss)
        optimizer.step()
        engine.optimizer.step()
        optimizer.zero_grad()
        engine.optimizer.zero_grad()
        assert_equal(plain, managed)


@pytest.mark.parametrize("steps", [1, 3])
def test_any_order_of_calls_keeps_every_gradient(steps):
    """Two backwards before a step, evaluation between backward and step, a dropped gradient: never told beforehand."""
    plain, optimizer, managed, engine = twins(Borrower(), gradient_accumulation_steps=steps)
    for round_ in range(4):
        for _ in range(1 + round_ % 3):
            batch = ids()
            plain(batch).backward()
            managed(batch).backward()
            with torch.no_grad():
                assert torch.equal(plain(batch), managed(batch))
        if round_ == 2:
            plain.zero_grad()
            managed.zero_grad()
            assert_equal(plain, managed)
            batch = ids()
            plain(batch).backward()
            managed(batch).backward()
        assert_equal(plain, managed)
        optimizer.step()
        optimizer.zero_grad()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert_equal(plain, managed)
    assert engine.manager.tensors[0].gradient is GradientPlace.NONE


def test_two_forwards_then_two_backwards_and_a_retained_graph():
    plain, optimizer, managed, engine = twins(Borrower())
    first, second = ids(), ids()
    losses = [(model(first), model(second)) for model in (plain, managed)]
    for one, two in losses:
        one.backward(retain_graph=True)
        two.backward()
        one.backward()
    optimizer.step()
    engine.optimizer.step()
    for key, value in plain.state_dict().items():
        # torch adds in another order here: (a + b) + a in place, ours the same; equal to the last bit all the same
        assert torch.equal(value, managed.state_dict()[key]), key


def test_backward_after_the_step_is_refused():
    _, _, managed, engine = twins(Borrower())
    stale = managed(ids())
    managed(ids()).backward()
    engine.optimizer.step()
    with pytest.raises(EngineError, match="changed by the optimizer between this forward and its backward"):
        stale.backward()


def test_zero_grad_without_step_restores_values():
    plain, _, managed, engine = twins(Borrower(), {})
    for drop in (engine.optimizer.zero_grad, managed.zero_grad):
        managed(ids()).backward()
        assert any(tensor.gradient is GradientPlace.PARAM for tensor in engine.manager.tensors)
        drop()
        for tensor in engine.manager.tensors:
            assert torch.equal(tensor.view(tensor.chunk.param), tensor.view(tensor.chunk.lists["master"]))
        assert_equal(plain, managed)


def test_stale_device_copies_are_dropped():
    """A roomy device keeps chunks over the whole step, and must not use them after the host changed."""
    numel = sum(p.numel() for p in Borrower().parameters())
    config = {"chunk_budget": numel * 8, "chunk_numel": 64}
    plain, optimizer, managed, engine = twins(Borrower(), config)
    for _ in range(3):
        batch = ids()
        loss, managed_loss = plain(batch), managed(batch)
        assert torch.equal(loss, managed_loss)
        loss.backward()
        managed_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    stats = engine.stats()
    assert stats["chunk_evictions"] == 0
    assert stats["chunk_invalidations"] > 0


def test_frozen_and_unused_parameters():
    model = Borrower()
    model.second.weight.requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    plain, optimizer, managed, engine = twins(model)
    before = managed.state_dict()["never.weight"]
    for _ in range(2):
        batch = ids()
        plain(batch).backward()
        managed(batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert torch.equal(engine.optimizer.clip_grad_norm_(managed.parameters(), 0.01), norm)
        optimizer.step()
        optimizer.zero_grad()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert_equal(plain, managed)
    assert torch.equal(managed.state_dict()["never.weight"], before)
    states = engine.optimizer.state_dict()["state"]
    assert len(states) == len(optimizer.state_dict()["state"])
    names = [tensor.spec.name for tensor in engine.manager.tensors if not tensor.chunk.lists]
    assert sorted(names) == ["embedding.weight", "second.weight"]


def test_parameters_outside_the_optimizer_keep_their_value():
    model = Borrower()
    managed = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.first.parameters(), lr=0.1, fused=True)
    engine = PatrickStarEngine(managed, HARSH, torch.optim.AdamW(managed.first.parameters(), lr=0.1, fused=True))
    for _ in range(2):
        batch = ids()
        for network, step in ((model, optimizer), (managed, engine.optimizer)):
            network(batch).backward()
            step.step()
            network.zero_grad()
    assert_equal(model, managed)


def test_state_dict_and_load_state_dict():
    plain, _, managed, _ = twins(Borrower())
    before = managed.state_dict()
    assert list(before) == list(plain.state_dict())
    assert all(value.device.type == "cpu" for value in before.values())
    part = managed.second.state_dict()
    assert torch.equal(part["weight"], plain.second.weight)
    other = {key: torch.randn_like(value) for key, value in before.items()}
    result = managed.load_state_dict(other)
    assert not result.missing_keys
    assert_equal_dict(managed.state_dict(), other)
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        managed.load_state_dict({**other, "first.weight": torch.zeros(3, 3)})
    assert_equal_dict(managed.state_dict(), other)
    plain.load_state_dict(other)
    batch = ids()
    assert torch.equal(plain(batch), managed(batch))
    assert managed.load_state_dict({"scale": torch.zeros(8)}, strict=False).missing_keys
    assert not managed.state_dict()["scale"].any()


def assert_equal_dict(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def test_loading_weights_keeps_a_gradient():
    plain, optimizer, managed, engine = twins(Borrower())
    batch = ids()
    plain(batch).backward()
    managed(batch).backward()
    state = {key: value + 1 for key, value in plain.state_dict().items()}
    plain.load_state_dict(state)
    managed.load_state_dict(state)
    optimizer.step()
    engine.optimizer.step()
    assert_equal(plain, managed)


def test_tied_names_share_one_tensor_in_a_state_dict():
    model = make_model("gpt2")
    PatrickStarEngine(model, {}, adamw(model))
    state_dict = model.state_dict()
    assert state_dict["lm_head.weight"] is state_dict["transformer.wte.weight"]


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


def test_full_parameters():
    plain, optimizer, managed, engine = twins(Borrower())
    with engine.full_parameters():
        for (name, parameter), other in zip(plain.named_parameters(), managed.parameters(), strict=True):
            assert torch.equal(parameter, other), name
            with torch.no_grad():
                parameter.add_(1)
                other.add_(1)
    assert_equal(plain, managed)
    with engine.full_parameters([managed.scale], writeback=False), torch.no_grad():
        managed.scale.zero_()
    assert_equal(plain, managed)
    batch = ids()
    plain(batch).backward()
    managed(batch).backward()
    with engine.full_parameters(with_grads=True):
        for (name, parameter), other in zip(plain.named_parameters(), managed.parameters(), strict=True):
            if parameter.grad is None:
                assert other.grad is None, name
            else:
                assert torch.equal(parameter.grad, other.grad), name
                parameter.grad.mul_(2)
                other.grad.mul_(2)
    for (name, parameter), other in zip(plain.named_parameters(), managed.parameters(), strict=True):
        assert (parameter.grad is None) is (other.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad), name
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    engine.optimizer.clip_grad_norm_(None, 0.01)
    optimizer.step()
    engine.optimizer.step()
    assert_equal(plain, managed)
    with pytest.raises(EngineError, match="not managed"):
        engine.full_parameters([nn.Parameter(torch.zeros(3))])


def test_clip_by_value():
    plain, optimizer, managed, engine = twins(Borrower())
    batch = ids()
    plain(batch).backward()
    managed(batch).backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    engine.optimizer.clip_grad_value_(1e-3)
    optimizer.step()
    engine.optimizer.step()
    assert_equal(plain, managed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_detach_gives_the_model_back(dtype):
    model = Borrower()
    before = copy.deepcopy(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    engine = PatrickStarEngine(model, {**HARSH, "dtype": dtype}, adamw(model))
    model(ids()).backward()
    engine.detach()
    for (name, parameter), other in zip(before.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        assert other.dtype is torch.float32
        assert other.untyped_storage().nbytes() == other.numel() * 4
    for name, module in model.named_modules():
        assert set(vars(module)) == attributes[name]
        assert type(module._parameters) is dict
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
            assert not getattr(module, hooks), hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    loss = model(ids())
    loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "never" not in n)
    assert all(engine.ledger.used(tier) == 0 for tier in Tier)


def test_what_an_attached_model_refuses():
    model = Borrower()
    PatrickStarEngine(model, HARSH, adamw(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(EngineError, match="detach"):
        model.half()
    with pytest.raises(EngineError, match="detach"):
        model.to("meta")
    assert model.to("cpu") is model
    assert model.float().to(torch.float32) is model
    assert_equal_dict(model.state_dict(), before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizer_goes_on_without_the_engine_and_with_another(kind):
    kwargs = {"lr": 1e-2, **({"fused": True} if kind is torch.optim.AdamW else {"momentum": 0.9})}
    plain = Borrower()
    managed = copy.deepcopy(plain)
    optimizer, inner = kind(plain.parameters(), **kwargs), kind(managed.parameters(), **kwargs)
    for phase in range(4):
        engine = PatrickStarEngine(managed, HARSH, inner) if phase % 2 == 0 else None
        for _ in range(2):
            batch = ids()
            for model, step in ((plain, optimizer), (managed, engine.optimizer if engine else inner)):
                model(batch).backward()
                step.step()
                model.zero_grad()
        if engine:
            engine.detach()
            engine.detach()
        assert_equal(plain, managed)
    assert len(inner.state) == len(optimizer.state)


def test_a_failing_forward_releases_everything():
    plain, optimizer, managed, engine = twins(Borrower())
    with pytest.raises(IndexError):
        managed(torch.full((2, 4), 99))
    assert all(not tensor.users for tensor in engine.manager.tensors)
    batch = ids()
    for model, step in ((plain, optimizer), (managed, engine.optimizer)):
        model(batch).backward()
        step.step()
    assert_equal(plain, managed)


def test_reentrant_checkpointing_is_refused():
    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True).sum()

    model = Reentrant()
    PatrickStarEngine(model, {}, adamw(model))
    with pytest.raises(EngineError, match="use_reentrant=False"):
        model(torch.randn(2, 4, requires_grad=True)).backward()


def test_cpu_embedding():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.embedding(x)).square().mean()

    plain, optimizer, managed, engine = twins(Lookup(), {**HARSH, "chunk_budget": 1024, "cpu_embedding": True})
    chunk = engine.manager.tensors[0].chunk
    assert chunk.spec.on_host
    for _ in range(3):
        batch = torch.randint(0, 30, (2, 3))
        for model, step in ((plain, optimizer), (managed, engine.optimizer)):
            model(batch).backward()
            step.step()
            model.zero_grad()
    assert_equal(plain, managed)
    moved = engine.stats()["device_to_host_nbytes"]
    assert moved == 3 * 4 * sum(p.numel() for p in plain.head.parameters()), "the embedding never crosses"


def test_scheduler_on_the_inner_optimizer_works():
    plain, optimizer, managed, engine = twins(Borrower())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, engine.optimizer.inner)]
    for _ in range(3):
        batch = ids()
        for model, step in ((plain, optimizer), (managed, engine.optimizer)):
            model(batch).backward()
            step.step()
            model.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert engine.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 2e-3
    assert_equal(plain, managed)


def test_group_counters_advance_once_per_step():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-group["lr"] * group["count"])

    model = Borrower()
    managed = copy.deepcopy(model)
    plain_optimizer = Counting(model.parameters(), lr=0.1)
    engine = PatrickStarEngine(managed, HARSH, Counting(managed.parameters(), lr=0.1))
    for _ in range(3):
        batch = ids()
        for network, step in ((model, plain_optimizer), (managed, engine.optimizer)):
            network(batch).backward()
            step.step()
            network.zero_grad()
    assert engine.optimizer.param_groups[0]["count"] == 3
    assert_equal(model, managed)


def test_closure():
    plain, optimizer, managed, engine = twins(Borrower())
    batch = ids()

    def closure(model, step):
        def evaluate():
            step.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        return evaluate

    expected = optimizer.step(closure(plain, optimizer))
    assert torch.equal(engine.optimizer.step(closure(managed, engine.optimizer)), expected)
    assert_equal(plain, managed)


def test_initialize_engine():
    plain = make_model("gpt2")
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    model, engine_optimizer = initialize_engine(lambda: make_model("gpt2"), {"chunk_budget": 30000})
    for step in range(2):
        batch = make_batch("gpt2", seed=step)
        for network, update in ((plain, optimizer), (model, engine_optimizer)):
            torch.manual_seed(step)
            update.zero_grad()
            loss = network(**batch).loss
            if network is model:
                model.backward(loss)
            else:
                loss.backward()
            update.step()
    assert_equal(plain, model)
    assert model.patrickstar_engine.stats()["chunk_evictions"] > 0
    with pytest.raises(EngineError, match="no trainable parameter"):
        initialize_engine(lambda: make_model("gpt2").requires_grad_(False))


def test_refused_models():
    model = Borrower()
    PatrickStarEngine(model, {}, adamw(model))
    with pytest.raises(EngineError, match="attached to this model already"):
        PatrickStarEngine(model, {}, adamw(model))
    with torch.device("meta"):
        meta = Borrower()
    with pytest.raises(EngineError, match="'scale' is on the meta device"):
        PatrickStarEngine(meta, {}, adamw(meta))
    stranger = Borrower()
    other = Borrower()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(EngineError, match="of the parameters of the AdamW not one is the model's"):
        PatrickStarEngine(other, {}, adamw(stranger))
    assert_equal_dict(other.state_dict(), before)
    assert "patrickstar_engine" not in vars(other)
    with pytest.raises(ConfigError, match="DataParallel"):
        PatrickStarEngine(nn.DataParallel(stranger), {}, adamw(stranger))


def test_the_engine_goes_when_the_model_goes():
    import weakref

    model = Borrower()
    engine = PatrickStarEngine(model, HARSH, adamw(model))
    model(ids()).backward()
    reference = weakref.ref(engine)
    del engine, model
    gc.collect()
    assert reference() is None


@pytest.mark.usefixtures("recorded")  # as the engine of tensors without bytes does it
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_step_under_fake_tensors(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    numel = sum(p.numel() for p in make_model("gpt2").parameters())
    with FakeTensorMode():
        model = make_model("gpt2")
        config = PatrickStarConfig(chunk_budget=numel, dtype=dtype)
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
@pytest.mark.parametrize("fused", [True, False])
def test_updates_on_the_host_use_the_workers_that_were_asked_for_and_nothing_else_does(fused, monkeypatch):
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
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
