"""What the code of a model changes outside of the model: global variables, attributes of classes, caches, closures.

[Note: what is kept]
A copy of a model runs the code of the user's classes, which may count calls in a global variable, draw from a
generator, append to a list of an enclosing function, or keep a tensor in a dictionary of its module, where the next
forward would find one without bytes. So this code has variables of its own while the copy runs: the functions of the
user's that it calls are copies, whose global variables are a namespace of their own (``_Namespace``). What a variable
refers to is copied when the code names it first; functions and modules lead to copies again. The objects themselves are
not touched, and another thread that changes them meanwhile changes the user's.

Classes are not copied, or ``isinstance`` would not know them: their functions, and the values of their attributes, are
replaced by copies, and are as they were when the copy has run. If something has no copy, the first step is recorded.
What code of libraries changes in global variables of its own stays changed.
"""

import builtins
import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hf_patrickstar.memory.operators import without_modes
from hf_patrickstar.tracing.fake import Copier, fake_mode, is_of_user, origin_of, own_code, reported

_OWN = "its own"
"""The key of what a module's stand-in keeps: no name that code has."""


@contextlib.contextmanager
def own_variables() -> Iterator[None]:
    """Inside, copies run with variables of their own; see [Note: what is kept]."""
    with contextlib.ExitStack() as changes:
        changes.callback(own_code.reset, own_code.set(OwnCode(changes)))
        yield


class OwnCode:
    """The user's code with variables of its own.

    Args:
        changes: Undoes at its end what was changed of classes.
    """

    def __init__(self, changes: contextlib.ExitStack) -> None:
        self._changes = changes
        self._copier = _Copier(None)
        self._classes: set[type] = set()
        self._namespaces: dict[int, _Namespace] = {}
        self._modules: dict[int, _Module] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def namespace(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The global variables of a copied function of the user's.

        Args:
            variables: Those of the function.
        """
        if isinstance(variables, _Namespace):
            return variables
        if id(variables) not in self._namespaces:
            self._namespaces[id(variables)] = _Namespace(variables, self._builtins, self._copier.copy)
        return self._namespaces[id(variables)]

    def module(self, module: types.ModuleType) -> types.ModuleType:
        """What stands for a module of Python."""
        if not is_of_user(module.__name__) or isinstance(module, _Module):
            return module
        if id(module) not in self._modules:
            self._modules[id(module)] = _Module(module, self.namespace(vars(module)), self._copier.copy)
        return self._modules[id(module)]

    def keep(self, cls: type) -> None:
        """Lets a class have copies of its attributes until the end."""
        for part in () if cls in self._classes else cls.__mro__:
            if part in self._classes:
                continue
            self._classes.add(part)
            if not is_of_user(part.__module__):
                continue
            before = dict(vars(part))
            self._changes.callback(_restore_class, part, before)
            for name, value in before.items():
                is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
                if is_code or not (name.startswith("__") or name == "_abc_impl"):
                    with reported(f"attribute '{name}' of class {part.__name__}"):
                        copied = self._copier.copy(value)
                    if copied is not value:
                        type.__setattr__(part, name, copied)

    def _import(self, *args: Any, **kwargs: Any) -> types.ModuleType:
        with without_modes():  # a module that is imported now has tensors with bytes
            return self.module(builtins.__import__(*args, **kwargs))


class _Copier(Copier):
    """Copies what variables refer to."""

    def make_tensor(self, tensor: Any, shape: Sequence[int]) -> torch.Tensor:
        mode = fake_mode()
        with without_modes(), mode:  # nobody shall take it for an operator of the forward
            return super().make_tensor(tensor, shape)

    def _object(self, value: Any) -> Any:
        # Objects of torch are handles of what is in C++, which has no copy; none of them changes in a forward.
        return self._led_to_model(value) if origin_of(value) == "torch" else super()._object(value)


class _Namespace(dict[str, Any]):
    """Global variables; Python asks a subclass of ``dict`` for each that a function reads.

    Args:
        variables: The user's.
        own_builtins: What Python finds if there is no such variable.
        copy: Copies what one refers to.
    """

    def __init__(self, variables: dict[str, Any], own_builtins: dict[str, Any], copy: Callable[[Any], Any]) -> None:
        super().__init__(variables, __builtins__=own_builtins)
        self._variables, self._copy = variables, copy
        self._left = {name for name in variables if not name.startswith("__")}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name not in self._left:
            return value
        if value is self._variables.get(name):  # else the code has set it
            with reported(f"'{name}', a global variable of {self._variables.get('__name__')},"):
                value = self[name] = self._copy(value)
        self._left.discard(name)
        return value


class _Module(types.ModuleType):
    """Stands for a module of the user's."""

    def __init__(self, module: types.ModuleType, namespace: dict[str, Any], copy: Callable[[Any], Any]) -> None:
        super().__init__(module.__name__)
        vars(self)[_OWN] = module, namespace, copy

    def __getattr__(self, name: str) -> Any:
        module, namespace, copy = vars(self)[_OWN]
        return namespace[name] if name in namespace else copy(getattr(module, name))  # its ``__getattr__`` makes that

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[_OWN][1][name] = value

    def __delattr__(self, name: str) -> None:
        del vars(self)[_OWN][1][name]


def _restore_class(cls: type, before: dict[str, Any]) -> None:
    for name in vars(cls).keys() - before.keys():
        type.__delattr__(cls, name)
    for name, value in before.items():
        if vars(cls).get(name, cls) is not value:
            type.__setattr__(cls, name, value)
