"""Checkpoints that several processes write together, and that exist whole or not at all."""

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
from hf_patrickstar.errors import CheckpointError, CollectiveError
from hf_patrickstar.runtime.collectives import Collectives

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_PATIENCE_S = 1800.0
"""Seconds without progress after which this process gives up waiting for the parts that other processes write."""
_LAST_PATIENCE_S = 20.0
"""The same while this process ends: others may have ended already, and write nothing any more."""


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is being written.

    Attributes:
        staged: Its directory.
        makers: The ranks that make and complete the directory, with those that write into it: one, unless machines have
            disks of their own.
        write: What this process still writes in the background.
        on_commit: Called on the makers when it is complete.
        error: Why it could not be completed in the background.
        thread: Completes it in the background.
        is_last: Set when this process ends; perhaps another is gone already, and will not write its part.
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
        enter: Makes sure that all of them are about to do what it is given in words.
    """

    def __init__(self, collectives: Collectives, enter: Callable[[str], None] = lambda what: None) -> None:
        self._collectives = collectives
        self._enter = enter
        self._pending: Checkpoint | None = None

    @contextlib.contextmanager
    def writing(self, final: str | os.PathLike[str]) -> Iterator[Checkpoint]:
        """Writes a checkpoint: what all processes write into its ``path`` appears when all have left.

        They enter together. If one fails, all do, and nothing has changed.

        Args:
            final: Where it will be; an older one is replaced.

        Raises:
            CheckpointError: If it cannot be written, here or on another process, or the one before could not.
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
                    error = agreed  # it says who was the first to fail
            except CollectiveError:
                pass
            if error is raised:
                raise
            raise error from raised
        self._end(checkpoint, None)

    def wait(self) -> None:
        """Waits until what is written in the background is complete; all processes call it together.

        Raises:
            CheckpointError: If it could not be written; it does not exist then.
        """
        checkpoint, self._pending = self._pending, None
        if checkpoint is None:
            return
        if checkpoint.write is not None:
            checkpoint.write.join()
        try:
            # A process that has died is noticed here; its part would be waited for much longer.
            self._collectives.exchange_objects("written", "waits for a checkpoint")
        except CollectiveError:
            _leave(checkpoint)
            raise
        self._agree(_join(checkpoint), checkpoint, "was not written")

    def close(self) -> None:
        """Waits for what this process writes in the background, and logs what went wrong."""
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
        wanted = self._collectives.exchange_objects(own, what)[0]
        # One that a kill left on a disk of its own is not that of rank 0.
        is_seen = mark.is_file() and mark.read_text() == wanted
        places = self._collectives.exchange_objects("" if is_seen else socket.gethostname(), what)
        for place in dict.fromkeys(places):
            ranks = [other for other, found in enumerate(places) if found == place]
            checkpoint.makers[ranks[0]] = ranks
        if len(checkpoint.makers) > 1:  # those that do not see it have disks of their own
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
        """Completes a checkpoint when the last process has written its part: each is a file that appears."""
        world_size = self._collectives.world_size
        files = [checkpoint.path / shard_name(rank, world_size) for rank in checkpoint.makers[self._collectives.rank]]
        known, since = 0, time.monotonic()
        # The directory may be removed only when every process has written its part, or has failed to.
        while not all(file.exists() or _failure(checkpoint, file) for file in files):
            nbytes = sum(map(nbytes_of, files))
            if nbytes != known:
                known, since = nbytes, time.monotonic()
            if time.monotonic() > since + (_LAST_PATIENCE_S if checkpoint.is_last.is_set() else _PATIENCE_S):
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
        """Raises on all processes what went wrong on one."""
        text = None if error is None else f"{error}" or type(error).__name__
        texts = self._collectives.exchange_objects(text, "completes a checkpoint")
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
    """What was wrong with the disk, where that is why a file of the checkpoint was not written."""
    error = disk_error(checkpoint.path, raised)
    if error is None and isinstance(raised, RuntimeError) and checkpoint.write is not None:
        # The background may have met the full disk as well, and has made room again when it removed its file.
        checkpoint.write.join()
        if isinstance(checkpoint.write.error, CheckpointError):
            error = checkpoint.write.error
    return error


def _failure(checkpoint: Checkpoint, file: Path) -> str | None:
    """Why a part was not written; the disk may not have taken the mark that says so to others."""
    write = checkpoint.write
    if write is not None and write.path == file and write.error is not None:
        return str(write.error)
    return failure_of(file)


def _commit(checkpoint: Checkpoint) -> None:
    checkpoint.staged.commit()
    checkpoint.on_commit()


def _leave(checkpoint: Checkpoint) -> None:
    """Waits for the threads of a checkpoint where others may be gone, and logs what went wrong."""
    checkpoint.is_last.set()
    error = _join(checkpoint)
    if error is not None:
        logger.error("patrickstar: checkpoint '%s' was not written: %s", checkpoint.staged.final, error)


def _join(checkpoint: Checkpoint) -> BaseException | None:
    """Waits for the threads of a checkpoint; what went wrong in them."""
    if checkpoint.write is not None:
        checkpoint.write.join()
    if checkpoint.thread is not None:
        checkpoint.thread.join()
    return (checkpoint.write.error if checkpoint.write is not None else None) or checkpoint.error
