"""What the code of a model changes outside of the model: global variables, attributes of classes, caches, closures.

[Note: what is kept]
A copy of a model runs the code of the user's classes, which may count calls in a global variable, append to a list of
an enclosing function, or keep a tensor in a dictionary of its module, where the next forward would find one without
bytes. So all that this code names is looked at before the copy runs, and is as it was when the copy has run: variables,
and the items of lists, dictionaries, sets and objects of the user's classes. Functions, classes and modules of the
user's that are named are looked at in the same way. A cache of ``functools`` that has got new items is cleared: they
may be tensors without bytes.

What other objects do (a logger of metrics that is called by name) cannot be undone.
"""

import builtins
import collections
import contextlib
import io
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from hf_patrickstar.errors import TraceError
from hf_patrickstar.tracing.twins import OTHERS_CODE, origin_of

_MAX_NESTED = 10_000
"""Of a container with more items the items are not looked into."""
_NOTHING = object()
_SEQUENCES = (list, collections.deque)
_CONTAINERS = (*_SEQUENCES, dict, set)
_PACKAGE = __name__.partition(".")[0]


class UserState:
    """What the code of modules may change; see [Note: what is kept].

    Args:
        modules: The modules; not their hooks.

    Raises:
        TraceError: If the code uses an open file.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._changes = contextlib.ExitStack()
        self._seen: dict[int, Any] = {}  # by the ``id``, which no other object can get meanwhile
        for module in modules:
            self._look_at_class(type(module))
            for value in vars(module).values():
                if isinstance(value, (types.FunctionType, types.MethodType)):
                    self._look_at(value, "")

    def restore(self) -> None:
        """Undoes what has changed."""
        self._changes.close()

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _look_at(self, value: Any, name: str) -> None:
        """Looks at what a variable refers to."""
        if isinstance(value, (str, int, float, torch.Tensor, torch.nn.Module)) or value is None:
            return
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, (property, staticmethod, classmethod)):
            for function in ("fget", "fset", "__func__"):
                self._look_at(getattr(value, function, None), name)
        elif hasattr(value, "cache_info") and hasattr(value, "cache_clear"):
            self._keep_cache(value)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif isinstance(value, _CONTAINERS):
            self._keep_container(value, name)
        elif isinstance(value, io.IOBase) and value not in (sys.stdout, sys.stderr):
            raise TraceError(
                f"the code of the model names '{name}', an open file, which a trial forward would write to; open it "
                "where it is used"
            )
        elif origin_of(value) not in (*OTHERS_CODE, _PACKAGE) and isinstance(getattr(value, "__dict__", None), dict):
            self._keep_container(vars(value), name)

    def _look_at_class(self, cls: type) -> None:
        for part in cls.__mro__:
            if part.__module__.partition(".")[0] in (*OTHERS_CODE, _PACKAGE) or not self._is_new(part):
                continue
            before = dict(vars(part))
            for name, value in before.items():
                self._look_at(value, name)
            self._changes.callback(_restore_class, part, before)

    def _look_at_function(self, function: types.FunctionType) -> None:
        if not self._is_new(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._keep_cell(cell, name)
        self._look_at(getattr(function, "__wrapped__", None), function.__name__)
        if origin_of(function) in (*OTHERS_CODE, _PACKAGE):
            return
        self._keep_container(vars(function), function.__name__)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look_at(value, function.__name__)
        self._keep_names(function.__globals__, _names_in(function.__code__))

    def _keep_names(self, namespace: dict[str, Any], names: set[str]) -> None:
        for name in names:
            before = namespace.get(name, _NOTHING)
            if before is _NOTHING and hasattr(builtins, name):
                continue
            self._changes.callback(_restore_item, namespace, name, before)
            is_module = isinstance(before, types.ModuleType)
            if is_module and before.__name__.partition(".")[0] not in (*OTHERS_CODE, _PACKAGE):
                if self._is_new(before) and not hasattr(before, "__path__"):
                    self._keep_names(vars(before), names & vars(before).keys())
            elif before is not _NOTHING and not is_module:
                self._look_at(before, name)

    def _keep_cell(self, cell: Any, name: str) -> None:
        if not self._is_new(cell):
            return
        try:
            before = cell.cell_contents
        except ValueError:  # it has no value yet
            return
        self._look_at(before, name)
        self._changes.callback(setattr, cell, "cell_contents", before)

    def _keep_cache(self, cached: Any) -> None:
        if not self._is_new(cached):
            return
        self._look_at(getattr(cached, "__wrapped__", None), "")
        misses = cached.cache_info().misses

        def restore() -> None:
            if cached.cache_info().misses != misses:
                cached.cache_clear()

        self._changes.callback(restore)

    def _keep_container(self, value: Any, name: str) -> None:
        if not self._is_new(value):
            return
        before = value.copy()
        self._changes.callback(_restore_container, value, before)
        if len(before) <= _MAX_NESTED:
            for item in before.values() if isinstance(before, dict) else before:
                self._look_at(item, name)


def _names_in(code: types.CodeType) -> set[str]:
    """All global names, and attributes, that code and the functions inside of it name."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return found


def _restore_class(cls: type, before: dict[str, Any]) -> None:
    for name, value in list(vars(cls).items()):
        if name not in before:
            delattr(cls, name)
        elif before[name] is not value and not name.startswith("__"):
            setattr(cls, name, before[name])
    for name in before.keys() - vars(cls).keys():
        setattr(cls, name, before[name])


def _restore_item(namespace: dict[str, Any], name: str, before: Any) -> None:
    if before is _NOTHING:
        namespace.pop(name, None)
    elif namespace.get(name, _NOTHING) is not before:
        namespace[name] = before


def _restore_container(value: Any, before: Any) -> None:
    items, items_before = list(value), list(before)
    is_same = len(items) == len(items_before) and all(a is b for a, b in zip(items, items_before, strict=True))
    if is_same and isinstance(value, dict):
        is_same = all(a is b for a, b in zip(value.values(), before.values(), strict=True))
    if not is_same:
        value.clear()
        if isinstance(value, _SEQUENCES):
            value.extend(before)
        else:
            value.update(before)
