"""Directories that exist whole or not at all: written aside, synced to the disk, renamed.

[Note: what a kill leaves]
A directory is written under ``.partial`` beside its final place, and renamed when every byte is on the disk. Nobody who
looks for checkpoints looks in there. One that replaces an older one of the same name moves that to ``.replaced`` first;
where a kill came between the two renames, ``recover`` puts the older one back. One that is deleted is renamed into
``.partial`` before, so that it does not die by halves.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hf_patrickstar.errors import CheckpointError

PARTIAL = ".partial"
REPLACED = ".replaced"


class StagedDirectory:
    """A directory on its way to its final place.

    Args:
        final: Where it will be.

    Attributes:
        final: Where it will be, without a trailing slash.
        path: Where it is written.
    """

    def __init__(self, final: str | os.PathLike[str]) -> None:
        self.final = Path(os.path.abspath(final))
        self.path = self.final.parent / PARTIAL / self.final.name
        self._replaced = self.final.parent / REPLACED / self.final.name

    def begin(self) -> None:
        """Makes it, empty; what an earlier attempt left is removed.

        Raises:
            CheckpointError: If it cannot be made.
        """
        try:
            self.recover()
            remove_tree(self.path)
            self.path.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"'{self.path}' cannot be made: {error.strerror or error}") from error

    def commit(self) -> None:
        """Syncs what is in it and moves it to its final place, whole.

        Raises:
            CheckpointError: If that fails; what was at the final place is there again then.
        """
        try:
            sync_tree(self.path)
            is_replacing = self.final.exists()
            if is_replacing:
                remove_tree(self._replaced)
                self._replaced.parent.mkdir(exist_ok=True)
                os.rename(self.final, self._replaced)
            os.rename(self.path, self.final)
            _sync(self.final.parent)
            if is_replacing:
                remove_tree(self._replaced)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.recover()
            raise CheckpointError(f"'{self.final}' cannot be completed: {error.strerror or error}") from error
        self._tidy()

    def abandon(self) -> None:
        """Removes what was written."""
        remove_tree(self.path)
        self._tidy()

    def recover(self) -> None:
        """Puts an older directory back whose replacement did not arrive; see [Note: what a kill leaves]."""
        if self._replaced.exists() and not self.final.exists():
            os.rename(self._replaced, self.final)
        remove_tree(self._replaced)

    def _tidy(self) -> None:
        for parent in (self.path.parent, self._replaced.parent):
            with contextlib.suppress(OSError):  # others may be in there
                parent.rmdir()


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Deletes a directory in one step, as far as anybody who looks for it can tell.

    Args:
        path: The directory.
    """
    staged = StagedDirectory(path)
    with contextlib.suppress(OSError):
        staged.path.parent.mkdir(exist_ok=True)
        remove_tree(staged.path)
        os.rename(staged.final, staged.path)
    staged.abandon()


def remove_tree(path: Path) -> None:
    """Removes a directory with all that is in it, if it is there; of a link to one, the link."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def sync_tree(path: Path) -> None:
    """Waits until every file and directory in it is on the disk.

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


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file that exists whole or not at all.

    Args:
        path: The file; an older one is replaced at the end.
        write: Writes it, under the name that it is given.

    Raises:
        CheckpointError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}{PARTIAL}")
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"'{path}' cannot be written: {error}") from error
