"""Processes for tests that need several ranks: started once, given one function after the other."""

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from support.streams import streams_of

from hf_patrickstar import units

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
GROUP_TIMEOUT_S = 60
START_TIMEOUT_S = 120
GRACE_S = 5
PRELOADED = ["torch.distributed", "pytest", "hf_patrickstar", "support.together", "support.trainers"]
"""All processes are forked from one that has imported these, which takes longer than most tests."""


class WorkerError(RuntimeError):
    """A worker died, gave no answer in time, or raised what cannot be pickled."""


class Workers:
    """As many processes as ranks, joined by a default process group of gloo.

    They start when they are first needed. After any failure all are replaced: what the others were sending, or waiting
    for, would otherwise meet the next function.

    Args:
        world_size: How many.
        store: Where they meet: "file", which nobody hosts, or "tcp", which rank 0 hosts.
        grace_s: When one has failed, how long the others may still take.

    Attributes:
        streams: Over which streams engines of the CPU tier run, as in the option ``--streams``.
    """

    streams = "threads"

    def __init__(self, world_size, store="file", grace_s=GRACE_S):
        self.world_size = world_size
        self._store = store
        self._grace_s = grace_s
        self._processes = []
        self._connections = []
        self._killed = set()
        self._folder = None
        self._is_running = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, function, *args, timeout=60):
        """Calls ``function(rank, *args)`` in every process.

        Args:
            function: Something that the processes can import.
            args: Whatever can be pickled.
            timeout: After so many seconds the processes are killed.

        Returns:
            The results by rank.

        Raises:
            WorkerError: If a process died or did not answer in time.
            Exception: What the first function to fail raised; a note has its traceback, and those of others.
        """
        self.start(function, *args, timeout=timeout)
        return self.collect(timeout)

    def start(self, function, *args, timeout=60):
        """The first half of ``run``."""
        assert not self._is_running, "collect first"
        if not self._processes:
            self._start_processes()
        self._send(function, args, timeout)

    def collect(self, timeout=60):
        """The second half of ``run``; the result of a rank that was killed meanwhile is ``None``."""
        try:
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise
        finally:
            self._is_running = False
            if self._killed:
                self.close()

    @contextlib.contextmanager
    def over(self, streams):
        """Inside the block engines of the processes run over other streams."""
        self.streams = streams
        try:
            yield
        finally:
            del self.streams

    def kill(self, rank):
        """Ends a process without giving it a chance to say goodbye."""
        self._killed.add(rank)
        self._processes[rank].kill()
        self._processes[rank].join()

    def close(self):
        """Ends all processes. They start again when they are needed."""
        for connection in self._connections:
            connection.close()  # a process that waits for its next function leaves
        deadline = time.monotonic() + (0 if self._is_running or self._killed else GRACE_S)
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []
        self._killed, self._is_running = set(), False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start_processes(self):
        self._folder = tempfile.mkdtemp(prefix="hf_patrickstar-workers-")
        address = f"file://{self._folder}/store" if self._store == "file" else f"tcp://127.0.0.1:{_free_port()}"
        context = torch.multiprocessing.get_context("forkserver")
        assert all(map(importlib.util.find_spec, PRELOADED))  # what cannot be imported is left out without a word
        # A process that has looked for devices, as imports do, cannot be forked to use them.
        context.set_forkserver_preload(PRELOADED if "CUDA_VISIBLE_DEVICES" in ENVIRONMENT else [])
        # Read when that one imports torch; it does not get this process's path by itself.
        with mock.patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self.world_size, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        self._send(_join, (self.world_size, address), START_TIMEOUT_S)
        self.collect(START_TIMEOUT_S)

    def _send(self, function, args, timeout):
        message = pickle.dumps((function, args, timeout, self.streams))
        self._is_running = True
        for connection in self._connections:
            with contextlib.suppress(OSError):  # collect says which one is dead
                connection.send_bytes(message)

    def _collect(self, timeout):
        results, failures = {}, {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    is_good, answer, text = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    if rank not in self._killed:
                        failures[rank] = WorkerError(self._describe_death(rank))
                    results[rank] = None
                    continue
                results[rank] = answer
                if not is_good:
                    answer.add_note(f"Raised by rank {rank} of {self.world_size}:\n{text}")
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + self._grace_s)
            if not ready:
                break
        if waiting:
            late = ", ".join(str(rank) for rank in sorted(waiting.values()))
            note = f"No answer in time from rank {late} of {self.world_size}"
            if not failures:
                raise WorkerError(f"{note}: {timeout} s")
            next(iter(failures.values())).add_note(note)
        if failures:
            self._raise(list(failures.values()))
        return [results[rank] for rank in range(self.world_size)]

    def _raise(self, failures):
        """Raises the first failure, or the first death: what the others say about a dead one is no news."""
        first = next((failure for failure in failures if isinstance(failure, WorkerError)), failures[0])
        for other in failures:
            if other is not first:
                first.add_note("\n".join([f"Then {type(other).__name__}.", *getattr(other, "__notes__", [str(other)])]))
        raise first

    def _describe_death(self, rank):
        process = self._processes[rank]
        process.join(GRACE_S)
        code = process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"Rank {rank} of {self.world_size} died with exit code {code}{name}"


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _join(rank, world_size, address):
    """What every process is told first."""
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=timeout)


def _serve(rank, world_size, connection):
    units.LEAST_BUDGET_NBYTES = 1  # as in conftest.py
    """Calls what it is sent until the connection ends."""
    torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            break
        answer = _call(rank, world_size, message)
        connection.send_bytes(answer)
    # Not over the default group's own goodbye: a process whose peers are gone would wait for them.
    os._exit(0)


def _look_away_from_imports():
    """What was imported need not be looked through whenever a test collects garbage."""
    if len(sys.modules) != _look_away_from_imports.num_modules:
        _look_away_from_imports.num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


_look_away_from_imports.num_modules = 0


def _call(rank, world_size, message):
    try:
        function, args, timeout, streams = pickle.loads(message)
        _look_away_from_imports()
        faulthandler.dump_traceback_later(max(1, timeout - 1))
        torch.manual_seed(0)
        if function is not _join:
            assert dist.get_world_size() == world_size
        no_traces = mock.patch("hf_patrickstar.tracing.estimator.keep_traces", return_value=None)  # as in conftest.py
        with streams_of(streams), no_traces:
            return pickle.dumps((True, function(rank, *args), ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((False, error, text))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((False, WorkerError(f"{type(error).__name__}: {error}"), text))
        return answer
    finally:
        faulthandler.cancel_dump_traceback_later()
