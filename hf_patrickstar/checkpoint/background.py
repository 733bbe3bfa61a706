"""A file that is written while training goes on.

[Note: consistent without a copy]
Masters and optimizer states change in the optimizer's step alone, chunk by chunk. So nothing is copied: a thread writes
the chunks in the order in which the step will come to them, and the step waits at a chunk that is not written yet.
Forward and backward passes, of which there are many per step where gradients accumulate, do not notice.
"""

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_patrickstar.checkpoint.safetensors_file import write_safetensors
from hf_patrickstar.runtime.chunk import Chunk

_UNFINISHED = ".writing"
_FAILED = ".failed"


def nbytes_of(path: Path) -> int:
    """How much of a file is written, by whichever process; -1 before it is begun."""
    for name in (path, path.with_name(path.name + _UNFINISHED)):
        with contextlib.suppress(OSError):
            return name.stat().st_size
    return -1


def failure_of(path: Path) -> str | None:
    """Why a file could not be written, by whichever process, or ``None``."""
    try:
        return path.with_name(path.name + _FAILED).read_text(encoding="utf-8") or f"'{path}' could not be written"
    except OSError:
        return None


class BackgroundWrite:
    """Writes a safetensors file in a thread of its own; the file has its name when all of it is on the disk.

    Args:
        path: The file.
        tensors: What to write, in place.
        metadata: Texts beside it.
        chunks: The chunk that each tensor is in; it does not change before the tensor is written.
        piece_numel: Elements in memory at once.

    Attributes:
        path: The file.
        error: Why it could not be written; then there is a file that says so, see ``failure_of``.
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
        self._thread = threading.Thread(target=self._run, args=(tensors, metadata), name=f"writes {path.name}")
        self._thread.start()

    def join(self) -> None:
        """Waits for its end; see ``error``."""
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
                on_written=self._let_go,
            )
            os.replace(unfinished, self.path)
        except BaseException as error:
            with contextlib.suppress(OSError):  # another process failed before, and the directory is gone
                unfinished.unlink(missing_ok=True)  # room to say so, if the disk is full
                unfinished.with_name(self.path.name + _FAILED).write_text(str(error), encoding="utf-8")
            self.error = error  # from here on the directory may be removed: nothing may be put into it
        finally:
            for event in self._events.values():
                event.set()

    def _let_go(self, name: str) -> None:
        index = self._indices[name]
        self._waiting[index] -= 1
        if not self._waiting[index]:
            self._events[index].set()
