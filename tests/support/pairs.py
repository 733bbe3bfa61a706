"""A plain model and one in chunks, side by side: the same code runs on both."""

import functools
import inspect

import torch
from support import inside
from support.same import assert_same, assert_same_states, assert_same_values, copied, gradients_of
from support.small import CHUNK_NUMEL, DTYPES, Stack, adamw, loss_of, make, trainable
from torch import nn

from hf_patrickstar import PatrickStarEngine


def clip(model, optimizer, max_norm=0.5, norm_type=2.0, part=None):
    """The engine's clipping for ours, that of torch for the twin."""
    parameters = list((part or model).parameters())
    if hasattr(model, "patrickstar_engine"):
        return optimizer.clip_grad_norm_(parameters, max_norm, norm_type)
    parameters = optimizer.masters if isinstance(optimizer, Masters) else parameters
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def config_of(budget, dtype="fp32", numel=CHUNK_NUMEL, chunks=3, **settings):
    """Settings under which everything stays on the device, three chunks have room there, or none stays unused."""
    config = {"chunk_numel": numel, "dtype": dtype if dtype in DTYPES else "auto", "autocast": False, "keep_fp32": []}
    if budget != "resident":
        config |= {"chunk_budget": chunks * numel * (2 if dtype == "bf16" else 4), "placement": "host"}
    if budget == "evicting":
        config |= {"debug_evict_all": True}
    return {**config, **settings}


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
                assert_same(master.detach(), copied(self.ours.get_parameter(name)), name)
        else:
            assert_same_values(self.plain, self.ours)
        if self.optimizer is not None:
            assert_same_states(self.plain_optimizer, self.optimizer)
        return found

    def check_gradients(self):
        """Gradients are the same, ``None`` where torch has none; in 16 bits they are those of the masters."""
        if isinstance(self.plain_optimizer, Masters):
            expected = [master.grad for master in self.plain_optimizer.masters]
            assert_same(expected, [parameter.grad.float() for parameter in trainable(self.ours)])
        else:
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
        inside.evict_unused(model.patrickstar_engine)
