"""Engines of several processes, and training in one process that must give the same bits."""

import contextlib
import gc
import logging
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import inside
from support.models import make_batch, make_model

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import BudgetError


def hf_loss(name, size=2, length=8):
    """The loss of one rank's micro-batch, as a function of the model and of where it is."""

    def loss(model, step, micro, rank):
        torch.manual_seed(seed_of(step, micro, rank))  # for dropout
        return model(**make_batch(name, size, seed_of(step, micro, rank), length)).loss

    return loss


@contextlib.contextmanager
def engaged(model, config=None, optimizer=None, accumulation=1, **kwargs):
    """An engine on the CPU tier; what fails leaves it as it is, since the others may be anywhere."""
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    engine = PatrickStarEngine(
        model, config, optimizer, device="cpu", gradient_accumulation_steps=accumulation, **kwargs
    )
    assert engine.collectives.world_size == dist.get_world_size() > 1
    yield engine
    engine.detach()
    gc.collect()


def tight(model, config=None, extra_nbytes=0):
    """The settings with the least ``chunk_budget`` that the engine asks for; all ranks call it."""
    try:
        PatrickStarEngine(model, {**(config or {}), "chunk_budget": 64}, make_optimizer(model), device="cpu")
    except BudgetError as error:
        return {
            **(config or {}),
            "chunk_budget": int(re.search(r"to at least (\d+) bytes", str(error))[1]) + extra_nbytes,
        }
    raise AssertionError("64 bytes were enough")


def prepared(name, checkpointing=False, change=None):
    model = make_model(name)
    if change is not None:
        change(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextlib.contextmanager
def heard():
    """What is logged as a warning."""
    texts = []

    class Keeper(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    keeper = Keeper(logging.WARNING)
    logging.getLogger("hf_patrickstar").addHandler(keeper)
    try:
        yield texts
    finally:
        logging.getLogger("hf_patrickstar").removeHandler(keeper)


def join_again(rank, folder, timeout_s):
    """Makes the default group anew, with a timeout of its own; the workers of a test cannot be used afterwards."""
    world_size, timeout = dist.get_world_size(), timedelta(seconds=timeout_s)
    dist.destroy_process_group()
    address = f"file://{folder}/store of all"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=timeout)


@contextlib.contextmanager
def launched(rank):
    """What a launcher tells its processes; accelerate has no state of before, and leaves none."""
    from accelerate.state import AcceleratorState, GradientState

    world_size = str(dist.get_world_size())
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


LR = 5e-3
STEPS = 3


def seed_of(step, micro, rank):
    return 1000 * step + 100 * micro + rank + 1


def make_optimizer(model):
    """Two param groups that differ in everything."""
    named = [item for item in model.named_parameters() if item[1].requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": LR / 2, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, fused=True)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def parts_of(engine):
    """Where parameters are cut that are spread over ranks, by their places in the model."""
    return {tensor.spec.index: tensor.parts for tensor in inside.tensors(engine) if tensor.is_split}


def clip(parameters, max_norm, parts):
    """``torch.nn.utils.clip_grad_norm_``; the norm of a parameter that is spread is made of the norms of its parts."""
    if not parts:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = []
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            cuts = parts.get(place)
            pieces = [parameter.grad.view(-1)[start:stop] for start, stop in cuts] if cuts else [parameter.grad]
            norms += [torch.linalg.vector_norm(piece) for piece in pieces]
    total = torch.linalg.vector_norm(torch.stack(norms))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def train_alone(
    model, loss_of, world_size, steps=STEPS, accumulation=1, max_norm=None, optimizer=None, first=0, parts=None
):
    """Plain torch: backward of the ranks' batches one after the other, the sum divided by their number."""
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    scheduler = make_scheduler(optimizer)
    losses, norms = [], []
    model.train()
    parameters = list(model.parameters())
    for step in range(first, first + steps):
        sums = [None] * len(parameters)
        for micro in range(accumulation):
            for rank in range(world_size):
                loss = loss_of(model, step, micro, rank)
                losses.append(loss.item())
                (loss / accumulation).backward()
            for place, parameter in enumerate(parameters):
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:
                    gradient.div_(world_size)
                    sums[place] = gradient if sums[place] is None else sums[place].add_(gradient)
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        if max_norm is not None:
            norms.append(clip(parameters, max_norm, parts).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer, losses, norms


def train_together(engine, loss_of, steps=STEPS, accumulation=1, max_norm=None, first=0):
    """The same of this rank; losses are its own."""
    model, optimizer, rank = engine.model, engine.optimizer, dist.get_rank()
    scheduler = make_scheduler(optimizer)
    losses, norms = [], []
    model.train()
    for step in range(first, first + steps):
        for micro in range(accumulation):
            loss = loss_of(model, step, micro, rank)
            losses.append(loss.item())
            engine.backward(loss / accumulation)
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms


def on_one_rank(function, *args):
    """Calls a function of one process in rank 0 alone, and gives its result to all."""
    found = [function(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def differences(expected, actual):
    """Where two state dictionaries are not the same to the last bit, and by how much."""
    assert expected.keys() == actual.keys()
    return {
        key: float((value.float() - actual[key].float()).abs().max())
        for key, value in expected.items()
        if value.dtype != actual[key].dtype or not torch.equal(value, actual[key])
    }


def copy_state(model):
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def alone(make, loss_of, world_size=2, make_optimizer=make_optimizer, **kwargs):
    """Weights, optimizer state, losses and norms of one process."""
    model = make()
    optimizer, losses, norms = train_alone(model, loss_of, world_size, optimizer=make_optimizer(model), **kwargs)
    return copy_state(model), optimizer.state_dict(), losses, norms


def train_as_alone(engine, expected, loss_of, **kwargs):
    """Trains together: losses, norms, weights and states are what ``alone`` gave; returns the norms."""
    state, optimizer_state, losses, norms = expected
    ours, our_norms = train_together(engine, loss_of, **kwargs)
    assert ours == losses[dist.get_rank() :: dist.get_world_size()]
    assert our_norms == norms
    assert differences(state, engine.model.state_dict()) == {}
    found = engine.optimizer.state_dict()
    assert found["param_groups"] == optimizer_state["param_groups"]
    assert found["state"].keys() == optimizer_state["state"].keys()
    for number, wanted in optimizer_state["state"].items():
        assert differences(*(as_tensors(each) for each in (wanted, found["state"][number]))) == {}, number
    return norms


def as_tensors(state):
    """Some optimizers count in ordinary numbers."""
    return {key: torch.as_tensor(value) for key, value in state.items()}
