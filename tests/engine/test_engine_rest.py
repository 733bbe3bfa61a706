"""Where nothing moves the engine rests: plain torch runs between the begin and the end of a forward or backward."""

import copy

import pytest
import torch
from support.pairs import Pair, clip
from support.same import gradients_of
from support.small import LAYER_NUMEL, WIDTH, Stack, Tied, batch, loss_of, make, steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_patrickstar import DeviceMemoryError, EngineError, PatrickStarEngine
from hf_patrickstar.memory.meters import StorageMeter
from hf_patrickstar.memory.tiers import Tier

pytestmark = pytest.mark.own_rest


def resting(factory=Stack, steps=3, **kwargs):
    """A pair whose engine rests."""
    pair = Pair(factory, "resident", **kwargs)
    pair.train(steps)
    assert hooked(pair.ours) == [pair.ours]
    return pair


def hooked(model):
    return [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]


def loss_of_evaluation(model, _):
    with torch.no_grad():
        return loss_of(model, 0)


def leave(pair):
    """As if memory had run out between two steps."""
    assert pair.engine.manager.evictor.leave_margin()


def test_nothing_of_the_engine_is_called_inside(monkeypatch):
    """No hook of inner modules, of gradients or of what autograd keeps."""
    pair = resting()
    inside = []

    def look(module, *_):
        inside.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
        inside.extend(parameter._post_accumulate_grad_hooks for parameter in module.parameters())

    for model, _ in pair:
        for layer in model.layers:
            layer.register_forward_hook(look)
    pair.train(1, first=3)
    assert inside
    assert not any(inside)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_are_where_torch_leaves_them(dtype):
    pair = resting(dtype=dtype)
    before = pair.engine.stats()
    for step in range(3, 6):
        pair.backward(step)
        assert all(parameter.grad is not None for parameter in pair.ours.parameters())
        pair.check_gradients()
        pair.step()
    after = pair.engine.stats()
    assert after["model_data_nbytes"] == before["model_data_nbytes"], "no list of gradients"


def test_larger_inputs_end_it_and_the_next_steps_begin_it_again():
    pair = resting()
    for step, size in enumerate((9, 9, 9), 3):
        pair.train(1, first=step, loss=lambda model, seed, size=size: loss_of(model, seed, size))
    assert hooked(pair.ours) == [pair.ours]
    assert pair.engine.stats()["diverged_steps"] == 0


def test_chunks_that_leave_end_it():
    pair = resting()
    leave(pair)
    weight = pair.ours.layers[0].weight
    assert torch.equal(weight.detach(), pair.plain.layers[0].weight)
    pair.both(loss_of_evaluation)  # before it, chunks come back
    pair.train(3, first=3)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_micro_batch_that_runs_out_of_memory_is_repeated_with_hooks(where):
    pair = resting()
    failures = [DeviceMemoryError("the device is full"), None]

    def fail(*_):
        error = failures.pop(0) if failures else None
        if error is not None:
            raise error

    layer = pair.ours.layers[2]
    if where == "forward":
        layer.register_forward_hook(fail)
    else:
        layer.weight.register_hook(fail)

    def train(model, optimizer):
        def micro_batch():
            loss_of(model, 3).backward()

        micro_batch() if model is pair.plain else pair.engine.attempt(micro_batch)
        optimizer.step()
        optimizer.zero_grad()

    pair.check(train)
    assert pair.engine.stats()["retries"] == 1
    pair.train(3, first=4)


def test_no_chunk_leaves_between_forward_and_backward():
    """The graph has values that nothing tells of."""
    pair = resting()
    losses = [loss_of(model, 3) for model, _ in pair]
    assert not pair.engine.manager.evictor.leave_margin()
    for loss in losses:
        loss.backward()
    pair.step()
    pair.train(2, first=4)


class Scales(nn.Module):
    """Autograd keeps the parameters themselves, and no views of them."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(4))

    def forward(self, x):
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x


@pytest.mark.parametrize("factory", [Stack, Scales])
def test_a_graph_that_is_kept(factory):
    """Chunks that it looks into stay; one whose values have left is refused, and nothing is computed with NaN."""
    pair = resting(factory)
    losses = [loss_of(model, 3) for model, _ in pair]
    for loss, (_, optimizer) in zip(losses, pair, strict=True):
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
    leave(pair)
    losses[0].backward()
    if factory is Stack:
        losses[1].backward()
        pair.check_gradients()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()


def test_a_part_that_is_called_by_itself_ends_it_for_good():
    pair = resting()
    pair.both(lambda model, _: model.layers[1](batch()).detach())
    assert len(hooked(pair.ours)) > 1, "from the next call on"
    pair.train(3, first=3)
    assert len(hooked(pair.ours)) > 1


def test_a_model_whose_results_tell_of_no_backward():
    """Two backwards between two steps are told apart all the same: their sum is one of fp32."""

    class Result:
        def __init__(self, value):
            self.value = value

    class Hidden(Stack):
        def forward(self, x):
            return Result(super().forward(x))

    pair = Pair(Hidden, "resident", dtype="bf16")
    pair.train(4, micro=2, loss=lambda model, seed: model(batch(seed).bfloat16()).value.float().square().sum())
    assert hooked(pair.ours) != [pair.ours]


def test_a_graph_of_before_a_step_is_refused_and_data_that_is_assigned_is_not():
    pair = resting()
    stale = [loss_of(model, 3) for model, _ in pair]
    pair.train(1, first=4)
    for loss in stale:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    for _, optimizer in pair:
        optimizer.zero_grad()

    def assign(model, optimizer):
        loss = loss_of(model, 5)
        model.layers[2].weight.data = model.layers[2].weight.data * 2  # the graph keeps the memory of before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    pair.check(assign)


def test_a_gradient_that_a_step_has_consumed_is_missed():
    pair = resting()
    loss_of(pair.ours, 3).backward()
    pair.optimizer.step()
    with pytest.raises(EngineError, match="consumed"):
        pair.ours.layers[0].weight.grad.norm()
    loss_of(pair.ours, 4).backward()
    with pytest.raises(EngineError, match="consumed"):
        pair.optimizer.step()


def test_an_unfrozen_parameter_ends_it():
    pair = resting(prepare=lambda model: model.layers[1].requires_grad_(False))
    for model, optimizer in pair:
        model.layers[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    pair.train(4, first=3)
    assert hooked(pair.ours) == [pair.ours]


def test_copies_have_no_hooks_of_the_engine():
    pair = resting()
    assert not hooked(copy.deepcopy(pair.ours))
    leave(pair)
    pair.train(1, first=3)
    assert not hooked(copy.deepcopy(pair.ours))


def test_what_a_forward_writes_counts():
    class Writing(Stack):
        def forward(self, x):
            with torch.no_grad():
                self.layers[0].weight.mul_(0.99)
                self.layers[1].weight.data.mul_(0.99)
            self.layers[2].weight.data = self.layers[2].weight.data * 0.99
            return super().forward(x)

    resting(Writing, steps=5)


def test_a_part_of_the_chunks_rests_where_others_move():
    """Modules whose chunks never move have no hooks, and the plans of steps are followed all the same."""
    pair = Pair(lambda: Stack(12), "resident", settings={"device_budget": 44_000})
    pair.train(6)
    stats = pair.engine.stats()
    assert 0 < stats["chunks_in_margin"] < 12
    rest = [layer for layer in pair.ours.layers if layer not in hooked(pair.ours)]
    assert 0 < len(rest) <= stats["chunks_in_margin"]
    loads = stats["chunk_loads"]
    pair.train(1, first=6)
    assert pair.engine.stats()["chunk_loads"] - loads == 12 - stats["chunks_in_margin"]
    assert pair.engine.stats()["diverged_steps"] == 0
    leave(pair)
    pair.train(3, first=7)


def test_an_exception_inside_is_the_end_of_the_pass():
    pair = resting(Tied)
    handle = pair.ours.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(pair.ours, 3)
    handle.remove()
    assert pair.ours.head.weight.grad is None
    pair.train(2, first=3)
    assert hooked(pair.ours) == [pair.ours]


def test_memory_without_room_for_gradients_is_no_place_to_rest():
    """Gradients stay in parameters, beside the chunks."""
    pair = resting()
    manager = pair.engine.manager
    manager.rest.end()
    peak = max(trace.non_model_peak_nbytes for trace in pair.engine.traces.values())
    manager.ledger.lower_limit(Tier.DEVICE, manager.ledger.used(Tier.DEVICE) + peak + LAYER_NUMEL * 4)
    pair.train(3, first=3)
    assert not manager.device.is_resting
    assert not manager.device.moves


def test_larger_steps_that_are_known_end_it_without_room_for_gradients():
    def loss_of_more(model, seed):
        return loss_of(model, seed, 6)

    pair = resting()
    manager = pair.engine.manager
    pair.train(4, first=3, loss=loss_of_more)
    taken = sorted(manager.rest.as_taken(trace).peak_nbytes for trace in pair.engine.traces.values())
    manager.ledger.lower_limit(Tier.DEVICE, manager.ledger.used(Tier.DEVICE) + taken[-1] - 1)
    pair.train(1, first=7)
    assert manager.device.is_resting
    pair.train(2, first=8, loss=loss_of_more)
    assert not manager.device.is_resting
    assert pair.engine.stats()["retries"] == 0


def test_a_loop_of_steps_sees_plain_gradients():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x):
            return self.layer(x)

    model = make(One)
    pair = Pair(lambda: copy.deepcopy(model), "resident")
    norms = []
    for each, optimizer in pair:
        for _ in steps(each, optimizer, 5):
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1))
    assert norms[:5] == norms[5:]
    pair.check()


# What only hooks of all modules would notice


def test_backwards_that_do_not_pass_what_the_model_returned():
    """Their gradients are found before anything that would lose them: the end of rest, reads, clipping."""
    pair = resting()

    def regularize(model, optimizer, then):
        model.layers[0].weight.square().sum().backward()
        then(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def clip_twice(model, optimizer):
        clip(model, optimizer, 0.1)
        model.layers[0].weight.square().sum().backward()

    pair.check(regularize, lambda model, _: model.layers[1](batch()))
    pair = resting()
    pair.check(regularize, lambda model, optimizer: clip_twice(model, optimizer))
    pair.check(regularize, lambda model, _: model.layers[0].weight.grad.clone())
    pair = resting(prepare=lambda model: model.layers[4].requires_grad_(False))

    def unfreeze(model, optimizer):
        model.layers[4].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[4].parameters())})

    pair.check(regularize, unfreeze)
    pair = resting()
    model = pair.ours
    model.layers[0].weight.square().sum().backward()
    with pair.engine.full_parameters(with_grads=True):
        assert model.layers[0].weight.grad is not None


def test_hooks_of_users_see_the_sum_of_several_backwards():
    pair = resting()
    for model, _ in pair:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: (p.grad.clamp_(-0.01, 0.01), None)[1])
    pair.train(3, first=3, micro=2)


def test_transforms_of_functions():
    pair = resting()
    pair.both(lambda model, _: torch.func.vmap(model)(batch().unsqueeze(0)).detach())
    pair.train(3, first=3)


def test_a_graph_that_is_kept_while_larger_inputs_come():
    def both(model, optimizer):
        kept = loss_of(model, 3)
        kept.backward(retain_graph=True)
        loss_of(model, 4, 9).backward()
        kept.backward()
        optimizer.step()
        optimizer.zero_grad()

    resting().check(both)


def test_what_a_forward_has_written_is_saved():
    class Saving(Stack):
        def forward(self, x):
            with torch.no_grad():
                self.layers[0].weight.mul_(0.99)
                self.layers[1].weight.data.mul_(0.99)
            self.saved = [value.clone() for value in self.state_dict().values()]
            return super().forward(x)

    pair = resting(Saving, steps=4)
    pair.both(lambda model, _: (loss_of(model, 4).backward(), model.saved)[1])


def test_gradients_of_a_backward_that_fails_are_added_to_those_before():
    pair = resting()

    def fail(model, optimizer):
        loss_of(model, 3).backward()
        handle = model.layers[1].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 4).backward()
        handle.remove()
        return gradients_of(model)

    pair.both(fail)
    pair.step()


def test_gradients_of_parameters_that_are_exchanged():
    pair = resting()

    def exchange(model, optimizer):
        loss_of(model, 3).backward()
        other = nn.Parameter(torch.ones(WIDTH, WIDTH))
        other.grad = torch.full((WIDTH, WIDTH), 0.5)
        torch.utils.swap_tensors(model.layers[0].weight, other)
        optimizer.step()
        optimizer.zero_grad()

    pair.both(exchange)
    pair.train(2, first=4)


def test_operands_of_what_is_recomputed():
    """They look into chunks without a trace: no gradient goes over a value that is still needed."""

    def block(x, layer):
        return torch.tanh(layer(x @ layer.weight.detach()))

    class Twice(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(block, x, layer, use_reentrant=False)
            return x

    for room in (50_000, 60_000):
        Pair(lambda: Twice(12), "resident", settings={"device_budget": room}).train(6)


@pytest.mark.parametrize("factory", [Stack, Tied])
@pytest.mark.parametrize(("num_micro_batches", "num_told"), [(1, 1), (2, 2), (2, 1)])
def test_a_step_is_counted_with_the_gradients_that_it_leaves(factory, num_micro_batches, num_told):
    """Also if users add gradients up without a word to the engine."""
    model = make(factory)
    config, optimizer = {"device_budget": "64MiB", "chunk_numel": LAYER_NUMEL}, torch.optim.AdamW(model.parameters())
    engine = PatrickStarEngine(model, config, optimizer, gradient_accumulation_steps=num_told)
    meter = StorageMeter(engine.manager.device.pool.owns, lambda: None)
    for step in range(6):
        taken = 0
        meter.start([])
        for micro_batch in range(num_micro_batches):
            meter.restart()
            loss_of(model, step + micro_batch).backward()
            taken = max(taken, engine.ledger.used(Tier.DEVICE) + meter.peak(0))
        meter.stop()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert hooked(model) == [model]
    counted, tides = engine.stats()["device_total_step_peak_nbytes"], engine.survey().tides
    assert num_told < num_micro_batches or max(max(tide.totals) for tide in tides) == counted
    assert tides[-1].gradients[0] == 0
    assert tides[-1].gradients[-1] == sum(parameter.nbytes for parameter in model.parameters())
    # Counted twice are those that are new at a moment; those of layers without a use are counted, too.
    unused = sum(parameter.nbytes for name, parameter in model.named_parameters() if "unused" in name)
    assert 0 <= counted - taken <= unused + 2 * 4 * LAYER_NUMEL
