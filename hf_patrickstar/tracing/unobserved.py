"""The surroundings of a trace: nothing that a copy of a model does is seen outside.

[Note: unobserved]
Before the first step a copy of the user's model without bytes runs once. The user's training must be the same as
without it, in every bit and in every side effect: random numbers, warnings and logs that appear once, what is printed,
global variables of the user's, the environment, modes and hooks. What is of the whole process (warnings, logs, streams,
files, hooks of tensors) is switched off for the thread that traces alone. What cannot be hidden is refused: a model is
not traced if its code opens a file to write to it.
"""

import builtins
import contextlib
import functools
import io
import logging
import os
import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy
import torch
from torch._C._autograd import (
    _enable_record_function,
    _pop_saved_tensors_default_hooks,
    _profiler_type,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message,
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import peek_interpreter_stack
from torch._C._profiler import ActiveProfilerType
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from hf_patrickstar.errors import TraceError
from hf_patrickstar.memory.accelerator import same_state
from hf_patrickstar.memory.operators import without_modes
from hf_patrickstar.tracing.twins import is_of_library, origin_of
from hf_patrickstar.tracing.user_state import own_variables

_PACKAGE = __name__.partition(".")[0]
TRACE_LOCK = threading.RLock()
"""One thread traces at a time: what two replace in the process would not come back in the opposite order."""
_LOGS_ONCE = ("warning_once", "info_once", "warning_advice")
"""What transformers adds to every logger; two of them remember what was logged."""


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Lets nobody see what runs inside; see [Note: unobserved]. ``FakeTensorMode`` is entered inside of it.

    Raises:
        TraceError: If the calls cannot be hidden: inside of ``torch.func``, or where the code uses a file.
    """
    if peek_interpreter_stack() is not None:
        raise TraceError("a model cannot be traced inside of torch.func (grad, vmap); trace it outside")
    with contextlib.ExitStack() as stack:
        stack.enter_context(TRACE_LOCK)
        for context in (
            *(_quiet_warnings, _quiet_logs, _quiet_streams, _no_files, _without_modes, _without_saved_tensors_hooks),
            *(_without_global_hooks, _no_hooks_of_tensors, same_state, _same_random_numbers, _same_settings),
            *(_same_environment, _without_profile),
        ):
            stack.enter_context(context())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # graphs would be those of tensors without bytes
        # Inside of ``parametrize.cached()`` torch finds values by the addresses of modules, and other modules may get
        # those of the copy's.
        stack.enter_context(mock.patch.multiple(parametrize, _cache_enabled=0, _cache={}))
        stack.enter_context(own_variables())
        yield


# What is shown


class _InThread:
    """The message of a filter of warnings: matches every message, in the thread that has made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def match(self, _: str) -> bool:
        return self._thread == threading.get_ident()


@contextlib.contextmanager
def _quiet_warnings() -> Iterator[None]:
    # ``catch_warnings`` would let Python forget which warnings it has shown: they would be shown again.
    ignore: Any = ("ignore", _InThread(), Warning, None, 0)
    warnings.filters.insert(0, ignore)  # type: ignore[attr-defined]
    is_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else a warning that torch gives once would not be given again
    try:
        yield
    finally:
        torch.set_warn_always(is_always)
        if ignore in warnings.filters:
            warnings.filters.remove(ignore)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    this = threading.get_ident()

    def quiet(method: Callable[..., Any]) -> Callable[..., Any]:
        def log(logger: logging.Logger, *args: Any, **kwargs: Any) -> None:
            if threading.get_ident() != this or logger.name.partition(".")[0] == _PACKAGE:
                method(logger, *args, **kwargs)

        return log

    with contextlib.ExitStack() as stack:
        for name in ("_log", *_LOGS_ONCE):
            method = getattr(logging.Logger, name, None)
            if method is not None:
                stack.enter_context(mock.patch.object(logging.Logger, name, quiet(method)))
        yield


class _Stream:
    """Drops what one thread writes; everything else is the stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet_streams() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            stream = getattr(sys, name)  # there is none in a process without a console
            stack.enter_context(mock.patch.object(sys, name, stream and _Stream(stream)))
        yield


@contextlib.contextmanager
def _no_files() -> Iterator[None]:
    """Lets the thread open no file to write to it."""
    this = threading.get_ident()

    def checked(function: Callable[..., Any], name: str, writes: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def open_file(*args: Any, **kwargs: Any) -> Any:
            how = args[1] if len(args) > 1 else kwargs.get(name)
            if how is not None and writes(how) and threading.get_ident() == this:
                raise TraceError(
                    "the model opens a file to write to it, which a trial forward must not do; write in the loop"
                )
            return function(*args, **kwargs)

        return open_file

    with contextlib.ExitStack() as stack:
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", checked(open, "mode", set("wax+").intersection)))
        numbers = checked(os.open, "flags", (os.O_WRONLY | os.O_RDWR).__and__)
        stack.enter_context(mock.patch.object(os, "open", numbers))
        yield


# Modes and hooks


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Takes modes off; the default device, which torch has as a mode, stays."""
    devices = [mode for mode in torch.overrides._get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    context: Any = torch._GLOBAL_DEVICE_CONTEXT
    default = getattr(context, "device_context", None)
    with without_modes():
        for mode in devices:
            torch._C._push_on_torch_function_stack(mode)
        try:
            yield
        finally:
            while torch._C._len_torch_function_stack():  # a forward may have changed the default device
                torch._C._pop_torch_function_stack()
            context.device_context = default


@contextlib.contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    refused = _saved_tensors_hooks_get_disabled_error_message()
    hooks: list[Any] = []
    if refused is not None:
        _saved_tensors_hooks_enable()
    while (found := _top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(found)
        _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            _push_saved_tensors_default_hooks(*pair)
        if refused is not None:
            _saved_tensors_hooks_disable(refused, False)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Takes hooks off that the user has registered for all modules; see ``is_of_library``."""
    is_full = torch_module._global_is_full_backward_hook
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch_module, "_global_is_full_backward_hook", is_full))
        for name, hooks in vars(torch_module).items():
            if name.startswith("_global_") and name.endswith("_hooks"):
                kept = {key: hook for key, hook in hooks.items() if is_of_library(hook)}
                stack.enter_context(mock.patch.dict(hooks, kept, clear=True))
        yield


@contextlib.contextmanager
def _no_hooks_of_tensors() -> Iterator[None]:
    """Lets the thread register no hooks of the user's on tensors: they would be called with tensors without bytes."""
    this = threading.get_ident()

    def checked(register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        @functools.wraps(register)
        def add_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> RemovableHandle:
            if threading.get_ident() != this or is_of_library(hook) or origin_of(hook) == _PACKAGE:
                return register(tensor, hook)
            return RemovableHandle(OrderedDict())

        return add_hook

    with contextlib.ExitStack() as stack:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            method = getattr(torch.Tensor, name)
            stack.enter_context(mock.patch.object(torch.Tensor, name, checked(method)))
        yield


@contextlib.contextmanager
def _without_profile() -> Iterator[None]:
    """Lets a profiler that is on see nothing."""
    is_on = _profiler_type() is not ActiveProfilerType.NONE
    if is_on:
        _enable_record_function(False)
    try:
        yield
    finally:
        if is_on:
            _enable_record_function(True)


# State of the process


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state()
    generator = torch.default_generator.clone_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.default_generator.set_state(generator.get_state())


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in {*before, *os.environ}:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]


@contextlib.contextmanager
def _same_settings() -> Iterator[None]:
    """What a forward may set for the whole process, or for its thread, is as it was."""
    before = [(put, get()) for get, put in _SETTINGS]
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # the user's autocast would keep copies without bytes
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)
        for (get, _), (put, values) in zip(_SETTINGS, before, strict=True):
            if get() != values:
                put(*values)


_CUDNN: Any = torch.backends.cudnn
_SETTINGS: tuple[tuple[Callable[[], tuple[Any, ...]], Callable[..., Any]], ...] = (
    (lambda: (torch.get_default_dtype(),), torch.set_default_dtype),
    (lambda: (torch.get_float32_matmul_precision(),), torch.set_float32_matmul_precision),
    (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), torch.autograd.set_detect_anomaly),
    (lambda: (torch.get_deterministic_debug_mode(),), torch.set_deterministic_debug_mode),
    (
        lambda: (_CUDNN.enabled, _CUDNN.benchmark, _CUDNN.deterministic),
        lambda enabled, benchmark, deterministic: _CUDNN.set_flags(enabled, benchmark, None, deterministic),
    ),
    (lambda: (torch.get_num_threads(),), torch.set_num_threads),
)
"""Functions that return settings, and functions that set them."""
