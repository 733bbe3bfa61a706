"""Finds the files from which frozen parameters can be read again; see [Note: originals]."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_patrickstar.checkpoint.deferred import PIECE_NUMEL, DeferredTensor, Reader
from hf_patrickstar.checkpoint.safetensors_file import FileSource
from hf_patrickstar.checkpoint.weight_files import open_safetensors
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.runtime.bits import same_bits
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.runtime.originals import Origin

_WRAPPERS = ("base_layer", "original_module")
"""Names of modules that PEFT puts between a module and its parameters."""


def origin_of(value: torch.Tensor) -> Origin | None:
    """The source of a deferred tensor that a safetensors file has as it is; ``None`` for any other tensor."""
    source = getattr(value, "recipe", None)
    return source if isinstance(source, FileSource) else None


class ModelFiles:
    """Searches the files that a model was loaded from for the values of its parameters.

    transformers' models know their directory or their name on the hub (``name_or_path``). A tensor in a file is
    accepted only if it has the same bits as the parameter, so names in the files may be guessed.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._opened: list[dict[str, DeferredTensor]] | None = None

    def find(self, tensor: ManagedParameter, value: torch.Tensor) -> Origin | None:
        """The tensor in a file that has the same bits as a value, or ``None``.

        Args:
            tensor: The parameter that has the value.
            value: The value, in memory; only this rank's part of it is compared.
        """
        start, stop = tensor.part
        own = value.detach().reshape(-1)[start:stop]
        for found in self._candidates(tensor.spec.name):
            if found.shape == value.shape and found.dtype == value.dtype:
                with contextlib.suppress(CheckpointError):
                    if _is_at(own, found, start):
                        return origin_of(found)
        return None

    def _candidates(self, name: str) -> Iterator[DeferredTensor]:
        """Tensors that may be the parameter: names with and without prefixes, and without PEFT's wrapper modules."""
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        prefix = getattr(self._model, "base_model_prefix", "")
        names = [[prefix, *parts], *(parts[place:] for place in range(len(parts)))]
        if self._opened is None:
            self._opened = [open_safetensors(path) for path in self._directories()]
        for values in self._opened:
            yield from (values[key] for key in map(".".join, names) if key in values)

    def _directories(self) -> list[Path]:
        """The directories that the model, or models in it, were loaded from; of the hub only the cache is searched."""
        found: dict[Path, None] = {}
        for module in self._model.modules():
            name = module.__dict__.get("name_or_path")
            if isinstance(name, str) and name:
                path = Path(name) if Path(name).is_dir() else _in_cache(name, getattr(module, "config", None))
                if path is not None:
                    found[path] = None
        return list(found)


def _is_at(own: torch.Tensor, found: DeferredTensor, start: int) -> bool:
    """Whether a flat tensor has the same bits as the elements of another one from ``start`` on."""
    reader = Reader()
    for place in range(0, own.numel(), PIECE_NUMEL):
        piece = own[place : place + PIECE_NUMEL].cpu()
        if not same_bits(piece, reader.read(found, start + place, start + place + piece.numel())):
            return False
    return True


def _in_cache(name: str, config: Any) -> Path | None:
    """The directory of a hub model's files in the cache, or ``None``."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("model.safetensors", "model.safetensors.index.json"):
        with contextlib.suppress(HFValidationError):
            path = try_to_load_from_cache(name, file, revision=getattr(config, "_commit_hash", None))
            if isinstance(path, str):
                return Path(path).parent
    return None
