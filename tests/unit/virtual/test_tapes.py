"""Updates that are alike: one calls operators, and the others cost exactly what they would."""

from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.memory.operators import storage_key
from hf_patrickstar.schedule.script import ThreadWork
from hf_patrickstar.virtual.costs import Cost, Touch
from hf_patrickstar.virtual.recording import record_step
from hf_patrickstar.virtual.tapes import Operator, Tapes

COST = Cost(0, 8, "float32")


def touch(storage, *, begin=0):
    return Touch(storage, begin, begin + 8, True, True)


def test_a_tape_is_played_over_the_memory_of_another_update():
    tapes, (first, second, scratch) = Tapes(), torch.zeros(3, 2).split(1)
    first, second, scratch = (tensor.clone() for tensor in (first, second, scratch))
    own, other, shared = map(storage_key, (first, second, scratch))
    assert tapes.play("a", [second]) is None
    tapes.keep("a", [first], [Operator("x", COST, (touch(own), touch(shared, begin=8)))], {shared}.__contains__)
    assert tapes.play("a", [second]) == [Operator("x", COST, (touch(other), touch(shared, begin=8)))]
    assert tapes.play("b", [second]) is None


def test_temporaries_are_new_ones_for_every_update():
    tapes, first = Tapes(), torch.zeros(2)
    operators = [Operator("x", COST, (touch(7),)), Operator("y", COST, (touch(7), touch(9)))]
    tapes.keep("a", [first], operators, lambda storage: False)
    found = [[t.storage for operator in tapes.play("a", [first]) for t in operator.touches] for _ in range(2)]
    assert all(storages[0] == storages[1] != storages[2] for storages in found)
    assert len({storage for storages in found for storage in storages}) == 4


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
    with mock.patch.object(Tapes, "play", return_value=None):
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
