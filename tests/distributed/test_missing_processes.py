"""A process that dies before the engine has a group of its own."""

import os

import pytest
import torch
import torch.distributed as dist
from support.processes import Workers

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.dist.watchdog import announce
from hf_patrickstar.errors import CollectiveError


def die_or_connect(rank, is_announced):
    if is_announced:
        announce()
        dist.barrier()
    if rank == 1:
        os._exit(7)
    wait_s = 100 if is_announced else 1.5
    with pytest.raises(CollectiveError) as caught:
        Collectives.connect(None, torch.device("cpu"), wait_s)
    raise caught.value


@pytest.mark.parametrize(("store", "is_announced"), [("file", True), ("tcp", False)])
def test_it_is_named(store, is_announced):
    """At once if it has told who it is; else it has not come within the time that is set."""
    expected = r"rank 0 gave up after \d+ s: it makes an engine \(called at .*\), and rank 1 "
    expected += r"has ended \(process \d+ on " if is_announced else r"has not come\. "
    with Workers(2, store) as workers:
        workers.start(die_or_connect, is_announced, timeout=50)
        workers._killed.add(1)  # which it does itself
        with pytest.raises(CollectiveError, match=expected):
            workers.collect(50)
