"""Which type a model says that it has, beside the stock Trainer, where every answer is the type that was loaded."""

import copy
import json
import pickle

import pytest
import torch
from safetensors import safe_open
from support.live import WIDTH, Tower, live, loss_of, train
from support.models import make_model
from support.trainers import make_trainer, run
from torch import nn
from transformers import TrainerCallback

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TRAINED = {"no": None, "bf16": BF16, "fp16": FP16}
CASES = [(FP32, "no"), (FP32, "bf16"), (BF16, "no"), (BF16, "fp16"), (FP16, "bf16")]


def types_of(tensors):
    return {tensor.dtype for tensor in tensors}


class Types(TrainerCallback):
    """What a callback is told while the model trains."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = types_of(parameter.grad for parameter in model.parameters())

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.model, self.first = model.dtype, next(model.parameters()).dtype
        self.parameters = types_of(model.parameters())
        self.values = types_of(parameter.data for parameter in model.parameters())
        self.results = types_of(parameter * 1 for parameter in model.parameters())
        self.made = types_of(torch.zeros_like(parameter) for parameter in model.parameters())
        self.config = model.config.dtype
        self.states = types_of(model.state_dict().values())
        self.copies = types_of(copy.deepcopy(model).parameters())
        self.pickled = types_of(pickle.loads(pickle.dumps(parameter)) for parameter in model.parameters())
        with model.patrickstar_engine.full_parameters():
            self.opened = types_of(model.parameters())


@pytest.mark.parametrize(("loaded", "trained"), CASES)
def test_types(loaded, trained, tmp_path):
    make_model("gpt2").to(loaded).save_pretrained(tmp_path / "model")
    model = type(make_model("gpt2")).from_pretrained(tmp_path / "model", dtype=loaded)
    inside = {}

    def note(name):
        return lambda module, args: inside.update({name: module.weight.dtype})

    for name, module in model.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(note(name))
    flags = {} if trained == "no" else {trained: True}
    trainer = make_trainer(
        PatrickStarTrainer,
        PatrickStarTrainingArguments,
        tmp_path / "out",
        model,
        max_steps=1,
        patrickstar_config={},
        save_strategy="steps",
        save_steps=1,
        trainer_kwargs={"callbacks": [types := Types()]},
        **flags,
    )
    run(trainer)
    # What the model is, wherever it goes: the type that was loaded.
    assert {loaded} == types.states == types.copies == types.pickled == types.opened == {types.config}
    saved = tmp_path / "out" / "checkpoint-1"
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(loaded).removeprefix("torch.")
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert types_of(file.get_tensor(name) for name in file.keys()) == {loaded}  # noqa: SIM118
    # So are its parameters and gradients, but for the module that computes with them.
    assert {loaded} == types.parameters == types.values == types.results == types.made == types.gradients
    assert types.model is types.first is loaded
    computed = TRAINED[trained] or loaded
    is_left = loaded is torch.float32  # then what autocast does not round is fp32
    assert inside["transformer.h.0.mlp.c_fc"] is computed
    assert inside["transformer.h.0.ln_1"] is inside["transformer.wte"] is (loaded if is_left else computed)
    trainer.patrickstar_engine.detach()
    assert {model.dtype} == types_of(model.parameters()) == {loaded}


# Beside plain torch under autocast, bit for bit.


class Computing(Tower):
    """Computes under autocast, as the Trainer has it, and may read the weight of a layer."""

    reads = None

    def forward(self, ids):
        with torch.autocast("cpu", BF16):
            logits = super().forward(ids).float()
            return logits if self.reads is None else logits + self.reads(self.blocks[2].linear.weight)


def make_computing(reads=None, frozen=()):
    model = Computing()
    model.reads = reads
    for place in frozen:
        model.blocks[place].linear.requires_grad_(False)
    return model


def in_bf16(pattern=None, **how):
    """A pattern whose parameters look and behave as in plain torch, though chunks have 16 bits."""
    if pattern is None:
        return lambda pattern: in_bf16(pattern, **how)
    how.setdefault("make", make_seeded)
    settings = {"dtype": "bf16", "chunk_budget": 8192, "frozen_master": True}
    return live(pattern, settings=settings, **how)


def make_seeded(**kwargs):
    torch.manual_seed(0)
    return make_computing(**kwargs)


@in_bf16(make=lambda: make_seeded(frozen=range(4)))
def test_frozen_weights_have_not_changed(model, optimizer, note):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, optimizer, 2)
    note("unchanged", {name: torch.equal(before[name], p) for name, p in model.named_parameters()})
    note("values", [parameter.data for parameter in model.parameters()])


@in_bf16
def test_what_it_looks_like(model, optimizer, note):
    parameter = model.blocks[1].linear.weight
    note("types", [str(t.dtype) for t in (parameter, parameter.data, parameter.detach(), torch.empty_like(parameter))])
    note("sizes", [parameter.nbytes, parameter.itemsize, parameter.element_size(), str(parameter.new_zeros(2).dtype)])
    note("results", [parameter.t(), parameter[1:], parameter + 1, repr(parameter), parameter.view_as(parameter)])
    loss_of(model).backward()
    note("gradients", [p.grad for p in model.parameters()])
    optimizer.step()
    note("after", [p.clone() for p in model.parameters()])


@in_bf16
def test_writes(model, optimizer, note):
    first, second = model.blocks[0].linear.weight, model.blocks[1].linear.weight
    kept, view = first.data, second.detach()[2:]
    with torch.no_grad():
        first.mul_(1.0001)
        second.copy_(second + 1e-5)
        first[1] += 1e-6
    kept.add_(1e-6)
    view.sub_(1e-6)
    model.blocks[3].linear.weight.data = model.blocks[3].linear.weight.data + 1e-6
    note("values", [first, second, kept, view, model.blocks[3].linear.weight])
    loss_of(model).backward()
    first.grad.mul_(1.001)
    second.grad = second.grad + 1e-6
    optimizer.step()
    note("kept", [kept, view])


def penalty(model):
    return 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


@pytest.mark.parametrize("order", ["before", "after", "alone"])
@in_bf16
def test_a_penalty(model, optimizer, note, order):
    for step in range(2):
        optimizer.zero_grad()
        first = penalty(model) if order != "after" else 0.0
        loss = loss_of(model, step) if order != "alone" else 0.0
        (first + loss + (penalty(model) if order == "after" else 0.0)).backward()
        note("gradients", [p.grad for p in model.parameters()])
        optimizer.step()


@in_bf16
def test_gradients_that_are_asked_for(model, optimizer, note):
    parameters = list(model.parameters())
    note("of loss", torch.autograd.grad(loss_of(model), parameters))
    note("of both", torch.autograd.grad(loss_of(model) + penalty(model), parameters))
    (found,) = torch.autograd.grad(penalty(model), parameters[2], create_graph=True)
    found.sum().backward()
    note("second", [p.grad for p in parameters])
    optimizer.zero_grad()
    loss = loss_of(model)
    seen = []
    handle = parameters[2].register_hook(lambda gradient: seen.append(gradient.float()))
    (loss + penalty(model)).backward()
    handle.remove()
    note("hook", seen)


READS = {
    "product": lambda weight: nn.functional.linear(weight[:1] * 1.001, weight).mean(),
    "transposed": lambda weight: (weight.t() @ weight).mean(),
    "normalized": lambda weight: nn.functional.normalize(weight).sum(),
    "own type": lambda weight: torch.full((), 0.123, dtype=weight.dtype).float(),
    "without autocast": lambda weight: plain_product(weight),
    "without graph": lambda weight: weight.detach().norm() + float(weight.data.abs().max()),
}


def plain_product(weight):
    with torch.autocast("cpu", enabled=False):
        return nn.functional.linear(torch.ones(1, WIDTH), weight).mean()


@pytest.mark.parametrize("name", READS)
def test_reads_inside_of_a_forward(name, both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            note("evaluation", loss_of(model))
        loss_of(model, 1).backward()
        note("gradients", [p.grad for p in model.parameters()])

    both(pattern, make=lambda: make_seeded(reads=READS[name]), settings={"dtype": "bf16", "chunk_budget": 8192})
