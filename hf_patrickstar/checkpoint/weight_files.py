"""Opens the files of a model's weights, and finds out to which parameters they belong, without reading values.

[Note: loading without values]
A model's ``load_state_dict``, with the hooks that run before it, may rename keys, split and join tensors, and resize
buffers. So ``find_weights`` calls it as the Trainer does, but with deferred tensors. A copy to a parameter or buffer is
recorded and not carried out; if everything fits, the engine reads each value straight into its chunk. A copy to another
tensor (``parameter.data``, or a part of a parameter), and a function that needs values, reads them at once.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, READING, DeferredTensor, Reader, Source, replaced
from hf_patrickstar.checkpoint.safetensors_file import FileSource, SafetensorsFile
from hf_patrickstar.checkpoint.storage import damaged, missing_file
from hf_patrickstar.errors import CheckpointError, PatrickStarError
from hf_patrickstar.memory.bits import same_bits
from hf_patrickstar.model.model_set import roots_of
from hf_patrickstar.runtime.parameter import ManagedParameter, Origin

SAFE_OPEN = (("transformers.modeling_utils", "safe_open"),)
LOAD_STATE_DICT = (("transformers.modeling_utils", "load_state_dict"),)
"""transformers' functions that read files of weights, which ``deferred_weights`` replaces."""

_SAFE_NAMES = ("model.safetensors", "model.safetensors.index.json")
_NAMES = (*_SAFE_NAMES, "pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTER_NAME = "adapter_model.safetensors"
_WRAPPERS = ("base_layer", "original_module")
"""Names of modules that PEFT puts between a module and its parameters."""


def has_weights(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has the weights of a model, under one of the names that libraries look for."""
    return any((Path(directory) / name).is_file() for name in _NAMES)


def open_weights(path: str | os.PathLike[str]) -> dict[str, DeferredTensor]:
    """Opens the weights of a saved model.

    Args:
        path: A directory with ``model.safetensors`` or ``pytorch_model.bin``, or their indices and shards, or one file.

    Returns:
        Deferred tensors by their names in the files.

    Raises:
        CheckpointError: If a file is missing, truncated, or has an object that ``weights_only`` of torch refuses.
    """
    path = Path(path)
    if path.is_file():
        return _open_index(path) if path.name.endswith(".index.json") else _open_file(path)
    for name in _NAMES:
        if (path / name).is_file():
            return open_weights(path / name)
    raise CheckpointError(
        f"'{path}' has no weights: none of {', '.join(_NAMES)} is there; give a directory that save_pretrained or a "
        "Trainer has written"
    )


def _open_index(path: Path) -> dict[str, DeferredTensor]:
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: _open_file(path.parent / name) for name in sorted(set(shards.values()))}
        return {tensor: files[name][tensor] for tensor, name in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            damaged(f"'{path}' does not name the tensors of the files beside it: {error!r}")
        ) from error


def _open_file(path: Path) -> dict[str, DeferredTensor]:
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        return {name: file.get_tensor(name) for name in file.entries}
    return {
        name: DeferredTensor.make(_in_memory(tensor, path), is_loadable=True)
        for name, tensor in load_torch_file(path).items()
        if isinstance(tensor, torch.Tensor)
    }


def _in_memory(tensor: torch.Tensor, path: Path) -> Source:
    """A tensor in memory, or in a memory-mapped file, as the source of a deferred tensor."""
    return Source(
        tuple(tensor.shape),
        tensor.dtype,
        lambda start, stop: tensor.reshape(-1)[start:stop],
        is_for_threads=tensor.is_contiguous(),  # each piece of another one is made from a copy of the whole
        name=f"'{path}'",
    )


def load_torch_file(path: Path, data: io.BytesIO | None = None) -> dict[str, Any]:
    """Loads a file of ``torch.save`` with ``weights_only``; tensors are memory-mapped if its format allows that.

    Args:
        path: The file.
        data: The bytes of ``torch.save``, if they are only a part of the file.

    Raises:
        CheckpointError: If it is missing, damaged, or holds other objects.
    """
    try:
        is_mappable = data is None and zipfile.is_zipfile(path)  # not so in the format before torch 1.6
        loaded = torch.load(data or path, map_location="cpu", mmap=is_mappable, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(missing_file(path)) from error
    except Exception as error:
        raise CheckpointError(
            f"'{path}' is damaged, or cannot be loaded safely: {str(error) or 'it is empty'}; use another checkpoint, "
            "or for weights safetensors files"
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"'{path}' has a {type(loaded).__name__}, not a dictionary; save the state_dict instead")
    return loaded


@contextlib.contextmanager
def deferred_weights(enabled: bool = True) -> Iterator[None]:
    """Inside the block ``from_pretrained`` reads no weights; the engine reads them later, straight into chunks.

    So weights are never in memory twice, and each process reads only its own part. The model has shapes, types and
    names, and PEFT can wrap it; it gets its values when a Trainer, or ``prepare``, makes its engine::

        with hf_patrickstar.deferred_weights(enabled=training_args.patrickstar):
            model = AutoModelForCausalLM.from_pretrained(name)

    Args:
        enabled: If false, ``from_pretrained`` reads weights as usual.

    Raises:
        CheckpointError: From ``from_pretrained``, if a file is truncated.
    """
    if not enabled:
        yield
        return
    import transformers.modeling_utils  # noqa: F401  (what is replaced must be imported)

    def load_state_dict(path: Any, *_args: Any, **_kwargs: Any) -> dict[str, DeferredTensor]:
        return _open_file(Path(path))

    with replaced(SAFE_OPEN, SafetensorsFile), replaced(LOAD_STATE_DICT, load_state_dict):
        yield


# Which weights belong to which parameters


@dataclasses.dataclass(frozen=True, slots=True)
class FoundWeights:
    """Saved weights that belong to a model, and the names that do not match.

    Attributes:
        values: Tensors, usually deferred ones, by name in the model.
        missing_keys: Names in the model that have no saved weights.
        unexpected_keys: Names in the files that the model does not have.
    """

    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    missing_keys: list[str] = dataclasses.field(default_factory=list)
    unexpected_keys: list[str] = dataclasses.field(default_factory=list)


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
    conversion of checkpoints is used. If adapters of a PEFT model are there, nothing else is searched for.

    Args:
        model: The model, with an engine or without.
        directory: The directory or file of the weights; see ``open_weights``.
        device: The device of buffers that hooks of the model create.

    Raises:
        CheckpointError: If a file is missing or damaged, or a shape does not fit.
    """
    names = getattr(model, "peft_config", None) or {}
    adapters = {name: Path(directory) / ("" if name == "default" else name) / _ADAPTER_NAME for name in names}
    if any(path.is_file() for path in adapters.values()):
        return _find_adapters(model, adapters, device)
    values: dict[str, torch.Tensor] = dict(open_weights(directory))

    def assign(values: dict[str, torch.Tensor]) -> FoundWeights:
        return _assign(model, values, directory, device, lambda given: model.load_state_dict(given, False))

    try:
        found = assign(values)
    except CheckpointError:
        converted = {} if values.keys() <= _tensors_of(model).keys() else _converted(model, directory, values)
        if not converted:
            raise
    else:
        converted = _converted(model, directory, values) if found.unexpected_keys else {}
    return assign(converted) if converted else found


def _find_adapters(model: torch.nn.Module, places: Mapping[str, Path], device: torch.device | str) -> FoundWeights:
    """Opens the files of a PEFT model's adapters; PEFT finds the parameters that they belong to."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    found = FoundWeights()
    for name, path in places.items():
        values = _open_file(path)
        for key, value in get_peft_model_state_dict(model, adapter_name=name).items():
            if key not in values:
                raise CheckpointError(f"'{path}' has no tensor '{key}'; load a checkpoint of these adapters")
            if values[key].shape != value.shape:
                raise CheckpointError(shape_mismatch(key, values[key], tuple(value.shape)))
        load = functools.partial(set_peft_model_state_dict, model, adapter_name=name)
        adapter = _assign(model, values, path, device, load)
        found.values.update(adapter.values)
        found.unexpected_keys.extend(adapter.unexpected_keys)
    return found


def _assign(
    model: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    device: torch.device | str,
    load: Callable[[dict[str, torch.Tensor]], Any],
) -> FoundWeights:
    """Lets a function load values into a model, and returns which values it assigns to which names."""
    before = _tensors_of(model)
    # A module may keep the tensor that it gets as extra state, so that one must have its values.
    given = {name: _read(value) if name.endswith("_extra_state") else value for name, value in values.items()}
    try:
        with _Assignments(before.values()) as assignments:
            result = load(given)
    except PatrickStarError:
        raise
    except RuntimeError as error:
        for name, value in values.items():
            if name in before and before[name].shape != value.shape:
                raise CheckpointError(shape_mismatch(name, value, tuple(before[name].shape))) from error
        raise _misfit(directory, error) from error
    assigned = assignments.values
    known = {id(tensor) for tensor in before.values()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor) and id(buffer) not in known:  # a hook has made it
                module._buffers[name] = _read(assigned.get(id(buffer), buffer)).to(device)
    tensors = _tensors_of(model)
    missing = getattr(result, "missing_keys", [name for name in tensors if name not in values])
    return FoundWeights(
        {name: assigned[id(tensor)] for name, tensor in tensors.items() if id(tensor) in assigned},
        [name for name in missing if name not in tensors or id(tensors[name]) not in assigned],  # else tied
        list(getattr(result, "unexpected_keys", [name for name in values if name not in tensors])),
    )


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
) -> dict[str, torch.Tensor]:
    """The weights as transformers converts them for the model; empty if that is not possible."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not Path(directory).is_dir():
        return {}
    kinds = {value.dtype for value in values.values() if value.is_floating_point()}
    widest = max(kinds, key=lambda dtype: dtype.itemsize, default=torch.float32)
    try:
        # from_pretrained initialises what is missing in the files; the global random state must not change by that.
        with deferred_weights(), torch.random.fork_rng(devices=[]):
            twin = type(model).from_pretrained(directory, config=model.config, dtype=widest)
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise _misfit(directory, error) from error
    items = [*twin.named_parameters(), *twin.named_buffers()]
    return {name: value for name, value in items if isinstance(value, DeferredTensor)}


def _misfit(directory: str | os.PathLike[str], error: Exception) -> CheckpointError:
    return CheckpointError(f"'{directory}' does not fit the model; make it with the same configuration: {error}")


def shape_mismatch(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> str:
    """The message of an error: a tensor has another shape in a file than in the model."""
    where = getattr(getattr(value, "recipe", None), "name", "the file")
    return (
        f"{where}: tensor '{name}' has shape {tuple(value.shape)}, in the model it has {shape}; make the model with "
        "the configuration that is beside the weights"
    )


def is_in_model_file(model: torch.nn.Module, tensor: ManagedParameter) -> bool:
    """Whether saving a model saves a parameter: PEFT saves adapters alone, and some models leave out names."""
    names = {tensor.spec.name, *tensor.spec.aliases}
    for place, root in enumerate(roots_of(model)):
        prefix = "" if root is model else f"{place}."
        own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        if not hasattr(root, "peft_config") and not own <= set(getattr(root, "_keys_to_ignore_on_save", None) or ()):
            return True
    return False


# Where frozen parameters can be read again


def origin_of(value: torch.Tensor) -> Origin | None:
    """The source of a deferred tensor that a safetensors file has as it is; ``None`` for any other tensor."""
    source = getattr(value, "recipe", None)
    return source if isinstance(source, FileSource) else None


class ModelFiles:
    """Searches the files that a model was loaded from for the values of its parameters; see [Note: originals].

    transformers' models know their directory or their name on the hub (``name_or_path``). A tensor in a file is
    accepted only if it has the same bits as the parameter, so names in the files may be guessed.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @functools.cached_property
    def _opened(self) -> list[dict[str, DeferredTensor]]:
        """The files that the model, or models in it, were loaded from; of the hub only the cache is searched."""
        found: dict[str, dict[str, DeferredTensor]] = {}
        for module in self._model.modules():
            name = module.__dict__.get("name_or_path", "")
            for file in _SAFE_NAMES if isinstance(name, str) and name else ():
                from transformers.utils import cached_file

                revision = getattr(getattr(module, "config", None), "_commit_hash", None)
                with contextlib.suppress(CheckpointError, OSError):
                    path = str(cached_file(name, file, revision=revision, local_files_only=True))
                    found[path] = found.get(path) or open_weights(path)
        return list(found.values())

    def find(self, tensor: ManagedParameter, value: torch.Tensor) -> Origin | None:
        """The tensor in a file that has the same bits as a value, or ``None``.

        Args:
            tensor: The parameter that has the value.
            value: The value, in memory; only this rank's part of it is compared.
        """
        parts = [part for part in tensor.spec.name.split(".") if part not in _WRAPPERS]
        parts.insert(0, getattr(self._model, "base_model_prefix", ""))
        for key in (".".join(parts[place:]) for place in range(len(parts))):
            for found in (values[key] for values in self._opened if key in values):
                if found.shape == value.shape and found.dtype == value.dtype:
                    pieces = (Reader().pieces(item, PIECE_NUMEL, *tensor.part) for item in (value, found))
                    with contextlib.suppress(CheckpointError):
                        if all(itertools.starmap(same_bits, zip(*pieces, strict=True))):
                            return origin_of(found)
        return None
