"""Updates that are alike: one calls operators, and the others cost exactly what they would."""

import random
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.optim import adam_kernel
from hf_patrickstar.optim.adam_kernel import AdamKernel
from hf_patrickstar.runtime.update import Likeness
from hf_patrickstar.schedule.script import HostWork, ThreadWork
from hf_patrickstar.tracing.costs import Cost, HostCache, Touch
from hf_patrickstar.virtual.recording import record_step
from hf_patrickstar.virtual.tapes import Charge, Operator, Tapes

COST = Cost(0, 8, "float32")


def touch(storage, *, begin=0, nbytes=8, is_write=True):
    return Touch(storage, begin, begin + nbytes, is_write, True)


def memories(num):
    tensors = [torch.zeros(2) for _ in range(num)]
    return tensors, list(map(storage_key, tensors))


def test_a_tape_is_played_over_the_memory_of_another_update():
    tapes, ((first, second, _scratch), (own, other, shared)) = Tapes(HostCache(0)), memories(3)
    assert tapes.play(likeness("a", second)) is None
    operators = [Operator("x", COST, (touch(own), touch(shared, begin=8)))]
    tapes.keep(likeness("a", first), operators, {shared}.__contains__)
    assert tapes.play(likeness("a", second)) == Charge((HostWork("x", 0, 8),), frozenset({other, shared}))
    assert tapes.play(likeness("b", second)) is None


def test_a_part_is_recalled_over_the_ranges_of_another_part():
    """Those of scratch space stay where they are, and a temporary is another one."""
    tapes, ((first, second, _scratch), (own, other, shared)) = Tapes(HostCache(0)), memories(3)
    touches = touch(own, begin=16), touch(shared, begin=8), touch(-5)
    tapes.keep(Likeness("a", [(first, 16)]), [Operator("x", COST, touches)], {shared}.__contains__)
    assert tapes.recall(likeness("b", second)) is None
    (found,) = tapes.recall(Likeness("a", [(second, 48)]))
    assert (found.name, found.cost) == ("x", COST)
    assert found.touches[:2] == (touch(other, begin=48), touch(shared, begin=8))
    assert found.touches[2].storage not in {-5, own, other, shared}
    (again,) = tapes.recall(Likeness("a", [(first, 16)]))
    assert again.touches[:2] == touches[:2]


def test_an_update_of_which_two_tensors_share_memory_is_not_kept():
    tapes, ((first,), (own,)) = Tapes(HostCache(0)), memories(1)
    shared = Likeness("a", [(first, 0), (first[1:], 4)])
    tapes.keep(shared, [Operator("x", COST, (touch(own),))], lambda storage: False)
    assert tapes.recall(shared) is None


def test_what_a_temporary_leaves_in_the_cache_is_of_no_use_to_the_next_update():
    cache, ((first,), _) = HostCache(100), memories(1)
    tapes = Tapes(cache)
    operators = [Operator("x", COST, (touch(7),)), Operator("y", COST, (touch(7), touch(9)))]
    tapes.keep(likeness("a", first), operators, lambda storage: False)
    for _ in range(3):
        assert [work.nbytes for work in tapes.play(likeness("a", first)).works] == [8, 0]
    assert len({line.storage for line in cache.lines()}) == 6


def likeness(key, *tensors):
    return Likeness(key, [(tensor, 0) for tensor in tensors])


def updates(seed, num):
    """Updates of a few kinds over memory of their own, and a scratch space that all share, in any order."""
    rng = random.Random(seed)
    kinds = [
        [(rng.randrange(4), rng.randrange(3) * 8, rng.choice([8, 16]), rng.random() < 0.5) for _ in range(6)]
        for _ in range(2)
    ]
    chunks = [memories(2) for _ in range(3)]
    _kept, (scratch,) = memories(1)
    for number in range(num):
        kind = rng.randrange(len(kinds))
        memory, own = rng.choice(chunks)
        base = [rng.randrange(3) * 8, rng.randrange(3) * 8, 0, 0]
        places = {0: own[0], 1: own[1], 2: scratch, 3: -1000 - number}  # the last one is a temporary
        operators = [
            Operator(str(n), COST, (touch(places[place], begin=base[place] + begin, nbytes=nbytes, is_write=writes),))
            for n, (place, begin, nbytes, writes) in enumerate(kinds[kind])
        ]
        yield Likeness(kind, list(zip(memory, base[:2], strict=True))), operators, {scratch}


@pytest.mark.parametrize("cache_nbytes", [0, 24, 50, 200])
@pytest.mark.parametrize("seed", range(5))
def test_an_update_costs_what_its_operators_would_whatever_is_in_the_cache(cache_nbytes, seed):
    """Also where an update finds what another one of the same chunk has left there."""
    plain, tapes, num_played = Tapes(HostCache(cache_nbytes)), Tapes(HostCache(cache_nbytes)), 0
    for alike, operators, lasting in updates(seed, 60):
        expected = plain.charge(operators)
        found = tapes.play(alike)
        num_played += found is not None
        if found is None:
            found = tapes.charge(operators)
            tapes.keep(alike, operators, lasting.__contains__)
        assert found.works == expected.works
        known = {storage for storage in expected.written if storage > -1000}
        assert {storage for storage in found.written if storage > -1000} == known
    assert num_played > 50


@pytest.fixture(autouse=True)
def _no_batches(monkeypatch):
    """Each chunk of a small model has an update of its own, as those of large models have."""
    monkeypatch.setattr(adam_kernel, "_BATCH_TILES", 1)


def record(num_micro_batches, dtype, max_norm):
    def make_model():
        sizes = {"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 2048, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).train()

    def make_inputs():
        tokens = torch.zeros((2, 64), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return record_step(
        make_model,
        make_inputs,
        MACHINES["rtx4090"],
        config={"dtype": dtype, "placement": "host", "chunk_budget": 2**25},
        num_micro_batches=num_micro_batches,
        max_norm=max_norm,
    )


@pytest.mark.parametrize(
    ("num_micro_batches", "dtype", "max_norm"), [(1, "bf16", 1.0), (2, "bf16", None), (1, "fp32", 1.0)]
)
def test_a_step_takes_as_long_as_if_every_update_were_run(num_micro_batches, dtype, max_norm):
    """But for a few bytes of single numbers, whose memory torch gives out again."""
    found = record(num_micro_batches, dtype, max_norm)
    with mock.patch.multiple(Tapes, play=mock.Mock(return_value=None), recall=mock.Mock(return_value=None)):
        expected = record(num_micro_batches, dtype, max_norm)
    updates, others = (
        [entry for entry in recording.script if isinstance(entry, ThreadWork)] for recording in (found, expected)
    )
    assert len(updates) == len(others) > 3
    for ours, theirs in zip(updates, others, strict=True):
        assert (ours.chunk_indices, ours.after) == (theirs.chunk_indices, theirs.after)
        assert [work.name for work in ours.operators] == [work.name for work in theirs.operators]
        assert sum(work.nbytes for work in ours.operators) == pytest.approx(
            sum(work.nbytes for work in theirs.operators), abs=64
        )
    assert found.timeline.duration_ns == pytest.approx(expected.timeline.duration_ns, abs=10)


def test_most_updates_of_a_model_of_equal_layers_are_not_run():
    with mock.patch.object(Tapes, "keep", autospec=True, side_effect=Tapes.keep) as keep:
        found = record(1, "bf16", 1.0)
    num_updates = sum(isinstance(entry, ThreadWork) for entry in found.script)
    assert keep.call_count < num_updates


def test_tiles_of_one_kind_are_run_once():
    with mock.patch.object(AdamKernel, "_update_tile", autospec=True, side_effect=AdamKernel._update_tile) as run:
        found = record(1, "bf16", 1.0)
    num_tiles = sum(
        "adam" in operator.name
        for entry in found.script
        if isinstance(entry, ThreadWork)
        for operator in entry.operators
    )
    assert run.call_count < num_tiles // 4, "most tiles have 2**19 elements"
