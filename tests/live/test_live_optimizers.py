"""Optimizers with more than a step, wrappers around them, schedules; several models and optimizers in one loop."""

import collections
import copy
import itertools
import os
import types

import pytest
import schedulefree
import torch
from accelerate.utils import ProjectConfiguration
from support.hf import CONFIGS, Accelerated, states
from support.live import VOCAB, WIDTH, live, loss_of, make_adamw, make_ids, make_tower, raises_in_both, train
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def some(model):
    return [model.embedding.weight, model.scale, model.blocks[3].linear.weight, model.blocks[-1].norm.bias]


def backward(model, optimizer, step=0):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach().clone()


def groups_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# The user's own optimizers


class Reporting(torch.optim.AdamW):
    """AdamW with attributes and methods of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.history = []

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
            state["step"].zero_()


@live(make_optimizer=lambda model: Reporting(model.named_parameters(), lr=1e-2))
def test_what_an_optimizer_of_the_user_has_and_does(model, optimizer, note):
    train(model, optimizer, 2)
    note("attributes", [list(optimizer.history), optimizer.num_parameters, hasattr(optimizer, "no_such_thing")])
    note("norm", optimizer.average_norm())
    optimizer.perturb(0.01)
    note("losses", train(model, optimizer, first=2))
    optimizer.restart()
    note("restarted", [optimizer.average_norm(), train(model, optimizer, first=3)])
    optimizer.history, optimizer.note_of_mine = ["set by the script"], 3
    train(model, optimizer, first=4)
    note("of mine", [list(optimizer.history), optimizer.note_of_mine])
    note("texts", [repr(optimizer), f"{optimizer}", optimizer.defaults, groups_of(optimizer)])
    note("names", optimizer.state_dict()["param_groups"][0]["param_names"])
    original, calls = optimizer.step, []

    def step(self, *args, **kwargs):
        calls.append(self is optimizer)
        return original(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # as profilers do it
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        train(model, optimizer, first=5)
    finally:
        for hook in hooks:
            hook.remove()
    del optimizer.step
    note("calls", calls)


# State and groups


@live(everywhere=True)
def test_the_state_read_and_written_by_parameter(model, optimizer, note):
    note("empty", (len(optimizer.state), model.scale in optimizer.state))
    train(model, optimizer, 2)
    state = optimizer.state
    note("states", [dict(state[parameter]) for parameter in model.parameters()])
    note("keys", [key is parameter for key, parameter in zip(state, model.parameters(), strict=True)])
    note("values", [float(each["step"]) for each in state.values()])
    note("get", [state.get(model.scale)["exp_avg"], state.get(torch.zeros(1), "nothing")])
    for parameter in list(model.parameters())[::2]:
        state[parameter]["exp_avg"].zero_()
        state[parameter]["exp_avg_sq"].mul_(2.0)
    torch._foreach_mul_([each["exp_avg"] for each in state.values()], 0.5)
    state[model.blocks[5].linear.weight]["exp_avg"][state[model.blocks[5].linear.weight]["exp_avg"] > 0] = 0.0
    state[model.scale]["step"].fill_(1.0)
    state[model.scale]["exp_avg"] = torch.full((WIDTH,), 0.1)
    state[model.norm.bias].update(exp_avg=torch.ones(WIDTH))
    state[model.blocks[0].norm.weight] = {
        "step": torch.tensor(5.0),
        "exp_avg": torch.zeros(WIDTH),
        "exp_avg_sq": torch.ones(WIDTH),
    }
    note("losses", train(model, optimizer, 2, first=2))
    for parameter in model.blocks[-1].linear.parameters():
        state.pop(parameter)
    state[model.blocks[-1].norm.weight].clear()
    del state[model.scale]
    note("count", sum(map(bool, state.values())))
    note("losses", [train(model, optimizer, first=4), [float(state[p]["step"]) for p in model.parameters()]])
    optimizer.state = collections.defaultdict(dict)
    note("again", train(model, optimizer, 2, first=5))
    optimizer.state.clear()
    saved = copy.deepcopy(optimizer.state_dict())
    note("and again", train(model, optimizer, first=7))
    backward(model, optimizer, 3)
    optimizer.load_state_dict(saved)  # gradients stay
    note("gradient", model.scale.grad.clone())
    optimizer.step()
    optimizer.zero_grad()
    with raises_in_both(ValueError, match="param"):
        optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict())


# Several models and optimizers over Accelerate; ``tests/integration/test_several.py`` has orders of calls and files.


@pytest.fixture(params=["plain"] if os.environ.get("LIVE_PLAIN") else ["tight"])
def accelerated(request):
    """Runs a script with stock Accelerate, and with ours at a small budget."""
    return Accelerated(CONFIGS.get(request.param))


def perceptron(sizes, seed):
    torch.manual_seed(seed)
    layers = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def adam(*models, lr=1e-2):
    return torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), lr=lr, betas=(0.5, 0.9))


def note_all(note, *parts):
    for part in parts:
        if hasattr(part, "param_groups"):
            note("optimizer", [states(part), groups_of(part)])
        else:
            note("model", part.state_dict())


def lm_steps(accelerator, model, optimizers, note, steps=2):
    for step in range(steps):
        loss = loss_of(model, step)
        accelerator.backward(loss)
        note("loss", loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_stages_over_one_prepared_model(accelerated, tmp_path):
    """By hand, by a plain optimizer, by two prepared ones, one of them schedule-free, and after all was freed."""

    def script(make, note):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        accelerator = make(project_config=ProjectConfiguration(str(directory), automatic_checkpoint_naming=True))
        model = accelerator.prepare(make_tower())
        accelerator.backward(loss_of(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        lm_steps(accelerator, model, [torch.optim.SGD(model.parameters(), lr=0.05)], note)
        body = torch.optim.SGD(model.blocks.parameters(), lr=0.05, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(body, 0.1, total_steps=8)
        rest = [model.embedding.weight, model.scale, *model.norm.parameters()]
        body, rest, scheduler = accelerator.prepare(body, schedulefree.AdamWScheduleFree(rest, lr=0.02), scheduler)
        for step in range(2):
            rest.train()
            lm_steps(accelerator, model, [body, rest], note, 1)
            rest.eval()
            scheduler.step()
            with torch.no_grad():
                note("evaluated", [loss_of(model, 9), rest.param_groups[0]["train_mode"], scheduler.get_last_lr()])
            if step == 0:
                accelerator.save_state()
        accelerator.load_state()
        rest.train()
        lm_steps(accelerator, model, [body, rest], note, 1)
        note_all(note, model, body, rest)
        model = accelerator.unwrap_model(model)
        body, rest = accelerator.free_memory(body, rest)
        model.blocks[:4].requires_grad_(False)
        last = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        model, last = accelerator.prepare(model, last)
        torch.manual_seed(3)
        model.head = nn.Linear(WIDTH, VOCAB)
        last.add_param_group({"params": list(model.head.parameters()), "lr": 3e-3})
        lm_steps(accelerator, model, [last], note)
        note_all(note, model, last)

    accelerated(script)


@pytest.mark.parametrize("kind", ["no_grad", "bf16"])
def test_distillation(accelerated, kind):
    """A teacher that is frozen, or only run without gradients, prepared with the student; then it follows it.

    In 16 bits it computes under autocast as the student does, and gives its output in fp32.
    """

    def script(make, note):
        accelerator = make(mixed_precision="bf16" if kind == "bf16" else "no")
        student, teacher = make_tower(), make_tower(seed=5)
        teacher.requires_grad_(kind == "no_grad")
        student, teacher, optimizer = accelerator.prepare(student, teacher.eval(), make_adamw(student))
        for step in range(3):
            ids = make_ids(step)
            with torch.no_grad():
                wanted = teacher(ids)
            note("teacher", [wanted, copy.deepcopy(teacher).requires_grad_(False)(ids)])
            with torch.autocast("cpu", enabled=False):
                note("inside", teacher.norm(torch.ones(1, 16)).detach())
            loss = -(wanted.softmax(-1) * student(ids).log_softmax(-1)).sum(-1).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            note("loss", loss.detach())
            if kind == "no_grad":
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.data.copy_(0.2 * fast.data + 0.8 * slow.data)
        note("student", student.state_dict())
        note("weights", teacher.state_dict())
        note("unwrapped", accelerator.unwrap_model(teacher, keep_fp32_wrapper=False) is teacher)

    accelerated(script)
