"""Small models in chunks beside their plain twins: the same code runs on both, and what it finds must be the same bits.

The tests of this folder know of the package what its users know: the engine, its optimizer, its settings, events,
errors and statistics. They say what must be true, never who calls whom.
"""

import contextlib
import copy
import functools
import inspect
import threading

import torch
from torch import nn

from hf_patrickstar import PatrickStarEngine

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


def clip(model, optimizer, max_norm=0.5, norm_type=2.0, part=None):
    """The engine's clipping for ours, that of torch for the twin."""
    parameters = list((part or model).parameters())
    if hasattr(model, "patrickstar_engine"):
        return optimizer.clip_grad_norm_(parameters, max_norm, norm_type)
    parameters = optimizer.masters if isinstance(optimizer, Masters) else parameters
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, **{"lr": 1e-2, "momentum": 0.9, **settings})


def config_of(budget, dtype="fp32", numel=CHUNK_NUMEL, chunks=3, **settings):
    """Settings under which everything stays on the device, three chunks have room there, or none stays unused."""
    config = {"chunk_numel": numel, "dtype": dtype if dtype in DTYPES else "auto", "autocast": False, "keep_fp32": []}
    if budget != "resident":
        config |= {"chunk_budget": chunks * numel * (2 if dtype == "bf16" else 4), "placement": "host"}
    if budget == "evicting":
        config |= {"debug_evict_all": True}
    return {**config, **settings}


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make(factory, seed=0):
    """A model with the values that this seed gives."""
    torch.manual_seed(seed)
    return factory()


def engine_of(model, budget="moving", make_optimizer=adamw, *, dtype="fp32", settings=None, **kwargs):
    """An engine over the CPU tier; its optimizer has all that is trainable, ``None`` makes it without one."""
    optimizer = None if make_optimizer is None else make_optimizer(trainable(model))
    return PatrickStarEngine(model, config_of(budget, dtype, **(settings or {})), optimizer, device="cpu", **kwargs)


class Masters:
    """Training in 16 bits as it must be, in a few lines of plain torch: the optimizer sees fp32 masters alone.

    The gradients of one micro-batch are 16-bit; several are summed in fp32.

    Args:
        model: It is rounded.
        make_optimizer: Makes torch's optimizer of a list of parameters.
        dtype: The type to round to.
    """

    def __init__(self, model, make_optimizer, dtype):
        self._parameters = trainable(model)
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in self._parameters]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda parameter, master=master: self._add(parameter, master))
        self.inner = make_optimizer(self.masters)

    @staticmethod
    def _add(parameter, master):
        gradient, parameter.grad = parameter.grad.float(), None
        master.grad = gradient if master.grad is None else master.grad + gradient

    def clip_grad_norm_(self, max_norm):
        return nn.utils.clip_grad_norm_(self.masters, max_norm)

    def step(self):
        self.inner.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self.masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self):
        self.inner.zero_grad()

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Pair:
    """A plain model and one in chunks, each with its optimizer.

    Args:
        factory: Makes the model; called twice.
        budget: See ``config_of``.
        make_optimizer: Makes torch's optimizer of a list of parameters.
        dtype: What the engine computes in; in 16 bits the plain twin does so too, with ``Masters``.
        settings: Settings of the engine beside those of the budget.
        prepare: Called with either model before anything is made of it.
        **kwargs: Passed to the engine.
    """

    def __init__(
        self,
        factory=Stack,
        budget="moving",
        make_optimizer=adamw,
        *,
        dtype="fp32",
        settings=None,
        prepare=None,
        **kwargs,
    ):
        self.plain, self.ours = make(factory), make(factory)
        for model in (self.plain, self.ours):
            if prepare is not None:
                prepare(model)
        if dtype not in DTYPES or dtype == "fp32":
            self.plain_optimizer = make_optimizer(trainable(self.plain))
        else:
            self.plain_optimizer = Masters(self.plain, make_optimizer, DTYPES[dtype])
        self.engine = engine_of(self.ours, budget, make_optimizer, dtype=dtype, settings=settings, **kwargs)
        self.optimizer = self.engine.optimizer
        self.moves = budget != "resident"

    def __iter__(self):
        yield self.plain, self.plain_optimizer
        yield self.ours, self.optimizer

    def both(self, function, *args):
        """Calls ``function(model, optimizer, *args)`` on both; what it returns must be the same. Returns ours."""
        results = []
        for model, optimizer in self:
            torch.manual_seed(3)
            results.append(function(model, optimizer, *args))
        assert_same(*results)
        return results[1]

    def train(self, steps=3, first=0, micro=1, loss=loss_of, max_norms=None, norm_type=2.0):
        """Steps of an ordinary loop on both; losses and norms are the same, and so is what they leave. Returns them."""

        def run(model, optimizer):
            found = []
            for step in range(first, first + steps):
                for part in range(micro):
                    value = loss(model, 10 * step + part)
                    value.backward()
                    found.append(value.detach().clone())
                if max_norms is not None:
                    found.append(clip(model, optimizer, max_norms[step % len(max_norms)], norm_type).clone())
                optimizer.step()
                optimizer.zero_grad()
            return found

        return self.check(run)

    def step(self):
        """A step of both optimizers, which leaves the same."""
        self.check(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))

    def backward(self, seed=0, loss=loss_of):
        """A backward on both."""
        self.both(lambda model, _: (lambda value: (value.backward(), value.detach().clone())[1])(loss(model, seed)))

    def check(self, function=None, *args):
        """Values of parameters and buffers, and the optimizer's states, are the same to the last bit.

        Args:
            function: Called on both before that, as by ``both``; what it returns for ours is returned.
            *args: For the function.
        """
        found = None if function is None else self.both(function, *args)
        if isinstance(self.plain_optimizer, Masters):
            ours = self.ours.state_dict()
            for parameter, master in zip(trainable(self.plain), self.plain_optimizer.masters, strict=True):
                name = next(name for name, other in self.plain.named_parameters() if other is parameter)
                assert_same(master.detach(), ours[name], name)
            self.both(lambda model, _: [copied(parameter) for parameter in model.parameters()])
        else:
            assert_same_values(self.plain, self.ours)
        if self.optimizer is not None:
            assert_same_states(self.plain_optimizer, self.optimizer)
        return found

    def check_gradients(self):
        """Gradients are the same, ``None`` where torch has none."""
        self.both(lambda model, _: gradients_of(model))


def alike(factory=Stack, make_optimizer=adamw, *, then=None, **settings):
    """Makes a test, at every budget, of code that does the same to a plain model and to one in chunks.

    Args:
        factory: As for ``Pair``; or the function ``(model, optimizer)`` itself, with parameters of pytest after that.
        make_optimizer: As for ``Pair``.
        then: How many steps follow in place of a comparison of what it leaves.
        **settings: As for ``Pair``.
    """
    if inspect.isfunction(factory) and next(iter(inspect.signature(factory).parameters), "") == "model":
        return alike()(factory)

    def decorate(run):
        @functools.wraps(run)
        def test(budget, **kwargs):
            pair = Pair(factory, budget, make_optimizer, **settings)
            pair.both(functools.partial(run, **kwargs))
            if then is None:
                pair.check()
            elif then:
                pair.train(then)

        names = ["budget", *list(inspect.signature(run).parameters)[2:]]
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        return test

    return decorate


def evict(model):
    """What large activations do at any moment, of a model in chunks: every copy that may leave the device leaves it."""
    if hasattr(model, "patrickstar_engine"):
        model.patrickstar_engine.manager.executor.evict_unused()


def copied(tensor):
    return None if tensor is None else tensor.detach().clone()


def gradients_of(model):
    return [copied(parameter.grad) for parameter in model.parameters()]


def in_threads(*functions):
    """Calls each function in a thread of its own, waits for all, and raises what the first of them raised."""
    errors = []

    def work(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def beside(function, *args):
    """Calls a function in a thread again and again while the block runs; raises what it raised."""
    has_ended, has_begun, errors = threading.Event(), threading.Event(), []

    def work():
        try:
            while not has_ended.is_set():
                function(*args)
                has_begun.set()
        except BaseException as error:
            errors.append(error)
        finally:
            has_begun.set()

    thread = threading.Thread(target=work, name="reader", daemon=True)
    thread.start()
    assert has_begun.wait(30)
    try:
        yield
    finally:
        has_ended.set()
        thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@torch.no_grad()
def read_parameters(model):
    for parameter in model.parameters():
        assert not parameter.norm().isnan()
        assert not parameter.data.isnan().any()


@torch.no_grad()
def read_state(model):
    assert not any(value.isnan().any() for value in model.state_dict().values())


def same_bits(left, right):
    """Whether two tensors are the same, NaN where NaN is."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def assert_same(left, right, where="result"):
    """Compares results with whatever is in them."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), where
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert same_bits(left.detach(), right.detach()), f"{where} differs"
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        assert left == right or left is right or (left != left and right != right), (
            f"{where}: {left!r} became {right!r}"
        )


def assert_same_values(plain, ours):
    left, right = plain.state_dict(), ours.state_dict()
    assert_same({key: value.clone() for key, value in left.items()}, {key: right[key].clone() for key in right})


def assert_same_states(plain, ours):
    left, right = plain.state_dict(), ours.state_dict()
    assert_same(left["param_groups"], right["param_groups"])
    assert sorted(left["state"]) == sorted(right["state"])
    for key, state in left["state"].items():
        for name, value in state.items():
            assert_same(value, right["state"][key][name], f"state {key} {name}")


def values_of(model):
    """Copies of all values by name."""
    return {key: value.clone() for key, value in copy.copy(model.state_dict()).items()}
