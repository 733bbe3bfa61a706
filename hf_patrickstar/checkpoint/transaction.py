"""Checkpoints that several processes write together, and that appear complete or not at all."""

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_patrickstar.checkpoint.background import BackgroundWrite, failure_of, nbytes_of
from hf_patrickstar.checkpoint.storage import MARK, StagedDirectory, disk_error
from hf_patrickstar.checkpoint.training_state import shard_name
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError, CollectiveError

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_TIMEOUT_S = 1800.0
"""Seconds without progress after which this process gives up waiting for the parts that other processes write."""
LAST_TIMEOUT_S = 20.0
"""The same while this process ends: the other processes may have ended before they wrote their parts."""


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is being written.

    Attributes:
        staged: Its directory.
        makers: Each rank that makes and completes the directory, with the ranks that write into it. There is one such
            rank, or one on each disk if machines do not share a disk.
        write: The part that this process writes in the background, or ``None``.
        on_commit: Called on the makers when the checkpoint is complete.
        error: Why the checkpoint could not be completed in the background.
        thread: The thread that completes the checkpoint in the background.
        is_last: Set when this process ends, or another one is gone: then missing parts are not waited for so long.
    """

    staged: StagedDirectory
    makers: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    write: BackgroundWrite | None = None
    on_commit: Callable[[], None] = lambda: None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    is_last: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def path(self) -> Path:
        """Where files are written now."""
        return self.staged.path


class Transactions:
    """Begins and ends checkpoints, one at a time.

    Args:
        collectives: The processes that write together.
        enter: Makes sure that all processes begin the same action; its argument describes the action.
    """

    def __init__(self, collectives: Collectives, enter: Callable[[str], None] = lambda what: None) -> None:
        self._collectives = collectives
        self._enter = enter
        self._pending: Checkpoint | None = None

    @contextlib.contextmanager
    def writing(self, final: str | os.PathLike[str]) -> Iterator[Checkpoint]:
        """Writes a checkpoint: its ``path`` is renamed to ``final`` after all processes have left the block.

        All processes must enter the block together. If one process fails, all raise, and ``final`` is unchanged.

        Args:
            final: The directory of the finished checkpoint; an older one is replaced.

        Raises:
            CheckpointError: If this checkpoint or the one before cannot be written, here or on another process.
        """
        self._enter("saves a checkpoint")
        self.wait()
        checkpoint = Checkpoint(StagedDirectory(final))
        self._begin(checkpoint)
        try:
            yield checkpoint
        except BaseException as raised:
            error = _disk_error(checkpoint, raised) or raised
            try:
                self._end(checkpoint, error)
            except CheckpointError as agreed:
                if isinstance(error, CheckpointError):
                    error = agreed  # it names the first rank that failed
            except CollectiveError:
                pass
            if error is raised:
                raise
            raise error from raised
        self._end(checkpoint, None)

    def wait(self) -> None:
        """Waits until the checkpoint that is written in the background is complete; all processes call it together.

        Raises:
            CheckpointError: If the checkpoint could not be written; it does not exist then.
        """
        checkpoint, self._pending = self._pending, None
        if checkpoint is None:
            return
        if checkpoint.write is not None:
            checkpoint.write.join()
        try:
            # The exchange notices a process that has died sooner than the wait for its part would.
            self._collectives.exchange("written", "waits for a checkpoint")
        except CollectiveError:
            _leave(checkpoint)
            raise
        self._agree(_join(checkpoint), checkpoint, "was not written")

    def close(self) -> None:
        """Waits until the background threads of this process have ended, and logs their error."""
        checkpoint, self._pending = self._pending, None
        if checkpoint is not None:
            _leave(checkpoint)

    def _begin(self, checkpoint: Checkpoint) -> None:
        rank, staged = self._collectives.rank, checkpoint.staged
        own, mark = uuid.uuid4().hex, staged.path / MARK

        def begin() -> None:
            staged.begin()
            mark.write_text(own)

        self._agree(_attempt(begin) if rank == 0 else None, checkpoint, "cannot be written")
        what = "looks for the directory of the checkpoint"
        wanted = self._collectives.exchange(own, what)[0]
        # A directory that a killed process left on another disk does not have the mark of rank 0.
        is_seen = mark.is_file() and mark.read_text() == wanted
        places = self._collectives.exchange("" if is_seen else socket.gethostname(), what)
        for place in dict.fromkeys(places):
            ranks = [other for other, found in enumerate(places) if found == place]
            checkpoint.makers[ranks[0]] = ranks
        if len(checkpoint.makers) > 1:  # ranks that do not see it have another disk
            is_maker = rank > 0 and rank in checkpoint.makers
            self._agree(_attempt(staged.begin) if is_maker else None, checkpoint, "cannot be written")

    def _end(self, checkpoint: Checkpoint, error: BaseException | None) -> None:
        is_maker = self._collectives.rank in checkpoint.makers
        try:
            self._agree(error, checkpoint, "was not written")
        except (CheckpointError, CollectiveError):
            if checkpoint.write is not None:
                checkpoint.write.join()
            if is_maker:
                checkpoint.staged.abandon()
            raise
        if checkpoint.write is not None:
            self._pending = checkpoint
            if is_maker:
                checkpoint.thread = threading.Thread(
                    target=self._commit_later, args=(checkpoint,), name="completes a checkpoint"
                )
                checkpoint.thread.start()
            return
        try:
            self._agree(_attempt(lambda: _commit(checkpoint)) if is_maker else None, checkpoint, "was not completed")
        except CheckpointError:
            if is_maker:
                checkpoint.staged.abandon()
            raise

    def _commit_later(self, checkpoint: Checkpoint) -> None:
        """Completes a checkpoint when the files of all processes that write into the directory have appeared."""
        world_size = self._collectives.world_size
        files = [checkpoint.path / shard_name(rank, world_size) for rank in checkpoint.makers[self._collectives.rank]]
        known, since = 0, time.monotonic()
        # The directory may be removed only when every process has written its part, or has failed to.
        while not all(file.exists() or _failure(checkpoint, file) for file in files):
            nbytes = sum(map(nbytes_of, files))
            if nbytes != known:
                known, since = nbytes, time.monotonic()
            if time.monotonic() > since + (LAST_TIMEOUT_S if checkpoint.is_last.is_set() else _TIMEOUT_S):
                break
            time.sleep(_POLL_S)
        missing = [_failure(checkpoint, file) or f"'{file}' was not written" for file in files if not file.exists()]
        if not missing:
            checkpoint.error = _attempt(lambda: _commit(checkpoint))
        else:
            checkpoint.error = CheckpointError(missing[0])
        if checkpoint.error is not None:
            checkpoint.staged.abandon()

    def _agree(self, error: BaseException | None, checkpoint: Checkpoint, what: str) -> None:
        """Raises on all processes if one of them has an error."""
        text = None if error is None else f"{error}" or type(error).__name__
        texts = self._collectives.exchange(text, "completes a checkpoint")
        if error is not None and isinstance(error, CheckpointError) and len(texts) == 1:
            raise error
        for rank, found in enumerate(texts):
            if found is not None:
                where = f" on rank {rank}" if len(texts) > 1 else ""
                raise CheckpointError(
                    f"checkpoint '{checkpoint.staged.final}' {what}: {found}{where}. Earlier ones are as they were"
                ) from error


def _attempt(function: Callable[[], None]) -> BaseException | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _disk_error(checkpoint: Checkpoint, raised: BaseException) -> CheckpointError | None:
    """An error of the disk, if that is the reason why a file of the checkpoint was not written."""
    error = disk_error(checkpoint.path, raised)
    if error is None and isinstance(raised, RuntimeError) and checkpoint.write is not None:
        # The background write may have failed on the full disk too; it then made room by removing its own file.
        checkpoint.write.join()
        if isinstance(checkpoint.write.error, CheckpointError):
            error = checkpoint.write.error
    return error


def _failure(checkpoint: Checkpoint, file: Path) -> str | None:
    """Why a part was not written; a full disk may lack the file that says so, but this process knows its own error."""
    write = checkpoint.write
    if write is not None and write.path == file and write.error is not None:
        return str(write.error)
    return failure_of(file)


def _commit(checkpoint: Checkpoint) -> None:
    checkpoint.staged.commit()
    checkpoint.on_commit()


def _leave(checkpoint: Checkpoint) -> None:
    """Waits for the threads of a checkpoint when other processes may be gone, and logs their error."""
    checkpoint.is_last.set()
    error = _join(checkpoint)
    if error is not None:
        logger.error("patrickstar: checkpoint '%s' was not written: %s", checkpoint.staged.final, error)


def _join(checkpoint: Checkpoint) -> BaseException | None:
    """Waits for the threads of a checkpoint, and returns their error or ``None``."""
    if checkpoint.write is not None:
        checkpoint.write.join()
    if checkpoint.thread is not None:
        checkpoint.thread.join()
    return (checkpoint.write.error if checkpoint.write is not None else None) or checkpoint.error
