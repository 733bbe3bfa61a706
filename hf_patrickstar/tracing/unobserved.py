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
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy
import torch
from torch._C import _autograd
from torch._C._functorch import peek_interpreter_stack
from torch._C._profiler import ActiveProfilerType
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from hf_patrickstar.errors import TraceError
from hf_patrickstar.memory.compute_device import same_state
from hf_patrickstar.memory.operators import without_modes
from hf_patrickstar.tracing.fake import is_of_library, origin_of
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
    with TRACE_LOCK, contextlib.ExitStack() as stack:
        for hide in (
            *(_quiet_warnings, _quiet_logs, _quiet_streams, _no_files, _without_modes, _without_saved_tensors_hooks),
            *(_without_global_hooks, _no_hooks_of_tensors, _same_random_numbers, _same_settings, _same_environment),
            _without_profile,
        ):
            hide(stack)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # graphs would be those of tensors without bytes
        # Inside of ``parametrize.cached()`` torch finds values by the addresses of modules, and other modules may get
        # those of the copy's.
        stack.enter_context(mock.patch.multiple(parametrize, _cache_enabled=0, _cache={}))
        stack.enter_context(own_variables())
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Calls ``instead(function, ...)`` in place of a function of ``owner``, in this thread alone."""
    function, this = getattr(owner, name), threading.get_ident()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(function, *args, **kwargs) if threading.get_ident() == this else function(*args, **kwargs)

    stack.enter_context(mock.patch.object(owner, name, call))


# What is shown


def _quiet_warnings(stack: contextlib.ExitStack) -> None:
    # ``catch_warnings`` would let Python forget which warnings it has shown: they would be shown again.
    this = threading.get_ident()
    is_here = types.SimpleNamespace(match=lambda _: threading.get_ident() == this)  # matches warnings of this thread
    ignore: Any = ("ignore", is_here, Warning, None, 0)
    warnings.filters.insert(0, ignore)  # type: ignore[attr-defined]

    def stop() -> None:
        if ignore in warnings.filters:
            warnings.filters.remove(ignore)  # type: ignore[attr-defined]

    stack.callback(stop)
    stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
    torch.set_warn_always(True)  # else a warning that torch gives once would not be given again


def _quiet_logs(stack: contextlib.ExitStack) -> None:
    def log(method: Callable[..., Any], logger: logging.Logger, *args: Any, **kwargs: Any) -> None:
        if logger.name.partition(".")[0] == _PACKAGE:
            method(logger, *args, **kwargs)

    for name in ("_log", *_LOGS_ONCE):
        if hasattr(logging.Logger, name):
            _replace(stack, logging.Logger, name, log)


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


def _quiet_streams(stack: contextlib.ExitStack) -> None:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        stream = getattr(sys, name)  # there is none in a process without a console
        stack.enter_context(mock.patch.object(sys, name, stream and _Stream(stream)))


def _no_files(stack: contextlib.ExitStack) -> None:
    """Lets the thread open no file to write to it."""

    def checked(name: str, writes: Callable[[Any], Any]) -> Callable[..., Any]:
        def open_file(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            how = args[1] if len(args) > 1 else kwargs.get(name)
            if how is not None and writes(how):
                raise TraceError(
                    "the model opens a file to write to it, which a trial forward must not do; write in the loop"
                )
            return function(*args, **kwargs)

        return open_file

    for module in (builtins, io):
        _replace(stack, module, "open", checked("mode", set("wax+").intersection))
    _replace(stack, os, "open", checked("flags", (os.O_WRONLY | os.O_RDWR).__and__))


# Modes and hooks


def _without_modes(stack: contextlib.ExitStack) -> None:
    """Takes modes off; the default device, which torch has as a mode, stays."""
    devices = [mode for mode in torch.overrides._get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    context: Any = torch._GLOBAL_DEVICE_CONTEXT
    default = getattr(context, "device_context", None)

    def restore() -> None:
        while torch._C._len_torch_function_stack():  # a forward may have changed the default device
            torch._C._pop_torch_function_stack()
        context.device_context = default

    stack.enter_context(without_modes())
    stack.callback(restore)
    for mode in devices:
        torch._C._push_on_torch_function_stack(mode)


def _without_saved_tensors_hooks(stack: contextlib.ExitStack) -> None:
    refused = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if refused is not None:
        _autograd._saved_tensors_hooks_enable()
        stack.callback(_autograd._saved_tensors_hooks_disable, refused, False)
    while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        stack.callback(_autograd._push_saved_tensors_default_hooks, *hooks)


def _without_global_hooks(stack: contextlib.ExitStack) -> None:
    """Takes hooks off that the user has registered for all modules; see ``is_of_library``."""
    is_full = torch_module._global_is_full_backward_hook
    stack.enter_context(mock.patch.object(torch_module, "_global_is_full_backward_hook", is_full))
    for name, hooks in vars(torch_module).items():
        if name.startswith("_global_") and name.endswith("_hooks"):
            kept = {key: hook for key, hook in hooks.items() if is_of_library(hook)}
            stack.enter_context(mock.patch.dict(hooks, kept, clear=True))


def _no_hooks_of_tensors(stack: contextlib.ExitStack) -> None:
    """Lets the thread register no hooks of the user's on tensors: they would be called with tensors without bytes."""

    def add_hook(register: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        is_known = is_of_library(hook) or origin_of(hook) == _PACKAGE
        return register(tensor, hook) if is_known else RemovableHandle(OrderedDict())

    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        _replace(stack, torch.Tensor, name, add_hook)


def _without_profile(stack: contextlib.ExitStack) -> None:
    """Lets a profiler that is on see nothing."""
    if _autograd._profiler_type() is not ActiveProfilerType.NONE:
        _autograd._enable_record_function(False)
        stack.callback(_autograd._enable_record_function, True)


# State of the process


def _same_random_numbers(stack: contextlib.ExitStack) -> None:
    stack.enter_context(same_state())  # of an accelerator
    stack.callback(random.setstate, random.getstate())
    stack.callback(numpy.random.set_state, numpy.random.get_state())
    generator = torch.default_generator.clone_state()
    stack.callback(lambda: torch.default_generator.set_state(generator.get_state()))


def _same_environment(stack: contextlib.ExitStack) -> None:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

    stack.callback(restore)


def _same_settings(stack: contextlib.ExitStack) -> None:
    """What a forward may set for the whole process, or for its thread, is as it was."""
    before = [get() for get, _ in _SETTINGS]

    def restore() -> None:
        for (get, put), values in zip(_SETTINGS, before, strict=True):
            if get() != values:
                put(*values)

    stack.callback(restore)
    stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(False)  # the user's autocast would keep copies without bytes
    stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))


_CUDNN: Any = torch.backends.cudnn
_SETTINGS: tuple[tuple[Callable[[], tuple[Any, ...]], Callable[..., Any]], ...] = (
    (lambda: (torch.get_default_dtype(),), torch.set_default_dtype),
    (lambda: (torch.get_float32_matmul_precision(),), torch.set_float32_matmul_precision),
    (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), torch.autograd.set_detect_anomaly),
    (lambda: (torch.get_deterministic_debug_mode(),), torch.set_deterministic_debug_mode),
    (lambda: (_CUDNN.enabled, _CUDNN.benchmark, None, _CUDNN.deterministic), _CUDNN.set_flags),
    (lambda: (torch.get_num_threads(),), torch.set_num_threads),
)
"""Functions that return settings, and functions that set them."""
