"""The simulator predicts what the engine moves, exactly; no policy, depth or placement changes a loss."""

import pytest
import torch
from movement import simulate
from support import inside
from support.models import make_batch, make_model
from support.trainers import smallest_budget
from torch._dynamo import convert_frame

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier

KEYS = ("chunk_loads", "chunk_evictions", "prefetches", "host_to_device_nbytes", "device_to_host_nbytes")
FIELDS = ("loads", "evictions", "prefetches", "host_to_device_nbytes", "device_to_host_nbytes")


def traces_of(engine, kind):
    traces = inside.traces(engine)
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


@pytest.mark.parametrize(("name", "checkpointing", "freeze"), [("gpt2", False, False), ("t5", True, True)])
def test_simulation_is_the_engine(name, checkpointing, freeze, monkeypatch):
    """Loads, evictions, prefetches and bytes, exactly; and no policy, depth or placement changes a loss."""
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 1)  # as in a process that has compiled something
    model = make_model(name)
    numel = sum(parameter.numel() for parameter in model.parameters())
    smallest = smallest_budget(model, checkpointing=checkpointing)
    counts, all_losses = {}, []
    for share in (0.0, 0.7):
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
            moved, losses, engine = steps_of(name, config, 3, checkpointing, freeze)
            all_losses.append(losses)
            (recorded,) = traces_of(engine, "training")
            margin = frozenset(inside.in_margin(engine))
            fixed = sum(inside.chunk_nbytes(engine)[index].device_nbytes for index in margin)
            predicted = simulate(
                recorded,
                budget - fixed,
                eviction,
                dropped_after=frozenset(c.spec.index for c in inside.chunks(engine) if c.spec.trainable),
                static=margin,
                prefetch_depth=depth,
                gradient_nbytes=[c.spec.used_numel * 4 * c.spec.trainable for c in inside.chunks(engine)],
                home_nbytes=[nbytes.host_nbytes for nbytes in inside.chunk_nbytes(engine)],
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
