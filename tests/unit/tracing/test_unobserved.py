"""Training with a trace of a copy without bytes, and without: nothing tells them apart."""

import argparse
import builtins
import collections
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import logging
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref

import numpy
import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from models import make_batch, make_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.neftune import neftune_post_forward_hook

from hf_patrickstar import PatrickStarEngine, initialize_engine
from hf_patrickstar.errors import TraceError
from hf_patrickstar.runtime.live_parameter import LiveMixin
from hf_patrickstar.tracing.twins import copy_without_bytes, is_of_library
from hf_patrickstar.tracing.unobserved import unobserved

X = torch.ones(2, 4)


def trace(model, *args, **kwargs):
    """Runs a copy of a model once, forward and backward; returns it."""
    with unobserved(model), FakeTensorMode():
        twin, args, kwargs = copy_without_bytes((model, args, kwargs))
        output = twin(*args, **kwargs)
        loss = getattr(output, "loss", output).sum()
        if loss.requires_grad:
            loss.backward()
    return twin


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


class Noisy(nn.Module):
    """Draws random numbers of all kinds, and counts in a buffer, an attribute and a list."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes, self.counts = 0, [], {"calls": [0]}

    def forward(self, x):
        self.calls += 1
        self.counts["calls"][0] += 1
        self.sizes.append(x.shape)
        self.seen += 1
        x = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        x = x + torch.rand(8) * random.random() * float(numpy.random.rand())
        return self.last(x).mean()


def train(model, num_steps=2, with_trace=False):
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(6, 4)
        if with_trace:
            trace(model, x)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# The same bits, and the same state


def test_losses_weights_buffers_and_counters_are_the_same():
    torch.manual_seed(0)
    plain, traced = Noisy(), Noisy()
    traced.load_state_dict(plain.state_dict())
    assert train(plain) == train(traced, with_trace=True)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, traced.state_dict()[key]), key
    assert (plain.calls, plain.sizes, plain.counts) == (traced.calls, traced.sizes, traced.counts)
    assert traced.norm.num_batches_tracked == 2


def test_seeds_that_a_forward_sets_are_set_back():
    class Seeding(nn.Linear):
        def forward(self, x):
            random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
            return super().forward(x)

    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    expected = random.random(), numpy.random.rand(), torch.rand(3).tolist()
    model = Seeding(4, 4)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    trace(model, X)
    assert (random.random(), numpy.random.rand(), torch.rand(3).tolist()) == expected


def test_a_generator_of_the_model_is_not_advanced():
    class Own(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.torchs, self.numpys = torch.Generator().manual_seed(0), numpy.random.default_rng(0)

        def forward(self, x):
            self.torchs.manual_seed(8)
            return super().forward(x) * float(self.numpys.random())

    model = Own()
    trace(model, X)
    assert model.torchs.initial_seed() == 0
    assert model.numpys.random() == numpy.random.default_rng(0).random()


def test_the_copy_has_types_shapes_and_flags():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].train()
    model[0].bias.requires_grad_(False)
    with FakeTensorMode():
        inputs = (X, [X, torch.zeros(3)])
        twin, (x, others) = copy_without_bytes((model, inputs), dtype_of=lambda _: torch.bfloat16, shapes={2: (9, 5)})
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    assert all(isinstance(parameter, (nn.Parameter, FakeTensor)) for parameter in twin.parameters())
    assert (twin.training, twin[0].training, twin[1].training) == (False, False, True)
    assert [parameter.requires_grad for parameter in twin[0].parameters()] == [True, False]
    assert x is others[0], "one tensor"
    assert [tensor.shape for tensor in others] == [(2, 4), (9, 5)]
    assert model[0].weight.dtype is torch.float32


def test_tied_parameters_are_tied_and_a_buffer_among_the_inputs_is_that_of_the_copy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("mask", torch.ones(4))
    with FakeTensorMode():
        twin, (mask,) = copy_without_bytes((model, (model.mask,)))
    assert twin[0].weight is twin[1].weight
    assert mask is twin.mask


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: list


def test_inputs_are_copied_and_not_changed():
    class Popping(nn.Linear):
        def forward(self, batch, cache, **kwargs):
            batch.names.append("seen")
            cache.append(batch.x)
            return super().forward(kwargs.pop("options").pop("scale") * batch.x)

    batch, cache, options = Batch(X, ["a"]), [], {"scale": 2}
    trace(Popping(4, 4), batch, cache, options=options)
    assert (batch.names, cache, options) == (["a"], [], {"scale": 2})
    assert batch.x is X


def test_strides_of_inputs_are_kept():
    with FakeTensorMode():
        copied = copy_without_bytes([torch.ones(4, 2).t(), torch.ones(1, 4).expand(3, 4)])
    assert [tensor.stride() for tensor in copied] == [(1, 2), (0, 1)]


# Hooks


def test_hooks_of_the_user_see_real_tensors_alone():
    seen = []
    model = nn.Sequential(linear(), nn.Linear(4, 1))

    def look(*args):
        seen.append(type(args[-1][0] if isinstance(args[-1], tuple) else args[-1]))

    def look_at(gradient):
        seen.append(type(gradient))

    model[0].register_forward_hook(look)
    model[0].register_forward_pre_hook(functools.partial(look))
    model[0].register_full_backward_hook(look)
    model[0].register_full_backward_pre_hook(look)
    model[0].weight.register_hook(look_at)
    model[0].weight.register_post_accumulate_grad_hook(look_at)
    with torch.nn.modules.module.register_module_forward_hook(look):
        twin = trace(model, X)
        assert seen == []
        model(X).sum().backward()
    assert not twin[0]._forward_hooks
    assert not twin[0]._backward_hooks
    assert not twin[0].weight._backward_hooks
    assert seen
    assert not {kind for kind in seen if issubclass(kind, FakeTensor)}
    assert len(model[0]._forward_hooks) == len(model[0]._backward_hooks) == 1


def test_hooks_of_libraries_are_on_the_copy():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    model[0].neftune_noise_alpha = 5.0
    model[0].register_forward_hook(neftune_post_forward_hook)
    nn.utils.parametrizations.weight_norm(model[1])
    operators = collections.Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with unobserved(model), FakeTensorMode():
        twin, tokens = copy_without_bytes((model, torch.zeros(2, 3, dtype=torch.long)))
        with Count():
            twin(tokens)
    assert operators["uniform_"] == operators["_weight_norm_interface"] == 1
    assert twin[1].parametrizations.weight.original1 is not model[1].parametrizations.weight.original1


def test_a_hook_is_judged_by_all_that_it_wraps():
    def own(module, args, output):
        return output

    @functools.wraps(neftune_post_forward_hook)
    def disguised(*args):
        return neftune_post_forward_hook(*args)

    assert is_of_library(neftune_post_forward_hook)
    assert is_of_library(functools.partial(neftune_post_forward_hook))
    assert is_of_library(torch.no_grad()(neftune_post_forward_hook))
    assert is_of_library(nn.Linear(1, 1).forward)
    for hook in (own, functools.partial(own), torch.no_grad()(own), disguised, print, [].append, Noisy().forward):
        assert not is_of_library(hook), hook


# Methods that were replaced


def running(function):
    """A module whose forward leads to what a function makes of its own method."""
    model = Noisy()
    model.forward = function(model)
    return model


def wrapped(model):
    forward = model.forward

    @functools.wraps(forward)
    def call(*args):
        return forward(*args)

    return call


class Caller:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: model.forward,
        lambda model: types.MethodType(Noisy.forward, model),
        lambda model: functools.partial(Noisy.forward, model),
        wrapped,
        lambda model: wrapped(types.SimpleNamespace(forward=wrapped(model))),
        lambda model: convert_outputs_to_fp32(model.forward),
        lambda model: types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model),
        lambda model: torch.autocast("cpu", torch.bfloat16)(model.forward),
        lambda model: lambda x, forward=model.forward: forward(x),
        lambda model: Caller(model.forward),
        lambda model: Caller([model.forward].__getitem__)(0),
        lambda model: (lambda reference: lambda x: Noisy.forward(reference(), x))(weakref.ref(model)),
    ],
)
def test_a_replaced_forward_runs_the_copy(replace):
    model = running(replace)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin = trace(model, torch.ones(6, 4))
    assert (model.calls, twin.calls) == (0, 1)
    for key, value in model.state_dict().items():
        assert torch.equal(before[key], value), key
    assert model(torch.ones(6, 4)).isfinite()


def test_a_proxy_of_the_model_is_refused():
    model = Noisy()
    model.me = weakref.proxy(model)
    with pytest.raises(TraceError, match=r"weakref.proxy"):
        trace(model, torch.ones(6, 4))


def test_what_a_closure_keeps_is_copied():
    seen, model = [], linear()
    forward, note = model.forward, seen.append
    model.forward = lambda x: (seen.append(x), note(x), forward(x))[-1]
    trace(model, X)
    assert seen == []


def test_a_method_of_a_list_is_that_of_the_copied_list():
    class Noting(nn.Linear):
        def forward(self, x):
            self.note(x)
            return super().forward(x)

    seen, model = [], Noting(4, 4)
    model.note = seen.append
    trace(model, X)
    assert seen == []


def test_a_function_without_state_is_the_same():
    model = nn.Module()
    model.functions = [nn.functional.gelu, torch.relu, warnings.warn, torch.nn.utils.clip_grad_norm_]
    with FakeTensorMode():
        assert copy_without_bytes(model).functions == model.functions


# What the user's code changes outside of the model

COUNTS = {"calls": 0, "tensors": []}
CALLS = 0


@functools.lru_cache
def mask_of(size):
    return torch.ones(size)


class Careless(nn.Linear):
    calls = 0

    def forward(self, x):
        global CALLS, ADDED
        CALLS += 1
        ADDED = x
        COUNTS["calls"] += 1
        COUNTS["tensors"].append(x)
        COUNTS[x.shape] = x
        type(self).calls += 1
        Careless.added = x
        note(x)
        return super().forward(x * mask_of(x.shape[-1]))


def note(x, seen=[]):  # noqa: B006
    seen.append(x)
    note.last = x


def test_global_variables_classes_and_caches_are_as_they_were():
    trace(Careless(4, 4), X)
    assert (COUNTS, CALLS, Careless.calls, vars(note)) == ({"calls": 0, "tensors": []}, 0, 0, {})
    assert note.__defaults__ == ([],)
    assert "ADDED" not in globals()
    assert not hasattr(Careless, "added")
    assert type(mask_of(4)) is torch.Tensor


def test_closures_of_classes_are_as_they_were():
    seen, calls = [], 0

    class Enclosed(nn.Linear):
        @torch.enable_grad()
        def forward(self, x):
            nonlocal calls
            calls += 1
            seen.append(x)
            return super().forward(x)

    trace(Enclosed(4, 4), X)
    assert (seen, calls) == ([], 0)


# Objects of all kinds, which a forward changes


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


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
OBJECTS = {
    "random": (random.Random(0), lambda it: it.random(), random.Random.getstate),
    "numpy": (numpy.random.default_rng(0), lambda it: it.random(), lambda it: it.bit_generator.state["state"]),
    "torch": (
        torch.Generator().manual_seed(0),
        lambda it: torch.rand(3, generator=it),
        lambda it: it.get_state().tolist(),
    ),
    "count": (itertools.count(), next, repr),
    "namespace": (types.SimpleNamespace(n=0), lambda it: setattr(it, "n", it.n + 1), repr),
    "arguments": (argparse.Namespace(n=0), lambda it: setattr(it, "n", it.n + 1), repr),
    "local": (threading.local(), lambda it: vars(it).update(n=vars(it).get("n", 0) + 1), lambda it: dict(vars(it))),
    "dictionary": (collections.UserDict(n=0), lambda it: it.update(n=it["n"] + 1), repr),
    "array": (numpy.zeros(2), lambda it: it.__iadd__(1), repr),
    "tensor": (torch.zeros(2), lambda it: it.add_(1), lambda it: it.tolist()),
    "layer": (nn.BatchNorm1d(4), lambda it: it(X), lambda it: it.running_mean.tolist()),
    "slots": (Slotted(), lambda it: setattr(it, "calls", it.calls + 1), lambda it: it.calls),
    "nested": ([{"deep": [0]}], lambda it: it[0]["deep"].append(1), repr),
    "lock": (threading.Lock(), lambda it: it.release() if it.locked() else it.acquire(), lambda it: it.locked()),
    "module": (
        MODULE,
        lambda it: (it.call(), setattr(it, "other", it.count)),
        lambda it: (it.count, vars(it).get("other")),
    ),
    "class": (Tally, lambda it: (it.note(), it().last, it()()), lambda it: (it.calls, it.seen, TALLIED)),
    "object": (Tally(), lambda it: it(), lambda it: (it.calls, it.seen, TALLIED)),
    "partial": (functools.partial(tallied), lambda it: it(), lambda _: TALLIED),
    "functions": ([tallied], lambda it: it[0](), lambda _: TALLIED),
    "bound method": (random.Random(0).random, lambda it: it(), lambda it: it.__self__.getstate()),
}
GLOBAL = CHANGE = None


@pytest.mark.parametrize("where", ["global", "closure", "class", "attribute", "default", "attribute of a function"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_a_forward_changes_is_as_it_was(kind, where, monkeypatch):
    value, change, look = OBJECTS[kind]
    if kind == "module" and where == "attribute":
        value = types.SimpleNamespace(module=value)
        change, look = (lambda it, call=change: call(it.module)), (lambda it, call=look: call(it.module))
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", value)
    monkeypatch.setattr(sys.modules[__name__], "CHANGE", change)

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


def test_a_generator_that_a_forward_names_has_no_copy(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", range_of())

    class Drawing(nn.Linear):
        def forward(self, x):
            next(GLOBAL)
            return super().forward(x)

    with pytest.raises(TraceError, match="'GLOBAL', a global variable of test_unobserved, cannot be copied"):
        trace(Drawing(4, 4), X)
    assert next(GLOBAL) == 0


def test_an_import_inside_of_a_forward_finds_the_same_variables(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("import torch\ncalls = 0\nmask = torch.ones(2)\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Importing(nn.Linear):
        def forward(self, x):
            import imported_late

            imported_late.calls += 1
            return super().forward(x)

    trace(Importing(4, 4), X)
    import imported_late

    assert imported_late.calls == 0
    assert type(imported_late.mask) is torch.Tensor


def test_what_a_cache_has_stays_in_it():
    before = mask_of(3)
    trace(Careless(4, 4), X)
    assert mask_of(3) is before
    assert type(mask_of(4)) is torch.Tensor


def test_another_thread_may_append_meanwhile():
    FEED.clear()

    is_done = threading.Event()

    def append():
        while not is_done.is_set():
            FEED.append("real")
            counts.append(1)
            time.sleep(1e-4)

    counts, thread = [], threading.Thread(target=append)
    thread.start()
    trace(Feeding(4, 4), X)
    is_done.set(), thread.join()
    assert len(FEED) == len(counts)
    assert set(FEED) == {"real"}


FEED = collections.deque()


class Feeding(nn.Linear):
    def forward(self, x):
        FEED.append("traced")
        return super().forward(x)


@pytest.mark.parametrize(
    "open_file",
    [
        lambda path: open(path, "a"),  # noqa: SIM115
        lambda path: open(path, mode="r+"),  # noqa: SIM115
        lambda path: path.open("w"),
        lambda path: path.write_text("called"),
        lambda path: os.open(path, os.O_WRONLY | os.O_APPEND),
    ],
)
def test_a_forward_that_writes_to_a_file_is_refused(open_file, tmp_path):
    class Writing(nn.Linear):
        def forward(self, x):
            with open(path) as file:
                assert path.read_text() == file.read() == "kept"
            open_file(path)
            return super().forward(x)

    path = tmp_path / "log"
    path.write_text("kept")
    before = open, io.open, os.open
    with pytest.raises(TraceError, match="opens a file to write to it"):
        trace(Writing(4, 4), X)
    assert before == (open, io.open, os.open)
    assert path.read_text() == "kept"
    with unobserved():  # another thread may write
        thread = threading.Thread(target=path.write_text, args=("written",))
        thread.start()
        thread.join()
    assert path.read_text() == "written"


def test_the_environment_is_as_it_was(monkeypatch):
    class Setting(nn.Linear):
        def forward(self, x):
            os.environ["ADDED"] = os.environ["CHANGED"] = "1"
            del os.environ["REMOVED"]
            return super().forward(x)

    monkeypatch.setenv("CHANGED", "0")
    monkeypatch.setenv("REMOVED", "0")
    before = dict(os.environ)
    trace(Setting(4, 4), X)
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_a_forward_registers_see_real_tensors_alone(name):
    model = linear()
    kinds, forward = [], model.forward

    class Look:
        def __call__(self, tensor):
            kinds_of_all.append(type(tensor))

    look = Look()

    def call(x):
        result = forward(x)
        getattr(result if name == "register_hook" else model.weight, name)(look)
        return result

    kinds_of_all = Shared(kinds)
    model.forward = call
    trace(model, X)
    assert kinds == []
    model(X).sum().backward()
    assert kinds
    assert not {kind for kind in kinds if issubclass(kind, FakeTensor)}


class Shared:
    """What a copy changes, too."""

    def __init__(self, items):
        self.append = lambda item: items.append(item)

    def __deepcopy__(self, _):
        return self


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


def shown(model, capsys, caplog):
    """What a forward shows."""
    caplog.clear()
    model(X)
    return [record.getMessage() for record in caplog.records], *capsys.readouterr()


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
                found[-1] += shown(model, capsys, caplog)
    assert found[0] == found[1]
    assert found[0] == ["loud", ["logged", "logged once"], "out\n", "err\n", ["logged"], "out\n", "err\n"]
    assert raw.getvalue() == "raw\n" * 4


def test_a_warning_that_was_shown_is_not_shown_again():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        globals().pop("__warningregistry__", None)
        for _ in range(2):
            Loud(4, 4)(X)
            trace(linear(), X)
    assert len(seen) == 1


def test_a_warning_that_torch_gives_once_is_still_given(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, warnings, torch\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from hf_patrickstar.tracing.unobserved import unobserved\n"
        "warn = lambda: torch.floor_divide\n"
        "x = torch.ones(2, 3, 4)\n"
        "if sys.argv[1] == 'traced':\n"
        "    with unobserved(), FakeTensorMode():\n"
        "        torch.zeros(2, 3, 4).T\n"
        "print('traced')\n"
        "x.T\n"
    )
    import subprocess

    said = [
        subprocess.run([sys.executable, program, kind], capture_output=True, text=True, check=True).stderr
        for kind in ("plain", "traced")
    ]
    assert said[0].count("UserWarning") == said[1].count("UserWarning") == 1


def test_other_threads_are_heard_meanwhile(capsys, caplog):
    def speak():
        warnings.warn("warned", stacklevel=1)
        logging.getLogger("other").warning("heard")
        print("printed")

    with warnings.catch_warnings(record=True) as seen, unobserved():
        thread = threading.Thread(target=speak)
        thread.start()
        thread.join()
    assert [str(warning.message) for warning in seen] == ["warned"]
    assert "heard" in caplog.messages
    assert "printed" in capsys.readouterr().out


def test_everything_is_as_it_was_after_an_error():
    before = logging.Logger._log, sys.stdout, list(warnings.filters), torch.is_warn_always_enabled()
    with pytest.raises(KeyError), unobserved():
        raise KeyError
    assert (logging.Logger._log, sys.stdout, list(warnings.filters), torch.is_warn_always_enabled()) == before


# Modes and settings


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

    model = linear()
    with See(), SeeFunctions(), torch.autograd.graph.saved_tensors_hooks(pack, pack):
        trace(model, X)
        assert seen == []
        model(X.clone().requires_grad_()).sum().backward()
    assert any(isinstance(value, torch.Tensor) for value in seen)
    assert torch.ops.aten.ones_like.default in seen
    assert torch.nn.functional.linear in seen


def test_saved_tensors_hooks_that_are_refused_are_refused_again():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with unobserved(), torch.autograd.graph.save_on_cpu():
            pass
        with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.save_on_cpu():
            pass


def test_the_default_device_is_that_of_the_user():
    try:
        torch.set_default_device("meta")
        mode = torch._GLOBAL_DEVICE_CONTEXT.device_context
        with unobserved():
            assert torch.zeros(1).device.type == "meta"
            torch.set_default_device("cpu")
        assert torch._GLOBAL_DEVICE_CONTEXT.device_context is mode
        assert torch.zeros(1).device.type == torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"
    assert torch._C._len_torch_function_stack() == 0


def test_settings_of_torch_are_as_they_were():
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
            return result

    def settings():
        return (
            *(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
            *(torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()),
            torch.is_autocast_cache_enabled(),
        )

    before = settings()
    with unobserved(), FakeTensorMode():
        assert not torch.is_autocast_cache_enabled()
        twin, x = copy_without_bytes((Setting(4, 4), X))
        twin(x)
    assert settings() == before


@pytest.mark.parametrize("is_cached", [True, False])
def test_autocast_around_keeps_no_fake_weights(is_cached):
    model = linear()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
        first = model(X)
        trace(model, X)
        assert torch.is_autocast_cache_enabled() is is_cached
        assert torch.equal(first, model(X))
    assert torch.equal(first, expected)


def test_a_profile_has_nothing_of_it():
    model = linear()
    with torch.profiler.profile() as profile:
        trace(model, X)
        model(X)
    assert [event.count for event in profile.key_averages() if event.key == "aten::linear"] == [1]


def test_a_compiled_model_is_not_compiled():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    model, other, third = (Model(linear()) for _ in range(3))
    model = torch.compile(model, backend=backend)
    other.compile(backend=backend)
    third.forward = torch.compile(third.forward, backend=backend)
    for compiled in (model, other, third):
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


def test_under_torch_func_it_is_refused():
    def loss(x):
        with unobserved():
            return x.sum()

    with pytest.raises(TraceError, match=r"torch\.func"):
        torch.func.grad(loss)(X)


# What cannot be copied


@pytest.mark.parametrize(
    "make",
    [lambda path: path.open("w"), lambda _: range_of()],
    ids=["an open file", "a generator"],
)
def test_what_has_no_copy_is_named(make, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].log = make(tmp_path / "log")
    with pytest.raises(TraceError, match=r"attribute 'log' of 1 \(Linear\) cannot be copied"):
        trace(model, X)
    assert model(X).isfinite().all()
    if isinstance(model[1].log, io.IOBase):
        model[1].log.close()
        assert (tmp_path / "log").read_text() == ""


class Owner:
    """Closes a file when it dies."""

    def __init__(self):
        self.number, other = os.pipe()
        os.close(other)

    def __del__(self):
        os.close(self.number)


class OwningModule(nn.Linear):
    def __del__(self):
        ENDED.append("ended")


ENDED = []


def test_what_owns_something_is_not_copied():
    owner, model = Owner(), linear()
    model.owners = [owner]
    with pytest.raises(TraceError, match="class Owner has a __del__"):
        trace(model, X)
    with pytest.raises(TraceError, match="class OwningModule has a __del__"):
        trace(nn.Sequential(OwningModule(4, 4)), X)
    gc.collect()
    os.fstat(owner.number)
    assert ENDED == ["ended"], "that of the user's own module"
    model.owners = [types.SimpleNamespace(end=weakref.finalize(model, ENDED.append, "finalized"))]
    trace(model, X)
    gc.collect()
    assert ENDED == ["ended"]


def test_large_arrays_are_shared_if_nobody_can_write_to_them_and_refused_else(monkeypatch, tmp_path):
    model = linear()
    numpy.ones(100).tofile(tmp_path / "array")
    model.mapped, model.small = numpy.memmap(tmp_path / "array", mode="r"), numpy.ones(10)
    monkeypatch.setattr("hf_patrickstar.tracing.twins._MOST_ARRAY_NBYTES", 80)
    twin = trace(model, X)
    assert twin.mapped is model.mapped
    assert not numpy.shares_memory(twin.small, model.small)
    model.large = numpy.ones(11)
    with pytest.raises(TraceError, match="array of numpy of 88 bytes"):
        trace(model, X)


def range_of():
    yield from range(3)


def test_an_input_that_has_no_copy_is_refused():
    with pytest.raises(TraceError, match="an input of the model cannot be copied"):
        trace(linear(), range_of())


def test_an_open_file_that_a_forward_names_is_refused(tmp_path):
    with open(tmp_path / "log", "w") as log:

        class Logging(nn.Linear):
            def forward(self, x):
                log.write("called")
                return super().forward(x)

        with pytest.raises(TraceError, match=r"'log', a variable of .*Logging.forward, cannot be copied"):
            trace(Logging(4, 4), X)


# With an engine

SMALL = {"chunk_budget": 40_000, "chunk_numel": 64, "debug_evict_all": True}


def adamw(model):
    return torch.optim.AdamW(getattr(model, "parameters", lambda: model)(), lr=1e-2, fused=True)


def counts(engine):
    return {name: value for name, value in engine.stats().items() if isinstance(value, int)}


@pytest.fixture(params=["gpt2", "t5"])
def attached(request):
    model = make_model(request.param)
    engine = PatrickStarEngine(model, SMALL, adamw(model))
    yield model, engine, make_batch(request.param)
    engine.detach()


def test_no_chunk_moves_for_a_model_with_an_engine(attached):
    model, engine, batch = attached
    before = counts(engine)
    twin = trace(model, **batch)
    assert counts(engine) == before
    kinds = {type(parameter) for parameter in twin.parameters()}
    assert not any(issubclass(kind, LiveMixin) for kind in kinds)
    assert all(parameter.grad is not None for parameter in twin.parameters() if parameter.requires_grad)
    assert all(parameter.grad is None for parameter in model.parameters())
    for module in twin.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not {"patrickstar_engine", "backward", "_apply", "__reduce_ex__", "zero_grad"} & vars(module).keys()


def test_an_engine_trains_the_same_after_a_trace():
    found = []
    for with_trace in (False, True):
        model, optimizer = initialize_engine(lambda: make_model("gpt2"), SMALL, adamw)
        losses = []
        for step in range(2):
            batch = make_batch("gpt2", seed=step)
            if with_trace:
                trace(model, **batch)
            loss = model(**batch).loss
            model.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        model.patrickstar_engine.detach()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_a_parametrized_model_with_an_engine_has_an_ordinary_copy():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    engine = PatrickStarEngine(model, SMALL, adamw(model))
    before = counts(engine)
    twin = trace(model, X)
    assert counts(engine) == before
    assert not {"patrickstar_engine", "_apply", "__reduce_ex__"} & vars(twin[0]).keys()
    assert not twin[0]._forward_hooks
    engine.detach()


def test_what_leads_to_the_engine_is_refused():
    model = linear()
    engine = PatrickStarEngine(model, SMALL, adamw(model))
    model.helpers = [engine]
    with pytest.raises(TraceError, match="PatrickStarEngine"):
        trace(model, X)
    engine.detach()


def test_an_evaluation_is_traced_as_it_is():
    model = make_model("gpt2").eval()
    with torch.no_grad():
        twin = trace(model, **make_batch("gpt2"))
    assert not twin.training
    assert all(parameter.grad is None for parameter in twin.parameters())


with contextlib.suppress(ImportError):
    from peft import LoraConfig, get_peft_model

    def test_adapters_are_copied():
        model = get_peft_model(make_model("gpt2"), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
        twin = trace(model, **make_batch("gpt2"))
        found = [name for name, parameter in twin.named_parameters() if parameter.grad is not None]
        assert found
        assert all("lora_" in name for name in found)


class Containers(nn.Linear):
    """Refers to itself through containers of all kinds."""

    def __init__(self):
        super().__init__(4, 4)
        self.cyclic = [self]
        self.cyclic.append(self.cyclic)
        self.kinds = collections.defaultdict(list, {"own": self})
        self.ordered = collections.OrderedDict(b=self, a=1)
        self.numbers = {1, 2}
        self.call = functools.partial(self.forward, input=self.cyclic)
        self.call.owner = self
        self.last = collections.deque([self], maxlen=3)


def test_containers_are_copied_with_what_they_refer_to():
    model = Containers()
    with FakeTensorMode():
        copied = copy_without_bytes(model)
    assert copied.cyclic is not model.cyclic
    assert copied.cyclic[0] is copied
    assert copied.cyclic[1] is copied.cyclic
    assert copied.kinds["own"] is copied
    assert copied.kinds["new"] == []
    assert "new" not in model.kinds
    assert list(copied.ordered) == ["b", "a"]
    assert copied.ordered["b"] is copied
    assert copied.numbers == model.numbers
    assert copied.numbers is not model.numbers
    assert copied.call.func.__self__ is copied
    assert copied.call.owner is copied
    assert copied.call.keywords["input"] is copied.cyclic
    assert copied.last[0] is copied
    assert copied.last.maxlen == 3


def test_traces_in_two_threads_leave_nothing_behind():
    before = builtins.open, os.open, torch.Tensor.register_hook, logging.Logger._log, sys.stdout
    begun, may_end = threading.Event(), threading.Event()

    def first():
        with unobserved():
            begun.set()
            may_end.wait(30)

    def second():
        with unobserved():
            threads[0].join(30)

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    time.sleep(0.2)  # time to begin inside of the first one
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert (builtins.open, os.open, torch.Tensor.register_hook, logging.Logger._log, sys.stdout) == before
