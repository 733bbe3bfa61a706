"""Out of memory in a step: the micro-batch is repeated, and nothing is lost or counted twice."""

import pytest
import torch
from support.models import make_batch, make_model
from support.trainers import assert_same_weights, smallest_budget

from hf_patrickstar import PatrickStarEngine


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_an_interrupt_in_a_retry_makes_nothing_later_a_repetition():
    """The user stops a repetition and goes on with a plain loop: every gradient from then on counts."""
    plain, model = make_model("gpt2").train(), make_model("gpt2").train()
    config = {"chunk_budget": int(1.5 * smallest_budget(make_model("gpt2")))}
    optimizer, engine = adamw(plain), PatrickStarEngine(model, config, adamw(model), gradient_accumulation_steps=3)
    batches = [make_batch("gpt2", seed=seed) for seed in range(3)]
    calls = []

    def once(model, batch):
        torch.manual_seed(3)
        model(**batch).loss.backward()

    def interrupted():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        once(model, batches[1])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    once(model, batches[0])
    with pytest.raises(KeyboardInterrupt):
        engine.attempt(interrupted)
    for batch in batches[:2]:  # what a failed attempt added to earlier gradients has stayed
        once(plain, batch)
    for count in (2, 1):
        for _ in range(count):
            once(model, batches[2])
            once(plain, batches[2])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    assert_same_weights(plain, model)
