"""Runs the same code on a plain model and on one in chunks: what it notes, and what it leaves, must be the same bits.

A *pattern* is a function of a model, its optimizer and a ``Notes`` object, written as for plain torch; ``live`` makes a
test of it. ``Both`` calls it twice, compares every note, trains two more steps and compares losses, parameters, buffers
and optimizer states.
"""

import contextlib
import functools
import inspect

import numpy
import pytest
import torch
from support.same import assert_same, assert_same_states, assert_same_values
from support.small import WIDTH, Block
from torch import nn

from hf_patrickstar import PatrickStarEngine

VOCAB = 24
DEPTH = 8
"""Blocks: so many that chunks may take a quarter of their bytes."""


class Tower(nn.Module):
    """Many small layers, a tied embedding, a parameter of its own and a buffer."""

    def __init__(self, depth=DEPTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))

    def forward(self, ids):
        x = self.embedding(ids) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


def make_tower(seed=0):
    torch.manual_seed(seed)
    return Tower()


def make_with_list():
    """A model that keeps its parameters from before anything was attached to it."""
    model = make_tower()
    model.kept = tuple(model.parameters())
    return model


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def make_ids(step=0, size=4, length=6):
    return torch.randint(0, VOCAB, (size, length), generator=torch.Generator().manual_seed(100 + step))


def loss_of(model, step=0):
    """The loss of a batch: the next token of each."""
    ids = make_ids(step)
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(model, optimizer, steps=1, first=0, loss=loss_of):
    """Steps of an ordinary loop; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.detach().clone())
    optimizer.zero_grad()
    return losses


class Notes:
    """What a pattern saw: tensors, arrays, numbers, texts, in order."""

    def __init__(self):
        self.rows = []

    def __call__(self, name, value):
        """Notes a value as it is now. Of a tensor its values, type and whether it requires a gradient are compared."""
        self.rows.append((name, _as_noted(value)))


def _as_noted(value):
    if isinstance(value, torch.Tensor):
        # Through torch's own functions: a parameter must answer them as any other does.
        return "tensor", value.dtype, value.requires_grad, value.detach().clone().cpu()
    if isinstance(value, numpy.ndarray):
        return "array", value.dtype, None, torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {key: _as_noted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_noted(item) for item in value]
    return value


assert_same_model = assert_same_values


def assert_same_notes(plain, ours):
    """Two lists of notes are the same."""
    for (name, left), (other, right) in zip(plain, ours, strict=True):
        assert name == other
        assert_same(left, right, name)


TIGHT = {"chunk_numel": 320, "chunk_budget": 4096}
"""A quarter of the Tower's bytes in fp32: three chunks, which one module uses at once."""
ROOMY = {}
POISONED = {**TIGHT, "debug_evict_all": True}
CONFIGS = {"tight": TIGHT, "roomy": ROOMY, "poisoned": POISONED}


class Both:
    """The fixture ``both`` of ``conftest.py``.

    Args:
        config: The engine's settings; ``None`` runs two plain models, to try a pattern itself.
    """

    def __init__(self, config):
        self.config = config

    def __call__(
        self, pattern, make=make_tower, make_optimizer=make_adamw, loss=loss_of, more=2, settings=None, **engine_kwargs
    ):
        """Runs a pattern on both models.

        Args:
            pattern: ``pattern(model, optimizer, note)``.
            make: Makes the model; called twice, and must make the same.
            make_optimizer: Makes a torch optimizer of a model.
            loss: What the steps after the pattern minimise.
            more: How many steps follow.
            settings: Settings of the engine beside those of the budget.
            engine_kwargs: Passed to ``PatrickStarEngine``.

        Returns:
            The plain model and ours, after all that.
        """
        plain, ours = make(), make()
        optimizer, our_optimizer = make_optimizer(plain), make_optimizer(ours)
        if self.config is not None:
            our_optimizer = PatrickStarEngine(
                ours, {**self.config, **(settings or {})}, our_optimizer, **engine_kwargs
            ).optimizer
        notes = []
        for model, its_optimizer in ((plain, optimizer), (ours, our_optimizer)):
            torch.manual_seed(7)
            note = Notes()
            kept = pattern(model, its_optimizer, note)  # what it returns stays alive meanwhile
            if more:
                note("losses afterwards", train(model, its_optimizer, more, first=50, loss=loss))
            notes.append(note.rows)
            del kept
        assert_same_notes(*notes)
        assert_same_model(plain, ours)
        assert_same_states(optimizer, our_optimizer)
        return plain, ours


def live(pattern=None, *, everywhere=False, **settings):
    """Makes a test of a pattern.

    Args:
        pattern: ``pattern(model, optimizer, note)``; fixtures of pytest may follow.
        everywhere: Whether it runs at every budget, and not at the tight one alone.
        **settings: Passed to ``Both``.
    """
    if pattern is None:
        return functools.partial(live, everywhere=everywhere, **settings)
    names = ["both", *list(inspect.signature(pattern).parameters)[3:]]

    @functools.wraps(pattern)
    def test(both, **fixtures):
        both(functools.partial(pattern, **fixtures), **settings)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    test.everywhere = everywhere
    return test


@contextlib.contextmanager
def raises_in_both(*exceptions, match=None):
    """For what plain torch refuses too: the same kind of error is expected of both."""
    with pytest.raises(exceptions, match=match):
        yield
