"""Parts of a model that the user has compiled: the bits, and the graphs, are those of the compiled model in torch."""

import copy
import gc

import pytest
import torch
from support import inside
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hf_patrickstar import ConfigError, initialize_engine

WIDTH, VOCABULARY = 16, 40
MOVING = {"chunk_numel": 1100, "chunk_budget": 5 * 4 * 1100}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Uses one value three times, whose gradients a graph adds up in an order of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.left, self.right, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.norm(x * getattr(self.right.weight, "factor", 1.0))
        return x + self.left(y).sigmoid() * self.right(y).tanh() * self.gate(y) * self.scale


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.call = lambda block, x: block(x)
        self.is_checkpointed = False

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            if self.is_checkpointed and torch.is_grad_enabled():
                x = checkpoint(self.call, block, x, use_reentrant=False)
            else:
                x = self.call(block, x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def in_place(model, **how):
    for block in model.blocks:
        block.compile(**how)


def wrapped(model, **how):
    model.blocks = nn.ModuleList(torch.compile(getattr(block, "_orig_mod", block), **how) for block in model.blocks)


def leaves(model, backend, **_):
    """Not with fullgraph: of a leaf that is compiled in place torch compiles nothing, and fullgraph refuses that."""
    model.words.compile(backend=backend)
    for block in model.blocks:
        block.left.compile(backend=backend)
        block.right = torch.compile(getattr(block.right, "_orig_mod", block.right), backend=backend)


def by_function(model, **how):
    model.call = torch.compile(model.call, **how)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class Training:
    """A bare loop with or without the engine.

    Args:
        is_managed: Whether there is an engine.
        make: Makes the model.
    """

    def __init__(self, is_managed, make=Model):
        if is_managed:
            self.model, self.optimizer = initialize_engine(make, MOVING, adamw)
        else:
            self.model = make()
            self.optimizer = adamw([p for p in self.model.parameters() if p.requires_grad])
        self.is_managed, self.losses, self.num_steps = is_managed, [], 0

    def step(self, num_micro_batches=1):
        """A step of training, and an evaluation."""
        for _ in range(num_micro_batches):
            generator = torch.Generator().manual_seed(self.num_steps)
            words = torch.randint(0, VOCABULARY, (2, 5 + self.num_steps % 2), generator=generator)
            self.num_steps += 1
            self.model.train()
            loss = self.model(words)
            self.model.backward(loss) if self.is_managed else loss.backward()
            self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.eval()
        with torch.no_grad():
            self.losses.append(self.model(words).item())


def assert_same(plain, managed):
    assert managed.losses == plain.losses
    found = managed.model.state_dict()
    assert found.keys() == plain.model.state_dict().keys()
    for key, value in plain.model.state_dict().items():
        assert torch.equal(found[key].to(value.dtype), value), key
    assert managed.model.patrickstar_engine.stats()["chunk_loads"]


def compared(make, use):
    """Does the same with and without an engine; the losses, the weights and the graphs are the same."""
    graphs = []
    pair = [Training(False, make), Training(True, make)]
    for training in pair:
        torch._dynamo.reset()
        counters.clear()
        use(training)
        graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert_same(*pair)
    return pair, graphs


def frozen_and_checkpointed(model):
    for block in model.blocks:
        block.left.requires_grad_(False)
    model.is_checkpointed = True


def adapted(model):
    """As adapters leave it: the input of the first block needs no gradient, which makes for more graphs."""
    frozen_and_checkpointed(model)
    model.words.requires_grad_(False)


def adapted_and_tied(model):
    """A frozen parameter in two places is one where it is recomputed with, and its attributes are there."""
    for block in model.blocks:
        block.right.weight = block.left.weight
        block.left.weight.factor = 2.0
    adapted(model)


def in_bf16(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("compile_parts", "change", "backend"),
    [
        (leaves, None, "aot_eager"),
        (in_place, in_bf16, "eager"),
        (in_place, frozen_and_checkpointed, "aot_eager"),
        (wrapped, adapted, "aot_eager"),
        (in_place, adapted_and_tied, "aot_eager"),
    ],
)
def test_a_compiled_part_is_the_graph_of_plain_torch(compile_parts, change, backend):
    """When backward has ended nothing looks into chunks, also without a collection of garbage."""

    def make():
        model = Model()
        if change is not None:
            change(model)
        compile_parts(model, backend=backend, fullgraph=True)
        return model

    def use(training):
        for _ in range(4):
            training.step()
        chunks = inside.chunks(training.model.patrickstar_engine) if training.is_managed else []
        assert not any(chunk.is_aliased for chunk in chunks if chunk.compute is not None)

    gc.disable()
    try:
        _, graphs = compared(make, use)
    finally:
        gc.enable()
    assert graphs[1] == graphs[0]
    assert graphs[0][0] > 0 == graphs[0][1], "none was cut into pieces"


def test_fullgraph_names_what_to_compile():
    """A function that calls a module, or reads the parameter of one, is no graph."""

    class Reading(Block):
        def forward(self, x):
            return self.compute(x)

        @torch.compile(backend="eager", fullgraph=True)
        def compute(self, x):
            return x + self.left(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph"):
        Training(True, lambda: Model(Reading)).step()


@pytest.mark.parametrize("compile_parts", [in_place, by_function])
def test_parts_can_be_compiled_anew_while_the_model_trains(compile_parts):
    def use(training):
        training.step()
        compile_parts(training.model, backend="eager")
        training.step()
        compile_parts(training.model, backend="aot_eager")
        training.step(2)

    compared(Model, use)


def test_functions_of_parameters_are_compiled():
    @torch.compile(backend="aot_eager")
    def penalty(weight):
        return weight.square().sum() + weight.abs().max() * weight.shape[0]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def gated(x, weight):
        return torch.sigmoid(x * weight) * x

    class Gated(Block):
        def forward(self, x):
            return super().forward(gated(x, self.scale))

    class Penalized(Model):
        """Parameters of others, while these compute and while they do not."""

        def __init__(self):
            super().__init__(Gated)

        def forward(self, words):
            return super().forward(words) + 0.1 * penalty(self.head.weight) + 0.1 * penalty(self.blocks[1].scale)

    def use(training):
        for _ in range(3):
            training.step()
            with torch.no_grad():
                training.losses += [penalty(parameter).item() for parameter in training.model.parameters()]

    compared(Penalized, use)


def test_a_model_with_compiled_parts_is_copied_and_given_back():
    def make():
        model = Model()
        in_place(model, backend="eager")
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        return model

    pair, _ = compared(make, Training.step)
    copied = copy.deepcopy(pair[1].model)
    assert all(torch.equal(*both) for both in zip(copied.parameters(), pair[0].model.parameters(), strict=True))
    pair[1].model.patrickstar_engine.detach()
    words = torch.arange(8).view(2, 4)
    assert torch.equal(pair[1].model(words), pair[0].model(words))
    assert torch.equal(copied(words), pair[0].model(words))
    assert {type(block._compiled_call_impl) for block in pair[1].model.blocks} == {
        type(block._compiled_call_impl) for block in pair[0].model.blocks
    }


# What is refused


def test_parts_in_code_of_torch_jit_are_refused():
    def replaced():
        model = Model()
        model.blocks[2].gate = torch.jit.script(model.blocks[2].gate)
        return model

    with pytest.raises(ConfigError, match=r"module 'blocks\.2\.gate' is compiled by torch\.jit"):
        initialize_engine(replaced, MOVING, adamw)
