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
from live.both import WIDTH, Block, Tower, assert_same_model, loss_of, make_adamw, make_ids, make_tower, train
from live.both import raises_in_both as raises
from torch import nn
from torch.nn.utils import prune

from hf_patrickstar import PatrickStarEngine, PatrickStarTrainer, PatrickStarTrainingArguments

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


def assert_ordinary_parameter(parameter, name=""):
    assert type(parameter) is nn.Parameter, f"{name} is a {type(parameter)}"
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


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def note_copy(note, copied, steps=2):
    """Notes what a copy is and how it trains on."""
    assert_ordinary(copied)
    note("names", list(copied.state_dict()))
    note("copy", weights_of(copied))
    note("flags", [parameter.requires_grad for parameter in copied.parameters()])
    note("tied", copied.head.weight is copied.embedding.weight)
    note("training", [module.training for module in copied.modules()])
    note("output", copied(make_ids()).detach())
    note("copy trained", train(copied, make_adamw(copied), steps, first=30))
    note("copy after", weights_of(copied))


def through_pickle(thing):
    data = pickle.dumps(thing)
    assert_no_trace(data)
    return pickle.loads(data)


def through_save(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    assert_no_trace(buffer.getvalue())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_dill(thing):
    dill = pytest.importorskip("dill")
    data = dill.dumps(thing, byref=True)
    assert_no_trace(data)
    return dill.loads(data)


WAYS = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "save": through_save, "dill": through_dill}
WAY = pytest.mark.parametrize("way", WAYS)
FEW_WAYS = pytest.mark.parametrize("way", ["deepcopy", "save"])


# The model


@WAY
def test_a_model_copied_before_and_in_the_middle_of_training(both, way):
    def pattern(model, optimizer, note):
        first = WAYS[way](model)
        note("losses", train(model, optimizer, 2))
        note_copy(note, first)
        second = WAYS[way](model)
        note_copy(note, second)
        note("losses afterwards", train(model, optimizer, 2, first=2))

    both(pattern)


@FEW_WAYS
def test_a_model_copied_between_backward_and_step(both, way):
    def pattern(model, optimizer, note):
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            forward = WAYS[way](model)
            loss.backward()
            backward = WAYS[way](model)
            note("norms", [parameter.grad.norm() for parameter in model.parameters()])
            optimizer.step()
            after = WAYS[way](model)
            for copied in (forward, backward, after):
                note_copy(note, copied, steps=1)

    both(pattern)


def test_a_copy_of_a_copy(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = copy.deepcopy(copy.deepcopy(model))
        note_copy(note, pickle.loads(pickle.dumps(copied)))

    both(pattern)


def test_a_copy_and_its_original_do_not_share_values(both):
    def pattern(model, optimizer, note):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.fill_(3.0)
            copied.offset.zero_()
        note("original", weights_of(model))
        note("buffer", model.offset)
        train(model, optimizer)
        note("copy", weights_of(copied))

    both(pattern)


def test_a_copy_that_is_dropped(both):
    def pattern(model, optimizer, note):
        for step in range(2):
            copied = copy.deepcopy(model)
            note("loss", loss_of(copied, 80).detach())
            del copied
            gc.collect()
            note("losses", train(model, optimizer, 1, first=step))

    both(pattern)


@FEW_WAYS
def test_which_parameters_are_trained_is_copied(both, way):
    def make():
        model = make_tower()
        model.blocks[:10].requires_grad_(False)
        model.scale.requires_grad = False
        return model

    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = WAYS[way](model)
        assert_ordinary(copied)
        note("flags", [parameter.requires_grad for parameter in copied.parameters()])
        note("trained", train(copied, make_adamw(copied), 2))
        note("copy", weights_of(copied))

    both(pattern, make=make)


@FEW_WAYS
def test_evaluation_mode_is_copied(both, way):
    def pattern(model, optimizer, note):
        model.eval()
        model.blocks[3].train()
        note_copy(note, WAYS[way](model))
        model.train()

    both(pattern)


class Tied(nn.Module):
    """Shares a whole block, and a weight between layers of different names."""

    def __init__(self):
        super().__init__()
        self.tower = Tower(depth=30)
        self.tower.blocks[7] = self.tower.blocks[3]
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first.weight = self.tower.blocks[5].linear.weight
        self.same = self.tower.scale

    def forward(self, ids):
        return self.tower(ids) + self.first(self.same).sum()


def make_tied():
    torch.manual_seed(0)
    return Tied()


@WAY
def test_what_is_shared_stays_shared(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = WAYS[way](model)
        assert_ordinary(copied)
        note("block", copied.tower.blocks[7] is copied.tower.blocks[3])
        note("weight", copied.first.weight is copied.tower.blocks[5].linear.weight)
        note("parameter", copied.same is copied.tower.scale)
        note("tied", copied.tower.head.weight is copied.tower.embedding.weight)
        note("not the original's", copied.same is model.same)
        note("number", len(list(copied.parameters())))
        note("trained", train(copied, make_adamw(copied), 2))
        note("copy", copied.state_dict())

    both(pattern, make=make_tied)


def _scale_output(module, args, output):
    return output * 1.5


def _count_calls(module, args):
    module.calls += 1


@FEW_WAYS
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_and_attributes_of_the_user_are_copied(both, way, when):
    def equip(model):
        model.blocks[2].register_forward_hook(_scale_output)
        model.blocks[4].calls = 0
        model.blocks[4].register_forward_pre_hook(_count_calls)
        model.settings = {"name": "tower", "numbers": [1, 2]}
        model.blocks[1].mask = torch.arange(3)
        model.history = collections.deque([1.0])
        return model

    def pattern(model, optimizer, note):
        if when == "after":
            equip(model)
        train(model, optimizer)
        copied = WAYS[way](model)
        assert_ordinary(copied, num_hooks=2)
        note("calls", copied.blocks[4].calls)
        note("output", copied(make_ids()).detach())
        note("calls after forward", [copied.blocks[4].calls, model.blocks[4].calls])
        copied.settings["numbers"].append(3)
        note("settings", [copied.settings, model.settings, list(copied.history)])
        note("mask", copied.blocks[1].mask)
        note("trained", train(copied, make_adamw(copied), 2))

    both(pattern, make=(lambda: equip(make_tower())) if when == "before" else make_tower)


def test_a_model_inside_of_another_module(both):
    def pattern(model, optimizer, note):
        wrapper = nn.ModuleDict({"policy": model, "value": nn.Linear(WIDTH, 1)})
        train(model, optimizer)
        copied = copy.deepcopy(wrapper)
        assert_ordinary(copied)
        note_copy(note, copied["policy"])
        again = through_save(wrapper)
        note_copy(note, again["policy"])

    both(pattern)


def test_a_copy_made_under_no_grad_can_be_trained(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        with torch.no_grad():
            copied = copy.deepcopy(model)
        note_copy(note, copied)

    both(pattern)


def test_a_copy_made_by_another_thread(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copies = []
        thread = threading.Thread(target=lambda: copies.extend([copy.deepcopy(model), through_save(model)]))
        thread.start()
        thread.join()
        for copied in copies:
            note_copy(note, copied)

    both(pattern)


def test_a_shallow_copy(both):
    def pattern(model, optimizer, note):
        shallow = copy.copy(model)
        note("the same modules", shallow.blocks is model.blocks)
        train(model, optimizer)
        note("output", shallow(make_ids()).detach())
        note("weights", weights_of(shallow))

    both(pattern)


def test_copies_as_an_ensemble(both):
    def pattern(model, optimizer, note):
        members = nn.ModuleList()
        for step in range(3):
            train(model, optimizer, 1, first=step)
            members.append(copy.deepcopy(model))
        assert_ordinary(members)
        with torch.no_grad():
            note("mean", sum(member(make_ids()) for member in members) / 3)
        parameters, buffers = torch.func.stack_module_state(list(members))
        base = copy.deepcopy(model)

        def output(parameters, buffers, ids):
            return torch.func.functional_call(base, (parameters, buffers), (ids,))

        note("stacked", torch.func.vmap(output, in_dims=(0, 0, None))(parameters, buffers, make_ids()).detach())

    both(pattern)


def test_a_live_model_and_a_copy_stacked(both):
    def pattern(model, optimizer, note):
        copied = copy.deepcopy(model)
        train(model, optimizer)
        parameters, buffers = torch.func.stack_module_state([model, copied])
        note("parameters", {name: value.detach() for name, value in parameters.items()})
        note("buffers", buffers)

    both(pattern)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_copy_in_another_type(both, dtype):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = copy.deepcopy(model).to(dtype)
        assert_ordinary(copied)
        note("copy", copied.state_dict())
        note("output", copied(make_ids()).detach())
        note("original", [str(parameter.dtype) for parameter in model.parameters()])

    both(pattern)


def test_a_copy_that_is_changed(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = copy.deepcopy(model)
        copied.blocks = copied.blocks[::3]
        copied.head = nn.Linear(WIDTH, 7)
        del copied.scale
        copied.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
        nn.utils.parametrizations.weight_norm(copied.blocks[0].linear)
        prune.l1_unstructured(copied.blocks[1].linear, "weight", amount=0.5)
        copied.norm.requires_grad_(False)
        note("output", copied(make_ids()).shape)
        copied(make_ids()).sum().backward()
        note("gradients", [parameter.grad is None for parameter in copied.parameters()])
        note("original", list(model.state_dict()))

    both(pattern)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_copy(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        note("kind", type(quantised.blocks[0].linear).__name__)
        with torch.no_grad():
            note("output", quantised(make_ids()))
        note("original", [type(model.blocks[0].linear) is nn.Linear, model.blocks[0].linear.weight.detach()])

    both(pattern)


def test_a_copy_that_gets_an_engine_of_its_own(both):
    results = []
    for attached in (False, True):
        model = make_tower()
        optimizer = make_adamw(model)
        with_engine = attached and both.config is not None
        if with_engine:
            optimizer = PatrickStarEngine(model, both.config, optimizer).optimizer
        losses = train(model, optimizer, 2)
        copied = copy.deepcopy(model)
        own = make_adamw(copied)
        if with_engine:
            own = PatrickStarEngine(copied, both.config, own).optimizer
        for step in range(2):
            losses += train(copied, own, 1, first=10 + step)
            losses += train(model, optimizer, 1, first=2 + step)
        results.append((model, copied, torch.stack(losses)))
    (plain, its_copy, expected), (ours, our_copy, actual) = results
    assert torch.equal(expected, actual)
    assert_same_model(plain, ours)
    assert_same_model(its_copy, our_copy)


# Parts of the model


@FEW_WAYS
def test_a_submodule_copied(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        for part in (model.blocks[3], model.blocks[3].linear, model.norm):
            copied = WAYS[way](part)
            assert_ordinary(copied)
            note("weights", weights_of(copied))
            note("output", copied(x).detach())
        blocks = WAYS[way](model.blocks)
        assert_ordinary(blocks)
        note("blocks", blocks.state_dict())
        embedding = WAYS[way](model.embedding)
        assert_ordinary(embedding)
        note("embedding", embedding(make_ids()).detach())
        own = torch.optim.SGD(blocks.parameters(), lr=0.1)
        blocks[0](x).pow(2).mean().backward()
        own.step()
        note("trained", weights_of(blocks))

    both(pattern)


def test_new_layers_made_of_live_ones(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        old = model.blocks[2].linear
        cloned = nn.Linear(WIDTH, WIDTH)
        cloned.weight = nn.Parameter(old.weight.clone())
        cloned.bias = nn.Parameter(old.bias.detach().clone())
        assigned = nn.Linear(WIDTH, WIDTH)
        assigned.weight.data = old.weight.data.clone()
        assigned.bias.data.copy_(old.bias.data)
        looked_up = nn.Embedding.from_pretrained(model.embedding.weight.detach().clone(), freeze=False)
        wider = nn.Embedding(30, WIDTH)
        with torch.no_grad():
            wider.weight[:24] = model.embedding.weight
            wider.weight[24:] = model.embedding.weight.mean(dim=0)
        clones = nn.ModuleList([copy.deepcopy(model.blocks[0]) for _ in range(3)])
        for name, layer in {"cloned": cloned, "assigned": assigned, "table": looked_up, "wider": wider}.items():
            note(name, layer.state_dict())
            assert_ordinary(layer)
        note("clones", clones.state_dict())
        train(model, optimizer, 1, first=1)
        note("unchanged", [cloned.weight, assigned.weight, looked_up.weight])

    both(pattern)


def test_a_student_made_of_every_second_layer(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        student = Tower(depth=len(model.blocks) // 2)
        student.embedding.load_state_dict(model.embedding.state_dict())
        student.norm.load_state_dict(model.norm.state_dict())
        student.scale.data = model.scale.data.clone()
        for place, block in enumerate(student.blocks):
            block.load_state_dict(model.blocks[2 * place].state_dict())
        note("student", student.state_dict())
        note("losses", train(student, make_adamw(student), 2))

    both(pattern)


@FEW_WAYS
def test_parameters_copied(both, way):
    def make():
        model = make_tower()
        model.norm.bias.requires_grad_(False)
        return model

    def pattern(model, optimizer, note):
        train(model, optimizer)
        one = WAYS[way](model.blocks[9].linear.weight)
        several = WAYS[way](list(model.parameters()))
        named = WAYS[way](dict(model.named_parameters()))
        listed = WAYS[way](nn.ParameterList([model.scale, model.norm.bias]))
        for parameter in (one, *several, *named.values(), *listed):
            assert_ordinary_parameter(parameter)
        note("one", one)
        note("several", several)
        note("named", named)
        note("listed", list(listed))
        with torch.no_grad():
            one.zero_()
            several[0].zero_()
        note("originals", [model.blocks[9].linear.weight, model.embedding.weight])

    both(pattern, make=make)


def test_copies_of_a_parameter_by_its_methods(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        weight = model.blocks[9].linear.weight
        copies = [
            weight.clone(),
            weight.detach().clone(),
            weight.data.clone(),
            weight.detach().cpu().clone(),
            weight.to(torch.float32, copy=True),
            torch.clone(weight),
            torch.empty_like(weight).copy_(weight),
            weight.new_tensor(weight.detach().tolist()),
            nn.Parameter(weight.detach().clone()),
            torch.from_numpy(weight.detach().numpy().copy()),
            copy.deepcopy(weight.data),
            copy.deepcopy(weight.detach()),
        ]
        note("copies", copies)
        note("types", [type(each).__name__ for each in copies])
        with raises(RuntimeError):
            copy.deepcopy(weight * 2)
        train(model, optimizer, 1, first=1)
        note("unchanged", copies)

    both(pattern)


def test_attributes_of_parameters(both):
    def pattern(model, optimizer, note):
        model.scale.no_weight_decay = True
        model.embedding.weight.tags = ["input", "output"]
        train(model, optimizer)
        note("live", [model.scale.no_weight_decay, model.head.weight.tags])
        copied = copy.deepcopy(model)
        note("deepcopy", [hasattr(copied.scale, "no_weight_decay"), hasattr(copied.head.weight, "tags")])
        loaded = through_pickle(model)
        note("pickle", [loaded.scale.no_weight_decay, loaded.head.weight.tags, vars(loaded.norm.bias)])
        shallow = copy.copy(model.scale)
        note("shallow", [shallow.no_weight_decay, shallow.detach().clone()])

    both(pattern)


class Marked(nn.Parameter):
    """A user's own class of parameters."""

    def doubled(self):
        return self.detach() * 2


def test_a_class_of_parameters_of_the_users_own(both):
    def make():
        model = make_tower()
        model.scale = Marked(torch.full((WIDTH,), 0.5))
        return model

    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("live", [isinstance(model.scale, Marked), model.scale.doubled()])
        copied = copy.deepcopy(model)
        note("class", type(copied.scale).__name__)
        note("doubled", copied.scale.doubled())

    both(pattern, make=make)


def test_gradients_copied(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss_of(model).backward()
        copied = copy.deepcopy([parameter.grad for parameter in model.parameters()])
        loaded = through_save({name: parameter.grad for name, parameter in model.named_parameters()})
        note("parameter", copy.deepcopy(model.scale).grad)
        note("pickled", through_pickle(model.scale.grad))
        optimizer.step()
        optimizer.zero_grad()
        note("copied", copied)
        note("loaded", loaded)

    both(pattern)


def test_files_of_one_tensor_hold_no_more_than_that(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        loss_of(model).backward()
        for name in ("blocks.3.linear.bias", "scale", "embedding.weight"):
            parameter = model.get_parameter(name)
            for tensor in (parameter, parameter.grad, parameter.data, parameter.detach(), [parameter]):
                buffer = io.BytesIO()
                torch.save(tensor, buffer)
                nbytes = parameter.numel() * 4
                note(name, [len(buffer.getvalue()) < nbytes + 3000, len(pickle.dumps(tensor)) < nbytes + 1500])

    both(pattern)


# State dicts


def test_a_state_dict_copied(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = copy.deepcopy(model.state_dict())
        cloned = {name: value.clone() for name, value in model.state_dict().items()}
        on_host = collections.OrderedDict((name, value.cpu().clone()) for name, value in model.state_dict().items())
        arrays = {name: value.cpu().numpy().copy() for name, value in model.state_dict().items()}
        note("losses", train(model, optimizer, 2, first=1))
        note("copied", copied)
        note("cloned", cloned)
        note("on host", on_host)
        note("arrays", arrays)
        note("type", [type(copied).__name__, copied._metadata == model.state_dict()._metadata])

    both(pattern)


def test_the_best_weights_kept_and_loaded_back(both):
    def pattern(model, optimizer, note):
        best, lowest = None, float("inf")
        for step in range(4):
            train(model, optimizer, 1, first=step)
            with torch.no_grad():
                loss = loss_of(model, 90).item()
            note("loss", loss)
            if loss < lowest and step < 2:
                lowest = loss
                best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        note("loaded", str(model.load_state_dict(best[0])))
        optimizer.load_state_dict(best[1])
        note("losses", train(model, optimizer, 2, first=4))

    both(pattern)


def test_weights_written_through_the_state_dict(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        state = model.state_dict()
        state["scale"].copy_(torch.arange(WIDTH).float() / WIDTH)
        state["blocks.2.linear.weight"].mul_(0.5)
        state["head.weight"][3] = 0.25
        with torch.no_grad():
            model.state_dict()["norm.bias"].add_(1.0)
            model.state_dict(keep_vars=True)["norm.weight"].sub_(0.5)
        note("weights", weights_of(model))
        note("losses", train(model, optimizer, 2))

    both(pattern)


def test_a_state_dict_shows_the_training_that_follows(both):
    def pattern(model, optimizer, note):
        state = model.state_dict()
        train(model, optimizer, 2)
        note("now", state)

    both(pattern)


def test_a_fresh_model_loaded_from_the_state_dict(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for how in range(4):
            fresh = make_tower(seed=9)
            if how == 0:
                note("keys", str(fresh.load_state_dict(model.state_dict())))
            elif how == 1:
                for theirs, ours in zip(fresh.parameters(), model.parameters(), strict=True):
                    theirs.data.copy_(ours.data)
            elif how == 2:
                with torch.no_grad():
                    torch._foreach_copy_(list(fresh.parameters()), list(model.parameters()))
            else:
                own = fresh.state_dict()
                own.update({name: value for name, value in model.state_dict().items() if "norm" not in name})
                fresh.load_state_dict(own)
            note("fresh", fresh.state_dict())
            note("losses", train(fresh, make_adamw(fresh), 1))

    both(pattern)


def test_a_state_dict_in_a_file(both, tmp_path):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        path = tmp_path / "model.pt"
        torch.save(model.state_dict(), path)
        assert_no_trace(path.read_bytes())
        state = torch.load(path, weights_only=True)
        note("state", state)
        note("tied", state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr())
        note("size", path.stat().st_size < 1.25 * 4 * sum(p.numel() for p in model.parameters()) + 300 * len(state))
        fresh = make_tower(seed=9)
        fresh.load_state_dict(state)
        note_copy(note, fresh)
        mapped = torch.load(path, weights_only=True, mmap=True)
        note("mapped", mapped)
        other = make_tower(seed=9)
        other.load_state_dict(mapped, assign=True)
        note("assigned", other.state_dict())

    both(pattern)


def test_a_checkpoint_of_an_ordinary_loop(both, tmp_path):
    def pattern(model, optimizer, note):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            scheduler.step()
        path = tmp_path / "checkpoint.pt"
        checkpoint = {
            "step": 3,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(checkpoint, path)
        assert_no_trace(path.read_bytes())
        loaded = torch.load(path, weights_only=True)
        fresh = make_tower(seed=9)
        own = make_adamw(fresh)
        own_scheduler = torch.optim.lr_scheduler.StepLR(own, 2, 0.5)
        fresh.load_state_dict(loaded["model"])
        own.load_state_dict(loaded["optimizer"])
        own_scheduler.load_state_dict(loaded["scheduler"])
        note("resumed", train(fresh, own, 2, first=3))
        note("rate", own_scheduler.get_last_lr())
        note("went on", train(model, optimizer, 2, first=3))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        note("repeated", train(model, optimizer, 2, first=3))

    both(pattern)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_a_state_dict_sent_to_another_process(both, strategy):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        try:
            sent = ForkingPickler.dumps({name: value.clone() for name, value in model.blocks[0].state_dict().items()})
            received = pickle.loads(sent)
            note("received", received)
            note("whole", pickle.loads(ForkingPickler.dumps(copy.deepcopy(model.norm))).state_dict())
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
            resource_sharer.stop()
        note("arrays", through_pickle({name: value.cpu().numpy() for name, value in model.state_dict().items()}))

    both(pattern)


# Files


def test_a_model_in_a_file(both, tmp_path):
    def pattern(model, optimizer, note):
        for step in range(2):
            train(model, optimizer, 1, first=step)
            torch.save(model, tmp_path / "model.pt")
            copied = torch.load(tmp_path / "model.pt", weights_only=False)
            note_copy(note, copied)
        torch.save(model, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        note_copy(note, torch.load(tmp_path / "old.pt", weights_only=False, map_location="cpu"))

    both(pattern)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_model_pickled_with_other_protocols(both, protocol):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        data = pickle.dumps(model, protocol=protocol)
        assert_no_trace(data)
        note_copy(note, pickle.loads(data))

    both(pattern)


# Optimizers and whole setups


@FEW_WAYS
def test_an_optimizer_copied_alone(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        copied = WAYS[way](optimizer)
        assert type(copied) is torch.optim.AdamW
        parameters = copied.param_groups[0]["params"]
        for parameter in parameters:
            assert_ordinary_parameter(parameter)
        note("parameters", parameters)
        note("states", [copied.state[parameter] for parameter in parameters])
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        copied.step()
        note("after a step", parameters)

    both(pattern)


def test_the_state_of_an_optimizer_copied(both):
    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        copies = [way(optimizer.state_dict()) for way in (copy.deepcopy, through_pickle, through_save)]
        note("states", copies)
        for state in copies:
            copied = copy.deepcopy(model)
            own = make_adamw(copied)
            own.load_state_dict(state)
            note("losses", train(copied, own, 2, first=2))
        note("the original's", train(model, optimizer, 2, first=2))

    both(pattern)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_model_optimizer_and_scheduler_copied_together(both, way):
    def pattern(model, optimizer, note):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        for step in range(3):
            train(model, optimizer, 1, first=step)
            scheduler.step()
        setup = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}
        copied = WAYS[way](setup)
        assert_ordinary(copied["model"])
        assert type(copied["optimizer"]) is torch.optim.AdamW
        note("scheduler's", copied["scheduler"].optimizer is copied["optimizer"])
        held = [parameter for group in copied["optimizer"].param_groups for parameter in group["params"]]
        theirs = list(copied["model"].parameters())
        note("held", [left is right for left, right in zip(held, theirs, strict=True)])
        for each in (copied, setup):
            for step in range(3, 6):
                note("loss", train(each["model"], each["optimizer"], 1, first=step))
                each["scheduler"].step()
                note("rate", each["scheduler"].get_last_lr())
        note("copy", weights_of(copied["model"]))

    both(pattern)


class Learner:
    """What scripts keep everything in."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.target = copy.deepcopy(model).requires_grad_(False)
        self.parameters = list(model.parameters())
        self.best = None
        self.steps = 0

    def learn(self, steps):
        losses = train(self.model, self.optimizer, steps, first=self.steps)
        self.steps += steps
        self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            for target, parameter in zip(self.target.parameters(), self.parameters, strict=True):
                target.lerp_(parameter, 0.1)
        return losses


@FEW_WAYS
def test_an_object_that_holds_everything_copied(both, way):
    def pattern(model, optimizer, note):
        learner = Learner(model, optimizer)
        learner.learn(2)
        copied = WAYS[way](learner)
        assert_ordinary(copied.model)
        assert_ordinary(copied.target)
        assert type(copied.optimizer) is torch.optim.AdamW
        note("parameters", [a is b for a, b in zip(copied.parameters, copied.model.parameters(), strict=True)])
        note("best", copied.best)
        note("copy", copied.learn(2))
        note("target", weights_of(copied.target))
        note("original", learner.learn(2))

    both(pattern)


def test_groups_of_an_optimizer_copied(both):
    def make_optimizer(model):
        groups = [{"params": list(model.blocks.parameters()), "lr": 1e-2, "name": "blocks"}]
        groups.append({"params": [model.scale, model.embedding.weight], "weight_decay": 0.0, "name": "others"})
        return torch.optim.AdamW(groups, lr=1e-3)

    def pattern(model, optimizer, note):
        train(model, optimizer, 2)
        groups = copy.deepcopy(optimizer.param_groups)
        for group in groups:
            for parameter in group["params"]:
                assert_ordinary_parameter(parameter)
            note(group["name"], [group["lr"], group["weight_decay"], group["params"]])
        own = torch.optim.AdamW(groups)
        note("groups", len(own.param_groups))
        setup = through_pickle([model, optimizer])
        note("names", [group["name"] for group in setup[1].param_groups])
        note("losses", train(*setup, 2, first=2))

    both(pattern, make_optimizer=make_optimizer)


# Traced and exported


def make_small_tower():
    """Tracing and exporting take their time by the layer."""
    torch.manual_seed(0)
    return Tower(depth=8)


@pytest.mark.filterwarnings("ignore")
def test_a_model_traced_in_the_middle_of_training(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        for step in range(2):
            model.eval()
            traced = torch.jit.trace(model, make_ids(step))
            note("traced", traced(make_ids(step)).detach())
            note("another batch", traced(make_ids(step + 5)).detach())
            with torch.no_grad():
                note("the model", model(make_ids(step)))
            buffer = io.BytesIO()
            torch.jit.save(torch.jit.freeze(traced), buffer)
            buffer.seek(0)
            note("saved", torch.jit.load(buffer)(make_ids(step)).detach())
            model.train()
            note("losses", train(model, optimizer, 1, first=step))

    both(pattern, make=make_small_tower)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_submodule(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        traced = torch.jit.trace(model.blocks[4], x)
        note("traced", traced(x).detach())
        note("weights", [parameter.detach() for parameter in traced.parameters()])

    both(pattern)


@pytest.mark.filterwarnings("ignore")
def test_a_model_exported_in_the_middle_of_training(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        model.eval()
        exported = torch.export.export(model, (make_ids(),))
        note("exported", exported.module()(make_ids()).detach())
        note("weights", {name: value.detach() for name, value in exported.state_dict.items()})
        buffer = io.BytesIO()
        torch.export.save(exported, buffer)
        buffer.seek(0)
        note("saved", torch.export.load(buffer).module()(make_ids()).detach())
        model.train()
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern, make=make_small_tower)


def test_a_model_traced_symbolically(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        traced = torch.fx.symbolic_trace(model)
        note("kinds", collections.Counter(node.op for node in traced.graph.nodes))
        note("traced", traced(make_ids()).detach())
        copied = copy.deepcopy(traced)
        note("copy", copied(make_ids()).detach())
        note("weights", copied.state_dict())
        note("losses", train(model, optimizer, 1, first=1))

    both(pattern)


def test_training_through_a_symbolic_trace(both):
    def pattern(model, optimizer, note):
        traced = torch.fx.symbolic_trace(model)
        note("losses", train(traced, optimizer, 2))

    both(pattern)


# Hugging Face


def settings_of(both):
    """Room for the largest working set of the tiny GPT-2, where the budget is small."""
    from trainers import tight

    if both.config is None or "chunk_budget" not in both.config:
        return {}
    return {"chunk_numel": "auto", **tight("gpt2")}


def make_gpt2():
    from models import make_model

    return make_model("gpt2")


def gpt2_loss(model, step=0):
    from models import make_batch

    return model(**make_batch("gpt2", seed=step)).loss


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{place}": place for place in range(3, 96)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def test_a_pipeline_of_a_live_model(both, tokenizer):
    from transformers import pipeline

    def pattern(model, optimizer, note):
        for step in range(2):
            train(model, optimizer, 1, first=step, loss=gpt2_loss)
            generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
            note("generated", generate("w3 w4 w5", max_new_tokens=4, do_sample=False, return_full_text=False))
            features = pipeline("feature-extraction", model=model.transformer, tokenizer=tokenizer)
            note("features", torch.tensor(features("w3 w4 w5")))
            model.train()

    both(pattern, make=make_gpt2, loss=gpt2_loss, settings=settings_of(both))


@FEW_WAYS
def test_a_hugging_face_model_copied(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer, 1, loss=gpt2_loss)
        copied = WAYS[way](model)
        assert_ordinary(copied)
        note("tied", copied.lm_head.weight is copied.transformer.wte.weight)
        note("config", copied.config.to_dict() == model.config.to_dict())
        note("copy", copied.state_dict())
        ids = torch.tensor([[3, 4, 5]])
        note("generated", copied.eval().generate(ids, max_new_tokens=4, do_sample=False))
        copied.train()
        note("trained", train(copied, make_adamw(copied), 2, loss=gpt2_loss))
        note("generated by the original", model.eval().generate(ids, max_new_tokens=4, do_sample=False))
        model.train()

    both(pattern, make=make_gpt2, loss=gpt2_loss, settings=settings_of(both))


def test_a_hugging_face_model_saved_and_loaded(both, tmp_path):
    from transformers import AutoModelForCausalLM

    def pattern(model, optimizer, note):
        train(model, optimizer, 1, loss=gpt2_loss)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        note("loaded", loaded.state_dict())
        fresh = type(model)(copy.deepcopy(model.config))
        fresh.load_state_dict(model.state_dict())
        note("losses", train(fresh, make_adamw(fresh), 2, loss=gpt2_loss))
        fresh = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
        note("from the state dict", fresh.state_dict())

    both(pattern, make=make_gpt2, loss=gpt2_loss, settings=settings_of(both))


def _trainers(both, tmp_path):
    """The stock Trainer after training, and ours."""
    from trainers import make_trainer, run
    from transformers import Trainer, TrainingArguments

    stock = make_trainer(Trainer, TrainingArguments, tmp_path / "stock")
    if both.config is None:
        ours = make_trainer(Trainer, TrainingArguments, tmp_path / "ours")
    else:
        config = {**both.config, **settings_of(both)}
        config = {key: value for key, value in config.items() if key != "chunk_numel"}
        kwargs = {"patrickstar_config": config}
        ours = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path / "ours", **kwargs)
    for trainer in (stock, ours):
        run(trainer)
    return stock, ours


def _assert_trains_as(stock, ours):
    from trainers import assert_same_weights, logged, run

    assert_same_weights(stock.model, ours.model)
    expected, actual = stock.evaluate(), ours.evaluate()
    assert expected["eval_loss"] == actual["eval_loss"]
    for trainer in (stock, ours):
        run(trainer)
    assert logged(stock, "loss") == logged(ours, "loss")
    assert_same_weights(stock.model, ours.model)


def test_a_trainer_copied_after_training(both, tmp_path):
    """A copy of the stock Trainer trains nothing: its scheduler has put a ``step`` of the original on its optimizer.

    So the copy of ours is compared with the stock Trainer itself.
    """
    from trainers import assert_same_weights, logged, run

    stock, ours = _trainers(both, tmp_path)
    copied = copy.deepcopy(ours)
    assert_ordinary(copied.model)
    assert copied.model is not ours.model
    assert copied.model_wrapped is copied.model
    assert copied.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]
    before = copy.deepcopy(copied.model.state_dict())
    _assert_trains_as(stock, ours)
    for name, value in copied.model.state_dict().items():
        assert torch.equal(value, before[name])
    if both.config is not None:
        run(copied)
        assert logged(copied, "loss") == logged(stock, "loss")
        assert_same_weights(stock.model, copied.model)


def test_a_trainer_pickled_after_training(both, tmp_path):
    """Accelerate keeps weak references, which cannot be pickled: they, and the optimizer that it wrapped, go first."""
    trainers = _trainers(both, tmp_path)
    copies = []
    for trainer in trainers:
        optimizer, scheduler, handler = trainer.optimizer, trainer.lr_scheduler, trainer.callback_handler
        trainer.accelerator.gradient_state.dataloader_references = [None]
        trainer.optimizer = trainer.lr_scheduler = None
        handler.optimizer = handler.lr_scheduler = handler.train_dataloader = None
        kept = trainer.accelerator._optimizers, trainer.accelerator._schedulers, trainer.accelerator._dataloaders
        trainer.accelerator._optimizers, trainer.accelerator._schedulers = [], []
        trainer.accelerator._dataloaders = []
        copies.append(pickle.loads(pickle.dumps(trainer)))
        trainer.accelerator._optimizers, trainer.accelerator._schedulers, trainer.accelerator._dataloaders = kept
        trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    assert_ordinary(copies[1].model)
    _assert_trains_as(*copies)


def test_the_model_of_a_trainer_pickled_after_training(both, tmp_path):
    from trainers import assert_same_weights

    stock, ours = _trainers(both, tmp_path)
    for way in (copy.deepcopy, through_pickle, through_save):
        copied = way(ours.model)
        assert_ordinary(copied)
        assert_same_weights(stock.model, copied)
    _assert_trains_as(stock, ours)


def test_a_model_copied_by_a_callback_in_the_middle_of_training(both, tmp_path):
    from trainers import assert_same_weights
    from trainers import train as run_trainer
    from transformers import TrainerCallback

    class Copies(TrainerCallback):
        def __init__(self):
            self.copies = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.copies.append(copy.deepcopy(model))
            self.copies.append(through_save(model))

    runs = []
    for place in ("stock", "ours"):
        config = None
        if place == "ours" and both.config is not None:
            config = {**both.config, **settings_of(both)}
            config["chunk_numel"] = "auto"
        callback = Copies()
        trainer, recorder = run_trainer("gpt2", tmp_path / place, config, callbacks=[callback], max_steps=3)
        runs.append((trainer.model, recorder.losses, callback.copies))
    (plain, expected, copies), (live, actual, our_copies) = runs
    assert expected == actual
    assert_same_weights(plain, live)
    for left, right in zip(copies, our_copies, strict=True):
        assert_ordinary(right)
        assert_same_weights(left, right)


# What is made of blocks


class Shuffled(nn.Module):
    """Holds its layers in a plain list beside the registered ones, and refers to one by a second name."""

    def __init__(self):
        super().__init__()
        self.tower = Tower(depth=30)
        self.extra = Block()
        self.order = [self.extra, *self.tower.blocks[:2]]
        self.weights = [self.extra.linear.weight, self.tower.scale]

    def forward(self, ids):
        x = self.tower.embedding(ids)
        for block in self.order:
            x = block(x)
        penalty = sum(weight.pow(2).mean() for weight in self.weights)
        return self.tower(ids) + self.tower.head(x) + penalty


def make_shuffled():
    torch.manual_seed(0)
    return Shuffled()


@FEW_WAYS
def test_lists_of_layers_and_parameters_inside_a_model_are_copied_with_it(both, way):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        copied = WAYS[way](model)
        assert_ordinary(copied)
        note("layers", [copied.order[0] is copied.extra, copied.order[1] is copied.tower.blocks[0]])
        note("weights", [copied.weights[0] is copied.extra.linear.weight, copied.weights[1] is copied.tower.scale])
        note("trained", train(copied, make_adamw(copied), 2))
        note("copy", copied.state_dict())

    both(pattern, make=make_shuffled)
