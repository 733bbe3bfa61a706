"""The types that a forward computes in: autocast around the outermost one, or narrow inputs without it."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

_NARROW = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64)


class Casting:
    """Changes types where a forward of the model begins and ends.

    Args:
        device: The compute device.
        autocast: The type to compute in under ``torch.autocast``; ``None`` for no autocast.
        inputs: The type to cast floating-point inputs to, without autocast; ``None`` for no cast.
    """

    def __init__(self, device: torch.device, autocast: torch.dtype | None, inputs: torch.dtype | None) -> None:
        self._device = device
        self._autocast = autocast
        self.inputs = inputs

    def autocast(self, *, is_recomputed: bool) -> contextlib.AbstractContextManager[Any] | None:
        """The context for an outermost forward, or ``None``.

        The cache of autocast is off: it would keep copies of parameters that no budget counts.

        Args:
            is_recomputed: Whether backward recomputes. Checkpointing has then restored the autocast of the first
                forward; where that is ours already, the recomputation needs no other.
        """
        is_there = torch.is_autocast_enabled(self._device.type) and not torch.is_autocast_cache_enabled()
        if self._autocast is None or (is_recomputed and is_there):
            return None
        return torch.autocast(self._device.type, dtype=self._autocast, cache_enabled=False)

    def widen(self, output: Any) -> Any:
        """Gives the output of an outermost forward in fp32 where it is 16-bit, as Accelerate does under autocast.

        Returns:
            The output itself if nothing in it was 16-bit.
        """
        return _apply(output, lambda tensor: tensor.float() if tensor.dtype in _NARROW else tensor)

    def narrow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Casts floating-point inputs (pixels, features) to the type ``inputs``, but not labels."""

        def cast(value: Any) -> Any:
            return value.to(self.inputs) if isinstance(value, torch.Tensor) and value.dtype in _WIDE else value

        named = {name: value if "label" in name else cast(value) for name, value in kwargs.items()}
        return tuple(cast(value) for value in args), named


def _apply(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replaces the tensors in tuples, lists and mappings; what has nothing to replace stays the same object."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        found = {key: _apply(item, function) for key, item in value.items()}
        if all(found[key] is item for key, item in value.items()):
            return value
        return type(value)(found)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        items = [_apply(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
