"""Training with a trace of a copy without bytes, and without: nothing tells them apart."""

import builtins
import collections
import functools
import io
import logging
import os
import random
import sys
import threading
import types
import warnings
import weakref

import numpy
import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from support.models import make_batch, make_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.neftune import neftune_post_forward_hook

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import TraceError
from hf_patrickstar.model.live_parameter import LiveMixin
from hf_patrickstar.tracing.fake import copy_without_bytes, is_of_library
from hf_patrickstar.tracing.unobserved import unobserved

X = torch.ones(2, 4)
THIS = sys.modules[__name__]


def trace(model, *args, **kwargs):
    """Runs a copy of a model once, forward and backward; returns it."""
    with unobserved(), FakeTensorMode():
        twin, args, kwargs = copy_without_bytes((model, args, kwargs))
        output = twin(*args, **kwargs)
        loss = getattr(output, "loss", output).sum()
        if loss.requires_grad:
            loss.backward()
    return twin


def layer(before=lambda self, x: None):
    """A linear layer that does something before it computes."""

    class Doing(nn.Linear):
        def forward(self, x):
            before(self, x)
            return super().forward(x)

    torch.manual_seed(0)
    return Doing(4, 4)


def seed_all(seed):
    random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)


class Noisy(nn.Module):
    """Draws random numbers of all kinds, and counts in a buffer, an attribute and a list."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes, self.counts = 0, [], {"calls": [0]}
        self.torchs, self.numpys = torch.Generator().manual_seed(0), numpy.random.default_rng(0)

    def forward(self, x):
        self.calls += 1
        self.counts["calls"][0] += 1
        self.sizes.append(x.shape)
        self.seen += 1
        x = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        x = x + torch.rand(8) * random.random() * float(numpy.random.rand()) * float(self.numpys.random())
        self.torchs.manual_seed(self.calls)
        seed_all(self.calls)
        return self.last(x).mean()


def train(model, with_trace=False):
    seed_all(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        x = torch.randn(6, 4)
        if with_trace:
            trace(model, x)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, random.random(), numpy.random.rand(), torch.rand(3).tolist(), model.torchs.initial_seed()


# The same bits, and the same state


def test_losses_weights_buffers_counters_and_random_numbers_are_the_same():
    torch.manual_seed(0)
    plain, traced = Noisy(), Noisy()
    traced.load_state_dict(plain.state_dict())
    assert train(plain) == train(traced, with_trace=True)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, traced.state_dict()[key]), key
    assert (plain.calls, plain.sizes, plain.counts) == (traced.calls, traced.sizes, traced.counts)


class Containers(nn.Linear):
    """Refers to itself through containers of all kinds."""

    def __init__(self):
        super().__init__(4, 4)
        self.cyclic = [self]
        self.cyclic.append(self.cyclic)
        self.kinds = collections.defaultdict(list, {"own": self})
        self.call = functools.partial(self.forward, input=self.cyclic)
        self.call.owner = self
        self.last = collections.deque([self], maxlen=3)
        self.functions = [nn.functional.gelu, torch.relu, warnings.warn, torch.nn.utils.clip_grad_norm_]


def test_containers_are_copied_with_what_they_refer_to():
    model = Containers()
    with FakeTensorMode():
        copied = copy_without_bytes(model)
    assert copied.cyclic is not model.cyclic
    refer = copied.cyclic[0], copied.kinds["own"], copied.call.func.__self__, copied.call.owner, copied.last[0]
    assert all(found is copied for found in refer)
    assert copied.cyclic[1] is copied.call.keywords["input"] is copied.cyclic
    assert (copied.kinds["new"], "new" in model.kinds) == ([], False)
    assert copied.last.maxlen == 3
    assert copied.functions == model.functions, "a function without state is the same"


# Hooks


def test_hooks_of_the_user_see_real_tensors_alone():
    seen, model = [], nn.Sequential(layer(), nn.Linear(4, 1))

    def look(*args):
        seen.append(type(args[-1][0] if isinstance(args[-1], tuple) else args[-1]))

    model[0].register_forward_hook(look)
    model[0].register_forward_pre_hook(functools.partial(look))
    model[0].register_full_backward_hook(look)
    model[0].register_full_backward_pre_hook(look)
    model[0].weight.register_hook(look)
    model[0].weight.register_post_accumulate_grad_hook(look)
    with torch.nn.modules.module.register_module_forward_hook(look):
        twin = trace(model, X)
        assert seen == []
        model(X.clone().requires_grad_()).sum().backward()
    for hooks in (twin[0]._forward_hooks, twin[0]._backward_hooks, twin[0].weight._backward_hooks):
        assert not hooks
    assert seen
    assert not {kind for kind in seen if issubclass(kind, FakeTensor)}
    assert len(model[0]._forward_hooks) == len(model[0]._backward_hooks) == 1


def own(module, args, output):
    return output


# Methods that were replaced


def wrapped(model):
    forward = model.forward

    @functools.wraps(forward)
    def call(*args):
        return forward(*args)

    return call


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: functools.partial(Noisy.forward, model),
        lambda model: wrapped(types.SimpleNamespace(forward=wrapped(model))),
        lambda model: types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model),
        lambda model: (lambda reference: lambda x: Noisy.forward(reference(), x))(weakref.ref(model)),
    ],
)
def test_a_replaced_forward_runs_the_copy(replace):
    model = Noisy()
    model.forward = replace(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin = trace(model, torch.ones(6, 4))
    assert (model.calls, twin.calls) == (0, 1)
    for key, value in model.state_dict().items():
        assert torch.equal(before[key], value), key
    assert model(torch.ones(6, 4)).isfinite()


# What the user's code changes outside of the model

COUNTS = {"calls": 0}
CALLS = 0


@functools.lru_cache
def mask_of(size):
    return torch.ones(size)


class Careless(nn.Linear):
    @torch.enable_grad()
    def forward(self, x):
        global CALLS, ADDED
        CALLS += 1
        ADDED = x
        COUNTS["calls"] += 1
        COUNTS[x.shape] = x
        Careless.added = x
        note(x)
        return super().forward(x * mask_of(x.shape[-1]))


def note(x, seen=[]):  # noqa: B006
    seen.append(x)
    note.last = x


def test_global_variables_classes_and_caches_are_as_they_were():
    before = mask_of(3)
    trace(Careless(4, 4), X)
    assert (COUNTS, CALLS, vars(note)) == ({"calls": 0}, 0, {})
    assert note.__defaults__ == ([],)
    assert "ADDED" not in globals()
    assert not hasattr(Careless, "added")
    assert type(mask_of(4)) is torch.Tensor
    assert mask_of(3) is before


class Tally:
    """Its code, which is no module's, counts in a global variable and in its class."""

    calls, seen = 0, []

    def __call__(self):
        global TALLIED
        TALLIED += 1
        Tally.calls += 1
        self.seen.append(1)

    @property
    def last(self):
        return tallied()

    @staticmethod
    def note():
        return tallied()


def tallied():
    global TALLIED
    TALLIED += 1


TALLIED = 0
MODULE = types.ModuleType("user_module")
exec("count = 0\ndef call():\n    global count\n    count += 1\n", vars(MODULE))
WHERE = ["global", "closure", "class", "attribute", "default", "attribute of a function"]
OBJECTS = {
    "torch": (
        torch.Generator().manual_seed(0),
        lambda it: torch.rand(3, generator=it),
        lambda it: it.get_state().tolist(),
    ),
    "local": (threading.local(), lambda it: vars(it).update(n=vars(it).get("n", 0) + 1), lambda it: dict(vars(it))),
    "tensor": (torch.zeros(2), lambda it: it.add_(1), lambda it: it.tolist()),
    "layer": (nn.BatchNorm1d(4), lambda it: it(X), lambda it: it.running_mean.tolist()),
    "nested": ([{"deep": [0]}], lambda it: it[0]["deep"].append(1), repr),
    "lock": (threading.Lock(), lambda it: it.release() if it.locked() else it.acquire(), lambda it: it.locked()),
    "module": (
        MODULE,
        lambda it: (it.call(), setattr(it, "other", it.count)),
        lambda it: (it.count, vars(it).get("other")),
    ),
    "class": (Tally, lambda it: (it.note(), it().last, it()()), lambda it: (it.calls, it.seen, TALLIED)),
    "bound method": (random.Random(0).random, lambda it: it(), lambda it: it.__self__.getstate()),
}
CASES = [(kind, WHERE[number % 6]) for number, kind in enumerate(OBJECTS)]
GLOBAL = CHANGE = None


@pytest.mark.parametrize(("kind", "where"), [*CASES, ("tensor", "global"), ("module", "global")])
def test_what_a_forward_changes_is_as_it_was(kind, where, monkeypatch):
    value, change, look = OBJECTS[kind]
    if kind == "module" and where == "attribute":
        value = types.SimpleNamespace(module=value)
        change, look = (lambda it, call=change: call(it.module)), (lambda it, call=look: call(it.module))
    monkeypatch.setattr(THIS, "GLOBAL", value)
    monkeypatch.setattr(THIS, "CHANGE", change)

    class Changing(nn.Linear):
        own = types.SimpleNamespace(value=value)

        def forward(self, x, given=value):
            found = {
                "global": lambda: GLOBAL,
                "closure": lambda: value,
                "class": lambda: self.own.value,
                "attribute": lambda: self.value,
                "default": lambda: given,
                "attribute of a function": lambda: forward_of.value,
            }[where]()
            CHANGE(found)
            return super().forward(x)

    def forward_of():
        pass

    forward_of.value = value
    model = Changing(4, 4)
    vars(model)["value"] = value
    before = look(value)
    trace(model, X)
    assert look(value) == before
    assert Changing.own.value is value
    assert {"global": GLOBAL, "attribute": model.value}.get(where, value) is value
    model(X)
    assert look(value) != before


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.open("w"),
        lambda path: open(path, mode="r+"),  # noqa: SIM115
        lambda path: os.open(path, os.O_WRONLY | os.O_APPEND),
    ],
)
def test_a_forward_that_writes_to_a_file_is_refused(write, tmp_path):
    def read_and_write(self, x):
        with open(path) as file:
            assert path.read_text() == file.read() == "kept"
        write(path)

    path = tmp_path / "log"
    path.write_text("kept")
    with pytest.raises(TraceError, match="opens a file to write to it"):
        trace(layer(read_and_write), X)
    assert path.read_text() == "kept"
    with unobserved():  # another thread may write
        thread = threading.Thread(target=path.write_text, args=("written",))
        thread.start()
        thread.join()
    assert path.read_text() == "written"


def settings():
    return (
        *(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
        *(torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()),
        *(torch.is_autocast_cache_enabled(), dict(os.environ)),
    )


def test_settings_of_torch_and_the_environment_are_as_they_were(monkeypatch):
    class Setting(nn.Linear):
        def forward(self, x):
            result = super().forward(x)
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            torch.set_grad_enabled(False)
            torch.set_float32_matmul_precision("medium")
            torch.backends.cudnn.benchmark = True
            torch.autograd.set_detect_anomaly(True)
            torch.set_autocast_cache_enabled(True)
            os.environ["ADDED"] = os.environ["CHANGED"] = "1"
            del os.environ["REMOVED"]
            return result

    monkeypatch.setenv("CHANGED", "0")
    monkeypatch.setenv("REMOVED", "0")
    before = settings()
    with unobserved(), FakeTensorMode():
        assert not torch.is_autocast_cache_enabled()
        twin, x = copy_without_bytes((Setting(4, 4), X))
        twin(x)
    assert settings() == before


# What is shown


class Loud(nn.Linear):
    """Warns, logs and prints."""

    def forward(self, x):
        warnings.warn("loud", stacklevel=1)
        logging.getLogger("loud").warning("logged")
        logging.getLogger("loud").warning_once("logged once")
        print("out")
        print("err", file=sys.stderr)
        print("raw", file=sys.__stderr__)
        return super().forward(x)


def test_nothing_is_shown_or_counts_as_shown(capsys, caplog, monkeypatch):
    found, raw = [], io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", raw)
    for with_trace in (False, True):
        logging.Logger.warning_once.cache_clear()
        globals().pop("__warningregistry__", None)
        model = Loud(4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda *args, **_: found[-1].append(str(args[0]))
            found.append([])
            for _ in range(2):
                if with_trace:
                    trace(model, X)
                    assert capsys.readouterr() == ("", "")
                caplog.clear()
                model(X)
                found[-1] += [caplog.messages[:], *capsys.readouterr()]
    assert found[0] == found[1]
    assert found[0] == ["loud", ["logged", "logged once"], "out\n", "err\n", ["logged"], "out\n", "err\n"]
    assert raw.getvalue() == "raw\n" * 4


def test_warnings_of_other_threads_are_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with unobserved():
            warnings.warn("of this thread", stacklevel=1)
            other = threading.Thread(target=warnings.warn, args=["of another one"])
            other.start()
            other.join()
    assert [str(found.message) for found in shown] == ["of another one"]


# Modes of the user


def test_modes_and_saved_tensors_hooks_of_the_user_see_nothing():
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class SeeFunctions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def pack(tensor):
        seen.append(tensor)
        return tensor

    model = layer()
    with See(), SeeFunctions(), torch.autograd.graph.saved_tensors_hooks(pack, pack):
        trace(model, X)
        assert seen == []
        model(X.clone().requires_grad_()).sum().backward()
    assert any(isinstance(value, torch.Tensor) for value in seen)
    assert {torch.ops.aten.ones_like.default, torch.nn.functional.linear} <= {each for each in seen if callable(each)}
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with unobserved(), torch.autograd.graph.save_on_cpu():
            pass
        with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.save_on_cpu():
            pass


def test_a_compiled_model_is_not_compiled():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    model, other = (Model(nn.Linear(4, 4)) for _ in range(2))
    model = torch.compile(model, backend=backend)
    other.compile(backend=backend)
    for compiled in (model, other):
        trace(compiled, X)
        assert calls == []
        compiled(X)
        trace(compiled, X)
        assert len(calls) == 1
        calls.clear()
        torch._dynamo.reset()
    with unobserved():
        torch.compile(lambda x: x + 1, backend=backend)(X)
    assert calls == []


# What cannot be copied


class Owner:
    def __del__(self):
        pass


LOG = None


def range_of():
    yield from range(3)


def with_attribute(value):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].log = value
    return model


def with_engine():
    model = nn.Linear(4, 4)
    model.helpers = [PatrickStarEngine(model, {"chunk_numel": 64}, torch.optim.AdamW(model.parameters()))]
    return model


REFUSED = {
    "an open file": (lambda: with_attribute(LOG), r"attribute 'log' of 1 \(Linear\) cannot be copied"),
    "an input": (lambda: layer(), "an input of the model cannot be copied"),
    "a global variable": (
        lambda: layer(lambda self, x: next(GLOBAL)),
        "'GLOBAL', a global variable of test_unobserved",
    ),
    "an owner": (lambda: with_attribute([Owner()]), "class Owner has a __del__"),
    "a large array": (lambda: with_attribute(numpy.ones(11)), "array of numpy of 88 bytes"),
    "the engine": (with_engine, "PatrickStarEngine"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_copy_is_named(name, tmp_path, monkeypatch):
    make, message = REFUSED[name]
    monkeypatch.setattr("hf_patrickstar.tracing.fake._MOST_ARRAY_NBYTES", 80)
    monkeypatch.setattr(THIS, "GLOBAL", range_of())
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(THIS, "LOG", log)
        model = make()
        with pytest.raises(TraceError, match=message):
            trace(model, *([X] if name != "an input" else [range_of()]))
        assert next(GLOBAL) == 0
    assert (tmp_path / "log").read_text() == ""


def test_under_torch_func_it_is_refused():
    def loss(x):
        with unobserved():
            return x.sum()

    with pytest.raises(TraceError, match=r"torch\.func"):
        torch.func.grad(loss)(X)


def replaced():
    """What is replaced inside."""
    functions = builtins.open, io.open, os.open, torch.Tensor.register_hook, logging.Logger._log, sys.stdout
    return *functions, list(warnings.filters), torch.is_warn_always_enabled()


def test_everything_is_as_it_was_after_an_error():
    before = replaced()
    with pytest.raises(KeyError), unobserved():
        raise KeyError
    assert replaced() == before


# With an engine


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("make", "batch"),
    [(lambda: make_model("gpt2"), make_batch("gpt2")), (parametrized, {"input": X})],
    ids=["gpt2", "parametrized"],
)
def test_no_chunk_moves_for_a_model_with_an_engine(make, batch):
    def counts():
        return {name: value for name, value in engine.stats().items() if isinstance(value, int)}

    model = make()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    config = {"chunk_budget": 40_000, "chunk_numel": 64, "debug_evict_all": True}
    engine = PatrickStarEngine(model, config, optimizer)
    before = counts()
    twin = trace(model, **batch)
    assert counts() == before
    assert not any(isinstance(parameter, LiveMixin) for parameter in twin.parameters())
    assert all((parameter.grad is not None) is parameter.requires_grad for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    for module in twin.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not {"patrickstar_engine", "backward", "_apply", "__reduce_ex__", "zero_grad"} & vars(module).keys()
    with torch.no_grad():
        twin = trace(model.eval(), **batch)
    assert not twin.training
    assert all(parameter.grad is None for parameter in twin.parameters())
    engine.detach()


def test_the_copy_has_types_shapes_strides_flags_and_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    model[1].train()
    model[0].bias.requires_grad_(False)
    model[2].weight = model[0].weight
    model.register_buffer("mask", torch.ones(4))
    inputs = (X, model.mask, [X, torch.zeros(3), torch.ones(4, 2).t(), torch.ones(1, 4).expand(3, 4)])
    with FakeTensorMode():
        twin, (x, mask, copied) = copy_without_bytes((model, inputs), shapes={3: (9, 5)})
    assert {(parameter.dtype, type(parameter)) for parameter in twin.parameters()} == {(torch.float32, FakeTensor)}
    assert (twin.training, twin[0].training, twin[1].training) == (False, False, True)
    assert [parameter.requires_grad for parameter in twin[0].parameters()] == [True, False]
    assert (twin[0].weight is twin[2].weight, x is copied[0], mask is twin.mask) == (True, True, True)
    assert [tensor.shape for tensor in copied] == [(2, 4), (9, 5), (2, 4), (3, 4)]
    assert [tensor.stride() for tensor in copied[2:]] == [(1, 2), (0, 1)]
    assert model[0].weight.dtype is torch.float32


@functools.wraps(neftune_post_forward_hook)
def disguised(*args):
    return neftune_post_forward_hook(*args)


@pytest.mark.parametrize(
    ("wrap", "of_library", "of_user"),
    [
        (lambda hook: hook, neftune_post_forward_hook, own),
        (functools.partial, neftune_post_forward_hook, own),
        (lambda hook: hook, nn.Linear(1, 1).forward, Noisy().forward),
        (lambda hook: hook, neftune_post_forward_hook, disguised),
        (lambda hook: hook, neftune_post_forward_hook, [].append),
    ],
)
def test_a_hook_is_judged_by_all_that_it_wraps(wrap, of_library, of_user):
    assert (is_of_library(wrap(of_library)), is_of_library(wrap(of_user))) == (True, False)
