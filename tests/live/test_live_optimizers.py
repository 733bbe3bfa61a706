"""Optimizers with more than a step, wrappers around them, schedules; several models and optimizers in one loop."""

import collections
import copy
import io
import itertools
import os
import types
import warnings

import pytest
import schedulefree
import torch
import transformers
from accelerate.utils import ProjectConfiguration
from live.both import VOCAB, WIDTH, loss_of, make_adamw, make_ids, make_tower, raises_in_both, train
from live.hf import CONFIGS, Accelerated, states
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers.optimization import Adafactor, AdafactorSchedule

from hf_patrickstar import PatrickStarAccelerator


def first_parameters(model):
    return [model.embedding.weight, model.scale, model.blocks[3].linear.weight, model.blocks[-1].norm.bias]


def backward(model, optimizer, step=0):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach().clone()


def groups_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# Schedule-free optimizers


def schedule_free(kind, **kwargs):
    def make_optimizer(model):
        optimizer = getattr(schedulefree, kind)(model.parameters(), **{"lr": 0.02, **kwargs})
        optimizer.train()
        return optimizer

    return make_optimizer


SCHEDULE_FREE = [
    pytest.param("AdamWScheduleFree", {"weight_decay": 0.1, "warmup_steps": 2}, id="adamw"),
    pytest.param("AdamWScheduleFree", {"weight_decay": 0.1, "foreach": False}, id="adamw_one_by_one"),
    pytest.param("SGDScheduleFree", {"lr": 0.1, "weight_decay": 0.01}, id="sgd"),
    pytest.param("RAdamScheduleFree", {}, id="radam"),
]


@pytest.mark.parametrize(("kind", "kwargs"), SCHEDULE_FREE)
def test_schedule_free_trained_and_evaluated_in_turn(both, kind, kwargs):
    def pattern(model, optimizer, note):
        for step in range(3):
            optimizer.train()
            model.train()
            note("losses", train(model, optimizer, 2, first=2 * step))
            optimizer.eval()
            model.eval()
            with torch.no_grad():
                note("evaluated", loss_of(model, 20 + step))
            note("weights", first_parameters(model))
            note("groups", groups_of(optimizer))
        optimizer.train()
        model.train()
        note("weights to train", first_parameters(model))

    both(pattern, make_optimizer=schedule_free(kind, **kwargs))


def test_schedule_free_refuses_a_step_in_evaluation_mode(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        optimizer.eval()
        backward(model, optimizer, 2)
        with raises_in_both(Exception, match="not in train mode"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.train()
        note("losses", train(model, optimizer, 1, first=3))

    both(pattern, make_optimizer=schedule_free("AdamWScheduleFree"))


def test_schedule_free_saved_in_evaluation_mode_and_loaded(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        optimizer.eval()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        optimizer.train()
        note("went on", train(model, optimizer, 2, first=2))
        saved = torch.load(io.BytesIO(file.getvalue()))
        note("saved weights", saved["model"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        note("mode", optimizer.param_groups[0]["train_mode"])
        optimizer.train()
        note("again", train(model, optimizer, 2, first=2))

    both(pattern, make_optimizer=schedule_free("AdamWScheduleFree"))


def test_a_schedule_free_wrapper_around_the_optimizer(both):
    """Swaps weights with a sequence of its own in the optimizer's state, before and after every step."""

    def pattern(model, optimizer, note):
        wrapper = schedulefree.ScheduleFreeWrapper(optimizer, momentum=0.9, weight_decay_at_y=0.01)
        for step in range(3):
            wrapper.train()
            backward(model, wrapper, step)
            wrapper.step()
            wrapper.eval()
            note("evaluated", first_parameters(model))
        wrapper.train()
        note("states", states(optimizer))

    both(pattern, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))


def test_schedule_free_with_a_closure(both):
    def pattern(model, optimizer, note):
        for step in range(3):

            def closure(step=step):
                return backward(model, optimizer, step)

            note("loss", optimizer.step(closure))
        note("weights", first_parameters(model))
        note("groups", groups_of(optimizer))

    def make_optimizer(model):
        return schedulefree.SGDScheduleFreeClosure(model.parameters(), lr=0.1)

    both(pattern, make_optimizer=make_optimizer, more=0)


# Adafactor


def test_adafactor_that_schedules_itself(both):
    """The schedule asks the optimizer for its rate, from the state and the gradients of the first parameters."""

    def pattern(model, optimizer, note):
        schedule = AdafactorSchedule(optimizer, initial_lr=0.5)
        note("before", schedule.get_last_lr())
        for step in range(4):
            backward(model, optimizer, step)
            optimizer.step()
            schedule.step()
            note("rates", schedule.get_lr())
            note("last rates", schedule.get_last_lr())
            optimizer.zero_grad()
            note("without gradients", schedule.get_lr())

    def make_optimizer(model):
        groups = [{"params": list(model.blocks.parameters())}, {"params": [model.scale, model.embedding.weight]}]
        return Adafactor(groups, scale_parameter=True, relative_step=True, warmup_init=True)

    both(pattern, make_optimizer=make_optimizer)


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactor_with_a_rate(both, beta1):
    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3))
        note("scales", [optimizer.state[parameter]["RMS"] for parameter in model.parameters()])
        note("rows", optimizer.state[model.embedding.weight]["exp_avg_sq_row"])

    def make_optimizer(model):
        return Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False, beta1=beta1)

    both(pattern, make_optimizer=make_optimizer)


# The user's own optimizers


class Reporting(torch.optim.AdamW):
    """AdamW with attributes and methods of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = []
        self.decay_norms = True

    def step(self, closure=None):
        self.history.append(len(self.history))
        return super().step(closure)

    @property
    def num_parameters(self):
        return sum(parameter.numel() for group in self.param_groups for parameter in group["params"])

    def average_norm(self):
        return torch.stack([state["exp_avg"].norm() for state in self.state.values()]).norm()

    @torch.no_grad()
    def perturb(self, size):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.sign(), alpha=size)

    @torch.no_grad()
    def restart(self):
        for state in self.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
            state["step"].zero_()


def make_reporting(model):
    return Reporting(model.parameters(), lr=1e-2)


def test_attributes_and_methods_of_the_optimizer(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 3)
        note("history", list(optimizer.history))
        note("flag", optimizer.decay_norms)
        note("property", optimizer.num_parameters)
        note("norm", optimizer.average_norm())
        note("missing", hasattr(optimizer, "no_such_thing"))
        with raises_in_both(AttributeError, match="no_such_thing"):
            _ = optimizer.no_such_thing

    both(pattern, make_optimizer=make_reporting)


def test_methods_of_the_optimizer_that_write(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        optimizer.perturb(0.01)
        note("perturbed", first_parameters(model))
        note("losses", train(model, optimizer, first=2))
        optimizer.restart()
        note("norm", optimizer.average_norm())
        note("restarted", train(model, optimizer, 2, first=3))

    both(pattern, make_optimizer=make_reporting)


def test_attributes_set_on_the_optimizer(both):
    def pattern(model, optimizer, note):
        optimizer.history = ["set by the script"]
        optimizer.decay_norms = False
        optimizer.note_of_mine = 3
        train(model, optimizer)
        note("history", list(optimizer.history))
        note("of mine", (optimizer.note_of_mine, optimizer.decay_norms))

    both(pattern, make_optimizer=make_reporting)


class Lamb(torch.optim.Optimizer):
    """LAMB as in timm: clips by the norm of all gradients inside the step, then a trust ratio for each parameter."""

    def __init__(self, params, lr=1e-2, max_grad_norm=0.1):
        super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            clip = (norm / group["max_grad_norm"]).clamp_(min=1.0)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                gradient = p.grad / clip
                state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(1e-6)
                ratio = p.norm() / update.norm()
                p.add_(update, alpha=-group["lr"] * float(ratio if ratio > 0 else 1.0))


class Prodigy(torch.optim.Optimizer):
    """Chooses its own step size, from sums over all parameters, against where each of them started."""

    def __init__(self, params):
        super().__init__(params, {"d": 1e-3, "numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        denominator = 0.0
        for p in group["params"]:
            state = self.state[p]
            if "p0" not in state:
                state["p0"] = p.detach().clone()
                state["s"] = torch.zeros_like(p)
            group["numerator"] += float(torch.dot(p.grad.flatten(), (state["p0"] - p).flatten())) * group["d"]
            state["s"].add_(p.grad, alpha=group["d"])
            denominator += float(state["s"].abs().sum())
        group["d"] = max(group["d"], group["numerator"] / denominator)
        group["k"] += 1
        for p in group["params"]:
            p.add_(p.grad.sign(), alpha=-group["d"])


class Counting(torch.optim.Optimizer):
    """Plain descent whose rate falls with the number of calls, counted in an attribute and in every state."""

    def __init__(self, params, lr=0.05):
        self.calls = 0
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"] / self.calls)
                    self.state[p].setdefault("rates", []).append(group["lr"] / self.calls)


@pytest.mark.parametrize("cls", [Lamb, Prodigy, Counting])
def test_optimizers_of_the_user(both, cls):
    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 4))
        note("groups", groups_of(optimizer))
        note("calls", getattr(optimizer, "calls", None))

    both(pattern, make_optimizer=lambda model: cls(model.parameters()))


# State, groups, hooks


def test_the_state_read_by_parameter(both):
    def pattern(model, optimizer, note):
        note("empty", (len(optimizer.state), model.scale in optimizer.state))
        train(model, optimizer, 2)
        note("count", len(optimizer.state))
        for parameter in model.parameters():
            note("state", dict(optimizer.state[parameter]))
        note("has", model.scale in optimizer.state)
        note("keys", [key is parameter for key, parameter in zip(optimizer.state, model.parameters(), strict=True)])
        note("values", [float(state["step"]) for state in optimizer.state.values()])
        note("get", optimizer.state.get(model.scale)["exp_avg"])
        note("none", optimizer.state.get(torch.zeros(1), "nothing"))
        note("ratio", optimizer.state[model.scale]["exp_avg"] / optimizer.state[model.scale]["exp_avg_sq"].sqrt())

    both(pattern)


def test_the_state_written_in_place(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        for parameter in list(model.parameters())[::2]:
            optimizer.state[parameter]["exp_avg"].zero_()
            optimizer.state[parameter]["exp_avg_sq"].mul_(2.0)
        optimizer.state[model.scale]["step"].fill_(1.0)
        averages = [state["exp_avg"] for state in optimizer.state.values()]
        torch._foreach_mul_(averages, 0.5)
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_entries_of_the_state_replaced(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        optimizer.state[model.scale]["exp_avg"] = torch.full((WIDTH,), 0.1)
        optimizer.state[model.blocks[0].norm.weight] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.zeros(WIDTH),
            "exp_avg_sq": torch.ones(WIDTH),
        }
        optimizer.state[model.norm.bias].update(exp_avg=torch.ones(WIDTH))
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_the_state_of_a_parameter_dropped(both):
    """A layer is drawn anew and its averages are forgotten: Adam begins again for it."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 3)
        model.blocks[-1].linear.reset_parameters()
        for parameter in model.blocks[-1].linear.parameters():
            optimizer.state.pop(parameter)
        optimizer.state[model.blocks[-1].norm.weight].clear()
        del optimizer.state[model.scale]
        note("count", sum(map(bool, optimizer.state.values())))
        note("losses", train(model, optimizer, 2, first=3))
        note("steps", [float(optimizer.state[parameter]["step"]) for parameter in model.parameters()])

    both(pattern)


def test_the_whole_state_reset(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        optimizer.state = collections.defaultdict(dict)
        note("again", train(model, optimizer, 2, first=2))
        optimizer.state.clear()
        note("and again", train(model, optimizer, 1, first=4))
        note("steps", {float(state["step"]) for state in optimizer.state.values()} == {1.0})

    both(pattern)


def test_dead_neurons_restarted(both):
    """ReDo: rows are drawn anew, their averages set to zero, what reads them is set to zero."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for block in model.blocks:
                weight = block.linear.weight
                dead = weight.abs().mean(1) < weight.abs().mean()
                weight[dead] = torch.randn(int(dead.sum()), WIDTH, generator=generator) * 0.1
                block.linear.bias[dead] = 0.0
                state = optimizer.state[weight]
                state["exp_avg"][dead] = 0.0
                state["exp_avg_sq"][dead] = 0.0
        note("losses", train(model, optimizer, 2, first=2))

    both(pattern)


def test_entries_of_the_script_in_the_state(both):
    """Importance weights kept beside Adam's averages: they are saved and loaded with them."""

    def pattern(model, optimizer, note):
        for parameter in model.parameters():
            optimizer.state[parameter]["importance"] = torch.zeros_like(parameter)
        note("kept", [list(state) for state in optimizer.state.values()][:2])
        saved = copy.deepcopy(optimizer.state_dict())
        note("saved", saved["state"][0]["importance"])
        optimizer.load_state_dict(saved)
        note("loaded", optimizer.state[model.scale]["importance"])

    both(pattern, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05), more=2)


def test_what_an_optimizer_says_of_itself(both):
    def pattern(model, optimizer, note):
        note("is one", isinstance(optimizer, torch.optim.Optimizer))
        note("text", repr(optimizer))
        note("formatted", f"{optimizer}")
        note("defaults", optimizer.defaults)
        note("groups", groups_of(optimizer))
        parameters = optimizer.param_groups[0]["params"]
        note("same objects", [p is q for p, q in zip(parameters, model.parameters(), strict=True)])
        note("the list", len(optimizer.param_groups))

    both(pattern)


def test_parameters_by_name(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("names", optimizer.param_groups[0]["param_names"])
        note("saved names", optimizer.state_dict()["param_groups"][0]["param_names"])

    both(pattern, make_optimizer=lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2))


def test_groups_with_entries_of_the_script(both):
    def pattern(model, optimizer, note):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * group["multiplier"]
        note("losses", train(model, optimizer, 2))
        note("groups", groups_of(optimizer))
        optimizer.param_groups[1]["multiplier"] = 5.0
        note("saved", [group["multiplier"] for group in optimizer.state_dict()["param_groups"]])

    def make_optimizer(model):
        groups = [
            {"params": list(model.blocks.parameters()), "name": "body", "multiplier": 1.0},
            {"params": [*model.norm.parameters(), model.embedding.weight, model.scale], "name": "rest"},
        ]
        groups[1]["multiplier"] = 10.0
        return torch.optim.Adam(groups, lr=1e-3)

    both(pattern, make_optimizer=make_optimizer)


def test_hooks_around_a_step(both):
    """A hook before the step clips, one after it clamps; each runs once a step, and gets the optimizer."""

    def pattern(model, optimizer, note):
        calls = []

        def before(given, args, kwargs):
            calls.append(("before", given is optimizer, len(args), list(kwargs)))
            parameters = [p for group in given.param_groups for p in group["params"]]
            note("norm", torch.nn.utils.clip_grad_norm_(parameters, 0.1))

        def after(given, args, kwargs):
            calls.append(("after", given is optimizer))
            with torch.no_grad():
                for group in given.param_groups:
                    for parameter in group["params"]:
                        parameter.clamp_(-0.5, 0.5)
            note("norms", [parameter.norm() for parameter in first_parameters(model)])

        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        note("losses", train(model, optimizer, 2))
        for handle in handles:
            handle.remove()
        note("without hooks", train(model, optimizer, 1, first=2))
        note("calls", calls)

    both(pattern)


def test_hooks_of_every_optimizer(both):
    def pattern(model, optimizer, note):
        calls = []
        handles = [
            register_optimizer_step_pre_hook(lambda *args: calls.append("before")),
            register_optimizer_step_post_hook(lambda *args: calls.append("after")),
        ]
        try:
            train(model, optimizer, 2)
        finally:
            for handle in handles:
                handle.remove()
        note("calls", calls)

    both(pattern)


def test_hooks_around_saving_and_loading(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        calls = []

        def add_version(given, state):
            calls.append("saved")
            state["version"] = 3
            return state

        def drop_version(given, state):
            calls.append(("loading", state.get("version"), given is optimizer))
            return {key: value for key, value in state.items() if key != "version"}

        optimizer.register_state_dict_pre_hook(lambda given: calls.append("saving"))
        optimizer.register_state_dict_post_hook(add_version)
        optimizer.register_load_state_dict_pre_hook(drop_version)
        optimizer.register_load_state_dict_post_hook(lambda given: calls.append("loaded"))
        saved = copy.deepcopy(optimizer.state_dict())
        note("keys", list(saved))
        train(model, optimizer, 1, first=2)
        optimizer.load_state_dict(saved)
        note("calls", calls)
        note("losses", train(model, optimizer, 1, first=3))

    both(pattern)


def test_the_step_replaced_by_the_script(both):
    """Profilers and schedulers wrap ``step`` of the instance."""

    def pattern(model, optimizer, note):
        original, calls = optimizer.step, []

        def step(self, *args, **kwargs):
            calls.append(self is optimizer)
            return original(*args, **kwargs)

        optimizer.step = types.MethodType(step, optimizer)
        note("losses", train(model, optimizer, 2))
        note("calls", calls)
        del optimizer.step
        train(model, optimizer, 1, first=2)
        note("calls", calls)

    both(pattern)


def test_a_step_with_a_closure(both):
    def pattern(model, optimizer, note):
        for step in range(3):

            def closure(step=step):
                note("gradients enabled", torch.is_grad_enabled())
                return backward(model, optimizer, step)

            note("loss", optimizer.step(closure))

    both(pattern)


def test_steps_that_have_nothing_to_do(both):
    """Before any backward, after zero_grad, and twice with the same gradients."""

    def pattern(model, optimizer, note):
        optimizer.step()
        note("count", len(optimizer.state))
        train(model, optimizer)
        optimizer.step()
        note("steps", [float(state["step"]) for state in optimizer.state.values()])
        note("loss", backward(model, optimizer, 1))
        optimizer.step()
        optimizer.step()
        note("steps", [float(state["step"]) for state in optimizer.state.values()])
        optimizer.zero_grad()

    both(pattern, settings={"keep_gradients": True})


def test_a_parameter_of_no_module(both):
    """A learnable temperature beside the model, in the same optimizer."""

    def make():
        model = make_tower()
        model.extras = [nn.Parameter(torch.tensor(1.5)), torch.zeros(VOCAB, requires_grad=True)]
        return model

    def warm(model, step=0):
        ids = make_ids(step)
        logits = model(ids[:, :-1]) * model.extras[0].exp() + model.extras[1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def make_optimizer(model):
        return torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": model.extras, "lr": 0.1}], lr=1e-2)

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=warm))
        note("extras", list(model.extras))
        note("state", dict(optimizer.state[model.extras[0]]))
        with torch.no_grad():
            model.extras[0].clamp_(max=1.0)
        note("clamped", train(model, optimizer, 1, first=3, loss=warm))

    both(pattern, make=make, make_optimizer=make_optimizer, loss=warm)


def test_a_parameter_of_no_module_that_joins_later(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.extras = [torch.full((VOCAB,), 0.1, requires_grad=True)]
        optimizer.add_param_group({"params": model.extras, "lr": 0.1})

        def biased(model, step=0):
            return (model(make_ids(step)) + model.extras[0]).logsumexp(-1).mean()

        note("losses", train(model, optimizer, 3, first=1, loss=biased))
        note("extras", list(model.extras))

    both(pattern)


def test_two_optimizers_over_one_model(both):
    """The engine has the optimizer of the body; the head's is a plain one."""

    def pattern(model, optimizer, note):
        head = torch.optim.SGD([model.embedding.weight, model.scale], lr=0.05, momentum=0.9)
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            note("loss", loss.detach())
            optimizer.step()
            if step % 2:
                head.step()
                head.zero_grad()
            optimizer.zero_grad()
        note("head", states(head))
        head.zero_grad()

    def make_optimizer(model):
        return torch.optim.AdamW([*model.blocks.parameters(), *model.norm.parameters()], lr=1e-2)

    both(pattern, make_optimizer=make_optimizer)


def test_a_rate_that_is_a_tensor(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        note("losses", train(model, optimizer, 2, first=2))
        note("rate", optimizer.param_groups[0]["lr"])

    both(pattern, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)))


OPTIMIZERS = {
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "maximize": lambda p: torch.optim.Adam(p, lr=1e-3, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused_adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, maximize=True, fused=True),
    "fused_tensor_rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_of_other_optimizers_of_torch(both, kind):
    """Adagrad has state before its first step, ASGD averages weights, Rprop looks at the gradient of before."""

    def pattern(model, optimizer, note):
        note("count", len(optimizer.state))
        note("losses", train(model, optimizer, 3))
        for parameter in first_parameters(model):
            note("state", dict(sorted(optimizer.state[parameter].items())))

    both(pattern, make_optimizer=lambda model: OPTIMIZERS[kind](model.parameters()))


# Saving, loading, copying


def test_rolled_back_in_the_middle(both):
    """When the loss rises the script goes back to the last good state, with a smaller rate."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        good = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        note("saved", states(optimizer))
        note("bad", train(model, optimizer, 2, first=2))
        model.load_state_dict(good[0])
        optimizer.load_state_dict(good[1])
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
        note("groups", groups_of(optimizer))
        note("better", train(model, optimizer, 2, first=2))

    both(pattern)


def test_loaded_between_backward_and_step(both):
    """The gradients stay as they are."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 1, first=2)
        backward(model, optimizer, 3)
        optimizer.load_state_dict(saved)
        note("gradient", model.scale.grad.clone())
        optimizer.step()
        optimizer.zero_grad()

    both(pattern)


def test_a_state_of_another_model_is_refused(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        with raises_in_both(ValueError, match="param"):
            optimizer.load_state_dict(other.state_dict())
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


def test_a_copy_of_the_model_goes_on_with_the_loaded_state(both):
    """Population based training: the copy is a plain model with a plain optimizer."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        twin = copy.deepcopy(model)
        second = make_adamw(twin)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        second.param_groups[0]["lr"] *= 2
        note("twin", train(twin, second, 2, first=2))
        note("first", train(model, optimizer, 2, first=2))
        model.load_state_dict(twin.state_dict())
        optimizer.load_state_dict(second.state_dict())

    both(pattern)


def test_the_optimizer_saved_to_a_file(both, tmp_path):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        read = torch.load(tmp_path / "optimizer.pt", weights_only=True)
        note("groups", read["param_groups"])
        note("states", [dict(sorted(state.items())) for _, state in sorted(read["state"].items())])
        os.remove(tmp_path / "optimizer.pt")

    both(pattern)


def test_model_and_optimizer_copied_together(both):
    """One deepcopy of both: the copy of the optimizer belongs to the copy of the model."""

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        twin, second = copy.deepcopy((model, optimizer))
        note("theirs", second.param_groups[0]["params"][0] is next(twin.parameters()))
        note("twin", train(twin, second, 2, first=2))
        note("state", states(second))
        note("first", train(model, optimizer, 1, first=4))

    both(pattern)


# Wrappers around the given optimizer


class Lookahead:
    """Every k steps the slow weights follow, and the fast ones start from there."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [[p.clone().detach() for p in group["params"]] for group in optimizer.param_groups]

    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.data.add_(p.data - q.data, alpha=self.alpha)
                    p.data.copy_(q.data)

    def zero_grad(self):
        self.optimizer.zero_grad()


class Sam:
    """Sharpness-aware minimisation: up along the gradient, the gradient there, back, and a step with it."""

    def __init__(self, optimizer, rho=0.05):
        self.optimizer, self.rho = optimizer, rho
        self.param_groups = optimizer.param_groups
        self.old = {}

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in self.parameters()]), p=2)
        for p in self.parameters():
            self.old[p] = p.data.clone()
            p.add_(p.grad * (self.rho / (norm + 1e-12)))
        self.optimizer.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.parameters():
            p.data = self.old[p]
        self.optimizer.step()
        self.optimizer.zero_grad()


class Centralised:
    """Takes the mean out of every gradient of a matrix."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.add_(-p.grad.mean(1, keepdim=True))
        self.optimizer.step()


class Clipped:
    """Adaptive gradient clipping: each row against the norm of its weights, as in timm."""

    def __init__(self, optimizer, factor=0.01):
        self.optimizer, self.factor = optimizer, factor
        self.zero_grad = optimizer.zero_grad

    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weights, gradient = p.detach(), p.grad.detach()
                dims = tuple(range(1, weights.dim())) or (0,)
                largest = weights.norm(dim=dims, keepdim=True).clamp_(min=1e-3).mul_(self.factor)
                norm = gradient.norm(dim=dims, keepdim=True)
                clipped = gradient * (largest / norm.clamp(min=1e-6))
                p.grad.detach().copy_(torch.where(norm < largest, gradient, clipped))
        self.optimizer.step()


class Noisy:
    """Adds noise to the gradients, and keeps the shadow of an average of the weights."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.zero_grad = optimizer.zero_grad
        self.generator = torch.Generator().manual_seed(2)
        self.average = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def step(self):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad + torch.randn(p.shape, generator=self.generator) * 1e-3
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, parameters, 0.1)


@pytest.mark.parametrize("wrapper", [Lookahead, Centralised, Clipped, Noisy])
def test_wrappers_of_the_user(both, wrapper):
    def pattern(model, optimizer, note):
        wrapped = wrapper(optimizer)
        note("losses", train(model, wrapped, 4))
        note("kept", getattr(wrapped, "average", None) or getattr(wrapped, "slow", None))

    both(pattern)


def test_sharpness_aware_minimisation(both):
    def pattern(model, optimizer, note):
        sam = Sam(optimizer)
        for step in range(3):
            for half in (sam.first_step, sam.second_step):
                loss = loss_of(model, step)
                loss.backward()
                half()
                note("loss", loss.detach())
                note("weights", first_parameters(model))

    both(pattern)


class WeightAverage(torch.optim.Optimizer):
    """A wrapper that is an optimizer itself, and shares groups and state with the one inside."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.average = {}

    def step(self, closure=None):
        result = self.inner.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                mean, count = self.average.get(p, (torch.zeros_like(p.data), 0))
                self.average[p] = mean.add_((p.data - mean) / (count + 1)), count + 1
        return result

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def swap(self):
        for p, (mean, _) in self.average.items():
            saved = p.data.clone()
            p.data.copy_(mean)
            mean.copy_(saved)


def test_a_wrapper_that_swaps_in_an_average(both):
    """torchcontrib's SWA: averages of the optimizer are swapped with the weights to evaluate."""

    def pattern(model, optimizer, note):
        wrapped = WeightAverage(optimizer)
        train(model, wrapped, 3)
        wrapped.swap()
        with torch.no_grad():
            note("average", loss_of(model, 9))
        wrapped.swap()
        note("losses", train(model, wrapped, 2, first=3))

    both(pattern)


# Schedules of the learning rate


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
    "three_phases": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8, three_phase=True),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=True),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
    "sequential": sequential,
    "chained": chained,
    "transformers": lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, 6),
    "inverse_root": lambda o: transformers.get_inverse_sqrt_schedule(o, 2),
}


WITH_MOMENTUM = [pytest.param(kind, True, id=f"{kind}_sgd") for kind in ("one_cycle", "cyclic")]


@pytest.mark.parametrize(
    ("kind", "momentum"), [*(pytest.param(kind, False, id=kind) for kind in SCHEDULERS), *WITH_MOMENTUM]
)
def test_schedules_of_the_rate(both, kind, momentum):
    """OneCycle and Cyclic write momentum, or Adam's first beta, too."""

    def make_optimizer(model):
        groups = [{"params": list(model.blocks.parameters())}, {"params": [model.scale], "lr": 3e-3}]
        return torch.optim.SGD(groups, 1e-2, momentum=0.9) if momentum else torch.optim.AdamW(groups, 1e-2)

    def pattern(model, optimizer, note):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of a schedule that steps before its optimizer
            scheduler = SCHEDULERS[kind](optimizer)
            note("its optimizer", getattr(scheduler, "optimizer", optimizer) is optimizer)
            for step in range(5):
                note("losses", train(model, optimizer, first=step))
                scheduler.step()
                note("rates", scheduler.get_last_lr())
                note("groups", groups_of(optimizer))

    both(pattern, make_optimizer=make_optimizer)


def test_a_rate_that_falls_on_a_plateau(both):
    def pattern(model, optimizer, note):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
        for step in range(4):
            losses = train(model, optimizer, first=step)
            scheduler.step(losses[0])
            note("rates", [group["lr"] for group in optimizer.param_groups])
            note("scheduler", scheduler.state_dict())

    both(pattern)


def test_a_schedule_saved_and_loaded(both):
    def pattern(model, optimizer, note):
        scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
        for step in range(2):
            train(model, optimizer, first=step)
            scheduler.step()
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        for round_ in range(2):
            for step in range(2, 4):
                note("losses", train(model, optimizer, first=step))
                scheduler.step()
                note("rates", scheduler.get_last_lr())
            if round_ == 0:
                for part, state in zip((model, optimizer, scheduler), saved, strict=True):
                    part.load_state_dict(state)

    both(pattern)


def test_a_schedule_and_a_group_that_joins(both):
    """A group that joins has no initial rate yet; a schedule made anew takes all groups."""

    def pattern(model, optimizer, note):
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        train(model, optimizer)
        scheduler.step()
        optimizer.add_param_group({"params": [model.scale], "lr": 1e-3, "initial_lr": 1e-3})
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5, last_epoch=1)
        for step in range(2):
            note("losses", train(model, optimizer, first=1 + step))
            scheduler.step()
            note("groups", groups_of(optimizer))

    both(pattern, make_optimizer=lambda model: torch.optim.AdamW(model.blocks.parameters(), lr=1e-2))


# Several models and optimizers, over Accelerate


@pytest.fixture(params=["plain"] if os.environ.get("LIVE_PLAIN") else list(CONFIGS))
def accelerated(request):
    """Runs a script with stock Accelerate, and with ours at a small budget and when all fits."""
    return Accelerated(CONFIGS.get(request.param))


def perceptron(sizes, seed):
    torch.manual_seed(seed)
    layers = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def make_generator():
    return perceptron([4] + [WIDTH] * 10 + [2], 1)


def make_discriminator():
    return perceptron([2] + [WIDTH] * 10 + [1], 2)


def make_loader(count=24, width=2, size=4):
    generator = torch.Generator().manual_seed(5)
    return torch.utils.data.DataLoader(torch.randn(count, width, generator=generator), size)


def adam(*models, lr=1e-2):
    return torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), lr=lr, betas=(0.5, 0.9))


def note_all(note, *parts):
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            note("optimizer", states(part))
            note("groups", groups_of(part))
        else:
            note("model", part.state_dict())


def adversarial_steps(accelerator, generator, discriminator, first, second, loader, note):
    """The loop of every GAN tutorial."""
    noise = torch.Generator().manual_seed(9)
    for real in loader:
        fake = generator(torch.randn(len(real), 4, generator=noise))
        second.zero_grad()
        real_score, fake_score = discriminator(real), discriminator(fake.detach())
        loss = nn.functional.softplus(-real_score).mean() + nn.functional.softplus(fake_score).mean()
        accelerator.backward(loss)
        second.step()
        first.zero_grad()
        other = nn.functional.softplus(-discriminator(fake)).mean()
        accelerator.backward(other)
        first.step()
        note("losses", [loss.detach(), other.detach()])


def test_a_gan(accelerated):
    def script(make, note):
        accelerator = make()
        generator, discriminator = make_generator(), make_discriminator()
        first, second = adam(generator), adam(discriminator)
        parts = accelerator.prepare(generator, discriminator, first, second, make_loader())
        adversarial_steps(accelerator, *parts, note)
        note_all(note, *parts[:4])

    accelerated(script)


def test_a_gan_prepared_one_by_one_with_schedules(accelerated):
    def script(make, note):
        accelerator = make()
        generator, discriminator = make_generator(), make_discriminator()
        first = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
        second = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.5)
        schedulers = [lr_scheduler.ExponentialLR(first, 0.9), lr_scheduler.StepLR(second, 2, 0.1)]
        generator, first = accelerator.prepare(generator, first)
        second, discriminator = accelerator.prepare(second, discriminator)
        schedulers = [accelerator.prepare(scheduler) for scheduler in schedulers]
        loader = accelerator.prepare(make_loader())
        for _ in range(2):
            adversarial_steps(accelerator, generator, discriminator, first, second, loader, note)
            for scheduler in schedulers:
                scheduler.step()
            note("rates", [scheduler.get_last_lr() for scheduler in schedulers])
        note_all(note, generator, discriminator, first, second)

    accelerated(script)


def test_a_wasserstein_gan_that_clips_weights(accelerated):
    """Several critic steps for each of the generator's, and the critic's weights are clamped after each."""

    def script(make, note):
        accelerator = make()
        generator, critic = make_generator(), make_discriminator()
        parts = accelerator.prepare(generator, critic, adam(generator), adam(critic), make_loader())
        generator, critic, first, second, loader = parts
        noise = torch.Generator().manual_seed(9)
        for place, real in enumerate(loader):
            for parameter in critic.parameters():
                parameter.requires_grad = True
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 4, generator=noise))
            loss = critic(fake).mean() - critic(real).mean()
            second.zero_grad()
            accelerator.backward(loss)
            second.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            note("critic", loss.detach())
            if place % 3 == 2:
                for parameter in critic.parameters():
                    parameter.requires_grad = False
                first.zero_grad()
                accelerator.backward(-critic(generator(torch.randn(4, 4, generator=noise))).mean())
                first.step()
        note_all(note, generator, critic, first, second)

    accelerated(script)


def test_a_gradient_penalty(accelerated):
    """The gradient of the critic by its input is differentiated again."""

    def script(make, note):
        accelerator = make()
        critic = make_discriminator()
        critic, optimizer, loader = accelerator.prepare(critic, adam(critic), make_loader())
        for real in loader:
            real = real.requires_grad_(True)
            (gradient,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
            penalty = (gradient.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            accelerator.backward(penalty)
            optimizer.step()
            note("penalty", penalty.detach())
        note_all(note, critic, optimizer)

    # A graph that is differentiated twice holds every weight until its last backward.
    accelerated(script, chunk_budget=2**15)


def test_actor_and_critic_with_one_optimizer(accelerated):
    def script(make, note):
        accelerator = make()
        actor, critic = perceptron([2] + [WIDTH] * 10 + [3], 1), perceptron([2] + [WIDTH] * 10 + [1], 2)
        optimizer = adam(actor, critic)
        actor, critic, optimizer, loader = accelerator.prepare(actor, critic, optimizer, make_loader())
        for states_ in loader:
            value = critic(states_).squeeze(1)
            chances = actor(states_).log_softmax(-1)
            advantage = states_.sum(1) - value
            loss = -(chances[:, 0] * advantage.detach()).mean() + advantage.square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            both_of_them = itertools.chain(actor.parameters(), critic.parameters())
            note("norm", accelerator.clip_grad_norm_(both_of_them, 0.5))
            optimizer.step()
            note("loss", loss.detach())
        note_all(note, actor, critic, optimizer)

    accelerated(script)


def test_an_encoder_and_a_decoder_in_one_graph(accelerated):
    def script(make, note):
        accelerator = make()
        encoder, decoder = perceptron([2] + [WIDTH] * 8 + [4], 1), perceptron([4] + [WIDTH] * 8 + [2], 2)
        first, second = adam(encoder), torch.optim.SGD(decoder.parameters(), lr=0.05)
        encoder, decoder, first, second, loader = accelerator.prepare(encoder, decoder, first, second, make_loader())
        for batch in loader:
            mean, spread = encoder(batch).chunk(2, -1)
            latent = mean + spread.exp() * torch.randn(mean.shape)
            loss = (decoder(torch.cat([latent, latent], -1)) - batch).square().mean() + 0.1 * mean.square().mean()
            accelerator.backward(loss)
            note("norms", [accelerator.clip_grad_norm_(model.parameters(), 1.0) for model in (encoder, decoder)])
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            note("loss", loss.detach())
        note_all(note, encoder, decoder, first, second)

    accelerated(script)


def lm_steps(accelerator, model, optimizers, note, steps=3, zero=True):
    for step in range(steps):
        loss = loss_of(model, step)
        accelerator.backward(loss)
        note("loss", loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers if zero else ():
            optimizer.zero_grad()


def test_two_optimizers_over_one_prepared_model(accelerated):
    """Momentum for the body, AdamW for the embeddings."""

    def script(make, note):
        accelerator = make()
        model = make_tower()
        body = torch.optim.SGD(model.blocks.parameters(), lr=0.05, momentum=0.9)
        rest = torch.optim.AdamW([model.embedding.weight, model.scale, *model.norm.parameters()], lr=1e-2)
        model, body, rest = accelerator.prepare(model, body, rest)
        lm_steps(accelerator, model, [body, rest], note)
        lm_steps(accelerator, model, [rest], note, 1)
        note_all(note, model, body, rest)

    accelerated(script)


@pytest.mark.parametrize("order", ["earlier_call", "same_call", "model_first"])
def test_an_optimizer_before_its_model(accelerated, order):
    def script(make, note):
        accelerator = make()
        model = make_tower()
        optimizer = make_adamw(model)
        if order == "earlier_call":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        elif order == "same_call":
            optimizer, model = accelerator.prepare(optimizer, model)
        else:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        lm_steps(accelerator, model, [optimizer], note)
        note_all(note, model, optimizer)

    accelerated(script)


def test_a_model_prepared_alone_and_a_plain_optimizer(accelerated):
    def script(make, note):
        accelerator = make()
        model = accelerator.prepare(make_tower())
        optimizer = make_adamw(model)
        for step in range(3):
            accelerator.backward(loss_of(model, step))
            note("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        lm_steps(accelerator, model, [optimizer], note)
        note_all(note, model, optimizer)

    accelerated(script)


def test_a_model_prepared_alone_and_descent_by_hand(accelerated):
    def script(make, note):
        accelerator = make()
        model = accelerator.prepare(make_tower())
        for step in range(3):
            loss = loss_of(model, step)
            accelerator.backward(loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
            note("loss", loss.detach())
        note_all(note, model)

    accelerated(script)


def test_a_plain_optimizer_first_and_a_prepared_one_later(accelerated):
    def script(make, note):
        accelerator = make()
        model = accelerator.prepare(make_tower())
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        lm_steps(accelerator, model, [plain], note)
        optimizer = accelerator.prepare(make_adamw(model))
        lm_steps(accelerator, model, [optimizer], note)
        note_all(note, model, optimizer)

    accelerated(script)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no_grad"])
def test_distillation(accelerated, frozen):
    """A teacher that is frozen, or one that is only run without gradients, prepared with the student."""

    def script(make, note):
        accelerator = make()
        student, teacher = make_tower(), make_tower(seed=5)
        if frozen:
            teacher.requires_grad_(False)
        student, teacher, optimizer = accelerator.prepare(student, teacher.eval(), make_adamw(student))
        for step in range(3):
            ids = make_ids(step)
            with torch.no_grad():
                wanted = teacher(ids).softmax(-1)
            loss = -(wanted * student(ids).log_softmax(-1)).sum(-1).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            note("loss", loss.detach())
        note_all(note, student, teacher, optimizer)

    accelerated(script)


def test_distillation_in_16_bit(accelerated):
    """A frozen teacher computes under autocast as the student does, and gives its output in fp32."""

    def script(make, note):
        accelerator = make(mixed_precision="bf16")
        student, teacher = make_tower(), make_tower(seed=5).requires_grad_(False)
        student, teacher, optimizer = accelerator.prepare(student, teacher.eval(), make_adamw(student))
        for step in range(2):
            ids = make_ids(step)
            wanted = teacher(ids)
            note("teacher", wanted)
            note("twin", copy.deepcopy(teacher).requires_grad_(False)(ids))
            with torch.autocast("cpu", enabled=False):
                note("inside", teacher.norm(torch.ones(1, 16)))
            loss = -(wanted.softmax(-1) * student(ids).log_softmax(-1)).sum(-1).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            note("loss", loss.detach())
        note("student", student.state_dict())
        note("weights", teacher.state_dict())
        plain = accelerator.unwrap_model(teacher, keep_fp32_wrapper=False)
        note("unwrapped", plain is teacher)

    accelerated(script)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_teacher_in_fp16(autocast):
    """The stock Accelerator computes in fp32 then, on a CPU; this one in fp16, as it trains."""
    accelerator = PatrickStarAccelerator(cpu=True, mixed_precision="fp16", patrickstar_config={"autocast": autocast})
    teacher = make_tower().requires_grad_(False)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        expected = teacher(make_ids())
    found = accelerator.prepare(teacher)(make_ids())
    assert found.dtype is torch.float32
    assert torch.equal(found, expected.float())


def test_a_target_network_that_follows(accelerated):
    """Q-learning: the target is a copy, prepared too, and moves a little after every step."""

    def script(make, note):
        accelerator = make()
        online = perceptron([2] + [WIDTH] * 10 + [3], 1)
        target = copy.deepcopy(online)
        online, target, optimizer, loader = accelerator.prepare(online, target, adam(online), make_loader())
        for place, batch in enumerate(loader):
            with torch.no_grad():
                wanted = batch.sum(1) + 0.9 * target(batch).max(1).values
            loss = nn.functional.smooth_l1_loss(online(batch)[:, 0], wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if place == 3:
                target.load_state_dict(online.state_dict())
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.data.copy_(0.2 * fast.data + 0.8 * slow.data)
            note("loss", loss.detach())
        note_all(note, online, target, optimizer)

    accelerated(script)


def test_an_optimizer_that_also_has_a_temperature(accelerated):
    """As in CLIP written by hand, or SAC's alpha: a parameter of no module."""

    def script(make, note):
        accelerator = make()
        left, right = perceptron([2] + [WIDTH] * 8, 1), perceptron([2] + [WIDTH] * 8, 2)
        temperature = nn.Parameter(torch.tensor(0.0))
        optimizer = torch.optim.AdamW(
            [{"params": [*left.parameters(), *right.parameters()]}, {"params": [temperature], "weight_decay": 0.0}],
            1e-2,
        )
        left, right, optimizer, loader = accelerator.prepare(left, right, optimizer, make_loader())
        for batch in loader:
            scores = left(batch) @ right(batch.flip(1)).T * temperature.exp()
            loss = nn.functional.cross_entropy(scores, torch.arange(len(batch)))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            note("loss", loss.detach())
            note("temperature", temperature)
        note_all(note, left, right, optimizer)

    accelerated(script)


class Prototypes(nn.Module):
    """A loss with parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.centres = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, features, labels):
        return nn.functional.cross_entropy(-torch.cdist(features, self.centres), labels)


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "left_alone"])
def test_a_loss_with_parameters(accelerated, prepared):
    def script(make, note):
        accelerator = make()
        model, criterion = perceptron([2] + [WIDTH] * 8, 1), Prototypes()
        optimizer = adam(model, criterion)
        if prepared:
            model, criterion, optimizer, loader = accelerator.prepare(model, criterion, optimizer, make_loader())
        else:
            model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
        for batch in loader:
            loss = criterion(model(batch), (batch[:, 0] > 0).long())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            note("loss", loss.detach())
        note_all(note, model, criterion, optimizer)

    accelerated(script)


def test_gradients_accumulated_for_several_models(accelerated):
    def script(make, note):
        accelerator = make(gradient_accumulation_steps=2)
        generator, discriminator = make_generator(), make_discriminator()
        parts = accelerator.prepare(generator, discriminator, adam(generator), adam(discriminator), make_loader())
        generator, discriminator, first, second, loader = parts
        for batch in loader:
            with accelerator.accumulate(generator, discriminator):
                loss = (discriminator(generator(batch.repeat(1, 2))) - batch.sum(1, True)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    note("norm", accelerator.clip_grad_norm_(generator.parameters(), 0.3))
                    accelerator.clip_grad_value_(discriminator.parameters(), 0.01)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
                note("loss", loss.detach())
        note_all(note, generator, discriminator, first, second)

    accelerated(script)


def test_several_models_saved_and_loaded(accelerated, tmp_path):
    def script(make, note):
        accelerator = make()
        generator, discriminator = make_generator(), make_discriminator()
        first, second = adam(generator), adam(discriminator)
        scheduler = lr_scheduler.StepLR(first, 1, 0.5)
        parts = accelerator.prepare(generator, discriminator, first, second, make_loader())
        scheduler = accelerator.prepare(scheduler)
        adversarial_steps(accelerator, *parts, note)
        scheduler.step()
        accelerator.save_state(str(tmp_path / "state"))
        before = [copy.deepcopy(part.state_dict()) for part in parts[:4]]
        adversarial_steps(accelerator, *parts, note)
        accelerator.load_state(str(tmp_path / "state"))
        for part, state in zip(parts[:2], before, strict=False):
            note("as it was", all(torch.equal(value, state[key]) for key, value in part.state_dict().items()))
        note_all(note, *parts[:4])
        adversarial_steps(accelerator, *parts, note)
        note_all(note, *parts[:4])

    accelerated(script)


def test_saved_states_named_by_the_project(accelerated, tmp_path):
    def script(make, note):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True)
        accelerator = make(project_config=project)
        model, other = make_tower(), make_discriminator()
        model, other, optimizer, second = accelerator.prepare(model, other, make_adamw(model), adam(other))
        lm_steps(accelerator, model, [optimizer], note, 1)
        accelerator.backward(other(torch.ones(2, 2)).mean())
        second.step()
        second.zero_grad()
        accelerator.save_state()
        lm_steps(accelerator, model, [optimizer], note, 2)
        accelerator.load_state()
        note_all(note, model, other, optimizer, second)

    accelerated(script)


def test_models_unwrapped_and_saved(accelerated, tmp_path):
    def script(make, note):
        accelerator = make()
        generator, discriminator = make_generator(), make_discriminator()
        parts = accelerator.prepare(generator, discriminator, adam(generator), adam(discriminator), make_loader())
        adversarial_steps(accelerator, *parts, note)
        for name, model in (("generator", parts[0]), ("discriminator", parts[1])):
            note("unwrapped", type(accelerator.unwrap_model(model)).__name__)
            note("state", dict(accelerator.get_state_dict(model)))
            accelerator.save_model(model, str(tmp_path / name))
            accelerator.save(accelerator.unwrap_model(model).state_dict(), str(tmp_path / f"{name}.pt"))
            note("saved", torch.load(tmp_path / f"{name}.pt"))
        adversarial_steps(accelerator, *parts, note)

    accelerated(script)


def test_freed_and_prepared_again_for_the_second_stage(accelerated):
    def script(make, note):
        accelerator = make()
        model = make_tower()
        model, optimizer = accelerator.prepare(model, make_adamw(model))
        lm_steps(accelerator, model, [optimizer], note)
        model = accelerator.unwrap_model(model)
        (optimizer,) = accelerator.free_memory(optimizer)
        model.blocks[:20].requires_grad_(False)
        second = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        model, second = accelerator.prepare(model, second)
        lm_steps(accelerator, model, [second], note)
        note_all(note, model, second)

    accelerated(script)


def test_schedule_free_over_accelerate(accelerated):
    def script(make, note):
        accelerator = make()
        model = make_tower()
        inner = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02)
        model, optimizer = accelerator.prepare(model, inner)
        optimizer.train()
        lm_steps(accelerator, model, [optimizer], note)
        optimizer.eval()
        with torch.no_grad():
            note("evaluated", loss_of(model, 9))
        note("mode", optimizer.param_groups[0]["train_mode"])
        note_all(note, model, optimizer)
        optimizer.train()
        lm_steps(accelerator, model, [optimizer], note)
        note_all(note, model, optimizer)

    accelerated(script)


def test_rates_scheduled_over_accelerate(accelerated):
    def script(make, note):
        accelerator = make()
        model = make_tower()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(4):
            lm_steps(accelerator, model, [optimizer], note, 1)
            scheduler.step()
            plateau.step(1.0 + step)
            note("rates", scheduler.get_last_lr())
            note("groups", groups_of(optimizer))
        note_all(note, model)

    accelerated(script)


def test_a_head_that_joins_a_prepared_model(accelerated):
    def script(make, note):
        accelerator = make()
        model = make_tower()
        model, optimizer = accelerator.prepare(model, make_adamw(model))
        lm_steps(accelerator, model, [optimizer], note)
        torch.manual_seed(3)
        model.head = nn.Linear(WIDTH, VOCAB)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 3e-3})
        lm_steps(accelerator, model, [optimizer], note)
        note_all(note, model, optimizer)

    accelerated(script)
