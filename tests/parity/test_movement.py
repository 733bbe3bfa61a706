"""The simulator predicts what the engine moves, exactly; no policy, depth or placement changes a loss."""

import pytest
import torch
from models import make_batch, make_model
from movement import simulate
from torch._dynamo import convert_frame
from trainers import smallest_budget

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier

KEYS = ("chunk_loads", "chunk_evictions", "prefetches", "host_to_device_nbytes", "device_to_host_nbytes")
FIELDS = ("loads", "evictions", "prefetches", "host_to_device_nbytes", "device_to_host_nbytes")


def traces_of(engine, kind):
    traces = engine.manager.tracer.traces
    return [trace for key, trace in traces.items() if key.split("/")[0] == kind]


def steps_of(name, config, num_steps=4, checkpointing=False, freeze=False):
    """Movement per step, losses, and the engine."""
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if freeze:
        for parameter in list(model.parameters())[2:8]:
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    engine = PatrickStarEngine(model, config, optimizer)
    before, moved, losses = [0] * len(KEYS), [], []
    for step in range(num_steps):
        engine.optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(**make_batch(name, seed=step)).loss
        loss.backward()
        engine.optimizer.step()
        losses.append(loss.item())
        now = [engine.stats()[key] for key in KEYS]
        moved.append(tuple(new - old for new, old in zip(now, before, strict=True)))
        before = now
    return moved, losses, engine


@pytest.mark.parametrize("freeze", [False, True], ids=["trainable", "partly frozen"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_simulation_is_the_engine(name, checkpointing, freeze, monkeypatch):
    """Loads, evictions, prefetches and bytes, exactly; and no policy, depth or placement changes a loss."""
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 1)  # as in a process that has compiled something
    model = make_model(name)
    numel = sum(parameter.numel() for parameter in model.parameters())
    smallest = smallest_budget(model, checkpointing=checkpointing)
    counts, all_losses = {}, []
    for share in (0.0, 0.5, 0.8):
        budget = max(int(smallest * 1.4), int(numel * 4 * share))
        config = {"chunk_budget": budget, "chunk_numel": 1100}
        for eviction, placement, depth in (
            ("belady", "host", 0),
            ("belady", "host", 2),
            ("belady", "auto", 3),
            ("lru", "host", 1),
            ("list_order", "host", 0),
        ):
            config.update(eviction=eviction, placement=placement, prefetch_depth=depth)
            moved, losses, engine = steps_of(name, config, 4, checkpointing, freeze)
            all_losses.append(losses)
            (recorded,) = traces_of(engine, "training")
            margin = frozenset(engine.manager.placement.in_margin)
            fixed = sum(engine.manager.placement.nbytes[index].device_nbytes for index in margin)
            predicted = simulate(
                recorded,
                budget - fixed,
                eviction,
                dropped_after=frozenset(c.spec.index for c in engine.manager.chunks if c.spec.trainable),
                static=margin,
                prefetch_depth=depth,
                gradient_nbytes=[c.spec.used_numel * 4 * c.spec.trainable for c in engine.manager.chunks],
                home_nbytes=[nbytes.host_nbytes for nbytes in engine.manager.placement.nbytes],
            )
            assert predicted.host_peak_nbytes == engine.ledger.used(Tier.HOST)
            expected = [getattr(predicted, field) for field in FIELDS]
            assert list(moved[-1]) == expected, config
            assert moved[-1] == moved[-2], "steps repeat themselves"
            assert engine.stats()["diverged_steps"] == 0
            assert predicted.device_peak_nbytes + fixed <= budget
            counts[eviction, placement, depth] = moved[-1]
        assert counts["belady", "host", 0][0] == counts["belady", "host", 2][0], "prefetch moves not a byte more"
        assert counts["belady", "host", 0][0] <= counts["lru", "host", 1][0]
        assert counts["belady", "host", 0][0] <= counts["list_order", "host", 0][0] * 1.05
    assert counts["belady", "host", 2][2] > 0, "something is prefetched"
    assert all(losses == all_losses[0] for losses in all_losses)


def test_a_step_that_leaves_its_trace_is_counted_and_right():
    class Fickle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(6))
            self.order = range(6)

        def forward(self, x):
            for index in self.order:
                x = torch.tanh(self.layers[index](x))
            return x.square().mean()

    plain, managed = Fickle(), Fickle()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    engine = PatrickStarEngine(
        managed,
        {"chunk_budget": 3 * 320 * 4, "chunk_numel": 320},
        torch.optim.AdamW(managed.parameters(), fused=True),
    )
    for order in (range(6), range(6), [5, 3, 1, 0], range(6), [2], range(6)):
        x = torch.randn(4, 16)
        losses = []
        for model, step in ((plain, optimizer), (managed, engine.optimizer)):
            model.order = order
            loss = model(x)
            loss.backward()
            step.step()
            model.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        with torch.no_grad():
            assert torch.equal(plain(x), managed(x))
    assert engine.stats()["diverged_steps"] == 2 * 2, "two training steps and the evaluations after them"


def test_zero_grad_between_forward_and_backward_does_not_lose_the_trace():
    """A common order of calls; without its trace a step would evict in the warm-up's list order for ever."""
    moved = []
    for between in (False, True):
        model = make_model("gpt2").train()
        numel = sum(parameter.numel() for parameter in model.parameters())
        engine = PatrickStarEngine(
            model,
            {"chunk_budget": numel * 2, "chunk_numel": 1100},
            torch.optim.AdamW(model.parameters(), fused=True),
        )
        for step in range(4):
            if not between:
                engine.optimizer.zero_grad()
            loss = model(**make_batch("gpt2", seed=step)).loss
            if between:
                engine.optimizer.zero_grad()
            loss.backward()
            engine.optimizer.step()
        assert traces_of(engine, "training")
        assert engine.stats()["diverged_steps"] == 0
        moved.append(engine.stats()["host_to_device_nbytes"])
    assert moved[0] == moved[1]
