"""The processes of the other tests do what those rely on."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.processes import WorkerError, Workers


def describe(rank, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total, os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def fail_on(rank, culprit):
    if rank == culprit:
        raise KeyError("lost")
    dist.barrier()


def die_on(rank, culprit):
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def sleep(rank, seconds):
    time.sleep(seconds)
    return os.getpid()


def test_results_are_by_rank_and_functions_can_talk(pair):
    assert pair.run(describe, 10) == [(rank, torch.tensor([21]), "1", 1) for rank in range(2)]


def test_failures_are_told_and_processes_replaced():
    with Workers(2, grace_s=0.5) as workers:
        before = workers.run(sleep, 0)
        begin = time.monotonic()
        with pytest.raises(KeyError, match="lost") as caught:
            workers.run(fail_on, 1)
        assert time.monotonic() - begin < 5
        notes = "\n".join(caught.value.__notes__)
        assert "Raised by rank 1 of 2" in notes
        assert 'raise KeyError("lost")' in notes
        assert "No answer in time from rank 0 of 2" in notes  # it waited for the barrier
        with pytest.raises(WorkerError, match=r"Rank 0 of 2 died with exit code -9 \(SIGKILL\)"):
            workers.run(die_on, 0)
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
