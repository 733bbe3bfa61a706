"""``overlap_optimizer="backward"`` in several processes: each updates its own parts early, with the same bits."""

from unittest import mock

import pytest
import torch
from test_training import add_unused, train_like_one
from together import engaged, hf_loss, prepared, tight, train_together

from hf_patrickstar.errors import EngineError
from hf_patrickstar.optim.ahead import UpdatesAhead
from hf_patrickstar.runtime.gradients import Gradients

pytestmark = pytest.mark.xdist_group("distributed")

BACKWARD = {"overlap_optimizer": "backward", "placement": "host"}
CASES = {
    "plain": ("gpt2", {}, True, {}),
    "norms": ("gpt2", {}, True, {"max_norm": float("inf")}),
    "dropped after forward": ("gpt2", {"reshard_after_forward": True}, True, {}),
    "recomputation": ("llama", {}, True, {"checkpointing": True}),
    "accumulation": ("gpt2", {}, True, {"accumulation": 2}),
    "micro-batches and parts of others": ("gpt2", {}, True, {"accumulation": 2, "max_norm": float("inf")}),
    "norms of micro-batches": ("llama", {}, True, {"accumulation": 2, "max_norm": float("inf")}),
    "on demand": ("gpt2", {"prefetch_depth": 0}, True, {}),
    "tied weights": ("t5", {}, True, {}),
    "copies that stay": ("gpt2", {"chunk_numel": 700, "chunk_budget": 400_000}, False, {}),
    "large tensors are spread": ("gpt2", {"chunk_numel": 320}, True, {"max_norm": float("inf")}),
    "parameters without a gradient": ("llama", {}, True, {"change": add_unused, "max_norm": float("inf")}),
    "every collective is agreed on": ("gpt2", {"debug_collectives": True}, True, {}),
}


def train_and_count(rank, name, settings, is_tight, kwargs):
    updated, update = [], UpdatesAhead._update

    def counted(self, chunk):
        updated.append(chunk.spec.index)
        update(self, chunk)

    with mock.patch.object(UpdatesAhead, "_update", counted):
        stats, norms = train_like_one(rank, name, settings, is_tight, kwargs)
    return len(updated), stats, norms


@pytest.mark.parametrize("streams", ["simulated", "simulated:1"])
@pytest.mark.parametrize(("name", "settings", "is_tight", "kwargs"), CASES.values(), ids=CASES)
def test_the_bits_are_those_of_one_process(pair, name, settings, is_tight, kwargs, streams):
    with pair.over(streams):
        how = {**kwargs, "steps": 5}
        for num_updated, stats, _ in pair.run(train_and_count, name, {**BACKWARD, **settings}, is_tight, how):
            assert num_updated > 0
            assert stats["steps"] == 5


def train_with_two_micro_batches(rank, overlap, *, leaves_apart):
    """Trains in 16-bit; returns what there is then, and how many last gradients were left to the update to add."""
    num_apart, stays_apart = 0, Gradients._stays_apart

    def counted(self, tensor):
        nonlocal num_apart
        is_apart = leaves_apart and stays_apart(self, tensor)
        num_apart += is_apart
        return is_apart

    model = prepared("gpt2")
    config = tight(model, {**BACKWARD, "overlap_optimizer": overlap, "dtype": "bf16"})
    with mock.patch.object(Gradients, "_stays_apart", counted), engaged(model, config, accumulation=2) as engine:
        losses, _ = train_together(engine, hf_loss("gpt2"), accumulation=2)
        return losses, {key: value.clone() for key, value in model.state_dict().items()}, num_apart


def compare_last_gradients(rank, overlap):
    losses, values, none = train_with_two_micro_batches(rank, overlap, leaves_apart=False)
    found, found_values, num_apart = train_with_two_micro_batches(rank, overlap, leaves_apart=True)
    assert found == losses
    assert all(torch.equal(value, values[key]) for key, value in found_values.items())
    assert none == 0 < num_apart


@pytest.mark.parametrize("overlap", [True, "backward"])
def test_the_average_of_the_last_micro_batch_is_added_by_the_update(pair, overlap):
    with pair.over("simulated:1"):
        pair.run(compare_last_gradients, overlap)


def train_until_the_promise_is_broken(rank, name):
    model = prepared("gpt2")
    with engaged(model, tight(model, BACKWARD)) as engine:
        train_together(engine, hf_loss("gpt2"), steps=3)
        engine.backward(hf_loss("gpt2")(model, 3, 0, rank))
        assert engine.manager.gradients.used_ahead
        with pytest.raises(EngineError, match=r"overlap_optimizer='backward'|consumed by optimizer.step"):
            BREAKS[name](engine)
        engine.manager.discard_gradients()


BREAKS = {
    "a forward": lambda engine: hf_loss("gpt2")(engine.model, 0, 0, 0),
    "clipping": lambda engine: engine.optimizer.clip_grad_norm_(None, 0.5),
    "another norm": lambda engine: engine.optimizer.grad_norm(norm_type=1.0),
    "zeroing": lambda engine: engine.optimizer.zero_grad(),
    "a skipped step": lambda engine: engine.optimizer.skip_step(),
    "unscaling": lambda engine: engine.optimizer.unscale(torch.tensor(0.5)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_promise_is_an_error_in_every_process(pair, name):
    with pair.over("simulated:1"):
        pair.run(train_until_the_promise_is_broken, name)


def use_the_head_again(rank):
    """Rank 0 has updated its parts, and rank 1 none, when rank 1 computes with a module once more."""
    share = float(rank == 0)
    model = prepared("gpt2")
    with (
        mock.patch("hf_patrickstar.schedule.pace.share_beside_backward", return_value=share),
        engaged(model, tight(model, BACKWARD)) as engine,
    ):
        train_together(engine, hf_loss("gpt2"), steps=3)
        loss = hf_loss("gpt2")(model, 3, 0, rank)

        def use(gradient):
            assert bool(engine.manager.gradients.used_ahead) == (rank == 0)
            if rank == 1:
                model.transformer.h[-1].mlp.c_fc(torch.zeros(1, model.config.n_embd))

        model.transformer.wte.weight.register_post_accumulate_grad_hook(use)
        engine.backward(loss)
        raise AssertionError("a process computed with parts of before and after an update")


def test_a_group_with_parts_of_before_and_after_an_update_is_not_gathered(pair):
    with pair.over("simulated:1"), pytest.raises(EngineError, match="a process needs chunk"):
        pair.run(use_the_head_again)


def step_once_more(rank):
    model = prepared("gpt2")
    with engaged(model, tight(model, BACKWARD)) as engine:
        train_together(engine, hf_loss("gpt2"), steps=3)
        engine.backward(hf_loss("gpt2")(model, 3, 0, rank))
        manager = engine.manager
        ahead = [tensor for tensor in manager.tensors if tensor.chunk.spec.index in manager.gradients.used_ahead]
        assert {tensor.is_owned for tensor in ahead} == {True, False}
        is_due = [not (tensor in ahead and tensor.is_owned) for tensor in manager.tensors]
        before = [tensor.num_writes for tensor in manager.tensors]
        engine.optimizer.step()
        num_more = [tensor.num_writes - num for tensor, num in zip(manager.tensors, before, strict=True)]
        assert num_more == list(map(int, is_due))
        assert not any(manager.gradients.has(tensor) for tensor in manager.tensors)
        engine.optimizer.zero_grad()


def test_the_step_uses_the_gradients_that_other_processes_have_updated_with(pair):
    with pair.over("simulated:1"):
        pair.run(step_once_more)


def leave_the_trace(rank, how):
    """Rank 1 computes two layers in the other order in one forward."""
    model = prepared("gpt2")
    settings = {**BACKWARD, "overlap_optimizer": how, "reshard_after_forward": True}
    with engaged(model, tight(model, settings, extra_nbytes=2**16)) as engine:
        train_together(engine, hf_loss("gpt2"), steps=3)
        layers = model.transformer.h._modules
        in_order = dict(layers)
        if rank == 1:
            layers["0"], layers["1"] = layers["1"], layers["0"]
        loss = hf_loss("gpt2")(model, 3, 0, rank)
        layers.update(in_order)
        engine.backward(loss)
        assert not engine.manager.gradients.used_ahead
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert engine.stats()["diverged_steps"] == rank
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_process_that_leaves_its_trace_in_forward_breaks_no_promise(pair):
    with pair.over("simulated:1"):
        (expected, _), (found, _) = (pair.run(leave_the_trace, how) for how in (True, "backward"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
