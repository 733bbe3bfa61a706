"""Parameters that have their value for the thread that computes with them, and for no other thread.

[Note: guarded parameters]
torch lets other threads run between looking at the class of an argument and reading its value. A thread that reads a
parameter while another one computes with it could so find that the module has ended, and NaN. Where other threads may
read the model, an acquired parameter is a guarded one: ``__torch_function__`` is switched off for the thread that
computes, and answers all others as if the parameter were released.
"""

from typing import Any

import torch

from hf_patrickstar.runtime.live_parameter import (
    BACKWARDS,
    NOT_OVERRIDDEN,
    WITHOUT_VALUE,
    AcquiredMixin,
    call_with_values,
    call_without_values,
    detach,
)
from hf_patrickstar.runtime.model_lock import ModelLock
from hf_patrickstar.runtime.quantized import bases_of

_DATA: Any = AcquiredMixin.data
_AS_THEY_ARE = WITHOUT_VALUE | {torch.Tensor.data.__set__}  # type: ignore[attr-defined]


class Guard:
    """The ``__torch_function__`` of guarded parameters, and their classes.

    Args:
        model_lock: Knows which thread computes.
    """

    def __init__(self, model_lock: ModelLock) -> None:
        self._model_lock = model_lock
        self._types: dict[type, type] = {}

    def __get__(self, parameter: Any, owner: type) -> Any:
        """What torch finds as ``__torch_function__``, of a parameter or of its class."""
        return NOT_OVERRIDDEN if self._model_lock.is_computing else self._answer

    def _set_data(self, parameter: Any, value: torch.Tensor) -> None:
        """Assigns ``.data``; of a parameter that another thread computes with, when it has done so."""
        if self._model_lock.is_computing:
            _DATA.fset(parameter, value)
            return
        with self._model_lock.held("an assignment to the data of a parameter"):
            parameter.data = value

    def type_of(self, original: type) -> type:
        """The class of a guarded parameter.

        Args:
            original: The class that it had.
        """
        if original not in self._types:
            members = {
                "_original": original,
                "__module__": original.__module__,
                "__torch_function__": self,
                "data": property(_DATA.fget, self._set_data),
            }
            self._types[original] = type(original.__name__, (AcquiredMixin, *bases_of(original)), members)
        return self._types[original]

    def _answer(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _AS_THEY_ARE:
            return call_without_values(func, args, kwargs)
        if func in BACKWARDS:
            with self._model_lock.held("a backward"):
                return func(*args, **kwargs)
        return detach(*args) if func is torch.Tensor.detach else call_with_values(func, args, kwargs)
