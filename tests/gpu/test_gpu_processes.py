"""Two processes on one GPU: the same bits as one process that adds their gradients.

nccl refuses two ranks on one device, so what the package sends from the device goes through the host, over gloo.
"""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import processes
from support.models import make_batch, make_model
from support.on_gpu import DEVICE, STEPS, adamw, exact_kernels, synchronize

from hf_patrickstar import PatrickStarEngine

pytestmark = pytest.mark.gpu
WORLD_SIZE = 2
SETTINGS = {"chunk_numel": 2048, "cpu_embedding": False, "placement": "host"}


class Done:
    """A collective that is complete."""

    def wait(self, *_):
        return True

    is_completed = wait


def another_name(group):
    return "nccl"


def through_the_host(collective):
    """A collective of gloo for tensors of any device; it writes to its first argument."""

    def call(*tensors, **kwargs):
        if len(tensors) == 1 and tensors[0].is_cpu:  # a message
            return collective(*tensors, **kwargs)
        synchronize()
        on_host = [tensor.cpu() for tensor in tensors]
        collective(*on_host, **{**kwargs, "async_op": False})
        tensors[0].copy_(on_host[0])
        return Done()

    return call


@contextlib.contextmanager
def over_gloo():
    """Inside, collectives take gloo for the backend of the device."""
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_reduce")
    found = {name: through_the_host(getattr(dist, name)) for name in names}
    found |= {"all_gather_single": found[names[0]], "reduce_scatter_single": found[names[1]]}  # as torch will name them
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist.ProcessGroupGloo, "name", another_name))
        stack.enter_context(mock.patch("hf_patrickstar.setup.homes.UNMEASURED_SHARE", 0.0))
        if DEVICE == "cpu":
            stack.enter_context(mock.patch("hf_patrickstar.dist.tickets.synchronize"))
        for name, function in found.items():
            stack.enter_context(mock.patch.object(dist, name, function, create=True))
        yield


def loss_of(model, step, rank):
    torch.manual_seed(10 * step + rank)  # for dropout
    return model(**{key: value.to(DEVICE) for key, value in make_batch("gpt2", seed=10 * step + rank).items()}).loss


def together(rank, settings):
    """Losses of one rank, all weights, and what was sent."""
    with over_gloo(), exact_kernels():
        model = make_model("gpt2").train()
        engine = PatrickStarEngine(model, settings, adamw(model.parameters()), device=DEVICE)
        assert engine.collectives.world_size == dist.get_world_size() == WORLD_SIZE
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, step, rank)
            losses.append(loss.item())
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        weights = {key: value.cpu() for key, value in model.state_dict().items()}
        stats = engine.stats()
        engine.detach()
    return losses, weights, {key: stats[key] for key in ("all_gathers", "reduce_scatters", "chunk_loads")}


def alone(rank):
    """The same of one process of plain torch, whose masters are updated on the host; losses by rank.

    It runs where the others do, with as many threads.
    """
    with exact_kernels():
        return train_alone()


def train_alone():
    model = make_model("gpt2").train()
    masters = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    model.to(DEVICE)
    optimizer, losses = adamw(masters.values()), [[] for _ in range(WORLD_SIZE)]
    for step in range(STEPS):
        for rank in range(WORLD_SIZE):
            loss = loss_of(model, step, rank)
            losses[rank].append(loss.item())
            loss.backward()
        for key, parameter in model.named_parameters():
            masters[key].grad, parameter.grad = (parameter.grad / WORLD_SIZE).cpu(), None
        optimizer.step()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(masters[key])
    return losses, {key: value.cpu() for key, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def pair():
    """Two processes, which see the device."""
    with mock.patch.dict(processes.ENVIRONMENT):
        if DEVICE != "cpu":
            del processes.ENVIRONMENT["CUDA_VISIBLE_DEVICES"]
        with processes.Workers(WORLD_SIZE) as workers:
            yield workers


def test_two_processes_have_the_bits_of_one(pair):
    found = pair.run(together, SETTINGS)
    losses, weights = pair.run(alone)[0]
    assert [ours for ours, _, _ in found] == losses
    for _, ours, counted in found:
        assert min(counted["all_gathers"], counted["reduce_scatters"]) > 0
        assert ours.keys() == weights.keys()
        assert [key for key, value in weights.items() if not torch.equal(ours[key], value)] == []
