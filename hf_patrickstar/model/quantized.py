"""Weights that bitsandbytes has packed into 4 or 8 bits.

[Note: packed weights]
A packed weight is a frozen parameter of bytes, and lives in chunks of bytes. The library computes with the parameter
and with scales that no module registers: ``absmax``, one for each block of 64 elements, which is a tensor of the
weight's ``QuantState``. These scales are an eighth of the packed bytes, so they live in chunks too: the tensor becomes
a managed parameter of the module, stays the same object, and has its old class again when the engine is detached. The
tables of a ``QuantState`` and the scales of 8-bit rows are less than a thousandth; they stay on the compute device, as
buffers do.

``matmul_4bit`` keeps a view of the weight in the graph, where no saved-tensors hook sees it, and the view would keep
the chunk on the device until backward. The view has the shape of the weight; so the weight answers with itself
(``Packed``), and backward reads it as it reads any parameter without a value.

The package never imports bitsandbytes: classes are known by their names.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_INT8 = "Int8Params"
_PACKED = frozenset({"Params4bit", _INT8})
_PACKS = "support_avx512bf16_for_cpu"


class Packed:
    """What the class of a packed weight has besides; see [Note: packed weights]."""

    def view(self: Any, *shape: Any) -> Any:
        """As of any tensor, but a view in the shape of the weight is the weight itself."""
        return self if shape == (-1, 1) and self.shape[1:] == (1,) else super().view(*shape)  # type: ignore[misc]

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of any tensor where a copy is asked for, which ``Int8Params`` would refuse."""
        return torch.Tensor.to(self, *args, **kwargs) if "copy" in kwargs else super().to(*args, **kwargs)  # type: ignore[misc]


def bases_of(original: type) -> tuple[type, ...]:
    """The base classes of a class that stands in for that of a parameter.

    Args:
        original: The class of the parameter.
    """
    return (Packed, original) if original.__name__ in _PACKED and not issubclass(original, Packed) else (original,)


@functools.cache
def packed_type(base: Any, name: str) -> type:
    """The class of a packed weight's copy that has no bytes.

    Args:
        base: The class of fake tensors.
        name: The name of the weight's class.
    """
    return type(name, (Packed, base), {})


def is_packed(tensor: Any) -> bool:
    """Whether a parameter is a weight that bitsandbytes has packed."""
    return type(tensor).__name__ in _PACKED


def keeps_type(tensor: torch.Tensor) -> bool:
    """Whether a managed tensor must stay in its own type: it is a packed weight, or its scales."""
    return is_packed(tensor) or not isinstance(tensor, torch.nn.Parameter)


def _weight_of(module: Any) -> Any:
    """The parameter ``weight`` of a module, or ``None``; the dictionaries of ``torch.jit`` have fewer methods."""
    return module._parameters["weight"] if "weight" in module._parameters else None  # noqa: SIM401


def scales_of(module: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where a module keeps scales that live in chunks.

    Args:
        module: Any module.

    Yields:
        A dictionary, the key of the scales in it, and their name beside the names of the module's parameters.
    """
    if (state := getattr(_weight_of(module), "quant_state", None)) is not None:
        yield vars(state), "absmax", "weight.absmax"


def parameters_of(module: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where a module keeps all that lives in chunks: its own parameters, and scales; see ``scales_of``."""
    yield from ((module._parameters, name, name) for name in list(module._parameters.keys()))
    yield from scales_of(module)


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that may live in chunks, by every name."""
    return {
        f"{path}.{name}" if path else name: place[key]
        for path, module in model.named_modules(remove_duplicate=False)
        for place, key, name in parameters_of(module)
        if place[key] is not None
    }


def buffers_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What modules compute with on the compute device that is in no chunk: buffers, tables and scales of 8-bit rows."""
    return itertools.chain(model.buffers(), *map(_tables_of, model.modules()))


def _tables_of(module: Any) -> Iterator[torch.Tensor]:
    weight = _weight_of(module)
    if weight is None or not is_packed(weight):
        return
    state = getattr(weight, "quant_state", None)
    nested = getattr(state, "state2", None)
    places = (state, "code"), (state, "offset"), (nested, "absmax"), (nested, "code"), (weight, "SCB")
    for owner, name in (*places, (module.__dict__.get("state"), "SCB")):
        if isinstance(table := getattr(owner, name, None), torch.Tensor):
            yield table


class PackedLayers:
    """Keeps layers of the library as the engine needs them.

    An evaluation on some CPUs packs 4-bit weights once more, so that nothing can be trained with them afterwards;
    these layers do not. An 8-bit layer has its weight where it has a second tensor over the same memory else.
    """

    def __init__(self) -> None:
        self._packs: dict[Any, bool | None] = {}

    def prepare(self, modules: Iterable[torch.nn.Module]) -> None:
        """Changes the layers among some modules; those that it has changed may be among them."""
        layers: list[Any] = [module for module in modules if is_packed(_weight_of(module))]
        for module in layers:
            self._packs.setdefault(module, module.__dict__.get(_PACKS))
            module.__dict__[_PACKS] = False
            weight = module.weight
            if type(weight).__name__ == _INT8:
                if weight.CB is not None:
                    module.init_8bit_state()
                module.state.CB = weight

    def tables(self) -> Iterable[torch.Tensor]:
        """What these layers have beside chunks; see ``buffers_of``."""
        return itertools.chain(*map(_tables_of, self._packs))

    def restore(self) -> None:
        """Gives the layers back, when their weights have their values."""
        for module, packs in self._packs.items():
            module.__dict__[_PACKS] = packs
            if packs is None:
                del module.__dict__[_PACKS]
            if (state := module.__dict__.get("state")) is not None and isinstance(state.CB, torch.nn.Parameter):
                state.CB = state.CB.data
        self._packs.clear()
