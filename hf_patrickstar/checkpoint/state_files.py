"""Files of optimizer states: written beside training, and what is in those of safetensors.

A safetensors file has tensors, Python's literals, and pickled objects.

[Note: consistent without a copy]
Only the optimizer's step changes masters and optimizer states, chunk by chunk. So the training state can be written in
the background without a copy: a thread writes the chunks in the order in which the step updates them, and the step
waits at a chunk that is not written yet. Forward and backward do not wait for the writer.
"""

import ast
import contextlib
import io
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from hf_patrickstar.checkpoint.deferred import DeferredTensor
from hf_patrickstar.checkpoint.safetensors_file import CHECKSUMS, FileSource, SafetensorsFile
from hf_patrickstar.checkpoint.storage import damaged
from hf_patrickstar.checkpoint.weight_files import load_torch_file
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.memory.streams import synchronize
from hf_patrickstar.runtime.chunk import Chunk

_PICKLED = "pickled"
"""The tensor of a file that has objects as bytes of ``torch.save``."""

States = dict[str, dict[Any, Any]]
"""What an optimizer keeps, by the parameter or group that it belongs to, and by key."""


class StateFile:
    """A file of optimizer states that is to be written, at once or in its own thread.

    It gets its final name when all of it is on the disk.

    Args:
        path: The file.
        tensors: Its tensors by name, those of a chunk one after the other; they are not copied.
        chunks: The chunk of each tensor, by the tensor's name.
        write: Writes it, with ``piece_numel`` and ``on_written`` as for ``write_safetensors``.

    Attributes:
        path: The file.
        tensors: Its tensors by name.
        write: Writes it in the thread of the caller.
        error: Why the thread could not write it, or ``None``.
    """

    def __init__(
        self, path: Path, tensors: dict[str, torch.Tensor], chunks: Mapping[str, Chunk], write: Callable[..., None]
    ) -> None:
        self.path, self.tensors, self.write = path, tensors, write
        self.error: BaseException | None = None
        self._chunks = chunks
        self._written = {name: threading.Event() for name in tensors}
        self._thread: threading.Thread | None = None

    def start(self, piece_numel: int) -> None:
        """Starts the thread; updates of a chunk wait until its tensors are written.

        Args:
            piece_numel: Elements in memory at once.
        """
        for name, chunk in self._chunks.items():
            chunk.reader = self._written[name]  # in the end that of its last tensor
        for device in {tensor.device for tensor in self.tensors.values() if not tensor.is_cpu}:
            synchronize(device)  # the thread has a compute stream of its own, which waits for no update
        self._thread = threading.Thread(target=self._run, args=(piece_numel,), name=f"writes {self.path.name}")
        self._thread.start()

    def join(self) -> BaseException | None:
        """Waits until the thread has ended, if there is one; returns ``error``."""
        if self._thread is not None:
            self._thread.join()
        return self.error

    def _run(self, piece_numel: int) -> None:
        try:
            unknown = threading.Event()
            self.write(piece_numel=piece_numel, on_written=lambda name: self._written.get(name, unknown).set())
        except BaseException as error:
            self.error = error
        finally:
            for event in self._written.values():
                event.set()


def pack(states: Mapping[str, Mapping[Any, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Puts states into the form of a safetensors file. Nothing is copied but objects; scalars of numpy become Python's.

    Args:
        states: What is kept under each key, by owner.

    Returns:
        The tensors of the file, by key and owner, and its metadata, with values that can be read without unpickling.

    Raises:
        CheckpointError: If a state cannot be pickled.
    """
    tensors: dict[str, torch.Tensor] = {}
    literals, objects = States(), States()
    for owner, state in states.items():
        for key, value in state.items():
            key = str.__str__(key) if isinstance(key, str) else key  # an enumeration may be a text, too
            is_tensor = isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)
            if is_tensor and isinstance(key, str) and "/" not in key:
                tensors[f"{key}/{owner}"] = value
            else:
                value = without_numpy(value)
                (literals if _is_literal((key, value)) else objects).setdefault(owner, {})[key] = value
    if objects:
        buffer = io.BytesIO()
        with pickling():
            torch.save(objects, buffer)
        tensors[_PICKLED] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()
    return tensors, {"format": "pt", "literals": repr(literals), CHECKSUMS: ""}


def without_numpy(value: Any) -> Any:
    """The same with scalars of Python in place of those of numpy, which ``weights_only`` of torch refuses."""
    return tree_map_only(numpy.generic, lambda scalar: scalar.item(), value)


@contextlib.contextmanager
def pickling() -> Iterator[None]:
    """Raises ``CheckpointError`` if what an optimizer keeps cannot be pickled inside of the block."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"what the optimizer keeps cannot be pickled ({error}); save without the optimizer's state "
            "(save_only_model of the Trainer)"
        ) from error


def _is_literal(value: Any) -> bool:
    """Whether Python can read a value from its ``repr``."""
    with contextlib.suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(repr(value)) == value)
    return False


def unpack(file: SafetensorsFile, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any, Any]]:
    """Yields what ``pack`` put into a file: owner, key and value; tensors with dimensions are deferred.

    Args:
        file: The file.
        shapes: The shapes of owners: those of tensors of which the file has a part.

    Raises:
        CheckpointError: If the file is damaged, or the program has not said that the type of an object is safe.
    """
    try:
        metadata = {"parts": "{}", **file.metadata()}
        parts = {name: (int(start), int(stop)) for name, (start, stop) in json.loads(metadata["parts"]).items()}
        literals = ast.literal_eval(metadata["literals"])
        yield from ((owner, key, value) for owner, state in literals.items() for key, value in state.items())
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damaged(f"'{file.path}' is not a part of a training state: {error!r}")) from error
    for name, (dtype, shape, _) in file.entries.items():
        numel = math.prod(shape)
        start, stop = parts.get(name, (0, numel))
        if stop - start != numel or start < 0:
            raise CheckpointError(
                damaged(f"'{file.path}': '{name}' should have elements {start} to {stop}, and has {numel}")
            )
        if name == _PICKLED:
            objects = load_torch_file(file.path, io.BytesIO(file.read(name, 0, numel).numpy().tobytes()))
            yield from ((owner, key, value) for owner, state in objects.items() for key, value in state.items())
            continue
        key, _, owner = name.partition("/")  # the names of parameters may have more of them
        if not shape:
            yield owner, key, file.read(name, 0, 1).view(())
            continue
        whole = shapes.get(owner, shape) if name in parts else shape
        yield owner, key, DeferredTensor.make(FileSource(whole, dtype, [(start, stop, file, name)]))


def update_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Loads the saved settings of a param group; tensors stay tensors."""
    for key, value in saved.items():
        present = group.get(key)
        if key == "params":
            continue
        if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
            present.fill_(value)
        elif isinstance(present, torch.Tensor) and getattr(value, "shape", None) == present.shape:
            present.copy_(value)
        else:
            group[key] = value
