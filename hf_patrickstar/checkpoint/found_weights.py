"""Finds which saved weights belong to which parameters, by the model's own ``load_state_dict``, without their values.

[Note: loading without values]
A model's ``load_state_dict``, with the hooks that run before it, may rename keys, split and join tensors, and resize
buffers. So ``find_weights`` calls it as the Trainer does, but with deferred tensors. A copy to a parameter or buffer is
recorded and not carried out; if everything fits, the engine reads each value straight into its chunk. A copy to another
tensor (``parameter.data``, or a part of a parameter), and a function that needs values, reads them at once.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hf_patrickstar.checkpoint.deferred import READING, DeferredTensor, Reader
from hf_patrickstar.checkpoint.weight_files import deferred_weights, open_weights
from hf_patrickstar.errors import CheckpointError, PatrickStarError
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.runtime.together import roots_of

_EXTRA_STATE = "_extra_state"


@dataclasses.dataclass(frozen=True, slots=True)
class FoundWeights:
    """Saved weights that belong to a model, and the names that do not match.

    Attributes:
        values: Tensors, usually deferred ones, by name in the model.
        missing_keys: Names in the model that have no saved weights.
        unexpected_keys: Names in the files that the model does not have.
    """

    values: dict[str, torch.Tensor]
    missing_keys: list[str]
    unexpected_keys: list[str]


class _Assignments(TorchFunctionMode):
    """Records what is copied to given tensors; see [Note: loading without values].

    Args:
        targets: The tensors.

    Attributes:
        values: The copied tensors, by the identity of the tensor that they were copied to.
    """

    def __init__(self, targets: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.values: dict[int, torch.Tensor] = {}
        self._targets = {id(target): target for target in targets}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "copy_":
            target, value = args[:2]
            if id(target) in self._targets or isinstance(target, DeferredTensor):  # or one that a hook made
                self._targets[id(target)] = target
                self.values[id(target)] = value
                return target
        if name in READING or name == "copy_":
            args, kwargs = tree_map_only(DeferredTensor, _read, (args, kwargs))
        return func(*args, **kwargs)


def find_weights(
    model: torch.nn.Module, directory: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> FoundWeights:
    """Opens saved weights and finds out which parameters they belong to; values of parameters are not read yet.

    The model's own ``load_state_dict`` decides. If it does not know some names in the files, transformers' renaming and
    conversion of checkpoints is used.

    Args:
        model: The model, with an engine or without.
        directory: The directory or file of the weights; see ``open_weights``.
        device: The device of buffers that hooks of the model create.

    Raises:
        CheckpointError: If a file is missing or damaged, or a shape does not fit.
    """
    values: dict[str, torch.Tensor] = dict(open_weights(directory))
    is_known = values.keys() <= _tensors_of(model).keys()
    try:
        found = _assign(model, values, directory, device)
    except CheckpointError:
        converted = None if is_known else _converted(model, directory, values)
        if not converted:
            raise
    else:
        converted = _converted(model, directory, values) if found.unexpected_keys else None
    return _assign(model, converted, directory, device) if converted else found


def _assign(
    model: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    device: torch.device | str,
) -> FoundWeights:
    """Calls the model's ``load_state_dict``, and returns which values it assigns to which names."""
    before = _tensors_of(model)
    assignments = _Assignments(before.values())
    # A module may keep the tensor that it gets as extra state, so that one must have its values.
    given = {name: _read(value) if name.endswith(_EXTRA_STATE) else value for name, value in values.items()}
    try:
        with assignments:
            result: Any = model.load_state_dict(given, False)
    except PatrickStarError:
        raise
    except RuntimeError as error:
        shapes = ((name, value, tuple(before[name].shape)) for name, value in values.items() if name in before)
        wrong = next((found for found in shapes if tuple(found[1].shape) != found[2]), None)
        message = (
            shape_mismatch(*wrong)
            if wrong
            else f"'{directory}' does not fit the model; load it into a model with its own configuration: {error}"
        )
        raise CheckpointError(message) from error
    assigned = assignments.values
    _read_new_buffers(model, {id(tensor) for tensor in before.values()}, assigned, device)
    tensors = _tensors_of(model)
    missing = getattr(result, "missing_keys", [name for name in tensors if name not in values])
    unexpected = getattr(result, "unexpected_keys", [name for name in values if name not in tensors])
    return FoundWeights(
        {name: assigned[id(tensor)] for name, tensor in tensors.items() if id(tensor) in assigned},
        [name for name in missing if name not in tensors or id(tensors[name]) not in assigned],  # else tied
        list(unexpected),
    )


def _read_new_buffers(
    model: torch.nn.Module, known: set[int], assigned: Mapping[int, torch.Tensor], device: torch.device | str
) -> None:
    """Reads the values of buffers that hooks have replaced by deferred tensors."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor) and id(buffer) not in known:
                value = assigned.get(id(buffer), buffer)
                module._buffers[name] = _read(value).to(device)


def _read(value: torch.Tensor) -> torch.Tensor:
    """A copy in memory."""
    return Reader().read_whole(value).clone()


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a state dictionary has, by name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _converted(
    model: torch.nn.Module, directory: str | os.PathLike[str], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """The weights as transformers converts them for the model; ``None`` if that is not possible."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not Path(directory).is_dir():
        return None
    kinds = {value.dtype for value in values.values() if value.is_floating_point()}
    widest = max(kinds, key=lambda dtype: dtype.itemsize, default=torch.float32)
    try:
        # from_pretrained initialises what is missing in the files; the global random state must not change by that.
        with deferred_weights(), torch.random.fork_rng(devices=[]):
            twin = type(model).from_pretrained(directory, config=model.config, dtype=widest)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"'{directory}' does not fit the model; load it into a model with its own configuration: {error}"
        ) from error
    items = [*twin.named_parameters(), *twin.named_buffers()]
    return {name: value for name, value in items if isinstance(value, DeferredTensor)}


def shape_mismatch(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> str:
    """The message of an error: a tensor has another shape in a file than in the model."""
    where = str(value.recipe) if isinstance(value, DeferredTensor) else "the file"
    return (
        f"{where}: tensor '{name}' has shape {tuple(value.shape)}, in the model it has {shape}; make the model with "
        "the configuration that is beside the weights"
    )


def is_in_model_file(model: torch.nn.Module, tensor: ManagedParameter) -> bool:
    """Whether saving a model saves a parameter: PEFT saves adapters alone, and some models leave out names."""
    names = {tensor.spec.name, *tensor.spec.aliases}
    roots = roots_of(model)
    for place, root in enumerate(roots):
        prefix = "" if root is model else f"{place}."
        own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        left_out = getattr(root, "_keys_to_ignore_on_save", None) or ()
        if not hasattr(root, "peft_config") and not own <= set(left_out):
            return True
    return False
