"""Out of memory on a GPU: a micro-batch is repeated, nothing is lost, and pieces of memory cost no budget."""

import pytest
import torch
from support.models import make_model
from support.on_gpu import (
    DEVICE,
    STEPS,
    adamw,
    assert_same,
    batch_of,
    capped,
    free,
    needs_cuda,
    repeats_itself,
    run_reference,
)

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier

pytestmark = pytest.mark.gpu


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


@needs_cuda
@pytest.mark.parametrize("accumulation", [1, 2])
def test_out_of_memory_in_the_thread_of_autograd(accumulation, at_home_on_host, exact):
    is_exact = repeats_itself(run_reference, "gpt2", torch.float32)
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
    assert_same(([], results[1][0]), ([], results[0][0]), is_exact)


@needs_cuda
def test_memory_in_pieces_costs_no_budget(at_home_on_host):
    """The message is torch's own, so what is read from it is what this version says."""
    model = make_model("gpt2").train()
    engine = PatrickStarEngine(model, capped("gpt2", 4), adamw(model.parameters()), device=DEVICE)
    limit = engine.ledger.limit(Tier.DEVICE, cautious=False)
    calls = []

    def micro_batch():
        calls.append(1)
        if len(calls) == 1:
            try:
                torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
            except torch.OutOfMemoryError as error:
                text = str(error)
                assert "Tried to allocate" in text
                assert "reserved by PyTorch but unallocated" in text
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB, and 64.00 MiB is reserved by PyTorch but unallocated."
            )
        return model(**batch_of("gpt2", 0)).loss.backward()

    engine.attempt(micro_batch)
    assert len(calls) == 2
    assert engine.ledger.limit(Tier.DEVICE, cautious=False) == limit
    engine.detach()
    free()
