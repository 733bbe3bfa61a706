"""Sweeps of a buffer between modules, whose own time is left out."""

import itertools

import numpy
import pytest
import torch

from hf_patrickstar.report import sweeps
from hf_patrickstar.report.sweeps import Sweeps

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock is a second after the one before."""
    now = itertools.count()
    monkeypatch.setattr(sweeps.time, "perf_counter", lambda: float(next(now)))


def test_there_is_one_after_each_module_in_both_directions(clock):
    made = Sweeps(CPU, nbytes=64)
    model = made.between(torch.nn.Linear(2, 2) for _ in range(3))
    loss = model(torch.ones(1, 2)).sum()
    assert made.seconds == 3.0
    loss.backward()
    assert made.seconds == 6.0
    made.seconds = 0.0
    made.sweep()
    assert made.seconds == 1.0


def test_they_change_no_value_and_no_gradient():
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    inputs = torch.randn(4, 2, requires_grad=True)
    plain = torch.nn.Sequential(*layers)
    swept = Sweeps(CPU, nbytes=64).between(layers)
    parameters = list(plain.parameters())
    assert torch.equal(swept(inputs), plain(inputs))
    for one, other in zip(
        torch.autograd.grad(swept(inputs).sum(), [inputs, *parameters]),
        torch.autograd.grad(plain(inputs).sum(), [inputs, *parameters]),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_a_sweep_goes_through_all_of_the_buffer_with_one_thread():
    made = Sweeps(CPU, nbytes=64)
    made.sweep()
    assert made._buffer.nbytes == 64
    assert (made._buffer == 1.0).all()
    assert isinstance(made._buffer, numpy.ndarray), "whose sums are of the thread of the caller"


def test_with_an_accelerator_there_are_none(clock, monkeypatch):
    monkeypatch.setattr(sweeps, "is_accelerator", lambda device: True)
    made = Sweeps(CPU)
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    model = made.between(layers)
    assert list(model) == layers
    model(torch.ones(1, 2)).sum().backward()
    made.sweep()
    assert made.seconds == 0.0
