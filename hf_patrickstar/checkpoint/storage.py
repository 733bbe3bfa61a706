"""Directories that appear complete or not at all: written elsewhere, synced to the disk, then renamed.

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
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
_PROBE_NBYTES = 2**18
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_THE_DISK = (*_FULL, errno.EFBIG, errno.EIO, errno.EROFS)


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

    def begin(self) -> None:
        """Makes an empty directory at the temporary path; leftovers of an earlier attempt are removed.

        Raises:
            CheckpointError: If the directory cannot be made.
        """
        if Path.cwd().is_relative_to(self.final) or os.path.ismount(self.final):
            kind = "the root of a disk" if os.path.ismount(self.final) else "the current directory, or around it"
            raise CheckpointError(
                f"'{self.final}' is {kind} and cannot be replaced; give the checkpoint one of its own"
            )
        try:
            self.recover()
            remove_leftovers(self.final.parent)
            remove_tree(self.path)
            self.path.mkdir(parents=True)
            self._lock = _Lock(self.path)
            (self.path / MARK).touch()
        except OSError as error:
            self.abandon()
            raise CheckpointError(describe_failure(self.path, error)) from error

    def commit(self) -> None:
        """Syncs the directory to the disk and renames it to its final path.

        Raises:
            CheckpointError: If that fails; an older directory is then at the final path again.
        """
        try:
            (self.path / MARK).unlink(missing_ok=True)
            sync_tree(self.path)
            is_replacing = self.final.exists()
            if is_replacing:
                remove_tree(self._replaced)
                self._replaced.parent.mkdir(exist_ok=True)
                os.rename(self.final, self._replaced)
            os.rename(self.path, self.final)
            _sync(self.final.parent)
            if is_replacing:
                self._clear_replaced()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.recover()
            raise CheckpointError(describe_failure(self.final, error)) from error
        self._tidy()

    def abandon(self) -> None:
        """Removes the directory at the temporary path."""
        remove_tree(self.path)
        self._tidy()

    def recover(self) -> None:
        """Moves an older directory back if its replacement is not there; see [Note: what a kill leaves]."""
        if self._replaced.exists() and not self.final.exists():
            os.rename(self._replaced, self.final)
        self._clear_replaced()

    def _clear_replaced(self) -> None:
        """Moves files that belong to no checkpoint to the new directory, and removes the rest of the older one."""
        if self._replaced.is_dir() and not self._replaced.is_symlink():
            for path in self._replaced.iterdir():
                is_stale = path.is_file() and _OF_CHECKPOINTS.match(path.name)
                if not is_stale and not os.path.lexists(self.final / path.name):
                    os.rename(path, self.final / path.name)
        remove_tree(self._replaced)

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
        remove_tree(removed / path.name)
        os.rename(path, removed / path.name)
    remove_tree(removed)


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
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except OSError:
            self.is_held = False

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self._descriptor)


def remove_leftovers(parent: str | os.PathLike[str]) -> None:
    """Removes directories that killed processes left half written or half deleted; locked ones stay.

    Args:
        parent: The parent directory of the final paths.
    """
    remove_tree(Path(parent) / REMOVED)
    partial = Path(parent) / PARTIAL
    for path in partial.glob("*"):
        if (path / MARK).exists() or _OF_TRAINERS.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if _Lock(path).is_held:
                    remove_tree(path)
    with contextlib.suppress(OSError):  # it may have other directories in it
        partial.rmdir()


def remove_tree(path: Path) -> None:
    """Removes a directory with its content, if it exists; of a symbolic link, only the link."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def describe_failure(path: str | os.PathLike[str], error: OSError, nbytes: int | None = None) -> str:
    """The message of an error: a file cannot be written. If the disk is full, it has the bytes needed and left.

    Args:
        path: The file.
        error: What was raised.
        nbytes: The size that it would have, if that is known.
    """
    failure = f"'{path}' cannot be written: {error.strerror or error}"
    if error.errno not in _FULL:
        return f"{failure}; make it writable, or save to another directory"
    need = "more" if nbytes is None else format_need(nbytes)
    free = shutil.disk_usage(_existing(Path(path))).free
    return (
        f"{failure}; the file needs {need}, {format_need(free)} are left. Make room, save to another disk, or keep "
        "fewer checkpoints (save_total_limit)"
    )


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
    if isinstance(error, CheckpointError) or not isinstance(error, (OSError, RuntimeError)):
        return None
    found = error if isinstance(error, OSError) else _try_out(directory)
    if found is None or found.errno not in _OF_THE_DISK:
        return None
    return CheckpointError(describe_failure(found.filename or _newest_file(directory) or directory, found))


def _newest_file(directory: Path) -> Path | None:
    times = {}
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # a thread that writes in the background may remove its file meanwhile
            if path.is_file():
                times[path] = path.stat().st_mtime_ns
    return max(times, key=times.__getitem__, default=None)


def _try_out(directory: Path) -> OSError | None:
    """Writes and removes a test file, larger than the buffers of usual writers; returns the error, if there is one."""
    probe = directory / ".probe"
    try:
        with open(probe, "wb", buffering=0) as file:
            write_all(file, memoryview(bytes(_PROBE_NBYTES)))
            os.fsync(file.fileno())
    except OSError as error:
        return OSError(error.errno, error.strerror)  # without the probe's name
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def write_all(file: Any, view: memoryview) -> None:
    """Writes all bytes, in several calls if the file accepts only a part at once."""
    while len(view):
        view = view[file.write(view) :]


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def sync_tree(path: Path) -> None:
    """Waits until every file and directory in a directory is on the disk.

    Args:
        path: The directory.

    Raises:
        OSError: If the disk does not take them.
    """
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    if os.path.islink(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that appears complete or not at all.

    Args:
        path: The file; an older one is replaced at the end.
        write: Writes the file at the temporary path that it gets.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    temporary = path.with_name(f"_{path.name}.partial")
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        text = str(error).replace(str(temporary), str(path))
        raise CheckpointError(
            text if isinstance(error, CheckpointError) else f"'{path}' cannot be written: {text}"
        ) from error
