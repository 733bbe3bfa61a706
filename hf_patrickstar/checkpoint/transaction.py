"""Checkpoints that several processes write together, and that appear complete or not at all.

[Note: consistent without a copy]
Only the optimizer's step changes masters and optimizer states, chunk by chunk. So the training state can be written in
the background without a copy: a thread writes the chunks in the order in which the step updates them, and the step
waits at a chunk that is not written yet. Forward and backward do not wait for the writer.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hf_patrickstar.checkpoint.safetensors_file import Unwritten
from hf_patrickstar.checkpoint.storage import MARK, StagedDirectory, disk_error
from hf_patrickstar.checkpoint.training_state import shard_name
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CheckpointError, CollectiveError
from hf_patrickstar.memory.streams import synchronize

logger = logging.getLogger(__name__)


class BackgroundWrite:
    """Writes a file in its own thread; the file gets its final name when all of it is on the disk.

    Args:
        file: The file; updates of a chunk wait until its tensors are written.
        piece_numel: Elements in memory at once.

    Attributes:
        error: Why the file could not be written, or ``None``.
        join: Waits until the thread has ended; ``error`` then says whether it failed.
    """

    def __init__(self, file: Unwritten, piece_numel: int) -> None:
        self.error: BaseException | None = None
        self._written = {name: threading.Event() for name in file.tensors}
        for name, chunk in file.chunks.items():
            chunk.reader = self._written[name]  # in the end that of its last tensor
        for device in {tensor.device for tensor in file.tensors.values() if not tensor.is_cpu}:
            synchronize(device)  # the thread has a compute stream of its own, which waits for no update
        thread = threading.Thread(target=self._run, args=(file, piece_numel), name=f"writes {file.path.name}")
        self.join = thread.join
        thread.start()

    def _run(self, file: Unwritten, piece_numel: int) -> None:
        try:
            unknown = threading.Event()
            file.write(piece_numel=piece_numel, on_written=lambda name: self._written.get(name, unknown).set())
        except BaseException as error:
            self.error = error
        finally:
            for event in self._written.values():
                event.set()


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A checkpoint that is being written.

    Attributes:
        staged: Its directory.
        makers: Each rank that makes and completes the directory, with the ranks that write into it. There is one such
            rank, or one on each disk if machines do not share a disk.
        paths: The files of the training state in torch's format; empty if each process writes its part.
        write: The part that this process writes in the background, or ``None``.
        on_commit: Called when the checkpoint is complete, by the process that completes it.
        error: Why the checkpoint could not be completed in the background.
        thread: The thread that completes the checkpoint in the background.
    """

    staged: StagedDirectory
    makers: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    paths: Sequence[Path] = ()
    write: BackgroundWrite | None = None
    on_commit: Callable[[], None] = lambda: None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """Where files are written now."""
        return self.staged.path

    def commit(self) -> None:
        """Lets it appear at its final path, if no other process has done so."""
        if self.staged.commit():
            self.on_commit()

    def complete(self, write: BackgroundWrite, files: Sequence[Path]) -> None:
        """Commits it if this process is the last one to write its part.

        Args:
            write: The part of this process.
            files: The parts of all processes that write into the directory.
        """
        write.join()
        if write.error is None and all(file.exists() for file in files):
            self.error = _attempt(self.commit)

    def join(self) -> BaseException | None:
        """Waits for its threads, and returns their error or ``None``."""
        for part in (self.write, self.thread):
            if part is not None:
                part.join()
        return getattr(self.write, "error", None) or self.error


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
            logger.error("patrickstar: checkpoint '%s' was not written: %s", checkpoint.staged.final, error)

    def _begin(self, checkpoint: Checkpoint) -> None:
        rank, staged = self._collectives.rank, checkpoint.staged
        own, mark = uuid.uuid4().hex, staged.path / MARK

        error = _attempt(functools.partial(staged.begin, own)) if rank == 0 else None
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
            self._agree(_attempt(staged.begin) if is_maker else None, checkpoint, "cannot be written")

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
        checkpoint.thread = threading.Thread(
            target=checkpoint.complete, args=(checkpoint.write, files), name="completes a checkpoint"
        )
        checkpoint.thread.start()

    def _agree(self, error: BaseException | None, checkpoint: Checkpoint, what: str) -> None:
        """Abandons the checkpoint and raises, on all processes, if one of them has an error."""
        text = None if error is None else f"{error}" or type(error).__name__
        texts = self._collectives.exchange(text, "completes a checkpoint")
        for rank, found in enumerate(texts):
            if found is not None:
                self._abandon(checkpoint)
                where = f" on rank {rank}" if len(texts) > 1 else ""
                raise CheckpointError(
                    f"checkpoint '{checkpoint.staged.final}' {what}: {found}{where}. Earlier ones are as they were"
                ) from error

    def _abandon(self, checkpoint: Checkpoint) -> None:
        checkpoint.join()
        if self._collectives.rank in checkpoint.makers:
            checkpoint.staged.abandon()


def _attempt(function: Callable[[], None]) -> BaseException | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _disk_error(checkpoint: Checkpoint, raised: BaseException) -> CheckpointError | None:
    """An error of the disk, if that is the reason why a file of the checkpoint was not written."""
    error = disk_error(checkpoint.path, raised)
    if error is None and type(raised) is RuntimeError and checkpoint.write is not None:
        # The background write may have failed on the full disk too; it then made room by removing its own file.
        checkpoint.write.join()
        error = checkpoint.write.error if isinstance(checkpoint.write.error, CheckpointError) else None
    return error
