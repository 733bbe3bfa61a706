"""Small models in chunks beside their plain twins: the same code runs on both, and what it finds must be the same bits.

The tests of this folder know of the package what its users know: the engine, its optimizer, its settings, counts,
errors and statistics. They say what must be true, never who calls whom.
"""

import torch
from torch import nn

WIDTH = 16
CHUNK_NUMEL = 320
"""One layer of a ``Stack``: 256 elements of the weight, and the bias, which begins at a multiple of 64."""
LAYER_NUMEL = WIDTH * WIDTH + WIDTH
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUDGETS = ("resident", "moving", "evicting")


class Stack(nn.Module):
    """A few layers, each of which fills a chunk."""

    def __init__(self, depth=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Tied(nn.Module):
    """Tokens in, logits out: an embedding that is the head too, blocks, a scale of its own, a layer without a use."""

    def __init__(self, depth=3, vocab=20):
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def batch(seed=0, size=4):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed=0, size=3, length=4, vocab=20):
    return torch.randint(0, vocab, (size, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=0, size=4):
    """The loss of a batch; of a ``Tied`` one, of tokens."""
    if isinstance(model, Tied):
        ids = tokens(seed, size)
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    dtype = next(model.parameters()).dtype
    return model(batch(seed, size).to(dtype)).float().square().sum()


def step_of(model, optimizer, seed=0, size=4):
    """A step of an ordinary loop; returns the loss."""
    loss = loss_of(model, seed, size)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def steps(model, optimizer, num):
    """Steps of an ordinary loop; what the caller does in its loop happens between backward and step."""
    for step in range(num):
        loss_of(model, step).backward()
        yield step
        optimizer.step()
        optimizer.zero_grad()


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, **{"lr": 1e-2, "momentum": 0.9, **settings})


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make(factory, seed=0):
    """A model with the values that this seed gives."""
    torch.manual_seed(seed)
    return factory()
