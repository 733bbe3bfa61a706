"""A safetensors file that a thread writes while training goes on.

[Note: consistent without a copy]
Only the optimizer's step changes masters and optimizer states, chunk by chunk. So the writer needs no copy: its thread
writes the chunks in the order in which the step updates them, and the step waits at a chunk that is not written yet.
Forward and backward do not wait for the writer.
"""

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.memory.streams import synchronize
from hf_patrickstar.runtime.chunk import Chunk

_UNFINISHED = ".writing"
_FAILED = ".failed"


def nbytes_of(path: Path) -> int:
    """Bytes of a file that any process has written so far; -1 if the file does not exist yet."""
    for name in (path, path.with_name(path.name + _UNFINISHED)):
        with contextlib.suppress(OSError):
            return name.stat().st_size
    return -1


def failure_of(path: Path) -> str | None:
    """The reason that a writer in any process left when it could not write a file, or ``None``."""
    try:
        return path.with_name(path.name + _FAILED).read_text(encoding="utf-8") or f"'{path}' could not be written"
    except OSError:
        return None


class BackgroundWrite:
    """Writes a safetensors file in its own thread; the file gets its final name when all of it is on the disk.

    Args:
        path: The file.
        tensors: The tensors by name; they are not copied.
        metadata: Metadata of the file.
        chunks: The chunk of each tensor, by the tensor's name; updates of a chunk wait until its tensors are written.
        piece_numel: Elements in memory at once.

    Attributes:
        path: The file.
        error: Why the file could not be written, or ``None``; other processes learn of it by ``failure_of``.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str],
        chunks: Mapping[str, Chunk],
        piece_numel: int,
    ) -> None:
        self.path = path
        self.error: BaseException | None = None
        self._piece_numel = piece_numel
        self._waiting: dict[int, int] = {}
        self._events: dict[int, threading.Event] = {}
        self._indices = {name: chunk.spec.index for name, chunk in chunks.items()}
        for chunk in chunks.values():
            index = chunk.spec.index
            self._waiting[index] = self._waiting.get(index, 0) + 1
            if index not in self._events:
                chunk.reader = self._events[index] = threading.Event()
        for device in {tensor.device for tensor in tensors.values() if not tensor.is_cpu}:
            synchronize(device)  # the thread has a compute stream of its own, which waits for no update
        self._thread = threading.Thread(target=self._run, args=(tensors, metadata), name=f"writes {path.name}")
        self._thread.start()

    def join(self) -> None:
        """Waits until the thread has ended; ``error`` says whether it failed."""
        self._thread.join()

    def _run(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        unfinished = self.path.with_name(self.path.name + _UNFINISHED)
        try:
            write_safetensors(
                unfinished,
                tensors,
                metadata,
                piece_numel=self._piece_numel,
                is_sorted=False,
                on_written=self._allow_changes,
            )
            os.replace(unfinished, self.path)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the directory may be gone, because another process failed first
                unfinished.unlink(missing_ok=True)  # frees room for the message, if the disk is full
                unfinished.with_name(self.path.name + _FAILED).write_text(str(error), encoding="utf-8")
            self.error = error  # set last: once it is set, another thread may remove the directory
        finally:
            for event in self._events.values():
                event.set()

    def _allow_changes(self, name: str) -> None:
        index = self._indices[name]
        self._waiting[index] -= 1
        if not self._waiting[index]:
            self._events[index].set()
