"""Budgets on a GPU: what torch's allocators have taken stays within them."""

import pytest
import torch
from support import inside
from support.models import make_batch, make_model
from support.on_gpu import DEVICE, MIB, STEPS, adamw, batch_of, capped, free, needs_cuda, warm_up

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier

pytestmark = pytest.mark.gpu


@needs_cuda
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_steps_that_follow_their_plan_stay_within_the_device_budget(name, at_home_on_host):
    model = make_model(name).train()
    # Activations of so small a model take less than half of the room that they are given: all copies would fit there.
    config = {**capped(name, 4), "chunk_budget": f"{2 * sum(p.numel() for p in model.parameters())}B"}
    engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
    for step in range(STEPS + 2):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        model(**batch_of(name, 0)).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    assert peak <= config["device_budget"], f"{peak - config['device_budget']} bytes too many"
    assert engine.stats()["chunk_evictions"] > 0
    engine.detach()
    free()


@needs_cuda
def test_page_locked_memory_is_booked_as_what_is_taken(at_home_on_host, caplog):
    """Whichever way it was had; see the line of the log."""
    free()
    stats = getattr(torch.cuda, "host_memory_stats", dict)
    before = stats().get("allocated_bytes.current", 0)
    model = make_model("gpt2").train()
    with caplog.at_level("INFO"):
        engine = PatrickStarEngine(model, capped("gpt2", 4), adamw(model.parameters()), device=DEVICE)
    assert "page-locked memory is" in caplog.text
    taken = stats().get("allocated_bytes.current", 0) - before
    assert taken <= engine.ledger.owners(Tier.HOST)["param"]
    assert all(chunk.param.is_pinned() for chunk in inside.chunks(engine) if chunk.home is Tier.HOST)
    engine.detach()
    free()


@needs_cuda
def test_a_budget_near_the_end_of_the_device_works_with_activations_that_come_and_go(at_home_on_host, exact):
    """Under a cap that leaves 64 MiB beside the budget for what an allocator rounds up; losses are those without."""
    width, budget = 2048, 256 * MIB  # 16 MiB in each of 24 chunks

    def run(cap_nbytes):
        free()
        warm_up()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(24)))
        taken, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(DEVICE).total_memory
        config = {"device_budget": torch.cuda.memory_allocated() + budget, "chunk_numel": width**2, "placement": "host"}
        engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
        torch.cuda.set_per_process_memory_fraction(min((taken + cap_nbytes) / total, 1.0))
        losses = []
        try:
            for rows in (256, 32, 320, 64, 256, 320):
                x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(DEVICE)

                def once(x=x):
                    loss = model(x).square().mean()
                    loss.backward()
                    return loss.item()

                losses.append(engine.attempt(once))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            assert engine.stats()["chunk_evictions"] > 0
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            engine.detach()
        return losses

    assert run(budget + 64 * MIB) == run(2**60)


@pytest.mark.parametrize("is_estimated", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_margin_is_filled_and_left(dtype, is_estimated, at_home_on_host, request):
    if not is_estimated:
        request.getfixturevalue("recorded")
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
    stats = engine.stats()
    assert in_margin[1] > 0
    if is_estimated:
        assert in_margin[0] > 0, "it is filled before the first step"
        assert stats["recorded_steps"] == stats["diverged_steps"] == 0
    else:
        assert in_margin[3] == 0, "larger inputs: the margin is given up before they are recorded"
    engine.detach()
    free()
