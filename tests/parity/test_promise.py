"""What a program may do between its last gradients and ``step()`` with ``overlap_optimizer="backward"``.

What it does from its first step on is noticed, and then chunks are updated by ``step()``. What it begins later, after
chunks have been updated in backward, is an error that says so. A wrong number is never computed.
"""

import copy
import logging

import pytest
import torch
from models import make_batch
from simulated import streams_of
from test_overlapped_updates import assert_same, groups
from test_updates_in_backward import UnclippedRun
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import EngineError

pytestmark = pytest.mark.own_streams


@pytest.fixture(autouse=True)
def everything_in_backward(monkeypatch):
    """As many chunks as can be are updated in backward."""
    monkeypatch.setattr("hf_patrickstar.schedule.pace.share_beside_backward", lambda *args: 1.0)


def parameters(run):
    return list(run.model.parameters())


def train(run, num=5, between=lambda run: None):
    for seed in range(num):
        run.backward(seed)
        run.note_updates()
        between(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


# What programs do in hooks of gradients, or between backward and step


def reads_in_hooks(run):
    first, last = parameters(run)[0], parameters(run)[-1]
    first.register_hook(lambda gradient: gradient + last.detach().norm() * 1e-3)


def decays_in_hooks(run):
    @torch.no_grad()
    def decay(parameter):
        parameter.mul_(0.99)

    for parameter in parameters(run):
        parameter.register_post_accumulate_grad_hook(decay)


def decays_data_in_hooks(run):
    for parameter in parameters(run):
        parameter.register_post_accumulate_grad_hook(lambda parameter: (parameter.data.mul_(0.99), None)[1])


def pads_in_its_own_hook(run):
    weight = run.model.transformer.wte.weight

    def pad(gradient):
        weight.data[0].zero_()

    weight.register_hook(pad)


def reads_in_module_hooks(run):
    for module in run.model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_full_backward_hook(lambda module, *gradients: run.keep(module.weight.detach().norm()))


class Scale(torch.autograd.Function):
    """Its backward reads a weight that forward does not know of."""

    @staticmethod
    def forward(ctx, hidden, module):
        ctx.module = module
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.module.weight.norm(), None


def reads_in_a_custom_backward(run):
    last = run.model.transformer.h[-1].mlp.c_fc

    def scale(module, args, output):
        return (Scale.apply(output[0], last), *output[1:]) if isinstance(output, tuple) else Scale.apply(output, last)

    run.model.transformer.h[0].register_forward_hook(scale)


def writes_where_forward_is_repeated(run):
    run.model.gradient_checkpointing_enable({"use_reentrant": False})
    module = run.model.transformer.h[0].mlp.c_fc
    module.register_forward_hook(lambda module, *_: (module.weight.data.mul_(0.99), None)[1])


def writes_to_what_it_holds_in_hooks(run):
    for parameter in parameters(run):
        held = parameter.data
        parameter.register_hook(lambda gradient, held=held: (held.mul_(0.99), None)[1])


IN_BACKWARD = {
    "reads in hooks": reads_in_hooks,
    "decays in hooks": decays_in_hooks,
    "decays .data in hooks": decays_data_in_hooks,
    "pads in its own hook": pads_in_its_own_hook,
    "reads in hooks of modules": reads_in_module_hooks,
    "reads in a custom backward": reads_in_a_custom_backward,
    "writes where forward is repeated": writes_where_forward_is_repeated,
    "writes to what it holds": writes_to_what_it_holds_in_hooks,
}


def holds(run):
    """Values that were handed out before the first step."""
    run.held = getattr(run, "held", None) or [parameter.data for parameter in parameters(run)]
    return run.held


@torch.no_grad()
def scales(run):
    for parameter in parameters(run)[::2]:
        parameter.mul_(0.99)


@torch.no_grad()
def assigns(run):
    for parameter in parameters(run)[::2]:
        parameter.data = parameter.detach() * 0.99


def first_state(run):
    return run.optimizer.state[parameters(run)[-1]]


def opens(run):
    with run.engine.full_parameters():
        run.keep(*parameters(run))


BETWEEN = {
    "norms of weights": lambda run: run.keep(*(parameter.norm() for parameter in parameters(run))),
    "data": lambda run: run.keep(*(parameter.data for parameter in parameters(run))),
    "writes": scales,
    "assigning": assigns,
    "a state dictionary": lambda run: run.keep(*run.model.state_dict().values()),
    "a copy of the model": lambda run: run.keep(*copy.deepcopy(run.model).parameters()),
    "opening": opens,
    "a state": lambda run: run.keep(*first_state(run).values()) if first_state(run) else None,
    "a state is zeroed": lambda run: first_state(run)["exp_avg"].zero_() if first_state(run) else None,
    "states": lambda run: run.keep_state(run.optimizer.state_dict()),
}
HOLDING = {
    "reads what it holds": lambda run: run.keep(*holds(run)),
    "writes to what it holds": lambda run: [held.mul_(0.99) for held in holds(run)],
}


def run_with(begin, between, streams, **settings):
    torch.manual_seed(0)
    with streams_of(streams):
        run = UnclippedRun(**settings)
        begin(run)
        train(run, between=between)
        return run.end(), run


@pytest.mark.parametrize("begin", IN_BACKWARD.values(), ids=IN_BACKWARD)
def test_what_is_done_in_backward_from_the_start_is_noticed(begin):
    settings = {"chunk_budget": 100_000}
    expected, _ = run_with(begin, lambda run: None, "threads", overlap_optimizer=False, **settings)
    for streams in ("simulated:1", "delayed"):
        found, run = run_with(begin, lambda run: None, streams, overlap_optimizer="backward", **settings)
        assert_same(expected, found)
        assert not any(run.num_ahead)


@pytest.mark.parametrize("between", {**BETWEEN, **HOLDING}.values(), ids={**BETWEEN, **HOLDING})
def test_what_is_done_before_the_step_from_the_start_is_noticed(between):
    begin = holds if between in HOLDING.values() else lambda run: None
    expected, _ = run_with(begin, between, "threads", overlap_optimizer=False)
    found, run = run_with(begin, between, "simulated:1", overlap_optimizer="backward")
    assert_same(expected, found)
    assert not any(run.num_ahead)


def evaluates(run):
    with torch.no_grad():
        run.keep(run.model(**make_batch(run.name, seed=9)).loss)


COMPUTING = {
    "an evaluation": evaluates,
    "another micro-batch": lambda run: run.backward(9),  # which the engine was not told of
}


@pytest.mark.parametrize("streams", ["simulated:1", "delayed"])
@pytest.mark.parametrize("between", COMPUTING.values(), ids=COMPUTING)
def test_what_is_computed_before_the_step_from_the_start_is_noticed(between, streams):
    expected, _ = run_with(lambda run: None, between, "threads", overlap_optimizer=False)
    found, run = run_with(lambda run: None, between, streams, overlap_optimizer="backward")
    assert_same(expected, found)
    assert not any(run.num_ahead)


def test_a_second_backward_through_one_graph_is_noticed():
    def backward(run, seed):
        loss = run.model(**make_batch(run.name, seed=seed)).loss
        loss.backward(retain_graph=True)
        loss.backward()

    def case(streams, overlap):
        torch.manual_seed(0)
        with streams_of(streams):
            run = UnclippedRun(overlap_optimizer=overlap, chunk_budget=1 << 20)
            for seed in range(5):
                backward(run, seed)
                run.note_updates()
                run.optimizer.step()
                run.optimizer.zero_grad()
            return run.end(), run

    expected, _ = case("threads", False)
    found, run = case("simulated:1", "backward")
    assert_same(expected, found)
    assert not any(run.num_ahead)


LATE = {
    **COMPUTING,
    **BETWEEN,
    "a zeroed gradient": lambda run: parameters(run)[-1].grad.zero_(),
    "loading": lambda run: run.model.load_state_dict({key: 2 * value for key, value in run.before.items()}),
    "the state of all": lambda run: run.optimizer.state_dict(),
}


@pytest.mark.parametrize("between", LATE.values(), ids=LATE)
def test_what_is_begun_late_is_an_error(between):
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        run.before = {key: value.clone() for key, value in run.model.state_dict().items()}
        train(run, 3)
        run.backward(3)
        assert run.engine.manager.gradients.used_ahead
        with pytest.raises((EngineError, RuntimeError), match="overlap_optimizer='backward' promises"):
            between(run)


@pytest.mark.parametrize("begin", [reads_in_hooks, decays_in_hooks, decays_data_in_hooks, reads_in_module_hooks])
def test_what_is_begun_late_in_backward_is_an_error_or_has_the_same_bits(begin):
    def late(streams, **settings):
        torch.manual_seed(0)
        with streams_of(streams):
            run = UnclippedRun(**settings)
            train(run, 3)
            begin(run)
            train(run, 2)
            return run.end()

    expected = late("threads", overlap_optimizer=False)
    try:
        found = late("simulated:1", overlap_optimizer="backward")
    except EngineError as error:
        assert "overlap_optimizer='backward' promises" in str(error)  # noqa: PT017
    else:
        assert_same(expected, found)


@pytest.mark.parametrize("is_global", [True, False], ids=["global", "its own"])
def test_hooks_before_a_step_see_values_of_before_it(is_global):
    def read(optimizer, args, kwargs):
        runs[-1].keep(*(parameter.detach().norm() for parameter in parameters(runs[-1])))

    found, runs = [], []
    for settings in ({"overlap_optimizer": False}, {"overlap_optimizer": "backward"}):
        torch.manual_seed(0)
        with streams_of("simulated:1"):
            runs.append(UnclippedRun(**settings))
            register = register_optimizer_step_pre_hook if is_global else runs[-1].optimizer.register_step_pre_hook
            handle = register(read)
            try:
                train(runs[-1])
            finally:
                handle.remove()
            found.append(runs[-1].end())
    assert_same(*found)


# Groups and settings


def moves(run):
    first, second = run.optimizer.param_groups[:2]
    second["params"].extend(first["params"][:5])
    del first["params"][:5]


def drops(run):
    del run.optimizer.param_groups[0]["params"][:5]


@pytest.mark.parametrize("change", [moves, drops])
def test_groups_that_changed_before_a_forward_count(change):
    def case(streams, **settings):
        torch.manual_seed(0)
        with streams_of(streams):
            run = UnclippedRun(make_optimizer=groups, **settings)
            train(run, 3)
            change(run)
            train(run, 2)
            return run.end(), run

    expected, _ = case("threads", overlap_optimizer=False)
    found, run = case("simulated:1", overlap_optimizer="backward")
    assert_same(expected, found)
    assert run.num_ahead[-1] > 0


def tensor_betas(parameters):
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    return torch.optim.AdamW(parameters, lr=1e-2, betas=betas, foreach=False)


@pytest.mark.parametrize(
    ("make_optimizer", "change"),
    [
        (groups, moves),
        (groups, drops),
        (groups, lambda run: run.optimizer.param_groups[0].update(weight_decay=0.5)),
        (tensor_betas, lambda run: run.optimizer.param_groups[0]["betas"][0].fill_(0.5)),
    ],
    ids=["moves", "drops", "a setting", "a tensor"],
)
def test_groups_that_change_before_the_step_are_an_error(make_optimizer, change):
    with streams_of("simulated:1"):
        run = UnclippedRun(make_optimizer=make_optimizer, overlap_optimizer="backward")
        train(run, 3)
        run.backward(3)
        assert run.engine.manager.gradients.used_ahead
        change(run)
        with pytest.raises(EngineError, match="settings of the optimizer have changed"):
            run.optimizer.step()


# A second gradient


class Inner(torch.autograd.Function):
    """Its backward runs another backward, which reaches parameters that the outer one comes to later."""

    @staticmethod
    def forward(ctx, hidden, function):
        ctx.function = function
        ctx.save_for_backward(hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(ctx.saved_tensors[0].detach()).sum())
        return gradient, None


class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(24, 24))

    def forward(self, hidden):
        return hidden + self.shift


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Linear(24, 24, bias=False) for _ in range(2))
        self.shift = Shift()

    def forward(self, hidden):
        hidden = self.last(torch.relu(self.shift(self.first(hidden))))
        return Inner.apply(hidden, lambda found: found + self.shift(found))


def test_a_second_gradient_of_an_updated_chunk_is_an_error():
    def case(streams, overlap):
        torch.manual_seed(0)
        with streams_of(streams):
            model = Nested()
            config = {"placement": "host", "chunk_numel": 576, "chunk_budget": 3 * 2304, "overlap_optimizer": overlap}
            engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), lr=1e-2))
            losses = []
            for _ in range(5):
                loss = model(torch.randn(24, 24)).square().mean()
                loss.backward()
                losses.append(loss.item())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return losses

    assert case("simulated:1", False) == case("threads", False)
    with pytest.raises(EngineError, match=r"another gradient of '.*' comes, but"):
        case("simulated:1", "backward")


def test_a_function_that_reentrant_checkpointing_repeats_is_refused():
    """Its backward would compute with a parameter that has no value any more."""
    run = UnclippedRun(overlap_optimizer=False)
    norm = run.model.transformer.ln_f
    norm.register_forward_hook(
        lambda module, args, output: output + checkpoint(lambda found: found * norm.weight, output, use_reentrant=True)
    )
    with pytest.raises(EngineError, match=r"'transformer.ln_f.weight'.* is recomputed by reentrant checkpointing"):
        train(run)


# The end


def test_an_engine_that_is_detached_in_between_says_what_the_model_is(caplog):
    with streams_of("simulated:1"):
        run = UnclippedRun(overlap_optimizer="backward")
        train(run, 3)
        run.backward(3)
        assert run.engine.manager.gradients.used_ahead
        with caplog.at_level(logging.ERROR, "hf_patrickstar"):
            run.engine.detach()
        assert "the engine is detached, but" in caplog.text
        assert run.model(**make_batch(run.name)).loss.isfinite()
