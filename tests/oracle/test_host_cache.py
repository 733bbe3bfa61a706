"""What the cache of a core saves: compared with numbers worked out by hand."""

import torch
from oracle.host_cache import HostCache, touches_of

from hf_patrickstar.tracing.costs import cost_of

aten = torch.ops.aten


def cost(operator, *args, **kwargs):
    return cost_of(operator, args, kwargs, operator(*args, **kwargs))


def saved(cache, operator, *args, **kwargs):
    return cache.saved_nbytes(touches_of(operator, args, kwargs))


def test_a_tile_of_adam_comes_to_28_bytes_per_parameter():
    """A 16-bit gradient is widened and scaled, and the new value rounded: scratch space stays in the cache."""
    assert nbytes_of_a_tile(is_listed=False) == 28 * 64


def test_a_sum_of_gradients_is_read_and_not_written():
    """Two bytes more than a 16-bit gradient; its product is in scratch space."""
    assert nbytes_of_a_tile(is_listed=True) == 30 * 64


def nbytes_of_a_tile(is_listed):
    cache, total = HostCache(), 0
    scratch, numel = torch.zeros(64), 64

    def run(operator, *args, **kwargs):
        nonlocal total
        total += cost(operator, *args, **kwargs).nbytes - saved(cache, operator, *args, **kwargs)

    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    kept = [torch.zeros(64)]  # else the next tile is in the same memory
    saved(cache, aten.copy_.default, scratch, kept[0])  # as of the tile before
    for _ in range(2):
        total = 0
        param = torch.zeros(numel, dtype=torch.bfloat16)
        lists = [torch.zeros(numel), scratch, torch.zeros(numel), torch.zeros(numel)]
        if is_listed:
            kept.append(torch.zeros(numel))
            run(aten.mul.out, kept[-1], 0.5, out=scratch)
        else:
            run(aten.copy_.default, scratch, param)
            run(aten._foreach_mul_.Scalar, [scratch], 0.5)
        step = [torch.ones(())]
        saved(cache, aten.neg.default, step[0])
        run(aten._fused_adamw_.default, *([t] for t in lists), [], step, **options, amsgrad=False, maximize=False)
        run(aten._foreach_copy_.default, [param], [lists[0]])
        kept += [param, *step, *lists]
    return total
