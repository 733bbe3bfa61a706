"""``optimizer.state``: the states of parameters that live in chunks, under the parameters, as in torch."""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from hf_patrickstar.optim.kernels import Kernel
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.manager import ChunkManager


class StateView(MutableMapping[Any, Any]):
    """The states of an optimizer by parameter; what is written to them counts.

    States of parameters in chunks are views of chunk lists, or what the user's optimizer keeps itself; states of others,
    and entries under keys that are no parameters, are in that optimizer's own dictionary.

    Args:
        kernel: Has the states of parameters in chunks.
        manager: Knows which those are.
        others: The states of the user's optimizer itself.
        is_ours: Whether the kernel updates a parameter.
    """

    def __init__(
        self, kernel: Kernel, manager: ChunkManager, others: Any, is_ours: Callable[[ManagedTensor], bool]
    ) -> None:
        self._kernel = kernel
        self._manager = manager
        self._others = others
        self._is_ours = is_ours

    def _find(self, key: Any) -> ManagedTensor | None:
        """The parameter in a chunk that a key is, if its state is in chunk lists."""
        tensor = self._manager.find(key) if isinstance(key, torch.Tensor) else None
        return tensor if tensor is not None and self._is_ours(tensor) and self._kernel.state_places(tensor) else None

    def __getitem__(self, key: Any) -> Any:
        tensor = self._find(key)
        if tensor is None:
            return self._others[key]
        return ParameterState(self._kernel, tensor)

    def __setitem__(self, key: Any, state: Any) -> None:
        tensor = self._find(key)
        if tensor is None:
            self._others[key] = state
        else:
            self._kernel.load_tensor_state(tensor, dict(state))

    def __delitem__(self, key: Any) -> None:
        tensor = self._find(key)
        if tensor is None:
            del self._others[key]
        elif not self._kernel.own_state(tensor):
            raise KeyError(key)
        else:
            self._kernel.load_tensor_state(tensor, {})

    def pop(self, key: Any, *default: Any) -> Any:
        """Takes a state out: what it returns is the caller's own."""
        tensor = self._find(key)
        if tensor is None:
            return self._others.pop(key, *default)
        state = self._kernel.tensor_state(tensor)
        if state:
            del self[key]
        elif not default:
            raise KeyError(key)
        return state or default[0]

    def __contains__(self, key: Any) -> bool:
        tensor = self._find(key)
        return key in self._others if tensor is None else bool(self._kernel.own_state(tensor))

    def __iter__(self) -> Iterator[Any]:
        yield from self._others
        for tensor in self._manager.tensors:
            if self._find(tensor.parameter) is tensor and self._kernel.own_state(tensor):
                yield tensor.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter in chunk lists: its tensors are views, so that writing to them counts.

    Args:
        kernel: Has it.
        tensor: The parameter.
    """

    def __init__(self, kernel: Kernel, tensor: ManagedTensor) -> None:
        self._kernel = kernel
        self._tensor = tensor

    def _read(self) -> dict[str, Any]:
        self._tensor.chunk.wait_for_reader()
        return self._kernel.own_state(self._tensor)

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._kernel.load_tensor_state(self._tensor, {**self._complete(), key: value})

    def __delitem__(self, key: str) -> None:
        raise KeyError(f"'{key}' is a part of what the optimizer keeps of '{self._tensor.spec.name}' and cannot go alone")

    def _complete(self) -> dict[str, Any]:
        places = {key: torch.full(place.shape, 0.0) for key, place in self._kernel.state_places(self._tensor).items()}
        return {"step": torch.tensor(0.0), **places, **self._read()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(dict(self))
