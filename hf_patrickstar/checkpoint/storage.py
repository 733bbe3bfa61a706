"""Files and directories that appear complete or not at all: written elsewhere, synced to the disk, then renamed.

[Note: what a kill leaves]
A new directory is written in ``_partial`` beside its final path, where nothing searches for checkpoints, and renamed
when all of it is on the disk. An older directory at the final path is moved to ``_replaced`` first; if the process is
killed between the two renames, ``recover`` moves the older directory back. Files of the older directory that belong to
no checkpoint (logs, for example) are moved to the new one, and the rest is deleted. Before a directory is deleted, it
is renamed into ``_removed``, so that a half-deleted one is never found. The Trainer does not upload names that begin
with an underscore.

A process that begins or loads a checkpoint, or begins to train, deletes what killed processes left in ``_partial`` and
``_removed``. A directory that is being written has a mark file, so that no other directory is deleted, and is locked;
the operating system releases the lock when the process ends, even when it is killed.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from hf_patrickstar.checkpoint.deferred import Reader
from hf_patrickstar.errors import CheckpointError
from hf_patrickstar.units import format_need

PARTIAL = "_partial"
REPLACED = "_replaced"
REMOVED = "_removed"
_OF_CHECKPOINTS = re.compile(
    r"(model|pytorch_model|adapter_\w+|optimizer|scheduler|scaler|sampler|rng_state|random_states|dl_state_dict|"
    r"custom_checkpoint|trainer_state|training_args|checkpoint-is-incomplete)\b|"
    r"(model|pytorch_model|optimizer|scheduler|sampler|rng_state|random_states|dl_state_dict|custom_checkpoint)[-_]\d"
)
"""Names of files of checkpoints; such files of an older checkpoint are not moved to the new one."""
MARK = ".mark"
"""A file in directories that are being written."""
_OF_TRAINERS = re.compile(r"checkpoint[-_]\d+")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_THE_DISK = (*_FULL, errno.EFBIG, errno.EIO, errno.EROFS)
_PROBE_NBYTES = 2**18
"""More than the buffers of usual writers."""
_WRITEBACK_NBYTES = 2**25
_PAGE_NBYTES = 2**12


class StagedDirectory:
    """A directory that is written at a temporary path and then renamed to its final path.

    Args:
        final: The final path.

    Attributes:
        final: The final path, absolute and without a trailing slash.
        path: The temporary path.
    """

    def __init__(self, final: str | os.PathLike[str]) -> None:
        self.final = Path(os.path.abspath(final))
        self.path = self.final.parent / PARTIAL / self.final.name
        self._replaced = self.final.parent / REPLACED / self.final.name
        self._lock: _Lock | None = None

    def begin(self, mark: str = "") -> None:
        """Makes an empty directory at the temporary path; leftovers of an earlier attempt are removed.

        Args:
            mark: The text of its mark file.

        Raises:
            CheckpointError: If the directory cannot be made.
        """
        if Path.cwd().is_relative_to(self.final) or os.path.ismount(self.final):
            kind = "the root of a disk" if os.path.ismount(self.final) else "the current directory, or around it"
            raise CheckpointError(f"'{self.final}' is {kind} and cannot be replaced; save to another directory")
        try:
            self.recover()
            remove_leftovers(self.final.parent)
            _remove_tree(self.path)
            self.path.mkdir(parents=True)
            self._lock = _Lock(self.path)
            (self.path / MARK).write_text(mark)
        except OSError as error:
            self.abandon()
            raise CheckpointError(describe_failure(self.path, error)) from error

    def commit(self) -> bool:
        """Syncs the directory to the disk and renames it to its final path.

        Returns:
            Whether this call did so; false if another one did, of this process or of another that writes there.

        Raises:
            CheckpointError: If that fails; an older directory is then at the final path again.
        """
        try:
            (self.path / MARK).unlink()
        except FileNotFoundError:
            return False
        try:
            for folder, _, names in os.walk(self.path, topdown=False):
                for name in (*names, "."):
                    _sync(Path(folder) / name)
            if self.final.exists():
                _remove_tree(self._replaced)
                self._replaced.parent.mkdir(exist_ok=True)
                os.rename(self.final, self._replaced)
            os.rename(self.path, self.final)
            _sync(self.final.parent)
            self.recover()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.recover()
            raise CheckpointError(describe_failure(self.final, error)) from error
        self._tidy()
        return True

    def abandon(self) -> None:
        """Removes the directory at the temporary path."""
        _remove_tree(self.path)
        self._tidy()

    def recover(self) -> None:
        """Moves an older directory back if its replacement is not there; see [Note: what a kill leaves].

        Of an older directory that was replaced, files that belong to no checkpoint are moved to the new one.
        """
        older = self._replaced
        if older.exists() and not self.final.exists():
            os.rename(older, self.final)
        if older.is_dir() and not older.is_symlink():
            for path in older.iterdir():
                is_stale = path.is_file() and _OF_CHECKPOINTS.match(path.name)
                if not is_stale and not os.path.lexists(self.final / path.name):
                    os.rename(path, self.final / path.name)
        _remove_tree(older)

    def _tidy(self) -> None:
        self._lock = None
        for parent in (self.path.parent, self._replaced.parent):
            with contextlib.suppress(OSError):  # it may have other directories in it
                parent.rmdir()


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Deletes a directory; for other processes it disappears in one step.

    Args:
        path: The directory.
    """
    path = Path(os.path.abspath(path))
    removed = path.parent / REMOVED
    with contextlib.suppress(OSError):
        removed.mkdir(exist_ok=True)
        _remove_tree(removed / path.name)
        os.rename(path, removed / path.name)
    _remove_tree(removed)


class _Lock:
    """Locks a directory that is being written, for the lifetime of this object.

    Args:
        path: The directory.

    Attributes:
        is_held: Whether this object has the lock; false if another one has it.

    Raises:
        OSError: If the directory cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.is_held = False
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True


def remove_leftovers(parent: str | os.PathLike[str]) -> None:
    """Removes directories that killed processes left half written or half deleted; locked ones stay.

    Args:
        parent: The parent directory of the final paths.
    """
    _remove_tree(Path(parent) / REMOVED)
    partial = Path(parent) / PARTIAL
    for path in partial.glob("*"):
        if (path / MARK).exists() or _OF_TRAINERS.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if _Lock(path).is_held:
                    _remove_tree(path)
    with contextlib.suppress(OSError):  # it may have other directories in it
        partial.rmdir()


def _remove_tree(path: Path) -> None:
    """Removes a directory with its content, if it exists; of a symbolic link, only the link."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


# Files


class NewFile(io.FileIO):
    """A file that is being written: it accepts all bytes at once, and its pages go to the disk early."""

    _waiting_nbytes = 0

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: str | os.PathLike[str], nbytes: int) -> Iterator["NewFile"]:
        """Opens a file for writing; it appears when the block has ended and all of it is on the disk, or not at all.

        Args:
            path: The file; an older one is replaced at the end.
            nbytes: The size that it will have, for errors.

        Raises:
            CheckpointError: If it cannot be written; if the disk is full, the message has the bytes needed and free.
        """
        path = Path(path)
        temporary = path.with_name(f"_{path.name}.partial")
        try:
            with cls(str(temporary), "wb") as file:
                yield file
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync(path.parent)
        except (OSError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(describe_failure(path, error, nbytes)) from error
        finally:
            temporary.unlink(missing_ok=True)  # after a failure: frees room, if the disk is full

    def write(self, data: Any) -> int:
        """Writes all bytes, in several calls if the system accepts only a part at once.

        On Linux ``POSIX_FADV_DONTNEED`` starts to write pages to the disk without waiting, so that ``fsync`` has less
        to do at the end.
        """
        view = memoryview(data)
        nbytes = len(view)
        while len(view):
            view = view[super().write(view) :]
        self._waiting_nbytes += nbytes
        if self._waiting_nbytes >= _WRITEBACK_NBYTES and sys.platform == "linux":
            self._waiting_nbytes = 0
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return nbytes

    def write_tensor(
        self, tensor: torch.Tensor, reader: Reader, piece_numel: int, *, is_checked: bool = True
    ) -> list[str]:
        """Writes the elements of a tensor with one piece in memory at a time; returns the checksums of the pieces.

        Args:
            tensor: The tensor, deferred or not.
            reader: Reads it.
            piece_numel: Elements of a piece.
            is_checked: If false, there are no checksums.
        """
        sums = []
        with contextlib.closing(reader.pieces(tensor, piece_numel)) as pieces:
            for piece in pieces:
                data = bytes_of(piece.contiguous())
                if is_checked:
                    sums.append(checksum(data))
                self.write(data)
                del piece, data  # so that the next piece is not allocated beside it
        return sums


def checksum(data: memoryview) -> str:
    """A checksum of bytes, in 24 digits, which damaged pages, and pages in another place, change.

    The words of each page of 4 KiB are added, and multiplied by an odd number that only this page has. That is some ten
    times as fast as ``zlib.crc32``, which is used for what is left after the last whole page.

    Args:
        data: The bytes.
    """
    whole = len(data) - len(data) % _PAGE_NBYTES
    pages = numpy.frombuffer(data[:whole], numpy.uint64).reshape(-1, _PAGE_NBYTES // 8).sum(axis=1, dtype=numpy.uint64)
    odd = numpy.arange(1, 2 * len(pages), 2, dtype=numpy.uint64)
    return f"{int((pages * odd).sum(dtype=numpy.uint64)):016x}{zlib.crc32(data[whole:]):08x}"


def text_checksum(value: Any) -> str:
    """A checksum, in 8 digits, of what JSON can hold."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    if not values.numel():
        return memoryview(b"")
    flat = values.detach().as_strided((values.numel(),), (1,))  # a single element may have any stride
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def _sync(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    if os.path.islink(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Errors


def describe_failure(path: str | os.PathLike[str], error: Exception, nbytes: int | None = None) -> str:
    """The message of an error: a file cannot be written. If the disk is full, it has the bytes needed and left.

    Args:
        path: The file.
        error: What was raised.
        nbytes: The size that it would have, if that is known.
    """
    failure = f"'{path}' cannot be written: {getattr(error, 'strerror', None) or error}"
    if getattr(error, "errno", None) not in _FULL:
        return failure + ("; make it writable, or save to another directory" if isinstance(error, OSError) else "")
    need = "more" if nbytes is None else format_need(nbytes)
    place = next(parent for parent in (Path(path), *Path(path).absolute().parents) if parent.exists())
    free = format_need(shutil.disk_usage(place).free)
    advice = "Make room, save to another disk, or keep fewer checkpoints (save_total_limit)"
    return f"{failure}; the file needs {need}, {free} are left. {advice}"


def damaged(text: str) -> str:
    """The message of an error: a file does not hold what was written to it.

    Args:
        text: The file, and what is wrong with it.
    """
    return f"{text}. The file is damaged: copy it again, or use another checkpoint"


def missing_file(path: str | os.PathLike[str]) -> str:
    """The message of an error: a file is missing."""
    return f"'{path}' is missing; copy it there, or use another checkpoint"


def disk_error(directory: Path, error: BaseException) -> CheckpointError | None:
    """Finds out whether the disk is the reason why other code could not write into a directory.

    Args:
        directory: The directory.
        error: What the other code raised. ``torch.save`` raises no ``OSError`` if the disk is full; then a test file
            is written.

    Returns:
        An error that describes the disk's failure, or ``None`` if there is another reason.
    """
    found = error if isinstance(error, OSError) else None
    if type(error) is RuntimeError:
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(bytes(_PROBE_NBYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as failure:
            found = OSError(failure.errno, failure.strerror)  # without the name of the temporary file
    if found is None or found.errno not in _OF_THE_DISK:
        return None
    newest = None
    with contextlib.suppress(OSError):  # a thread that writes in the background may remove its file meanwhile
        newest = max(directory.rglob("*.*"), key=lambda path: path.stat().st_mtime_ns, default=None)
    return CheckpointError(describe_failure(found.filename or newest or directory, found))
