"""The kernel for Adam on small chunks: the same bits as torch's own, whatever is joined or cut."""

import re
import threading

import pytest
import torch
from unit.optim.updates import (
    add_lists,
    end_update,
    give,
    group_of,
    make_parts,
    masters,
    randomize,
    twins,
    values,
)
from unit.runtime.data_parts import CPU
from unit.runtime.parts import OneOfTwo
from unit.spec_builders import BF16, FP32

from hf_patrickstar.layout.specs import Types
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim import adam_kernel as module
from hf_patrickstar.optim import workers as workers_module
from hf_patrickstar.optim.adam_kernel import EXP_AVG, EXP_AVG_SQ, AdamKernel, is_plain_adam
from hf_patrickstar.optim.kernel import WORKSPACE
from hf_patrickstar.optim.workers import HostWorkers
from hf_patrickstar.runtime.chunk import GRADIENT
from hf_patrickstar.runtime.gradient_place import GradientPlace

FP16, FP64 = Types("float16", "float32"), Types("float64", "float64")
Adam, AdamW = torch.optim.Adam, torch.optim.AdamW
NUMELS = ((64, 64, 70, 33), (64, 1, 100))  # some end where others may be joined to them, some do not
GROUPS = group_of([0, 1, 2, 5], [3, 4, 6])


def make(*chunks, cls=AdamW, prefer_fused=False, options=None, workers=None, has_lanes=False, **settings):
    """Parts and a kernel over their chunks, of an optimizer with two groups; groups are the first half and the rest."""
    parts = make_parts(*(chunks or [(64, 64)]), **settings)
    add_lists(parts, EXP_AVG, EXP_AVG_SQ)
    parts.optimizer = cls(
        [
            {"params": [torch.nn.Parameter(torch.zeros(1))]},
            {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125},
        ],
        **{"lr": 0.01, **(options or {})},
    )
    parts.kernel = AdamKernel(parts.optimizer, parts.pool, prefer_fused, workers or HostWorkers(1), has_lanes)
    parts.kernel.reserve(parts.chunks)
    return parts


def update(parts, groups=None, coefficient=None, chunks=None, **settings):
    groups = {tensor.spec.index: 0 for tensor in parts.tensors} if groups is None else groups
    parts.kernel.prepare(parts.chunks if chunks is None else chunks, groups, coefficient, **settings).run()
    end_update(parts)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of elements that torch's Adam was called with, and the steps before, call by call."""
    found, adam = [], module.adam

    def counted(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, **options):
        found.append(([param.numel() for param in params], steps[0].item()))
        adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, **options)

    monkeypatch.setattr(module, "adam", counted)
    return found


def numels(calls):
    return [numels for numels, _ in calls]


# The same bits as torch


@pytest.mark.parametrize("types", [BF16, FP32])
@pytest.mark.parametrize(
    ("cls", "options", "prefer_fused"),
    [
        (AdamW, {}, False),
        (AdamW, {}, True),
        (AdamW, {"weight_decay": 0.5, "maximize": True}, False),
        (AdamW, {"weight_decay": 0.5, "maximize": True, "fused": True}, False),
        (AdamW, {"foreach": True}, True),
        (AdamW, {"foreach": False}, True),
        (AdamW, {"lr": torch.tensor(0.01)}, False),
        (AdamW, {"lr": torch.tensor(0.01), "fused": True}, False),
        (Adam, {"weight_decay": 0.5}, False),
        (Adam, {"weight_decay": 0.5}, True),
        (Adam, {"weight_decay": 0.5, "decoupled_weight_decay": True}, False),
    ],
)
def test_three_steps_of_two_groups_end_in_the_same_bits_as_with_torch(types, cls, options, prefer_fused):
    parts = make(*NUMELS, cls=cls, options=options, prefer_fused=prefer_fused, types=types)
    randomize(parts)
    ordinary = twins(parts)
    reference = cls(
        [
            {"params": [ordinary[index] for index in (0, 1, 2, 5)]},
            {"params": [ordinary[index] for index in (3, 4, 6)], "lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125},
        ],
        **{"lr": 0.01, **options, **({"fused": True} if prefer_fused and "foreach" not in options else {})},
    )
    for _ in range(3):
        for tensor, twin in zip(parts.tensors, ordinary, strict=True):
            gradient = torch.randn(tensor.spec.shape).to(tensor.chunk.param.dtype)
            parts.gradients.add(tensor, gradient)
            twin.grad = gradient.float() * 0.3
        update(parts, GROUPS, torch.tensor(0.3))
        reference.step()
    for tensor, master, value, twin in zip(parts.tensors, masters(parts), values(parts), ordinary, strict=True):
        assert torch.equal(master, twin)
        assert torch.equal(value, twin.to(value.dtype)), "the rounded master"
        state, expected = parts.kernel.own_state(tensor), reference.state[twin]
        assert [state["step"].item(), expected["step"].item()] == [3.0, 3.0]
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"])


def test_pieces_of_a_tensor_have_the_bits_of_the_whole(monkeypatch, calls):
    monkeypatch.setattr(module, "TILE_NUMEL", 128)
    parts = make((300,))
    randomize(parts)
    (twin,) = twins(parts)
    gradient = torch.randn(300).bfloat16()
    parts.gradients.add(parts.tensors[0], gradient)
    twin.grad = gradient.float()
    update(parts)
    AdamW([twin], lr=0.01).step()
    assert torch.equal(masters(parts)[0], twin)
    assert numels(calls) == [[128], [128], [44]]


def test_the_learning_rate_is_read_in_every_step():
    parts = make((64,), types=FP32)
    parts.optimizer.param_groups[0].update(lr=0.25, weight_decay=0.0, betas=(0.0, 0.0), eps=0.0)
    for rate in (0.25, 2.0):
        parts.optimizer.param_groups[0]["lr"] = rate
        give(parts, t0=4)
        update(parts)  # with these options it moves by the rate
    assert masters(parts)[0][:3].tolist() == [-2.25, -1.25, -0.25]


# On workers


@pytest.fixture
def in_workers(monkeypatch):
    """Lets workers have whatever there is, however small; makes pools of workers."""
    pools, before = [], torch.get_num_threads()
    torch.set_num_threads(2)  # else one worker is of no use
    for place in (module, workers_module):
        monkeypatch.setattr(place, "SMALL_NUMEL", 64)

    def make_workers(num):
        pools.append(HostWorkers(num))
        return pools[-1]

    yield make_workers
    for pool in pools:
        pool.close()
    torch.set_num_threads(before)


@pytest.fixture
def names(monkeypatch):
    """The threads in which tiles are updated."""
    found, round_masters = [], module.round_masters

    def counted(*args):
        found.append(re.sub(r"_\d+$", "", threading.current_thread().name))
        round_masters(*args)

    monkeypatch.setattr(module, "round_masters", counted)
    return found


FUSED = {"fused": True}
LARGE = ((1000, 64, 6401), (64, 1, 3000), (129,))


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("tile_numel", [64, 192, 4096])
@pytest.mark.parametrize("types", [BF16, FP16, FP32, FP64, Types("bfloat16", "bfloat16")], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (AdamW, FUSED),
        (AdamW, {}),
        (AdamW, {"foreach": True, "weight_decay": 0.5, "maximize": True}),
        (AdamW, {**FUSED, "weight_decay": 0.5, "maximize": True}),
        (Adam, {**FUSED, "weight_decay": 0.5, "lr": torch.tensor(0.01)}),
        (Adam, {"weight_decay": 0.5}),
    ],
)
def test_neither_the_workers_nor_their_tiles_change_a_bit(
    cls, options, types, tile_numel, num, in_workers, names, monkeypatch
):
    monkeypatch.setattr(module, "TILE_NUMEL", tile_numel)
    parts = make(*LARGE, cls=cls, options=options, types=types, workers=in_workers(num))
    randomize(parts)
    ordinary = twins(parts)
    group = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125}
    reference = cls(
        [{"params": ordinary[:3] + ordinary[6:]}, {"params": ordinary[3:6], **group}], **{"lr": 0.01, **options}
    )
    for step in range(3):
        chosen = [0, 2, 4, 5] if step == 1 else range(len(ordinary))
        for index in chosen:
            tensor = parts.tensors[index]
            gradient = torch.randn(tensor.spec.shape).to(tensor.chunk.param.dtype)
            parts.gradients.add(tensor, gradient)
            ordinary[index].grad = gradient.to(ordinary[index].dtype) * torch.tensor(0.3)
            if index == 2 and step == 2:
                parts.gradients.move_to_list(tensor)
        update(parts, group_of([0, 1, 2, 6], [3, 4, 5]), torch.tensor(0.3))
        parts.gradients.clear(parts.tensors[2])
        reference.step()
        reference.zero_grad()
    for tensor, master, value, twin in zip(parts.tensors, masters(parts), values(parts), ordinary, strict=True):
        assert torch.equal(master, twin)
        assert torch.equal(value, twin.to(value.dtype))
        state, expected = parts.kernel.own_state(tensor), reference.state[twin]
        assert state["step"].item() == expected["step"].item()
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"])
    assert set(names) == {"hf_patrickstar-update"}


def test_a_chunk_is_cut_into_as_many_tiles_as_there_are_workers(in_workers, calls):
    parts = make((640,), workers=in_workers(3))
    give(parts, t0=1)
    update(parts)
    assert sorted(numels(calls)) == [[128], [256], [256]]


@pytest.mark.parametrize(("num", "has_lanes", "tile"), [(9, True, 128), (9, False, 64), (8, True, 64)])
def test_many_workers_beside_a_device_have_larger_tiles(num, has_lanes, tile, in_workers, calls, monkeypatch):
    """Each tile holds Python's lock for a while, which the thread that launches kernels needs."""
    monkeypatch.setattr(module, "TILE_NUMEL", 64)
    parts = make((64 * 2 * num,), workers=in_workers(num), has_lanes=has_lanes)
    assert parts.kernel.workspace_numel(64 * 2 * num, widens=False) == tile * num
    give(parts, t0=1)
    update(parts)
    assert numels(calls) == [[tile]] * (64 * 2 * num // tile)


def test_small_chunks_are_given_to_workers_together(in_workers, calls, names):
    parts = make((64,), (64,), (64,), (64,), types=FP32, workers=in_workers(2))
    give(parts, t0=1, t1=1, t2=1, t3=1)
    update(parts)
    assert numels(calls) == [[64, 64], [64, 64]]
    assert set(names) == {"hf_patrickstar-update"}


def test_what_is_done_sooner_than_handed_over_is_done_at_once(names):
    parts = make((64,), workers=HostWorkers(3))
    give(parts, t0=1)
    update(parts)
    assert names == ["MainThread"]


@pytest.mark.parametrize("home", list(Tier))
def test_workers_update_chunks_where_they_live(home, in_workers, names):
    parts = make((640,), home=home, workers=in_workers(3))
    give(parts, t0=1)
    update(parts)
    assert masters(parts)[0][[0, 639]].tolist() == pytest.approx([-0.01, 639 * (1 - 1e-4) - 0.01])
    assert set(names) == {"hf_patrickstar-update"}


@pytest.mark.parametrize("num", [1, 3])
def test_an_error_names_the_parameters_that_were_updated(num, in_workers, monkeypatch):
    def fail(masters, places):
        raise MemoryError("no room")

    monkeypatch.setattr(module, "round_masters", fail)
    parts = make((64, 64, 64), (64,), workers=in_workers(num))
    give(parts, t1=1, t2=1, t3=1)
    with pytest.raises(MemoryError, match="no room") as caught:
        update(parts)
    assert caught.value.__notes__ in [
        ["while the optimizer updated 't1' (chunk 0) to 't3' (chunk 1)"],
        ["while the optimizer updated 't1' (chunk 0)"],
        ["while the optimizer updated 't2' (chunk 0)"],
        ["while the optimizer updated 't3' (chunk 1)"],
    ]


# What is joined, and what is not


def test_neighbours_that_end_where_vectors_end_are_updated_as_one(calls):
    parts = make((64, 128, 64))
    give(parts, t0=1, t1=1, t2=1)
    update(parts)
    assert numels(calls) == [[256]]


def test_a_neighbour_of_one_that_ends_elsewhere_keeps_its_own_end(calls):
    parts = make((70, 58, 64))
    give(parts, t0=1, t1=1, t2=1)
    update(parts)
    assert numels(calls) == [[70, 122]], "one call, of two tensors"


def test_what_is_not_side_by_side_is_not_joined(calls):
    parts = make((64, 64), offsets=[0, 128], chunk_numel=192)
    give(parts, t0=1, t1=1)
    update(parts)
    assert numels(calls) == [[64, 64]]


def test_groups_are_updated_apart(calls):
    parts = make((64, 64, 64))
    give(parts, t0=1, t1=1, t2=1)
    update(parts, group_of([0, 2], [1]))
    assert numels(calls) == [[64, 64], [64]]


def test_those_with_another_number_of_steps_are_updated_apart(calls):
    parts = make((64, 64))
    give(parts, t0=1)
    update(parts)
    give(parts, t0=1, t1=1)
    update(parts)
    assert calls == [([64], 0.0), ([64], 1.0), ([64], 0.0)]


def test_gradients_in_different_places_are_not_joined_but_updated_in_one_call(calls):
    parts = make((64, 64))
    give(parts, t0=1, t1=1)
    parts.gradients.move_to_list(parts.tensors[1])
    update(parts)
    assert numels(calls) == [[64, 64]]
    assert parts.kernel.own_state(parts.tensors[0])["exp_avg"].unique().item() == pytest.approx(0.1)
    assert parts.kernel.own_state(parts.tensors[1])["exp_avg"].unique().item() == pytest.approx(0.1)


def test_one_call_widens_no_more_gradients_than_there_is_scratch_space_for(calls):
    parts = make((64,), (64,), (128,))
    give(parts, t0=1, t1=1, t2=1)
    update(parts)
    assert numels(calls) == [[64, 64], [128]]


def test_chunks_whose_gradients_need_no_scratch_space_are_updated_in_one_call(calls):
    parts = make((64,), (64,), (64,), types=FP32)
    give(parts, t0=1, t1=1, t2=1)
    update(parts)
    assert numels(calls) == [[64, 64, 64]]


def test_a_tile_that_is_full_is_updated_before_the_next_is_begun(monkeypatch, calls):
    monkeypatch.setattr(module, "TILE_NUMEL", 128)
    parts = make((64,), (64,), (64,), types=FP32)
    give(parts, t0=1, t1=1, t2=1)
    update(parts)
    assert numels(calls) == [[64, 64], [64]]


def test_chunks_of_other_types_are_updated_apart(calls):
    parts = make((64,))
    parts.add_chunk(64, types=FP32)
    add_lists(parts, EXP_AVG, EXP_AVG_SQ)
    give(parts, t0=1, t1=1)
    update(parts)
    assert numels(calls) == [[64], [64]]


# Gradients


@pytest.mark.parametrize("types", [BF16, FP32])
@pytest.mark.parametrize("place", [GradientPlace.PARAM, GradientPlace.LIST])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_coefficient_is_applied_once(types, place, keeps):
    parts = make((64, 64), types=types)
    give(parts, t0=8, t1=8)
    for tensor in parts.tensors if place is GradientPlace.LIST else ():
        parts.gradients.move_to_list(tensor)
    assert {tensor.gradient for tensor in parts.tensors} == {place}
    update(parts, group_of([], [0, 1]), torch.tensor(0.5), keeps=keeps)
    for tensor in parts.tensors:
        state = parts.kernel.own_state(tensor)
        assert (state["exp_avg"].unique().tolist(), state["exp_avg_sq"].unique().tolist()) == ([2.0], [4.0])


def test_a_gradient_that_stays_is_the_clipped_one():
    parts = make((64, 64))
    give(parts, t0=8)
    parts.gradients.move_to_list(parts.tensors[0])
    update(parts, None, torch.tensor(0.5))
    assert parts.gradients.of(parts.tensors[0]).unique().tolist() == [4.0]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_sums_and_16_bit_gradients_of_one_tile_are_multiplied_alike(keeps, num_workers):
    mixed, plain = make(*NUMELS, workers=HostWorkers(num_workers)), make(*NUMELS)
    for parts in (mixed, plain):
        torch.manual_seed(1)
        randomize(parts)
        give(parts, **{f"t{number}": number + 1 for number in range(len(parts.tensors))})
    for tensor in mixed.tensors[::2]:
        mixed.gradients.move_to_list(tensor)
    update(mixed, None, torch.tensor(0.3), keeps=keeps)
    update(plain, None, torch.tensor(0.3))
    assert all(map(torch.equal, masters(mixed), masters(plain)))
    for one, other in zip(mixed.tensors, plain.tensors, strict=True):
        one, other = mixed.kernel.own_state(one), plain.kernel.own_state(other)
        assert other["exp_avg"].all()
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_sum_that_nobody_reads_again_is_not_written_to():
    """Memory traffic of the host is what an update takes its time for."""
    parts = make((64, 64))
    give(parts, t0=8)
    parts.gradients.move_to_list(parts.tensors[0])
    update(parts, None, torch.tensor(0.5), keeps=False)
    assert parts.gradients.of(parts.tensors[0]).unique().tolist() == [8.0]


def test_what_has_no_gradient_stays_as_it_is():
    parts = make((64, 64))
    give(parts, t0=1)
    update(parts)
    assert masters(parts)[1].tolist() == values(parts)[1].tolist() == [float(16 + i) for i in range(64)]
    assert parts.kernel.own_state(parts.tensors[1]) == {}
    assert not parts.chunks[0].lists[EXP_AVG][64:].any()
    assert masters(parts)[0][0].item() == pytest.approx(-0.01), "the other moves by the rate"


@pytest.mark.parametrize("place", [GradientPlace.ZERO, GradientPlace.CONSUMED, GradientPlace.REMOTE])
def test_a_gradient_that_is_not_at_home_is_none(place, calls):
    parts = make()
    parts.tensors[0].gradient = place
    update(parts)
    assert calls == []
    assert parts.kernel.own_state(parts.tensors[0]) == {}


def test_what_is_in_no_group_keeps_its_gradient_and_its_master(calls):
    parts = make()
    give(parts, t0=1, t1=5)
    parts.kernel.update(parts.chunks, {0: 0}, None)
    assert numels(calls) == [[64]]
    assert values(parts)[1].unique().tolist() == [5.0]
    assert masters(parts)[1][:2].tolist() == [16.0, 17.0]
    assert parts.kernel.own_state(parts.tensors[1]) == {}


def test_a_tensor_without_elements_counts_steps_too():
    parts = make((64, 0))
    give(parts, t0=1, t1=1)
    update(parts)
    assert parts.kernel.own_state(parts.tensors[1])["step"].item() == 1.0


@pytest.mark.parametrize("home", list(Tier))
def test_chunks_are_updated_where_they_live(home):
    parts = make((64,), home=home)
    give(parts, t0=1)
    update(parts)
    assert masters(parts)[0][0].item() == pytest.approx(-0.01)
    assert WORKSPACE in parts.ledger.owners(home)


# Scratch space


def test_scratch_space_is_for_one_tile_or_for_a_chunk_if_that_is_smaller():
    parts = make()
    assert parts.kernel.workspace_numel(64) == 64
    assert parts.kernel.workspace_numel(2**30) == 2**19
    assert parts.kernel.batch_numel == 2**23
    assert AdamKernel(parts.optimizer, parts.pool, True, HostWorkers(1), has_lanes=True).workspace_numel(2**30) == 2**24


@pytest.mark.parametrize(
    ("num", "capacity", "numel"), [(2, 2**30, 2**20), (3, 64, 192), (3, 6400, 6528), (3, 0, 0), (2, 2**19, 2**19)]
)
def test_every_worker_has_a_tile_of_its_own_or_its_part_of_a_chunk(num, capacity, numel):
    kernel = AdamKernel(make().optimizer, None, False, HostWorkers(num))
    assert kernel.workspace_numel(capacity) == numel
    assert kernel.batch_numel == max(num, 16) * 2**19, "small chunks until all have a tile"


def test_sums_of_gradients_are_multiplied_in_scratch_space_of_the_host_alone():
    kernel = AdamKernel(make().optimizer, None, True, HostWorkers(2), has_lanes=True)
    assert kernel.workspace_numel(2**30, widens=False) == 2 * 2**19
    parts = make((64,), home=Tier.DEVICE, has_lanes=True)
    give(parts, t0=8)
    parts.gradients.move_to_list(parts.tensors[0])
    update(parts, None, torch.tensor(0.5), keeps=False)
    assert parts.gradients.of(parts.tensors[0]).unique().tolist() == [4.0], "a device saves nothing by it"


def test_the_tile_of_a_gpu_may_be_smaller_than_those_of_all_workers():
    kernel = AdamKernel(make().optimizer, None, True, HostWorkers(48), has_lanes=True)
    assert kernel.workspace_numel(2**30) == 48 * 2**20


def test_scratch_space_is_booked_where_chunks_live_and_given_back():
    parts = make((64,), (64, 64))
    assert parts.ledger.owners(Tier.HOST)[WORKSPACE] == 4 * 128, "that of the largest"
    assert WORKSPACE not in parts.ledger.owners(Tier.DEVICE)
    parts.kernel.reserve(parts.chunks, Tier.DEVICE)
    parts.kernel.reserve(parts.chunks, Tier.DEVICE)
    assert [parts.ledger.owners(tier)[WORKSPACE] for tier in Tier] == [4 * 128, 4 * 128], "once on each"
    assert parts.kernel.release() == set(Tier)
    assert [WORKSPACE in parts.ledger.owners(tier) for tier in Tier] == [False, False]
    assert parts.kernel.release() == set()


def test_what_is_never_updated_needs_no_scratch_space():
    parts = make((64,), trainable=False, has_master=True)
    parts.kernel.reserve(parts.chunks, Tier.DEVICE)
    assert [WORKSPACE in parts.ledger.owners(tier) for tier in Tier] == [False, False]


# State


def test_there_is_no_state_before_the_first_step():
    parts = make()
    tensor = parts.tensors[0]
    assert parts.kernel.own_state(tensor) == parts.kernel.tensor_state(tensor) == {}
    assert list(parts.kernel.state_places(tensor)) == ["exp_avg", "exp_avg_sq"]


def stepped():
    """A kernel after one step of the second group, in which averages are halves and quarters of 8 and 64."""
    parts = make()
    give(parts, t0=8)
    update(parts, group_of([], [0]))
    return parts, parts.kernel, parts.tensors[0]


def has(state):
    return {key: value.unique().tolist() for key, value in state.items()}


def test_the_state_has_the_names_that_torch_uses():
    _, kernel, tensor = stepped()
    assert has(kernel.own_state(tensor)) == {"step": [1.0], "exp_avg": [4.0], "exp_avg_sq": [16.0]}


def test_writes_to_its_own_state_take_effect():
    parts, kernel, tensor = stepped()
    state = kernel.own_state(tensor)
    state["step"].fill_(6)
    state["exp_avg"].fill_(2)
    give(parts, t0=8)
    update(parts, group_of([], [0]))
    assert has(kernel.own_state(tensor)) == {"step": [7.0], "exp_avg": [5.0], "exp_avg_sq": [28.0]}
    assert state["step"].item() == 7.0, "who has it sees it count on"


def test_writes_to_a_copy_of_it_do_not():
    _, kernel, tensor = stepped()
    for value in kernel.tensor_state(tensor).values():
        value.fill_(100)
    assert has(kernel.tensor_state(tensor)) == {"step": [1.0], "exp_avg": [4.0], "exp_avg_sq": [16.0]}


@pytest.mark.parametrize("step", [5, 5.0, torch.tensor(5.0), torch.tensor(5)])
def test_a_state_is_taken_over_and_gone_on_with(step, calls):
    parts = make()
    tensor = parts.tensors[0]
    parts.kernel.load_tensor_state(
        tensor, {"step": step, "exp_avg": torch.full((64,), 2.0), "exp_avg_sq": torch.full((64,), 4.0)}
    )
    give(parts, t0=8)
    update(parts, group_of([], [0]))
    assert calls == [([64], 5.0)]
    assert has(parts.kernel.own_state(tensor)) == {"step": [6.0], "exp_avg": [5.0], "exp_avg_sq": [19.0]}


def test_a_state_that_was_loaded_does_not_count_the_step_of_whoever_had_it():
    parts = make()
    step = torch.tensor(5.0)
    state = {"step": step, "exp_avg": torch.zeros(64), "exp_avg_sq": torch.zeros(64)}
    parts.kernel.load_tensor_state(parts.tensors[0], state)
    give(parts, t0=8)
    update(parts)
    assert step.item() == 5.0


def test_an_empty_state_begins_anew(calls):
    parts, kernel, tensor = stepped()
    kernel.load_tensor_state(tensor, {})
    assert kernel.own_state(tensor) == {}
    assert has(kernel.state_places(tensor)) == {"exp_avg": [0.0], "exp_avg_sq": [0.0]}
    give(parts, t0=8)
    update(parts)
    assert [step for _, step in calls] == [0.0, 0.0]


def test_a_rank_has_its_part_of_the_state_of_a_tensor_that_is_spread():
    parts = make((100,), chunk_numel=64, collectives=OneOfTwo())
    tensor = parts.tensors[0]
    assert tensor.is_split
    whole = {"step": 1, "exp_avg": torch.arange(100.0), "exp_avg_sq": torch.arange(100.0) + 1}
    parts.kernel.load_tensor_state(tensor, whole)
    state = parts.kernel.tensor_state(tensor)
    assert torch.equal(state["exp_avg"], torch.arange(64.0))
    assert torch.equal(state["exp_avg_sq"], torch.arange(64.0) + 1)


def test_a_shape_is_that_of_the_parameter():
    parts = make(((8, 8), 64))
    assert parts.kernel.state_places(parts.tensors[0])["exp_avg"].shape == (8, 8)


# Which optimizers it is for


class OwnAdamW(AdamW):
    """It may do anything."""


@pytest.mark.parametrize(
    ("cls", "options", "answer"),
    [
        (Adam, {}, True),
        (AdamW, {}, True),
        (AdamW, {"fused": True}, True),
        (AdamW, {"amsgrad": True}, False),
        (AdamW, {"capturable": True}, False),
        (AdamW, {"differentiable": True}, False),
        (OwnAdamW, {}, False),
        (torch.optim.SGD, {}, False),
    ],
)
def test_it_is_for_torchs_own_adam_without_further_lists(cls, options, answer):
    assert is_plain_adam(cls([torch.nn.Parameter(torch.zeros(1, device=CPU))], lr=0.1, **options)) is answer


def test_one_group_is_enough_for_a_no():
    one, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    assert not is_plain_adam(AdamW([{"params": [one]}, {"params": [other], "amsgrad": True}]))


def test_what_others_hold_of_the_gradient_list_is_what_it_reads():
    parts = make()
    give(parts, t0=8)
    parts.gradients.move_to_list(parts.tensors[0])
    parts.chunks[0].lists[GRADIENT][:64] = 4
    update(parts, group_of([], [0]))
    assert has(parts.kernel.own_state(parts.tensors[0]))["exp_avg"] == [2.0]
