"""The files that frozen parameters were read from, to be read again; see [Note: originals]."""

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
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.originals import Origin

_WRAPPERS = ("base_layer", "original_module")
"""Names of modules that PEFT puts between a module and its parameters."""


def origin_of(value: torch.Tensor) -> Origin | None:
    """Where a value is read from, if it lies as it is in a safetensors file."""
    source = getattr(value, "recipe", None)
    return source if isinstance(source, FileSource) else None


class ModelFiles:
    """The files that a model says it was loaded from, searched for the values that it has.

    transformers' models know their directory or their name on the hub (``name_or_path``). Whether what lies there is
    what the model has is found out bit by bit, so names need only be good guesses.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._opened: list[dict[str, DeferredTensor]] | None = None

    def find(self, tensor: ManagedTensor, value: torch.Tensor) -> Origin | None:
        """What has the same bits as a value.

        Args:
            tensor: The parameter that it is the value of.
            value: The value, in memory. What this rank has of it is compared.
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
        """What may be a parameter in the files: with a model's prefix or without, PEFT's modules left out."""
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        prefix = getattr(self._model, "base_model_prefix", "")
        names = [[prefix, *parts], *(parts[place:] for place in range(len(parts)))]
        if self._opened is None:
            self._opened = [open_safetensors(path) for path in self._directories()]
        for values in self._opened:
            yield from (values[key] for key in map(".".join, names) if key in values)

    def _directories(self) -> list[Path]:
        """Where the model, or models in it, were loaded from; one of the hub is looked for in the cache alone."""
        found: dict[Path, None] = {}
        for module in self._model.modules():
            name = module.__dict__.get("name_or_path")
            if isinstance(name, str) and name:
                path = Path(name) if Path(name).is_dir() else _in_cache(name, getattr(module, "config", None))
                if path is not None:
                    found[path] = None
        return list(found)


def _is_at(own: torch.Tensor, found: DeferredTensor, start: int) -> bool:
    """Whether a flat tensor has the same bits as the elements of another one from a first one on."""
    reader = Reader()
    for place in range(0, own.numel(), PIECE_NUMEL):
        piece = own[place : place + PIECE_NUMEL].cpu()
        if not same_bits(piece, reader.read(found, start + place, start + place + piece.numel())):
            return False
    return True


def _in_cache(name: str, config: Any) -> Path | None:
    """Where the cache has the files of a model of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("model.safetensors", "model.safetensors.index.json"):
        with contextlib.suppress(HFValidationError):
            path = try_to_load_from_cache(name, file, revision=getattr(config, "_commit_hash", None))
            if isinstance(path, str):
                return Path(path).parent
    return None
