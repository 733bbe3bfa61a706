"""Activations that leave the device between forward and backward: the same bits, fewer bytes, exact figures."""

import contextlib
import functools

import pytest
import torch
from support import inside
from support.models import MODELS, make_batch
from support.pairs import Pair
from support.same import assert_same, gradients_of
from support.small import WIDTH, Stack, batch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_patrickstar import BudgetError
from hf_patrickstar.memory.tiers import Tier

NUMEL = 4096
ROOMY = {"chunk_numel": NUMEL, "chunk_budget": 8 * NUMEL * 4, "placement": "host", "device_budget": "1GiB"}
MOVED = ("host_to_device_nbytes", "device_to_host_nbytes")


def deep(name, *, checkpointing=False, layers=6, length=96, **changes):
    """Makes a factory of a small model of so many layers, for sequences beside which its parameters are small."""

    def make():
        config = MODELS[name]().config
        config.num_hidden_layers, config.max_position_embeddings, config.use_cache = layers, length, False
        config.update(changes)
        torch.manual_seed(0)
        model = type(MODELS[name]())(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(checkpointing))
        return model

    return make


PLAIN, EVERY = {}, {"use_reentrant": False}


def loss_of(name, length=96):
    return lambda model, seed: model(**make_batch(name, 4, seed + 1, length)).loss


def planned(pair, seed=9):
    """The trace and the plan that a micro-batch of the engine follows, which is dropped."""
    pair.ours(**make_batch("llama", 4, seed, 96))
    step = inside.step(pair.engine)
    assert step.cursor is not None
    assert step.plan is not None
    return step.cursor.trace, step.plan


def steps_of(factory, settings, num=3, loss=None, **kwargs):
    """Trains a pair; returns it, and what the statistics gained in each step."""
    pair, gained = Pair(factory, "resident", settings=settings, **kwargs), []
    for number in range(num):
        before = pair.engine.stats()
        pair.train(1, first=number, loss=loss or loss_of("llama"))
        after = pair.engine.stats()
        gained.append({key: after[key] - before[key] for key in (*MOVED, "offloaded_nbytes", "chunk_loads")})
    return pair, gained


@pytest.mark.own_streams  # over others, gradients on their way home take room, too
@pytest.mark.parametrize("checkpointing", [PLAIN, EVERY], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_fits_with_it_alone_trains_to_the_same_bits(name, checkpointing):
    factory = deep(name, checkpointing=checkpointing)
    pair, without = steps_of(factory, {**ROOMY, "activation_offload": False})
    most = pair.engine.stats()["device_total_peak_nbytes"]
    pair.engine.detach()

    pair, gained = steps_of(factory, {**ROOMY, "activation_offload": True})
    offloaded = sum(planned(pair)[1].offloaded)
    assert offloaded > 0
    assert [step["offloaded_nbytes"] for step in gained] == [offloaded] * 3
    for key in MOVED:
        assert [step[key] for step in gained] == [step[key] + offloaded for step in without]
    assert pair.engine.ledger.owners(Tier.HOST)["activations"] == offloaded
    least = pair.engine.stats()["device_total_peak_nbytes"]
    assert least < most
    pair.engine.detach()

    tight = {**ROOMY, "device_budget": least}
    with pytest.raises(BudgetError, match="needs a device_budget of at least"):
        steps_of(factory, {**tight, "activation_offload": False}, 1)
    pair = Pair(factory, "resident", settings={**tight, "activation_offload": "auto"})
    on_host = []
    for number in range(3):
        pair.train(1, first=number, loss=loss_of(name))
        on_host.append(dict(pair.engine.ledger.owners(Tier.HOST)))
    stats = pair.engine.stats()
    assert on_host[0]["activations"] > 0
    assert on_host[1:] == on_host[:1] * 2
    assert stats["device_total_peak_nbytes"] <= least
    trace, plan = planned(pair)
    need = max(nbytes + visit.non_model_nbytes for nbytes, visit in zip(plan.chunk_nbytes, trace.visits, strict=True))
    assert stats["device_total_step_peak_nbytes"] == pytest.approx(need, rel=0.01)
    assert 0 < sum(plan.offloaded) <= offloaded


# All kinds of models


def selective(model):
    """What attention and matrix products give is kept, all else is computed again."""

    def policy(ctx, op, *args, **kwargs):
        is_kept = any(name in str(op) for name in ("scaled_dot_product", "aten.mm", "aten.addmm"))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


class Adapter(nn.Module):
    """A product of two thin matrices beside a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    torch.manual_seed(1)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=EVERY)


def every_other(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=EVERY, every_n_layers=2)


def recompute(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=EVERY)


def no_change(model):
    """The model stays as it was made."""


@pytest.mark.parametrize(
    ("name", "change", "settings", "micro"),
    [
        ("t5", recompute, {}, 1),
        ("t5", no_change, {"debug_evict_all": True}, 2),
        ("mixtral", recompute, {"debug_evict_all": True}, 1),
        ("mixtral", no_change, {"cpu_embedding": True}, 1),
        ("bert_mlm", no_change, {}, 3),
        ("opt", every_other, {}, 1),
        ("llama", selective, {}, 1),
        ("llama", selective, {"debug_evict_all": True}, 3),
        ("llama", adapt, {}, 3),
        ("llama", adapt, {"placement": "auto", "chunk_budget": "1GiB"}, 1),
        ("gpt2", every_other, {"overlap_optimizer": False, "prefetch_depth": 0}, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bits_are_those_of_plain_models(name, change, settings, micro):
    layers = {"layers": 3, "length": 32}
    pair = Pair(
        deep(name, **layers),
        "resident",
        settings={**ROOMY, "activation_offload": True, **settings},
        prepare=change,
        gradient_accumulation_steps=micro,
    )
    pair.train(3, micro=micro, loss=loss_of(name, 32), max_norms=(0.5, 0.1))
    stats = pair.engine.stats()
    assert stats["offloaded_nbytes"] > 0
    assert stats["recorded_steps"] == 0


# What autograd may do with what has left


@pytest.fixture(params=["stays", "planned", "eager"])
def leaving(request, monkeypatch):
    """Settings with which activations stay, leave by a plan, or leave although nothing is known of the step."""
    if request.param == "eager":
        inside.record_first_steps(monkeypatch)
        monkeypatch.setattr(*inside.EAGER_NBYTES, 1)
    return {"activation_offload": request.param != "stays"}


def pair_of(factory, leaving, **kwargs):
    return Pair(factory, "moving", settings=leaving, **kwargs)


def check_left(pair, leaving):
    """Activations have left and come back, or none has."""
    assert (pair.engine.stats()["offloaded_nbytes"] > 0) is leaving["activation_offload"]


def rows(seed=0):
    return batch(seed, 64)


def mean_of(model, seed=0):
    return model(rows(seed)).square().mean()


class Changing(nn.Module):
    """Changes what autograd has kept, if that is asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.changes = "never"

    def forward(self, x):
        kept = self.layers[0](x)
        y = torch.tanh(self.layers[1](kept))
        if self.changes == "inside":
            kept.add_(1)
        self.kept = kept if self.changes == "after" else None
        return self.layers[3](torch.tanh(self.layers[2](y)))


@pytest.mark.own_streams  # what is changed while it leaves is copied in vain, and refused
@pytest.mark.parametrize("changes", ["inside", "after"])
def test_what_is_changed_in_place_is_refused_as_in_torch(changes, leaving):
    pair = pair_of(Changing, leaving)
    pair.train(1, loss=mean_of)
    for model, _ in pair:
        model.changes = changes
        loss = mean_of(model)
        if changes == "after":
            model.kept.detach()[0] = 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    for model, optimizer in pair:
        model.changes = "never"
        model.zero_grad()
        optimizer.zero_grad()
    pair.train(2, first=1, loss=mean_of)
    check_left(pair, leaving)


class Rekept(nn.Module):
    """Autograd keeps the same memory before and after a change in place; backward needs only what came after."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Stack()

    def forward(self, x):
        kept = self.first(x)
        self.aside = kept * kept
        kept.mul_(2)
        return self.second(kept * kept)


@pytest.mark.own_streams  # what is changed while it leaves is copied in vain: nobody may need it any more
def test_memory_that_is_kept_again_after_a_change_has_its_new_values(leaving):
    pair = pair_of(Rekept, leaving)
    pair.train(3, loss=mean_of)
    check_left(pair, leaving)


class Views(nn.Module):
    """Keeps one storage in many ways."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Stack()

    def forward(self, x):
        x = self.first(x)
        z = torch.view_as_complex(x.view(-1, 8, 2))
        y = torch.view_as_real(z * z.conj() + z * z).flatten(1)
        y = y + x * x.flip(0) + (x.t() * x.t()).t().contiguous()
        y = y + torch.cat([x[::2] * x[1::2]] * 2) + (z.conj().imag * z.imag * z.real).repeat(1, 2)
        halves = x.detach().view(torch.bfloat16)[:, 1::2]
        y = y + (y.bfloat16() * halves).float() + x.expand(2, *x.shape).prod(0)
        return self.second(y)


def test_views_come_back_as_they_were(leaving):
    pair = pair_of(Views, leaving)
    pair.train(3, loss=mean_of)
    check_left(pair, leaving)


class Cube(torch.autograd.Function):
    """Keeps an input, an output, and what is neither."""

    @staticmethod
    def forward(ctx, x):
        y = x * x * x
        ctx.save_for_backward(x, y, x * 2)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y, double = ctx.saved_tensors
        return gradient * (x * double * 1.5 + y * 0)


class InPlace(torch.autograd.Function):
    """Keeps an input that it has changed."""

    @staticmethod
    def forward(ctx, x):
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Own(nn.Module):
    """Functions of the user, and operators that change their input and keep it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = Cube.apply(self.layers[0](x))
        x = InPlace.apply(self.layers[1](x))
        x = nn.functional.relu(self.layers[2](x), inplace=True)
        return nn.functional.dropout(self.layers[3](x), 0.2, training=True, inplace=True).sigmoid_()


def test_functions_of_the_user_and_operators_in_place(leaving):
    pair = pair_of(Own, leaving)
    pair.train(3, loss=mean_of)
    check_left(pair, leaving)


def backward_twice(model, loss):
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model, loss):
    gradients = torch.autograd.grad(loss, model.x, create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()


def one_by_one(model, loss):
    gradient = torch.autograd.grad(loss, model.x, retain_graph=True)[0]
    assert gradient.abs().sum() > 0
    loss.backward()


@pytest.mark.parametrize("how", [backward_twice, penalty, one_by_one])
def test_graphs_that_are_used_more_than_once(how, leaving):
    pair = pair_of(Stack, leaving)

    def run(model, optimizer):
        for seed in range(3):
            model.x = rows(seed).requires_grad_()
            how(model, model(model.x).square().mean())
            found = gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
        return found

    pair.check(run)
    check_left(pair, leaving)


def test_losses_that_are_dropped_or_held_over_the_next_steps(leaving):
    pair = pair_of(Stack, leaving)
    pair.train(2, loss=mean_of)
    held = {}

    def run(model, optimizer):
        mean_of(model, 7)
        held[model] = mean_of(model, 8)

    pair.both(run)
    pair.train(2, first=2, loss=mean_of)
    held.clear()
    before = pair.engine.stats()["offloaded_nbytes"]
    pair.train(2, first=4, loss=mean_of)
    assert (pair.engine.stats()["offloaded_nbytes"] > before) is leaving["activation_offload"]


def test_a_backward_after_the_engine_has_left(leaving):
    pair = pair_of(Stack, leaving)
    pair.train(1, loss=mean_of)
    losses = [mean_of(model) for model, _ in pair]
    check_left(pair, leaving)
    pair.engine.detach()
    assert not pair.engine.ledger.owners(Tier.HOST).get("activations")
    for loss in losses:
        loss.backward()
    assert_same(gradients_of(pair.plain), gradients_of(pair.ours))


def test_two_forwards_before_one_backward_and_two_backwards_in_any_order(leaving):
    pair = pair_of(Stack, leaving)

    def run(model, optimizer):
        for seed in range(3):
            first, second = mean_of(model, seed), mean_of(model, 10 + seed)
            if seed == 0:
                (first + second).backward()
            elif seed == 1:
                first.backward()
                second.backward()
            else:
                second.backward()
                first.backward()
            optimizer.step()
            optimizer.zero_grad()

    pair.check(run)
    check_left(pair, leaving)


def test_evaluations_between_forward_and_backward(leaving):
    pair = pair_of(lambda: nn.Sequential(Stack(), nn.Dropout(0.1)), leaving)

    def run(model, optimizer):
        found = []
        for seed in range(3):
            loss = mean_of(model, seed)
            model.eval()
            with torch.inference_mode() if seed == 1 else torch.no_grad():
                found.append(mean_of(model, 20).clone())
            model.train()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    pair.check(run)
    check_left(pair, leaving)


def to_half(tensor):
    return tensor.dtype, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def from_half(kept):
    return kept[1].to(kept[0])


HOOKS = {
    "none": contextlib.nullcontext,
    "on the host": torch.autograd.graph.save_on_cpu,
    "quantized": lambda: saved_tensors_hooks(to_half, from_half),
    "as they are": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
}


@pytest.mark.parametrize("hooks", list(HOOKS)[1:])
def test_hooks_of_the_user(hooks, leaving):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacks = nn.ModuleList(Stack() for _ in range(2))

        def forward(self, x):
            with HOOKS[hooks]():
                x = self.stacks[0](x)
            return self.stacks[1](x)

    pair = pair_of(Hooked, leaving)

    def around(model, seed):
        with HOOKS[hooks]():
            return mean_of(model, seed)

    pair.train(2, loss=mean_of)
    check_left(pair, leaving)
    pair.train(2, first=2, loss=around)
    pair.train(1, first=4, loss=mean_of)


def test_the_whole_model_is_recomputed(leaving):
    pair = pair_of(Stack, {**leaving, "chunks": 8})

    def whole(model, seed):
        return checkpoint(model, rows(seed), use_reentrant=False).square().mean()

    pair.train(2, loss=whole)
    pair.train(1, first=2, loss=mean_of)
    pair.train(1, first=3, loss=whole)


class Transformed(nn.Module):
    """Gradients inside of forward, and a function for each row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        x = torch.func.vmap(lambda row: torch.tanh(row) * row.sum())(x)
        return self.layers[2](torch.tanh(self.layers[1](x)))


def test_transforms_inside_and_around(leaving):
    pair = pair_of(Transformed, leaving)

    def run(model, optimizer):
        found = []
        for seed in range(2):
            mean_of(model, seed).backward()
            values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            gradients = torch.func.grad(
                lambda given: torch.func.functional_call(model, given, (rows(),)).square().mean()
            )(values)
            found += list(gradients.values())
            optimizer.step()
            optimizer.zero_grad()
        return found

    pair.check(run)
    check_left(pair, leaving)


# Without a plan


class Failing(TorchDispatchMode):
    """Raises what an accelerator raises, at one operator that allocates."""

    def __init__(self, at):
        super().__init__()
        self.left, self.has_failed = at, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= all(result.alias_info is None for result in func._schema.returns)
        if self.left == 0:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at", [20, 450], ids=str)
@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_step_that_runs_out_of_memory_is_repeated_and_still_fits(asked, at, monkeypatch):
    monkeypatch.setattr(*inside.EAGER_NBYTES, 1)
    budget = 2_000_000  # 5.8 MB without, 0.8 MB if all leave
    pair = Pair(deep("llama"), "resident", settings={**ROOMY, "device_budget": budget, "activation_offload": asked})
    loss, failures = loss_of("llama"), []

    def run(model, optimizer):
        found = []
        for seed in range(4):

            def once(seed=seed):
                value = loss(model, seed)
                value.backward()
                return value.detach().clone()

            if model is pair.plain:
                found.append(once())
            else:
                with Failing(at if seed == 1 else 0) as mode:
                    found.append(pair.engine.attempt(once))
                failures.append(mode.has_failed)
            optimizer.step()
            optimizer.zero_grad()
        return found

    pair.check(run)
    assert failures[1]
    stats = pair.engine.stats()
    assert stats["retries"] == 1
    assert stats["device_total_peak_nbytes"] <= budget


def test_a_backward_that_failed_leaves_all_room_to_the_next_step():
    pair = Pair(deep("llama"), "resident", settings={**ROOMY, "device_budget": 1_000_000, "activation_offload": True})
    pair.train(1, loss=loss_of("llama"))
    before = pair.engine.stats()["offloaded_nbytes"]
    with Failing(450) as mode, contextlib.suppress(torch.OutOfMemoryError):
        loss_of("llama")(pair.ours, 1).backward()
    assert mode.has_failed
    loss_of("llama")(pair.ours, 1).backward()
    pair.optimizer.zero_grad()
    pair.train(2, first=1, loss=loss_of("llama"))
    assert pair.engine.stats()["offloaded_nbytes"] == 5 * before
    assert pair.engine.stats()["device_total_peak_nbytes"] <= 1_000_000


class Unforeseen(Stack):
    """Asks for numbers, which no tensor without bytes has."""

    def forward(self, x):
        x = super().forward(x)
        return x * float(x.detach().numpy().sum() != 7)


@pytest.mark.parametrize(("rows", "leaves"), [(1 << 14, True), ((1 << 14) - 1, False)])
def test_large_activations_leave_where_nothing_is_known_of_a_step(rows, leaves):
    peaks = []
    for asked in (False, True, "auto"):
        pair = Pair(Unforeseen, "moving", settings={"activation_offload": asked, "device_budget": "1GiB"})
        pair.train(3, loss=lambda model, seed: model(batch(seed, rows)).square().mean())
        stats = pair.engine.stats()
        assert (stats["offloaded_nbytes"] > 0) is (leaves and asked is True)
        peaks.append(stats["device_total_step_peak_nbytes"])
    assert peaks[0] == peaks[2]
    assert peaks[1] <= peaks[0] - leaves * 3 * (1 << 20)


def test_auto_lets_activations_leave_without_a_plan_once_memory_ran_out():
    rows = 1 << 14
    pair = Pair(Unforeseen, "moving", settings={"activation_offload": "auto", "device_budget": "6MiB"})

    def run(model, optimizer):
        for seed in range(3):

            def once(seed=seed):
                model(batch(seed, rows)).square().mean().backward()

            once() if model is pair.plain else pair.engine.attempt(once)
            optimizer.step()
            optimizer.zero_grad()

    pair.check(run)
    stats = pair.engine.stats()
    assert stats["retries"] == 1
    assert stats["offloaded_nbytes"] > 0
    assert stats["device_total_step_peak_nbytes"] <= 6 << 20


def test_where_the_host_has_no_room_activations_stay(leaving, monkeypatch):
    factory = deep("llama", layers=3)
    pair = Pair(factory, "resident", settings={**ROOMY, **leaving})
    pair.train(1, loss=loss_of("llama"))
    owners = pair.engine.ledger.owners(Tier.HOST)
    left = owners.pop("activations", 0)
    pair.engine.detach()
    pair = Pair(factory, "resident", settings={**ROOMY, **leaving, "host_budget": sum(owners.values()) + left // 2})
    pair.train(3, loss=loss_of("llama"))
    stats = pair.engine.stats()
    assert stats["host_peak_nbytes"] <= sum(owners.values()) + left // 2
