"""Checkpoints that several processes write together, and that appear complete or not at all."""

import contextlib
import functools
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hf_patrickstar.checkpoint.state_files import StateFile
from hf_patrickstar.checkpoint.storage import MARK, StagedDirectory, disk_error
from hf_patrickstar.checkpoint.training_state import shard_name
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError, CollectiveError

logger = logging.getLogger(__name__)


class Checkpoint(StagedDirectory):
    """A checkpoint that is being written.

    Args:
        final: The directory of the finished checkpoint.

    Attributes:
        makers: Each rank that makes and completes the directory, with the ranks that write into it. There is one such
            rank, or one on each disk if machines do not share a disk.
        paths: The files of the training state in torch's format; empty if each process writes its part.
        write: The part that this process writes in the background, or ``None``.
        on_commit: Called when the checkpoint is complete, by the process that completes it.
        error: Why the checkpoint could not be completed in the background.
        thread: The thread that completes the checkpoint in the background.
    """

    def __init__(self, final: str | os.PathLike[str]) -> None:
        super().__init__(final)
        self.makers: dict[int, list[int]] = {}
        self.paths: Sequence[Path] = ()
        self.write: StateFile | None = None
        self.on_commit: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def commit(self) -> bool:
        """Lets it appear at its final path; returns false if another process has done so."""
        if is_mine := super().commit():
            self.on_commit()
        return is_mine

    def complete(self, files: Sequence[Path]) -> None:
        """Commits it if this process is the last one to write its part.

        Args:
            files: The parts of all processes that write into the directory.
        """
        assert self.write is not None
        if self.write.join() is None and all(file.exists() for file in files):
            self.error = _attempt(self.commit)

    def join(self) -> BaseException | None:
        """Waits for its threads, and returns their error or ``None``."""
        if self.thread is not None:
            self.thread.join()
        return (None if self.write is None else self.write.join()) or self.error


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
        checkpoint = Checkpoint(final)
        self._begin(checkpoint)
        try:
            yield checkpoint
        except BaseException as raised:
            error = disk_error(checkpoint.path, raised) or raised
            if type(error) is RuntimeError and checkpoint.write is not None:
                # The background write may have failed on the full disk too; it then made room by removing its own file.
                found = checkpoint.write.join()
                error = found if isinstance(found, CheckpointError) else raised
            # Of errors of checkpoints, the one that all processes raise names the first rank that failed.
            hidden = () if isinstance(error, CheckpointError) else (CheckpointError,)
            with contextlib.suppress(CollectiveError, *hidden):
                self._end(checkpoint, error)
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
        is_maker = self._collectives.rank in checkpoint.makers
        self._agree(checkpoint.join(), checkpoint, "was not written")
        # One that was written in the background may be complete by now.
        self._agree(_attempt(checkpoint.commit) if is_maker else None, checkpoint, "was not completed")

    def close(self) -> None:
        """Waits for the threads of this process when other processes may be gone, and logs their error."""
        checkpoint, self._pending = self._pending, None
        if checkpoint is not None and (error := checkpoint.join()) is not None:
            logger.error("patrickstar: checkpoint '%s' was not written: %s", checkpoint.final, error)

    def _begin(self, checkpoint: Checkpoint) -> None:
        rank = self._collectives.rank
        own, mark = uuid.uuid4().hex, checkpoint.path / MARK
        error = _attempt(functools.partial(checkpoint.begin, own)) if rank == 0 else None
        self._agree(error, checkpoint, "cannot be written")
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
            self._agree(_attempt(checkpoint.begin) if is_maker else None, checkpoint, "cannot be written")

    def _end(self, checkpoint: Checkpoint, error: BaseException | None) -> None:
        try:
            self._agree(error, checkpoint, "was not written")
        except CollectiveError:
            self._abandon(checkpoint)
            raise
        self._pending = checkpoint
        if checkpoint.write is None:
            self.wait()
            return
        rank, world_size = self._collectives.rank, self._collectives.world_size
        (writers,) = (ranks for ranks in checkpoint.makers.values() if rank in ranks)
        others = writers if world_size > 1 else []  # the own part is waited for
        files = [checkpoint.path / shard_name(writer, world_size) for writer in others]
        checkpoint.thread = threading.Thread(target=checkpoint.complete, args=(files,), name="completes a checkpoint")
        checkpoint.thread.start()

    def _agree(self, error: BaseException | None, checkpoint: Checkpoint, what: str) -> None:
        """Abandons the checkpoint and raises, on all processes, if one of them has an error."""
        if (failed := self._first_failure(error, "completes a checkpoint")) is not None:
            self._abandon(checkpoint)
            rank, text = failed
            where = f" on rank {rank}" if self._collectives.world_size > 1 else ""
            raise CheckpointError(
                f"checkpoint '{checkpoint.final}' {what}: {text}{where}. Earlier ones are as they were"
            ) from error

    def _first_failure(self, error: BaseException | None, what: str) -> tuple[int, str] | None:
        """Sends an error of this process to all; returns the first rank that has one, with its text."""
        text = None if error is None else f"{error}" or type(error).__name__
        texts = self._collectives.exchange(text, what)
        return next(((rank, found) for rank, found in enumerate(texts) if found is not None), None)

    def _abandon(self, checkpoint: Checkpoint) -> None:
        checkpoint.join()
        if self._collectives.rank in checkpoint.makers:
            checkpoint.abandon()


def _attempt(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except Exception as error:
        return error
    return None
