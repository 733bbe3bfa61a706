"""What the tests on a GPU share: kernels that repeat themselves, runs of the engine and of plain torch, and comparison.

[Note: bugs and noise]
Most kernels of a GPU give the same bits every time. Some do not: the fast kernels of attention in backward, and sums by
atomic additions. Tests that ask for equal bits run with ``exact`` kernels, and first run plain torch twice: where that
does not repeat itself the device has noise that is not ours, and the comparison is to the tolerance below instead. What
differs where plain torch repeats itself is a bug.
"""

import contextlib
import functools
import gc
import os

import pytest
import torch
from support.models import make_batch, make_model
from support.reference import rounded

from hf_patrickstar import PatrickStarEngine

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")
"""``cpu`` rehearses the tests on the CPU tier (``scripts/gpu_check.py --rehearse``)."""
needs_cuda = pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="asks CUDA for what a CPU does not have")
STEPS = 3
MIB = 2**20
LOSS_TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
"""For losses of kernels that do not repeat themselves: three steps of AdamW at 3e-3."""
WEIGHT_TOLERANCE = {"rtol": 2e-3, "atol": 2e-4}
"""For weights after these: AdamW turns noise in tiny gradients into updates of up to the learning rate, so few elements
may be further apart; see ``assert_close``."""
FEW = 1e-3
"""The part of the elements of a tensor that may be further apart, where kernels do not repeat themselves."""


@contextlib.contextmanager
def exact_kernels():
    """Inside, torch takes kernels that repeat themselves, where it has them; attention is that of plain products."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def assert_same(found, expected, is_exact):
    """Compares losses and weights of two runs."""
    losses, weights = found
    if is_exact:
        assert losses == expected[0]
        for key, value in expected[1].items():
            assert torch.equal(weights[key], value), key
        return
    torch.testing.assert_close(losses, expected[0], **LOSS_TOLERANCE)
    for key, value in expected[1].items():
        apart = ~torch.isclose(weights[key].float(), value.float(), **WEIGHT_TOLERANCE)
        assert apart.float().mean() <= FEW, key


def batch_of(name, seed):
    return {key: value.to(DEVICE) for key, value in make_batch(name, seed=seed).items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


def free():
    gc.collect()
    torch.cuda.empty_cache()


def synchronize():
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def occupy(cycles):
    """Keeps the compute stream busy, so that the host runs ahead of it."""
    if DEVICE != "cpu":
        torch.cuda._sleep(cycles)


def run_engine(name, config, max_norm=None, checkpointing=False):
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**batch_of(name, step)).loss
        losses.append(loss.item())
        loss.backward()
        if max_norm is not None:
            engine.optimizer.clip_grad_norm_(model.parameters(), max_norm)
        engine.optimizer.step()
        model.zero_grad()
    state_dict, stats = model.state_dict(), engine.stats()
    engine.detach()
    free()
    return losses, state_dict, stats


def run_plain(name, max_norm=None):
    """Plain torch with everything on the device; losses and weights."""
    model = make_model(name).train().to(DEVICE)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**batch_of(name, step)).loss
        losses.append(loss.item())
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    weights = {key: value.cpu() for key, value in model.state_dict().items()}
    del model, optimizer
    free()
    return losses, weights


def run_reference(name, dtype, checkpointing=False, max_norm=None):
    """Weights on the device, 16-bit where autocast rounds; fp32 masters and AdamW on the host; losses and masters."""
    model = make_model(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    masters = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    in_16_bit = rounded(model) if dtype is not torch.float32 else []
    for key, parameter in model.named_parameters():
        parameter.data = parameter.data.to(DEVICE, dtype if key in in_16_bit else torch.float32)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(DEVICE)
    optimizer = adamw(masters.values())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        with torch.autocast(torch.device(DEVICE).type, dtype, enabled=bool(in_16_bit), cache_enabled=False):
            loss = model(**batch_of(name, step)).loss
        losses.append(loss.item())
        loss.backward()
        for key, parameter in model.named_parameters():
            masters[key].grad = None if parameter.grad is None else parameter.grad.cpu().float()
            parameter.grad = None
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(masters.values()), max_norm)
        optimizer.step()
        for key, parameter in model.named_parameters():
            parameter.data.copy_(masters[key].data)
    del model
    free()
    return losses, {key: master.detach() for key, master in masters.items()}


@functools.cache
def repeats_itself(run, *arguments):
    """Whether plain torch gives the same bits twice on this device, with the kernels that are set now."""
    first, second = run(*arguments), run(*arguments)
    return first[0] == second[0] and all(torch.equal(first[1][key], second[1][key]) for key in first[1])


def warm_up():
    """Makes the libraries' workspaces, of the main thread and of autograd's, before memory is measured."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(64, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, x[0]).sum().backward()
        torch.mm(x, x).sum().backward()  # a product without bias may have another workspace
    synchronize()


def capped(name, itemsize):
    """A budget over what is allocated now: chunks of half of the parameters, and room for activations."""
    warm_up()
    numel = sum(p.numel() for p in make_model(name).parameters())
    return {
        "device_budget": int(torch.cuda.memory_allocated() + 2 * MIB + numel * itemsize * 0.5),
        "chunk_numel": 2048,
        "cpu_embedding": False,
        "placement": "host",  # the reference updates its masters on the host
        "updates": "host",
    }
