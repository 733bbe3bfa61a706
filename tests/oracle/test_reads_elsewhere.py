"""Modules that read parameters of other modules: the simulator tells what the real engine does."""

import dataclasses
import types

import pytest
import torch
from support import inside
from support.oracle import Training, record_step
from test_same_as_engine import check, gaps, without_activations

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.machine import CPU_TIER, MACHINES

SIZE = 64
NUM_LAYERS = 4
CHUNK = SIZE * (SIZE + 1)
"""Elements of a layer: each is in a chunk of its own, and so is the one that others read."""
ROOM = 3 * CHUNK * 4
"""Bytes of three chunks."""
SLOW_BUS = dataclasses.replace(MACHINES["h100"], to_device_bandwidth=1e7)

READS = {
    "add": lambda x, child: x + child.bias,
    "getitem": lambda x, child: x * child.weight[0] * child.weight.view(-1)[:SIZE],
    "slice": lambda x, child: x + child.weight[:, 1:2].sum() * child.bias[:1].unsqueeze(0),
    "transposed": lambda x, child: x @ child.weight.t(),
    "exp": lambda x, child: x * (-torch.exp(-child.bias.float())),
    "linear": lambda x, child: torch.nn.functional.linear(x, child.weight, child.bias),
    "chunk": lambda x, child: x + sum(part.sum() for part in child.weight.chunk(2)),
    "shape": lambda x, child: x * child.weight.shape[0] + torch.zeros_like(child.bias),
    "data": lambda x, child: x + child.bias.data,
    "detach": lambda x, child: x + child.weight.detach()[1],
    "no_grad": lambda x, child: x + _without_graph(child),
}
TOLD = [name for name in READS if name not in ("data", "detach")]


def _without_graph(child):
    with torch.no_grad():
        return child.bias.abs() + child.weight.mean(0)


class Parent(torch.nn.Module):
    """Reads the parameters of its first child between its layers; calls that child, too, if ``calls``."""

    def __init__(self, read, calls, checkpointing=False):
        super().__init__()
        self.child = torch.nn.Linear(SIZE, SIZE)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS))
        self.read, self.calls, self.checkpointing = read, calls, checkpointing

    def forward(self, x):
        if self.calls:
            x = self.child(x)
        for layer in self.layers:
            x = self._checkpointed(layer, x) if self.checkpointing else self._through(layer, x)
        return x.square().mean()

    def _checkpointed(self, layer, x):
        return torch.utils.checkpoint.checkpoint(self._through, layer, x, use_reentrant=False)

    def _through(self, layer, x):
        return torch.tanh(self.read(layer(x), self.child))


def make_training(name, calls=True, checkpointing=False, compute_loss=None, max_norm=1.0, **settings):
    def make_inputs():
        return {"x": torch.zeros(3, SIZE)}

    return Training(
        lambda: Parent(READS[name], calls, checkpointing).train(),
        make_inputs,
        {"dtype": "fp32", "chunk_numel": CHUNK, "placement": "host", "prefetch_depth": 0, **settings},
        compute_loss=compute_loss or (lambda model, inputs: model(**inputs)),
        max_norm=max_norm,
    )


def run(training):
    """The real engine after four steps, and what it moved in the last one."""
    torch.manual_seed(0)
    model = training.make_model()
    budgets = {"device_budget": CPU_TIER.device_nbytes, "host_budget": CPU_TIER.host_nbytes, "reuse_plan": False}
    made = training.make_optimizer(model.parameters())
    engine = PatrickStarEngine(model, {**budgets, **training.config}, made, device=torch.device("cpu"))
    engine.optimizer.zero_grad()
    for _ in range(4):
        before = engine.stats()
        inputs = training.make_inputs()
        engine.attempt(lambda inputs=inputs: training.compute_loss(model, inputs).backward())
        engine.optimizer.clip_grad_norm_(None, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    after = engine.stats()
    return engine, [after[key] - before[key] for key in ("host_to_device_nbytes", "device_to_host_nbytes")]


def assert_as_run(training, most_missing_nbytes=0):
    told = training.simulate(CPU_TIER)
    engine, moved = run(training)
    real = types.SimpleNamespace(traces=[inside.traces(engine)[trace.key] for trace in told.traces])
    assert all(-most_missing_nbytes <= min(found) <= max(found) <= 0 for found in gaps(told, real))
    assert list(told.moved_nbytes) == moved


@pytest.mark.parametrize("name", TOLD)
def test_a_simulation_visits_what_a_run_visits(name):
    """In turns the child is called too, and only read; of what is read without a graph alone no gradient arrives."""
    calls = name in ("shape", "no_grad") or TOLD.index(name) % 2 == 0
    assert_as_run(make_training(name, calls, chunk_budget=ROOM))


def test_so_does_one_that_computes_segments_again_and_one_with_a_penalty_in_the_loss():
    assert_as_run(make_training("linear", checkpointing=True, chunk_budget=ROOM))

    def compute_loss(model, inputs):
        return model(**inputs) + model.child.weight.square().sum()

    # Single numbers of the loss stay a little longer in a run.
    assert_as_run(make_training("add", compute_loss=compute_loss, chunk_budget=ROOM), most_missing_nbytes=64)


@pytest.mark.parametrize(("name", "max_norm"), [("add", 1.0), ("no_grad", 1.0), ("linear", None)])
def test_so_does_an_engine_in_virtual_time(name, max_norm):
    training = make_training(name, chunk_budget=2 * ROOM, device_budget="1GiB", max_norm=max_norm)
    told, done = training.simulate(SLOW_BUS), record_step(training, SLOW_BUS)
    check(told, done)
    assert [without_activations(made) for made in told.traces] == done.traces


@pytest.mark.parametrize("name", ["data", "detach"])
def test_what_is_read_at_home_cannot_be_told(name):
    """What such a read waits for depends on where the value is at home."""
    assert make_training(name).trace(SLOW_BUS) is None
