"""``optimizer.state``: the states of parameters that live in chunks, under the parameters, as in torch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hf_patrickstar.layout.specs import MASTER
from hf_patrickstar.memory.operators import unseen
from hf_patrickstar.optim.kernel import SAVED_MASTER, Kernel
from hf_patrickstar.runtime.manager import ChunkManager
from hf_patrickstar.runtime.parameter import ManagedParameter

_INNER = "__bnb_optimizer_quant_state__"
"""What bitsandbytes calls the dictionary that it puts around states of 8 bits when it saves them."""


class StateView(MutableMapping[Any, Any]):
    """The states of an optimizer by parameter; writes to them take effect.

    States of parameters in chunks are views of chunk lists, or what the user's optimizer keeps itself; states of
    others, and entries under keys that are no parameters, are in that optimizer's own dictionary.

    Args:
        kernel: Has the states of parameters in chunks.
        manager: Finds parameters in chunks.
        others: The states of the user's optimizer itself.
        is_ours: Whether the kernel updates a parameter.
    """

    def __init__(
        self, kernel: Kernel, manager: ChunkManager, others: Any, is_ours: Callable[[ManagedParameter], bool]
    ) -> None:
        self._kernel = kernel
        self._manager = manager
        self._others = others
        self._is_ours = is_ours

    @unseen()
    def _find(self, key: Any) -> ManagedParameter | None:
        """The ``ManagedParameter`` of a key, if it is a parameter whose state is in chunk lists; else ``None``."""
        tensor = self._manager.find(key) if isinstance(key, torch.Tensor) else None
        return tensor if tensor is not None and self._is_ours(tensor) and self._kernel.state_places(tensor) else None

    def __getitem__(self, key: Any) -> Any:
        tensor = self._find(key)
        if tensor is None:
            return self._others[key]
        return ParameterState(self._kernel, tensor)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter, or the default; asking does not make one."""
        return self[key] if key in self else default  # noqa: SIM401

    @unseen()
    def __setitem__(self, key: Any, state: Any) -> None:
        tensor = self._find(key)
        if tensor is None:
            self._others[key] = state
        else:
            self._kernel.load_tensor_state(tensor, dict(state))

    @unseen()
    def __delitem__(self, key: Any) -> None:
        tensor = self._find(key)
        if tensor is None:
            del self._others[key]
        elif not self._kernel.own_state(tensor):
            raise KeyError(key)
        else:
            self._kernel.load_tensor_state(tensor, {})

    @unseen()
    def pop(self, key: Any, *default: Any) -> Any:
        """Removes a state and returns a copy of it."""
        tensor = self._find(key)
        if tensor is None:
            return self._others.pop(key, *default)
        state = self._kernel.tensor_state(tensor)
        if state:
            del self[key]
        elif not default:
            raise KeyError(key)
        return state or default[0]

    @unseen()
    def __contains__(self, key: Any) -> bool:
        tensor = self._find(key)
        return key in self._others if tensor is None else bool(self._kernel.own_state(tensor))

    def __iter__(self) -> Iterator[Any]:
        yield from self._others
        for tensor in self._manager.tensors:
            if self._find(tensor.parameter) is tensor and tensor.parameter in self:
                yield tensor.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter in chunk lists; its tensors are views, so writes to them take effect.

    Args:
        kernel: The kernel that has the state.
        tensor: The parameter.
    """

    def __init__(self, kernel: Kernel, tensor: ManagedParameter) -> None:
        self._kernel = kernel
        self._tensor = tensor

    @unseen()
    def _read(self) -> dict[str, Any]:
        self._tensor.chunk.wait_for_reader()
        return self._kernel.own_state(self._tensor)

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    @unseen()
    def __setitem__(self, key: str, value: Any) -> None:
        self._kernel.load_tensor_state(self._tensor, {**self._complete(), key: value})

    def __delitem__(self, key: str) -> None:
        raise KeyError(
            f"'{key}' is a part of what the optimizer keeps of '{self._tensor.spec.name}' and cannot go alone"
        )

    @unseen()
    def clear(self) -> None:
        """Forgets the state: the optimizer begins again with this parameter."""
        self._kernel.load_tensor_state(self._tensor, {})

    def _complete(self) -> dict[str, Any]:
        places = {
            key: torch.zeros(place.shape, dtype=place.dtype, device="cpu")
            for key, place in self._kernel.state_places(self._tensor).items()
        }
        return {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), **places, **self._read()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(dict(self))


def check_shapes(tensor: ManagedParameter, state: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Makes sure that the tensors of a state that have places in chunks have the parameter's shape.

    Args:
        tensor: The parameter.
        state: Its state.
        keys: The names of the lists in chunks; other tensors may have any shape.

    Raises:
        ValueError: If one has another shape.
    """
    for name in keys:
        key = SAVED_MASTER if name == MASTER else name
        value, (dtype, block_numel) = state.get(key), tensor.spec.types.of_list(name)
        if not isinstance(value, torch.Tensor):
            continue
        if tuple(value.shape) != (tensor.spec.shape if block_numel == 1 else (-(-tensor.spec.numel // block_numel),)):
            raise ValueError(
                f"optimizer state '{key}' of parameter '{tensor.spec.name}' has shape {tuple(value.shape)}, "
                f"the parameter has {tensor.spec.shape}"
            )
        if (value.dtype is torch.uint8) != (dtype == "uint8"):
            raise ValueError(
                f"optimizer state '{key}' of parameter '{tensor.spec.name}' was saved as {value.dtype}, and here it is "
                f"{dtype}: the optimizer was made with another number of bits"
            )


def read(value: Any) -> Any:
    """Reads tensors that are still in a file, which are on the meta device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu() if tensor.is_meta else tensor, value)


def call_hooks(hooks: Mapping[int, Any], optimizer: torch.optim.Optimizer, *state_dict: Any) -> Any:
    """Calls hooks of an optimizer.

    Args:
        hooks: The hooks.
        optimizer: The first argument of the hooks.
        *state_dict: The second argument of the hooks, if they have one; each hook may replace it.

    Returns:
        The second argument after the last hook.
    """
    found = state_dict
    for hook in hooks.values():
        replaced = hook(optimizer, *found)
        found = (replaced,) if found and replaced is not None else found
    return found[0] if found else None


def pack_state(
    param_groups: Sequence[Mapping[str, Any]], states: Iterable[tuple[torch.Tensor, Any]], entries: Mapping[Any, Any]
) -> dict[str, Any]:
    """Packs groups and states as ``torch.optim.Optimizer.state_dict`` does, with numbers in place of parameters.

    Args:
        param_groups: The groups.
        states: Parameters and their states.
        entries: What is kept under other keys; it is copied.
    """
    numbers: dict[int, int] = {}
    groups = []
    for group in param_groups:
        members = [numbers.setdefault(id(parameter), len(numbers)) for parameter in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": members})
    packed = {numbers[id(parameter)]: state for parameter, state in states}
    return {"state": {**packed, **copy.deepcopy(dict(entries))}, "param_groups": groups}


def pair_up(
    param_groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """The parameters of groups, each with its state of a state dictionary, which may be empty.

    Raises:
        ValueError: If the groups do not match.
    """
    saved = state_dict["param_groups"]
    ours, theirs = [len(group["params"]) for group in param_groups], [len(group["params"]) for group in saved]
    if ours != theirs:
        raise ValueError(
            f"optimizer state has param groups of {theirs} parameters, this optimizer of {ours}; "
            "it was saved for another model or other groups"
        )
    numbers = [number for group in saved for number in group["params"]]
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    states, masters = state_dict["state"], state_dict.get(SAVED_MASTER, {})
    places = zip(numbers, parameters, strict=True)
    return [(p, _flat(states.get(number, {}), masters.get(number))) for number, p in places]


def _flat(state: Mapping[str, Any], master: torch.Tensor | None) -> dict[str, Any]:
    """A state with its master, and without the dictionary that bitsandbytes puts around states of 8 bits."""
    flat = dict(state)
    inner = flat.pop(_INNER, {})
    return flat | inner | ({} if master is None else {SAVED_MASTER: master})
