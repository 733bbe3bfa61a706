"""What is done on a backend of a device, such as nccl, over gloo that goes by another name."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.processes import Workers

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CollectiveError

CPU = torch.device("cpu")


def instead(owner, name, function):
    return mock.patch.object(owner, name, function, create=True)


def broken(*args, **kwargs):
    return Broken()


@contextlib.contextmanager
def connected(reduce_dtype="auto"):
    """Collectives that take gloo for the backend of a device."""
    with instead(dist.ProcessGroupGloo, "name", lambda self: "nccl"):
        collectives = Collectives.connect(None, CPU, reduce_dtype=reduce_dtype)
    try:
        yield collectives
    finally:
        collectives.close()
    dist.barrier()


def terms(rank, dtype, numel=384):
    """A buffer of three slices; every sum of them is exact in 8 bits of mantissa, and most averages are not."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-40, 40, (numel,), generator=generator).to(dtype)


def expected(rank, dtype):
    total = sum(terms(other, torch.float64) for other in range(3)).view(3, -1)[rank]
    return (total / 3).to(dtype)


def reduce(rank, dtype, reduce_dtype):
    with connected(reduce_dtype) as collectives:
        staging = collectives.staging_numel(128, dtype)
        wide = torch.full((staging[1],), float("nan")) if staging[1] else None
        buffers = []
        for _ in range(2):  # the second uses the scratch space of the first
            buffers.append(terms(rank, dtype))
            ticket = collectives.reduce_scatter(buffers[-1], (None, wide), "reduces group 0")
            ticket.join()
            ticket.join()
        owned = [buffer.view(3, -1)[rank] for buffer in buffers]
        return staging, [torch.equal(own, expected(rank, dtype)) for own in owned], collectives.is_asynchronous


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"), [(torch.float32, "fp32"), (torch.bfloat16, "auto"), (torch.bfloat16, "fp32")]
)
def test_an_average_is_the_sum_divided_once(three, dtype, reduce_dtype):
    """Not the sum of terms that were multiplied with a rounded third."""
    numel = 384 if reduce_dtype == "fp32" and dtype is not torch.float32 else 0
    assert three.run(reduce, dtype, reduce_dtype) == [((0, numel), [True, True], True)] * 3


def reduce_without_room(rank):
    with connected("fp32") as collectives, pytest.raises(CollectiveError, match="0 elements and 192 of fp32"):
        collectives.reduce_scatter(torch.zeros(192, dtype=torch.bfloat16), (None, None), "reduces group 0")


def test_scratch_space_that_is_too_small(three):
    three.run(reduce_without_room)


def note_groups(rank):
    """Over which groups gathers and reductions go."""
    groups = {"gather": [], "reduce": []}
    real_gather, real_reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def gather(*args, group, **kwargs):
        groups["gather"].append(group)
        return real_gather(*args, group=group, **kwargs)

    def reduce(*args, group, **kwargs):
        groups["reduce"].append(group)
        return real_reduce(*args, group=group, **kwargs)

    names = {"all_gather_single": gather, "all_gather_into_tensor": gather}
    names |= {"reduce_scatter_single": reduce, "reduce_scatter_tensor": reduce}
    with connected() as collectives, contextlib.ExitStack() as stack:
        for name, function in names.items():
            stack.enter_context(instead(dist, name, function))
        buffer = torch.full((192,), float(rank))
        collectives.all_gather(buffer, "gathers group 0").join()
        gathered = buffer.view(3, -1)[:, 0].tolist()
        collectives.reduce_scatter(buffer, (None, None), "reduces group 0").join()
        (gathers,), (reductions,) = groups.values()
        same = [dist.get_process_group_ranks(group) for group in (gathers, reductions)]
        return gathered, gathers is reductions, gathers is collectives.control, reductions is collectives.control, same


def test_reductions_do_not_queue_behind_gathers(three):
    assert three.run(note_groups) == [([0.0, 1.0, 2.0], False, False, False, [[0, 1, 2]] * 2)] * 3


class Broken:
    """A collective whose other ranks are gone."""

    def wait(self):
        raise RuntimeError("NCCL communicator was aborted")


def fail(rank):
    aborted = []
    with connected() as collectives:
        with (
            instead(dist.ProcessGroup, "abort", lambda group: aborted.append(group)),
            instead(dist, "reduce_scatter_tensor", broken),
            instead(dist, "reduce_scatter_single", broken),
        ):
            messages = []
            for _ in range(2):
                with pytest.raises(CollectiveError) as caught:
                    collectives.reduce_scatter(torch.zeros(192), (None, None), "reduces group 0").join()
                messages.append(str(caught.value))
        assert dist.group.WORLD in aborted
        return len(aborted), len({id(group) for group in aborted}), messages


def test_what_is_under_way_is_aborted_once_after_a_failure():
    """Kernels of a communicator wait for ranks that are gone, and the process could not end."""
    with Workers(3) as workers:
        for num, num_distinct, messages in workers.run(fail):
            assert (num, num_distinct) == (3, 3), "the reductions', that for gathers, and the user's"
            assert all("reduces group 0: a collective failed on rank" in message for message in messages)
