"""Which memory is a buffer of a pool, and on which tier: what streams that stand in for those of a device must know."""

import array
import contextlib
from unittest import mock

from hf_patrickstar.memory.pool import PayloadPool


@contextlib.contextmanager
def told_of_buffers(take, free):
    """Inside, pools tell of their buffers."""
    allocate, forget = PayloadPool.allocate, PayloadPool._forget

    def allocate_and_tell(pool, tier, numel, dtype, owner, **settings):
        buffer = allocate(pool, tier, numel, dtype, owner, **settings)
        take(buffer, tier, owner)
        return buffer

    def forget_and_tell(pool, buffer):
        forget(pool, buffer)
        free(buffer)

    with mock.patch.multiple(PayloadPool, allocate=allocate_and_tell, _forget=forget_and_tell):
        yield


def are_there(address, nbytes):
    """For each page whether the system has given it to this process."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // (4096) * 8)
        return [bool(entry >> 63) for entry in array.array("Q", file.read(nbytes // (4096) * 8))]
