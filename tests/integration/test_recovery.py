"""Out of memory in a step: the micro-batch is repeated, and nothing is lost or counted twice."""

import pytest
import torch
from models import make_batch, make_model
from trainers import smallest_budget

from hf_patrickstar import PatrickStarEngine


def make_pair(name, dtype, accumulation, checkpointing=False):
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    precision = {"fp32": "no", "bf16": "bf16"}[dtype]
    config = {"dtype": dtype, "chunk_budget": int(1.5 * smallest_budget(make_model(name), precision, checkpointing))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, PatrickStarEngine(model, config, optimizer, gradient_accumulation_steps=accumulation)


def gradients(engine):
    """Copies of all gradients, ``None`` where there is none."""
    found = [engine.manager.gradients.of(tensor) for tensor in engine.manager.tensors]
    return [None if gradient is None else gradient.clone() for gradient in found]


@pytest.mark.parametrize(("accumulation", "where"), [(1, "in the forward"), (3, "before the forward")])
def test_an_interrupt_in_a_retry_makes_nothing_later_a_repetition(accumulation, where):
    """The user stops a repetition and goes on with a plain loop: every gradient from then on counts."""
    model, engine = make_pair("gpt2", "fp32", accumulation)
    plain = make_model("gpt2").train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    batches = [make_batch("gpt2", seed=seed) for seed in range(3)]
    calls = []

    def stop(*_):
        raise KeyboardInterrupt

    def once(model, batch):
        torch.manual_seed(3)
        model(**batch).loss.backward()

    def interrupted():
        calls.append(1)
        if len(calls) == 2 and where == "before the forward":
            stop()
        elif len(calls) == 2:
            handles.append(model.transformer.h[1].register_forward_pre_hook(stop))
        once(model, batches[1])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    handles = []
    if accumulation > 1:
        once(model, batches[0])
    with pytest.raises(KeyboardInterrupt):
        engine.attempt(interrupted)
    for handle in handles:
        handle.remove()
    # What a failed attempt was the first to store was undone; what it added to earlier ones' has stayed.
    for batch in batches[:2] if accumulation > 1 else ():
        once(plain, batch)
    for count in (2, 1):
        for _ in range(count):
            once(model, batches[2])
            once(plain, batches[2])
        for ours, theirs in zip(gradients(engine), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs.grad)
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
