"""Copies of a live model, in memory and in files: ordinary torch objects, and the original goes on training."""

import collections
import copy
import gc
import io
import pickle
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # registers how tensors are sent to other processes
from support.live import WIDTH, Block, Tower, live, loss_of, make_adamw, make_ids, make_tower, train
from torch import nn

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]


def _is_ours(thing):
    """Whether a value, a class or a function comes from the package."""
    thing = getattr(thing, "func", thing)
    thing = getattr(thing, "__self__", thing)
    return any(str(getattr(each, "__module__", "")).startswith("hf_patrickstar") for each in (thing, type(thing)))


def assert_ordinary(module, num_hooks=0):
    """No trace of an engine: torch's classes, hooks of the user only, memory of its own on the host."""
    found = 0
    for name, each in module.named_modules():
        assert not _is_ours(each), f"{name} is a {type(each)}"
        assert type(each._parameters) is dict, name
        assert type(each._buffers) is dict, name
        for key, value in vars(each).items():
            assert "patrickstar" not in key, f"{name}.{key}"
            assert not _is_ours(value), f"{name}.{key} is {value}"
        assert "forward" not in vars(each), name
        for kind in HOOKS:
            for hook in vars(each)[kind].values():
                assert not _is_ours(hook), f"{name}: {hook}"
                found += 1
    assert found == num_hooks, f"{found} hooks"
    for name, parameter in module.named_parameters():
        assert_ordinary_parameter(parameter, name)
    for name, buffer in module.named_buffers():
        assert type(buffer) is torch.Tensor, name
        assert buffer.device.type == "cpu", name


def assert_ordinary_parameter(parameter, name="", cls=nn.Parameter):
    assert type(parameter) is cls or type(parameter) is Marked, f"{name} is a {type(parameter)}"
    assert parameter.device.type == "cpu", name
    assert parameter.is_leaf, name
    assert parameter.grad is None, name
    assert not parameter._backward_hooks, name
    assert not parameter._post_accumulate_grad_hooks, name
    assert not any("patrickstar" in key or _is_ours(value) for key, value in vars(parameter).items()), name
    assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name
    assert bool(torch.isfinite(parameter).all()), name


def assert_no_trace(data):
    """The bytes can be read where the package is not installed."""
    assert b"patrickstar" not in data


def through_pickle(thing, **settings):
    data = pickle.dumps(thing, **settings)
    assert_no_trace(data)
    return pickle.loads(data)


def through_save(thing, **settings):
    buffer = io.BytesIO()
    torch.save(thing, buffer, **settings)
    assert_no_trace(buffer.getvalue())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_dill(thing):
    dill = pytest.importorskip("dill")
    data = dill.dumps(thing, byref=True)
    assert_no_trace(data)
    return dill.loads(data)


def through_another_thread(thing):
    copies = []
    thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(thing)))
    thread.start()
    thread.join()
    return copies[0]


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "save": through_save,
    "dill": through_dill,
    "thread": through_another_thread,
    "old pickle": lambda thing: through_pickle(thing, protocol=2),
    "old file": lambda thing: through_save(thing, _use_new_zipfile_serialization=False),
}


# The model


class Marked(nn.Parameter):
    """A user's own class of parameters."""

    def doubled(self):
        return self.detach() * 2


def _scale_output(module, args, output):
    return output * 1.5


def _count_calls(module, args):
    module.calls += 1


class Equipped(Tower):
    """Shared blocks and weights, lists of them, hooks, attributes, frozen parts, a class of parameters of its own."""

    def __init__(self):
        super().__init__()
        self.blocks[7] = self.blocks[3]
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first.weight = self.blocks[5].linear.weight
        self.same = self.scale
        self.extra = Block()
        self.order = [self.extra, *self.blocks[:2]]
        self.weights = [self.extra.linear.weight, self.scale]
        self.blocks[:2].requires_grad_(False)
        self.norm.bias = Marked(torch.full((WIDTH,), 0.5))
        self.norm.bias.requires_grad_(False)
        self.scale.no_weight_decay = True
        self.embedding.weight.tags = ["input", "output"]

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.order:
            x = block(x)
        penalty = sum(weight.pow(2).mean() for weight in self.weights)
        return super().forward(ids) + self.head(x) + penalty + self.first(self.same).sum()

    def equip(self):
        self.blocks[2].register_forward_hook(_scale_output)
        self.blocks[4].calls = 0
        self.blocks[4].register_forward_pre_hook(_count_calls)
        self.settings = {"name": "tower", "numbers": [1, 2]}
        self.blocks[1].mask = torch.arange(3)
        self.history = collections.deque([1.0])
        return self


@pytest.mark.parametrize(("way", "before"), [(way, n % 2 == 0) for n, way in enumerate(WAYS)])
def test_a_model_copied_at_any_time(both, way, before):
    def make():
        torch.manual_seed(0)
        model = Equipped()
        return model.equip() if before else model

    def pattern(model, optimizer, note):
        copies = [WAYS[way](model)] if before else []
        if not before:
            model.equip()
        train(model, optimizer)
        model.eval()
        model.blocks[3].train()
        copies.append(WAYS[way](model))
        model.train()
        loss = loss_of(model, 1)
        copies.append(WAYS[way](model))
        loss.backward()
        copies.append(WAYS[way](model))
        optimizer.step()
        optimizer.zero_grad()
        for copied in copies:
            assert_ordinary(copied, num_hooks=2)
            note(
                "shared", [copied.blocks[7] is copied.blocks[3], copied.same is copied.scale, copied.same is model.same]
            )
            note("tied", [copied.first.weight is copied.blocks[5].linear.weight, len(list(copied.parameters()))])
            note("tied", [copied.head.weight is copied.embedding.weight, copied.order[1] is copied.blocks[0]])
            note("list", [copied.weights[0] is copied.extra.linear.weight, copied.weights[1] is copied.scale])
            note("flags", [[p.requires_grad for p in copied.parameters()], [m.training for m in copied.modules()]])
            note("attributes", [hasattr(copied.scale, "no_weight_decay"), hasattr(copied.head.weight, "tags")])
            note("class", type(copied.norm.bias).__name__)
            note("values", copied.state_dict())
            note("output", [copied(make_ids()).detach(), copied.blocks[4].calls, model.blocks[4].calls])
            copied.settings["numbers"].append(3)
            note("settings", [copied.settings, model.settings, list(copied.history), copied.blocks[1].mask])
        with torch.no_grad():
            for parameter in copies[-1].parameters():
                parameter.fill_(3.0)
        note("original", [model.state_dict(), model.norm.bias.doubled()])
        note("copy trained", [train(copies[0], make_adamw(copies[0])), copies[0].state_dict()])
        copies.clear()
        gc.collect()

    both(pattern, make=make)


# State dicts


@live
def test_state_dicts_copied_kept_and_loaded(model, optimizer, note, tmp_path):
    train(model, optimizer)
    best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    arrays = {name: value.cpu().numpy().copy() for name, value in model.state_dict().items()}
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    assert_no_trace(path.read_bytes())
    note("losses", train(model, optimizer, 2, first=1))
    note("copied", [*best, arrays, best[0]._metadata == model.state_dict()._metadata])
    for settings in ({"mmap": True}, {}):
        state = torch.load(path, weights_only=True, **settings)
        note("tied", state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr())
        fresh = make_tower(seed=9)
        fresh.load_state_dict(state, assign=bool(settings))
        note("fresh", fresh.state_dict())
    note("size", path.stat().st_size < 1.25 * 4 * sum(p.numel() for p in model.parameters()) + 300 * len(state))
    assert_ordinary(fresh)
    with torch.no_grad():
        torch._foreach_copy_(list(fresh.parameters()), list(model.parameters()))
    note("fresh", [fresh.state_dict(), train(fresh, make_adamw(fresh), 1)])
    note("loaded", str(model.load_state_dict(best[0])))
    optimizer.load_state_dict(best[1])
    note("losses", train(model, optimizer, 2, first=4))


@live
def test_a_state_dict_sent_to_another_process(model, optimizer, note):
    train(model, optimizer)
    try:
        sent = ForkingPickler.dumps({name: value.clone() for name, value in model.blocks[0].state_dict().items()})
        note("received", pickle.loads(sent))
        note("whole", pickle.loads(ForkingPickler.dumps(copy.deepcopy(model.norm))).state_dict())
    finally:
        resource_sharer.stop()


class OwnCopy(nn.Module):
    """Copies its parts itself, as some modules do."""

    def __init__(self, weight):
        super().__init__()
        self.weight = self.same = weight

    def __deepcopy__(self, memo):
        made = OwnCopy(self.weight.__deepcopy__(memo))
        made.same = self.same.__deepcopy__(memo)
        return made


@live
def test_a_module_that_copies_its_parameters_itself(model, optimizer, note):
    model.own = OwnCopy(model.norm.weight)
    train(model, optimizer)
    copied = copy.deepcopy(model)
    note("same", copied.own.weight is copied.own.same is copied.norm.weight)
    note("copied", copied.state_dict())
    note("losses", train(model, optimizer, 1, first=2))


# Traced and exported


@pytest.mark.filterwarnings("ignore")
@live
def test_captures_in_the_middle_of_training(model, optimizer, note):
    """``torch.jit``, ``torch.export`` and ``torch.fx`` get values; what they made does not follow the training."""
    for step in range(2):
        train(model, optimizer, first=step)
        model.eval()
        traced = torch.jit.trace(model, make_ids(step))
        note("traced", [traced(make_ids(step)).detach(), traced(make_ids(step + 5)).detach()])
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.freeze(traced), buffer)
        buffer.seek(0)
        note("saved", torch.jit.load(buffer)(make_ids(step)).detach())
        note("part", [p.detach() for p in torch.jit.trace(model.blocks[4], torch.ones(2, WIDTH)).parameters()])
        model.train()
    model.eval()
    exported = torch.export.export(model, (make_ids(),))
    note("exported", [exported.module()(make_ids()).detach(), dict(exported.state_dict.items())])
    model.train()
    symbolic = torch.fx.symbolic_trace(model)
    note("symbolic", [collections.Counter(node.op for node in symbolic.graph.nodes), symbolic(make_ids()).detach()])
    note("copied", copy.deepcopy(symbolic).state_dict())
    note("losses", train(symbolic, optimizer, 2, first=2))
