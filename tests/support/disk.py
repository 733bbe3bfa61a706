"""Masters and optimizer states of some chunks on the disk, though there is room for them in memory."""

import contextlib
import dataclasses
from unittest import mock

from hf_patrickstar.schedule.estimate import Estimate
from hf_patrickstar.setup import homes


@contextlib.contextmanager
def share_on_disk(share):
    """Inside the block engines with ``disk_path`` have this share of the chunks that may be there on the disk."""

    def chosen(chunks, device):
        may_go = [chunk.chunk_index for chunk in chunks if chunk.list_nbytes and chunk.chunk_index not in device]
        return frozenset(may_go[len(may_go) - round(share * len(may_go)) :])

    def plan_homes(chunks, tiers, *args, **kwargs):
        found = plan(chunks, tiers, *args, **kwargs)
        return dataclasses.replace(found, disk=chosen(chunks, found.device)) if tiers.disk_nbytes else found

    def with_disk(estimate, current, *, are_made):
        if not estimate.disk_nbytes:
            return estimate
        indices = chosen(estimate.nbytes, current.device)
        nbytes = [dataclasses.replace(chunk, is_on_disk=chunk.chunk_index in indices) for chunk in estimate.nbytes]
        return dataclasses.replace(estimate, nbytes=nbytes)

    plan = homes.plan_homes
    with mock.patch.object(homes, "plan_homes", plan_homes), mock.patch.object(Estimate, "with_disk", with_disk):
        yield
