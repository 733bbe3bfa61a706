"""Reading gradients in 2 and 3 processes: at any time, in any type, whatever only one rank knows of them."""

import pytest
import torch
from support.models import make_model
from support.together import engaged, hf_loss

from hf_patrickstar import PatrickStarEngine

ROUNDED = ("c_attn", "c_proj", "c_fc")  # what autocast computes with in 16 bits
MOMENTS = ("before", "between", "after backward", "after step")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precise(precision):
    dtype = DTYPES[precision]
    return torch.autocast("cpu", dtype, enabled=dtype is not torch.float32, cache_enabled=False)


def train_alone(precision, world_size, micro_batches, steps=2):
    """Gradients of each rank in the parameter's type, averaged in fp32, rounded once, and added in fp32.

    Returns:
        The gradients after each backward, and the weights at the end.
    """
    dtype = DTYPES[precision]
    plain = make_model("gpt2")
    masters = [parameter.detach().clone().requires_grad_() for parameter in plain.parameters()]
    for name, parameter in plain.named_parameters():
        if any(part in name for part in ROUNDED):
            parameter.data = parameter.data.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=5e-3, fused=True)
    seen = []
    for step in range(steps):
        plain.train()
        for micro in range(micro_batches):
            totals = [torch.zeros_like(master) for master in masters]
            for rank in range(world_size):
                with precise(precision):
                    loss = hf_loss("gpt2")(plain, step, micro, rank)
                (loss / micro_batches).backward()
                for total, parameter in zip(totals, plain.parameters(), strict=True):
                    total += parameter.grad.float()
                plain.zero_grad()
            for parameter, master, total in zip(plain.parameters(), masters, totals, strict=True):
                average = (total / world_size).to(parameter.dtype).float()
                master.grad = average if master.grad is None else master.grad + average
            seen.append([master.grad.clone() for master in masters])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                parameter.copy_(master)
    return seen, [master.detach() for master in masters]


def read(model, expected):
    """Reads all gradients on all ranks, as the Trainer does before it clips."""
    for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.float(), wanted), name


def train_and_read(rank, precision, micro_batches, is_declared, moments):
    world_size = torch.distributed.get_world_size()
    seen, weights = train_alone(precision, world_size, micro_batches)
    model = make_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    declared = micro_batches if is_declared else 1
    kwargs = {"device": "cpu", "precision": precision, "gradient_accumulation_steps": declared}
    engine = PatrickStarEngine(model, {"chunk_numel": 2048}, optimizer, **kwargs)
    assert engine.collectives.world_size == world_size
    for step in range(2):
        if "before" in moments:
            assert all(parameter.grad is None for parameter in model.parameters())
        model.train()
        for micro in range(micro_batches):
            loss = hf_loss("gpt2")(model, step, micro, rank)
            engine.backward(loss / micro_batches)
            is_last = micro + 1 == micro_batches
            if ("after backward" if is_last else "between") in moments:
                read(model, seen[step * micro_batches + micro])
        engine.optimizer.step()
        if "after step" in moments:
            read(model, seen[(step + 1) * micro_batches - 1])
        engine.optimizer.zero_grad()
    state = model.state_dict()
    for (name, _), wanted in zip(model.named_parameters(), weights, strict=True):
        assert torch.equal(state[name], wanted), name
    engine.detach()


@pytest.mark.parametrize(
    ("precision", "micro_batches", "is_declared", "moments"),
    [
        ("fp32", 1, True, ("before", "after step")),
        ("fp32", 3, False, ("between",)),
        ("bf16", 1, True, ("after backward",)),
        ("bf16", 3, True, MOMENTS),
    ],
)
def test_gradients_that_are_read(pair, precision, micro_batches, is_declared, moments):
    pair.run(train_and_read, precision, micro_batches, is_declared, moments)


def test_gradients_that_three_processes_read(three):
    three.run(train_and_read, "bf16", 3, False, MOMENTS)


def clip_with_another(rank, culprits):
    """A parameter that is in no chunk, with the same gradient on some ranks."""
    model, another = make_model("gpt2"), torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([*model.parameters(), another], lr=0.1)
    with engaged(model, {"chunk_numel": 2048}, optimizer) as engine:
        engine.backward(hf_loss("gpt2")(model, 0, 0, rank))
        alone = engine.optimizer.clip_grad_norm_(model.parameters(), float("inf"))
        if rank in culprits:
            another.grad = torch.full((5,), 2.0)
        total = engine.optimizer.clip_grad_norm_([another, *model.parameters()], float("inf"))
        torch.testing.assert_close(total, (alone**2 + 20 * (rank in culprits)).sqrt())
        engine.optimizer.zero_grad()


@pytest.mark.parametrize("culprits", [(1,), (0, 1)], ids=str)
def test_norms_of_what_only_one_rank_knows(pair, culprits):
    pair.run(clip_with_another, culprits)
