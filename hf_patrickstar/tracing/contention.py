"""Processes that call an operator, too, while this one times it.

[Note: contention]
Processes that train together on the cores of one machine share its memory, and often its caches and cores. So an
operator takes longer there than where nobody else works. A competing process calls the same operator, on operands of
its own, for as long as this process times it.
"""

import contextlib
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe

import torch

from hf_patrickstar.tracing.calls import OperatorCall, as_they_are

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_TIMEOUT_S = 60.0
"""A competing process that has not answered for so long does not answer any more."""


_ERRORS = (OSError, EOFError, ValueError)
"""How a competing process shows that it cannot be started, has ended, or does not answer."""


class CompetingProcesses:
    """Starts competing processes with the first call, and ends them when nobody uses it; see [Note: contention].

    Args:
        num: How many there are.
        num_threads: Threads of torch in each.
    """

    def __init__(self, num: int, num_threads: int) -> None:
        self._num = num
        self._num_threads = num_threads
        self._connections: list[Connection] | None = None  # before the first call
        self._processes = contextlib.ExitStack()
        weakref.finalize(self, self._processes.close)

    @contextlib.contextmanager
    def calling(self, call: OperatorCall) -> Iterator[None]:
        """Inside the block all competing processes make a call, again and again.

        Where there are none, or one of them refuses the call, nobody does. Where one has failed, nobody does from then
        on, and a line of the log says so.
        """
        has_all = self._tell(call)
        if not has_all:
            self._tell(None)  # some may have begun
        try:
            yield
        finally:
            if has_all:
                self._tell(None)

    def _tell(self, what: OperatorCall | None) -> bool:
        """Tells all competing processes something; returns whether all do it."""
        try:
            if self._connections is None:
                self._connections = self._start()
            for connection in self._connections:
                connection.send(what)
            answers = [_answer(connection) for connection in self._connections]
        except _ERRORS as error:
            logger.warning(
                "patrickstar: operators are timed as if this process were alone: no other process can call them at the "
                "same time (%s: %s)",
                *(type(error).__name__, error),
            )
            self._connections = []
            self._processes.close()  # the others would call the operator for ever
            return False
        return all(answers) and bool(answers)

    def _start(self) -> list[Connection]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._num_threads)}
        found: list[Connection] = []
        for _ in range(self._num):
            here, there = Pipe()
            with there:
                command = [sys.executable, "-m", __name__, str(there.fileno()), str(self._num_threads)]
                process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()])
            for end in (process.wait, process.kill, here.close):  # the last one first
                self._processes.callback(end)
            found.append(here)
        return found


def _answer(connection: Connection) -> bool:
    if not connection.poll(_TIMEOUT_S):
        raise TimeoutError(f"no answer for {_TIMEOUT_S:g} s")
    return bool(connection.recv())


def serve(connection: Connection) -> None:
    """Makes calls until nobody asks any more; what a competing process does.

    Args:
        connection: Who asks. It gets ``True`` when calls have begun, ``False`` if an operator refuses such operands,
            and ``True`` when they have ended.
    """
    while True:
        call = connection.recv()
        if call is None:
            connection.send(True)
            continue
        with as_they_are(_CPU):
            try:
                work = call.make(_CPU)
                work()
            except Exception as error:  # an operator may refuse any values
                logger.debug("patrickstar: a competing process cannot call operator '%s': %s", call.name, error)
                connection.send(False)
                continue
            connection.send(True)
            while not connection.poll():
                work()


def main() -> None:
    """A competing process; the command line has the file descriptor of its connection, and its number of threads."""
    descriptor, num_threads = map(int, sys.argv[1:])
    torch.set_num_threads(num_threads)
    with contextlib.suppress(EOFError, ConnectionError), Connection(descriptor) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
