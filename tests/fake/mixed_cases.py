"""Engines on a fake device, each as one case. Run as a program: writes what became of each case to a file.

The device changes the process, so the cases have one of their own. Where plain torch can do the same, it does so on the
same device, and every loss and parameter must be the same to the last bit.
"""

import copy
import gc
import json
import pathlib
import re
import sys
import tempfile
import traceback
import warnings

import pytest
import torch
from support import fake_device, fused_losses, inside
from support.models import make_batch, make_model
from support.reference import Reference
from torch import nn
from transformers import Adafactor

from hf_patrickstar import DeviceMemoryError, EngineError, PatrickStarEngine, deferred_weights, units
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.model.chunked_loss import chunk_losses, find_heads
from hf_patrickstar.model.live_parameter import set_raw_data
from hf_patrickstar.optim.scaler import ChunkedGradScaler

units.LEAST_BUDGET_NBYTES = 1  # as in conftest.py


SIM = fake_device.NAME
LR = 3e-3
TIGHT = {"chunk_numel": 3200, "chunk_budget": 90_000}
"""Settings with which chunks of every model here move."""
MAX_NORM = 0.3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TWO_DEVICES = "sim:0 and cpu|cpu and sim:0"
SCALE = {"init_scale": 2.0**8, "growth_interval": 2}

CASES = {}


def case(*args):
    """Names a case after its function, and after the arguments that it is to have."""

    def note(function):
        name = "-".join([function.__name__, *(str(arg) for arg in args if not callable(arg))])
        CASES[name] = lambda: function(*args)
        return function

    return note


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def batch_of(name, seed):
    return {key: value.to(SIM) for key, value in make_batch(name, size=2, seed=seed, length=8).items()}


def plain_model(name, change=lambda model: None):
    """A model on the device, without the engine."""
    model = make_model(name).train()
    change(model)
    return _move(model, SIM)


@torch.no_grad()
def _move(module, device):
    for tensor in (*module.parameters(), *module.buffers()):
        set_raw_data(tensor, tensor.to(device))
    return module


def budgeted(nbytes):
    """Settings that give an engine as many bytes of the device, beside what is taken already."""
    gc.collect()
    return {"device_budget": fake_device.MEMORY.current + nbytes, "chunk_numel": 3200}


def make_engine(name, config=None, change=lambda model: None, make_optimizer=adamw, tight=True, **kwargs):
    """A model that was made on the host, and its engine, with chunks that move unless ``tight`` is false."""
    model = make_model(name).train()
    change(model)
    own = {"pin_memory": False, **(TIGHT if tight else {})}
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    return model, PatrickStarEngine(model, own | (config or {}), optimizer, device=SIM, **kwargs)


def train(name, model, optimizer, clip, steps=2, accumulation=1, loss_of=lambda model, batch: model(**batch).loss):
    """Losses and norms of an ordinary loop."""
    seen = []
    for step in range(steps):
        for micro in range(accumulation):
            torch.manual_seed(10 * step + micro)
            loss = loss_of(model, batch_of(name, 10 * step + micro))
            assert loss.device.type == SIM
            seen.append(loss.item())
            (loss / accumulation).backward()
        if clip is not None:
            seen.append(clip(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same(model, expected):
    """The parameters of a model in chunks, or detached from its engine, are those of another to the last bit."""
    found = {key: value.cpu() for key, value in model.state_dict().items()}
    for key, value in expected.items():
        assert torch.equal(found[key], value.cpu()), f"'{key}' differs"


def compare(name, config=None, change=lambda model: None, make_optimizer=adamw, clips=True, tight=True, **kwargs):
    """Trains a plain model and one in chunks; gives the latter's engine, which is detached."""
    loop = {key: kwargs.pop(key) for key in ("steps", "loss_of") if key in kwargs}
    loop["accumulation"] = kwargs.get("gradient_accumulation_steps", 1)
    plain = plain_model(name, change)
    optimizer = make_optimizer([parameter for parameter in plain.parameters() if parameter.requires_grad])
    expected = train(name, plain, optimizer, torch.nn.utils.clip_grad_norm_ if clips else None, **loop)
    model, engine = make_engine(name, config, change, make_optimizer, tight, **kwargs)
    found = train(name, model, engine.optimizer, engine.optimizer.clip_grad_norm_ if clips else None, **loop)
    assert found == expected
    assert_same(model, plain.state_dict())
    engine.detach()
    assert_same(model, plain.state_dict())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}, "where they were before"
    if tight:
        assert engine.stats()["chunk_loads"] > 0
    return engine


def alike(name, do, tight=True, change=lambda model: None):
    """Does the same with a plain model and with one in chunks: numbers and parameters are the same."""
    plain = plain_model(name, change)
    model, engine = make_engine(name, change=change, tight=tight)
    expected = do(plain, adamw([parameter for parameter in plain.parameters() if parameter.requires_grad]))
    assert do(model, engine.optimizer) == expected
    assert_same(model, plain.state_dict())


def run_backward(model, name, seed):
    torch.manual_seed(seed)
    loss = model(**batch_of(name, seed)).loss
    loss.backward()
    return loss.item()


# The matrix


@case("gpt2")
@case("bert")
@case("llama")
@case("t5")
@case("mixtral")
@case("gpt2", 2)
@case("gpt2", 1, "looked up")
def fp32(name, accumulation=1, embedding=""):
    compare(name, {"cpu_embedding": True} if embedding else {}, gradient_accumulation_steps=accumulation)


@case("gpt2", "bf16", 1, "looked up")
@case("bert", "fp16")
@case("llama", "bf16", 2)
@case("t5", "fp16", 2)
@case("mixtral", "bf16")
@case("mixtral", "fp16")
def sixteen_bit(name, precision, accumulation=1, embedding=""):
    """Against 16-bit weights with fp32 masters in plain torch, all of them on the device; fp16 with a scaler."""
    scalers = [None, None]
    if precision == "fp16":
        scalers = [torch.amp.GradScaler(SIM, **SCALE), ChunkedGradScaler(SIM, **SCALE)]
    reference = Reference(
        plain_model(name), DTYPES[precision], lambda named: adamw(named.values()), MAX_NORM, scalers[0], device=SIM
    )
    config = {"cpu_embedding": True} if embedding else {}
    model, engine = make_engine(name, config, precision=precision, gradient_accumulation_steps=accumulation)
    optimizer, scaler = engine.optimizer, scalers[1]
    for step in range(2):
        batches = [batch_of(name, 10 * step + micro) for micro in range(accumulation)]
        torch.manual_seed(step)
        expected, _ = reference.step(batches)
        torch.manual_seed(step)
        losses = []
        for batch in batches:
            loss = model(**batch).loss
            losses.append(loss.item())
            loss = loss / accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(model.parameters(), MAX_NORM)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        assert losses == expected
        assert norm.item() == reference.norms[-1]
    assert engine.stats()["chunk_loads"] > 0
    assert_same(model, {name: master.detach() for name, master in reference.masters.items()})


# Settings


@case("saved", "in forward")
@case("recomputed", "in forward")
@case("saved", "outside")
@case("recomputed", "outside")
def fused_loss(kind, place):
    compare(
        "llama",
        change=lambda model: fused_losses.fuse(model, kind, place),
        loss_of=lambda model, batch: fused_losses.loss_of(model, batch, kind, place),
    )


@case("llama")
@case("gpt2")
def loss_in_chunks(name):
    def loss_of(model, batch):
        if not hasattr(model, "patrickstar_engine"):
            chunk_losses(find_heads(model))
        return model(**batch).loss

    compare(name, {"chunked_loss": True}, loss_of=loss_of)


@case()
def margin():
    """Some chunks have their home on the device, and the optimizer works on both tiers."""
    plain = plain_model("gpt2")
    expected = train("gpt2", plain, adamw(plain.parameters()), torch.nn.utils.clip_grad_norm_, steps=3)
    plain.zero_grad()
    _move(plain, "cpu")
    model, engine = make_engine("gpt2", budgeted(1_000_000), tight=False)
    assert train("gpt2", model, engine.optimizer, engine.optimizer.clip_grad_norm_, steps=3) == expected
    homes = inside.homes(engine)
    assert homes == {Tier.DEVICE, Tier.HOST}, homes
    assert_same(model, plain.state_dict())
    return model, engine


@case()
def everything_on_the_device():
    engine = compare("gpt2", tight=False)
    assert engine.stats()["chunk_loads"] == 0
    assert engine.stats()["device_peak_nbytes"] > 0


@case()
def activation_checkpointing():
    compare("gpt2", change=lambda model: model.gradient_checkpointing_enable())


@case()
def a_model_made_on_the_device():
    plain = plain_model("bert")
    model = plain_model("bert")
    engine = PatrickStarEngine(model, {"pin_memory": False, **TIGHT}, adamw(model.parameters()), device=SIM)
    expected = train("bert", plain, adamw(plain.parameters()), None)
    assert train("bert", model, engine.optimizer, None) == expected
    engine.detach()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {SIM}
    assert_same(model, plain.state_dict())


def _freeze_some(model):
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)


@case()
def a_default_device():
    """What the engine keeps on the host is there, wherever tensors are made by default."""
    with torch.device(SIM):
        checkpoint("torch", False)
        pretrained_and_optimizer_state()


# Optimizers, clipping, scaling


@case("adamw, one by one", True, lambda parameters: torch.optim.AdamW(parameters, lr=LR, foreach=False))
@case("adam, a tensor for rate", True, lambda parameters: torch.optim.Adam(parameters, torch.tensor(LR), fused=True))
@case("sgd", True, lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9))
@case("adafactor", False, lambda parameters: Adafactor(parameters, lr=LR, relative_step=False, scale_parameter=False))
def optimizer(_, tight, make_optimizer):
    """States on the host, or on the device."""
    compare("bert", make_optimizer=make_optimizer, tight=tight)


@case()
def clipping_some_and_by_value():
    """Gradients of some parameters are clipped by their norm, then all by their values."""

    def do(model, optimizer):
        run_backward(model, "gpt2", 0)
        clip = getattr(optimizer, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
        norm = clip(list(model.parameters())[::2], MAX_NORM)
        if hasattr(optimizer, "clip_grad_value_"):
            optimizer.clip_grad_value_(1e-3)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        return norm.item()

    alike("gpt2", do)


# Checkpoints


@case("sharded", False)
@case("torch", True)
def checkpoint(optimizer_format, background):
    """A run goes on from a checkpoint, in another engine with other homes."""
    config = {"optimizer_format": optimizer_format, "background_save": background}
    with tempfile.TemporaryDirectory() as folder:
        model, engine = make_engine("gpt2", config)
        train("gpt2", model, engine.optimizer, None)
        engine.save_checkpoint(folder + "/checkpoint")
        expected = train("gpt2", model, engine.optimizer, None)
        for tight in (True, False):
            again, other = make_engine("gpt2", config, tight=tight)
            engine.detach()  # waits for the files
            other.load_checkpoint(folder + "/checkpoint")
            assert train("gpt2", again, other.optimizer, None) == expected
            assert_same(again, model.state_dict())


@case()
def pretrained_and_optimizer_state():
    """Files of transformers and states of optimizers are those of a plain model."""
    plain, (model, engine) = plain_model("gpt2"), make_engine("gpt2")
    inner = adamw(plain.parameters())
    train("gpt2", plain, inner, None)
    train("gpt2", model, engine.optimizer, None)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert_same(type(model).from_pretrained(folder), plain.state_dict())
    ours, theirs = engine.optimizer.state_dict()["state"], inner.state_dict()["state"]
    for number, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[number][name].cpu(), value.cpu()), (number, name)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    train("gpt2", model, engine.optimizer, None)


@case()
def deferred_weights_from_a_file():
    """Parameters without a value until the engine reads them become parameters with placeholders on the device."""
    plain = plain_model("bert")
    with tempfile.TemporaryDirectory() as folder:
        make_model("bert").save_pretrained(folder)
        with deferred_weights():
            model = type(plain).from_pretrained(folder).train()
        engine = PatrickStarEngine(model, {"pin_memory": False, **TIGHT}, adamw(model.parameters()), device=SIM)
    expected = train("bert", plain, adamw(plain.parameters()), None)
    assert train("bert", model, engine.optimizer, None) == expected


# A live model


def _touch(model):
    """Reads and writes parameters and gradients as training code does."""
    first, second, third = list(model.parameters())[:3]
    second.grad.mul_(0.5)
    third.grad = torch.ones_like(third)
    with torch.no_grad():
        first.mul_(0.9)
        second.add_(torch.full_like(second, 0.01))
        third.data.copy_(first.data.flatten()[: third.numel()].view_as(third))
        first.data[0] = 1.0
    noted = [first.norm(), (second * third.flatten()[0]).sum(), first.grad.abs().sum(), first.detach()[:1].sum()]
    devices = {value.device for value in (*noted, first, first.data, first.grad, torch.zeros_like(first))}
    assert {device.type for device in devices} == {SIM}, devices
    return [value.item() for value in noted]


@case(True)
@case(False)
def reads_and_writes(tight):
    def do(model, optimizer):
        noted = []
        for step in range(2):
            noted += [run_backward(model, "bert", step), *_touch(model)]
            optimizer.step()
            optimizer.zero_grad()
        return noted

    alike("bert", do, tight)


@case()
def copies():
    """Copies are ordinary models on the host, and a value of another device is written to where the chunk is."""
    model, _ = make_engine("bert")
    copied = copy.deepcopy(model)
    assert {parameter.device.type for parameter in copied.parameters()} == {"cpu"}
    assert_same(copied, model.state_dict())
    model.load_state_dict({key: value.to(SIM) + 1 for key, value in copied.state_dict().items()})
    assert_same(model, {key: value + 1 for key, value in copied.state_dict().items()})
    model.load_state_dict(copied.state_dict())
    assert_same(model, copied.state_dict())


@case()
def full_parameters():
    model, engine = make_engine("bert")
    model(**batch_of("bert", 0)).loss.backward()
    first = next(model.parameters())
    before = [id(parameter) for parameter in model.parameters()]
    with engine.full_parameters(with_grads=True):
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert {parameter.grad.device.type for parameter in model.parameters() if parameter.grad is not None} == {"cpu"}
        first.data.mul_(2)
        first.grad.zero_()
        expected = first.detach().clone()
    assert [id(parameter) for parameter in model.parameters()] == before
    assert torch.equal(first.detach().cpu(), expected)
    assert not first.grad.any()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    train("bert", model, engine.optimizer, None)


@case()
def changes_of_the_model():
    """Parameters are frozen, thawed and replaced between steps."""

    def do(model, optimizer):
        noted = train("bert", model, optimizer, None)
        thawed = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        for parameter in thawed:
            parameter.requires_grad_(True)
        torch.manual_seed(3)
        model.classifier = nn.Linear(32, 3)
        model.classifier.to(SIM) if hasattr(model, "patrickstar_engine") else _move(model.classifier, SIM)
        optimizer.add_param_group({"params": [*thawed, *model.classifier.parameters()]})
        return noted + train("bert", model, optimizer, None)

    alike("bert", do, change=_freeze_some)


# Memory


@case()
def out_of_memory():
    """The device refuses an allocation in a step: the micro-batch is repeated."""
    model, engine = make_engine("gpt2", budgeted(2_000_000), tight=False)
    plain = plain_model("gpt2")
    expected = train("gpt2", plain, adamw(plain.parameters()), None, steps=1)
    full, losses = fake_device.MEMORY.capacity, []

    def once():
        torch.manual_seed(0)
        if not losses:
            fake_device.MEMORY.capacity = fake_device.MEMORY.current + 20_000
        losses.append(None)
        try:
            loss = model(**batch_of("gpt2", 0)).loss
            loss.backward()
        finally:
            fake_device.MEMORY.capacity = full
        return loss.item()

    assert [engine.attempt(once)] == expected
    assert len(losses) == 2
    engine.optimizer.step()
    assert_same(model, plain.state_dict())


@case()
def advice():
    """What a step needs is estimated for the device, with tensors that are fakes there."""
    batch = {key: value.to(SIM) for key, value in make_batch("gpt2", size=8).items()}
    config = budgeted(500_000)
    model, engine = make_engine("gpt2", config, tight=False)
    said = ""
    try:
        model(**batch).loss.backward()
    except DeviceMemoryError as error:
        said = str(error)
    engine.detach()
    del model, engine
    enough = int(re.search(r"device_budget of at least (\d+)", said)[1])
    gc.collect()
    model, engine = make_engine("gpt2", config | {"device_budget": enough}, tight=False)
    model(**batch).loss.backward()
    engine.optimizer.step()
    assert enough < 1.5 * engine.stats()["device_total_peak_nbytes"], "no more than is needed"


@case()
def a_parameter_of_another_device():
    """The object stays, with all that it has; a graph of before cannot reach it."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "kept"
    calls = []
    parameter.register_hook(lambda gradient: calls.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("post"))
    graph = (parameter * 2).sum()
    set_raw_data(parameter, torch.full((3,), 5.0, device=SIM))
    assert (parameter.device.type, type(parameter), parameter.note) == (SIM, nn.Parameter, "kept")
    assert parameter.requires_grad
    assert parameter.is_leaf
    (parameter * 2).sum().backward()
    assert calls == ["hook", "post"]
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(EngineError, match="moved to another device after the forward"):
        graph.backward()


# Mistakes that are found


class Mistaken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.row = torch.ones(16)  # no buffer, so it stays on the host

    def forward(self, x):
        return self.linear(x) @ self.row


@case()
def an_operator_of_two_devices_in_a_model():
    model = Mistaken()
    PatrickStarEngine(model, {"pin_memory": False}, adamw(model.parameters()), device=SIM)
    with pytest.raises(fake_device.MixedDevicesError, match=TWO_DEVICES):
        model(torch.ones(2, 16, device=SIM))


def main(path):
    """Runs every case, or those that are named, and writes the errors of those that failed."""
    fake_device.register()
    warnings.simplefilter("ignore")
    results = {}
    for name in sys.argv[2:] or CASES:
        gc.collect()
        torch.manual_seed(0)
        try:
            CASES[name]()
            results[name] = None
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
    pathlib.Path(path).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
