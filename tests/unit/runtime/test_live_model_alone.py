"""LiveModel with a manager and weights that write down what they are told: what users call beside the forward."""

import contextlib
import copy
import pickle
import types

import pytest
import torch
from torch import nn
from unit.runtime.parts import Fake

from hf_patrickstar.errors import EngineError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.runtime.captures import Capture
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.frames import Frame, Frames
from hf_patrickstar.runtime.live_model import LiveModel
from hf_patrickstar.runtime.live_tensor import LiveServices
from hf_patrickstar.runtime.together import Together
from hf_patrickstar.states import Stage


class Weights:
    """In place of what reads full parameters: each reading is another tensor.

    Attributes:
        saved: What is read of a parameter while the model is saved.
    """

    def __init__(self, told, needs_all):
        self.told, self.needs_all, self.saved = told, needs_all, {}

    def hand_out(self, tensor):
        self.told.append(("hand out", tensor.spec.name))
        return torch.full(tensor.spec.shape, 7.0)

    def read(self, tensor):
        self.told.append(("read", tensor.spec.name))

    def deferred(self, tensor):
        return self.saved.get(tensor.spec.name)

    @contextlib.contextmanager
    def streamed(self, *, is_reader):
        self.told.append(("begin to stream", is_reader))
        yield
        self.told.append(("end of stream",))

    @contextlib.contextmanager
    def opened(self, tensors, writeback, with_grads):
        self.told.append(("open", [tensor.spec.name for tensor in tensors], writeback, with_grads))
        yield
        self.told.append(("close",))


class Alive:
    """A model that is kept the user's own, and what is told.

    Args:
        model: The model.
        left_out: Names of parameters that are not managed.
        needs_all: Whether all processes must read together.
        rank: Which of them this is.
    """

    def __init__(self, model=None, *, left_out=(), needs_all=False, rank=0):
        self.model = model or nn.Sequential(nn.Linear(2, 1), nn.ReLU())
        self.tensors = {
            parameter: ManagedTensor(
                TensorSpec(index, name, tuple(parameter.shape), True, aliases=("other",) if "tied" in name else ()),
                *(parameter, 0, torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)),
            )
            for index, (name, parameter) in enumerate(self.model.named_parameters())
            if name not in left_out
        }
        self.told, self.frames = [], Frames()
        self.weights = Weights(self.told, needs_all)
        manager = Fake(self.told, "zero_gradients")
        manager.find, manager.values = self.tensors.get, types.SimpleNamespace(version=0)
        manager.gradients = types.SimpleNamespace(lock=contextlib.nullcontext())
        manager.sharing = Fake(self.told, "enter", "meet")
        manager.sharing.rank = rank
        self.manager = manager
        self.live = LiveModel(self.model, LiveServices(manager, self.weights, self.frames, None))
        self.before = [dict(module.__dict__) for module in self.model.modules()]

    def attach(self, *hook_ids):
        self.live.attach(hook_ids)
        return self

    def take(self):
        """What was told since the last call."""
        found, self.told[:] = list(self.told), []
        return found


@pytest.fixture
def alive():
    made = []

    def make(*args, **settings):
        made.append(Alive(*args, **settings))
        return made[-1].attach()

    yield make
    for one in made:
        one.live.detach()


# Attach and detach


def test_detach_leaves_no_attribute_on_the_modules(alive):
    one = alive()
    assert [dict(module.__dict__) for module in one.model.modules()] != one.before
    one.live.detach()
    assert [dict(module.__dict__) for module in one.model.modules()] == one.before
    one.live.detach()
    assert [dict(module.__dict__) for module in one.model.modules()] == one.before, "twice"


def test_a_module_that_has_come_is_the_users_own_and_one_that_is_gone_is_torchs(alive):
    one = alive()
    gone, there = one.model[0], set(one.model[0].__dict__)
    one.model[0] = nn.Linear(2, 1)
    one.live.refresh(())
    assert set(one.model[0].__dict__) == there
    assert set(gone.__dict__) == set(nn.Linear(2, 1).__dict__)


def test_a_refresh_keeps_what_is_installed_on_the_model(alive):
    one = alive()
    there = set(one.model.__dict__)
    one.live.refresh(())
    assert set(one.model.__dict__) == there


def test_live_models_are_captured_as_copies_until_detach(alive):
    own = torch.jit.trace
    one = alive()
    assert isinstance(torch.jit.trace, Capture)
    one.live.detach()
    assert torch.jit.trace is own


# zero_grad


@pytest.mark.parametrize(("settings", "to_none"), [({}, True), ({"set_to_none": False}, False)])
def test_zero_grad_is_the_managers(alive, settings, to_none):
    one = alive()
    one.model.zero_grad(**settings)
    ((name, parameters, set_to_none),) = one.told
    assert (name, set_to_none) == ("zero_gradients", to_none)
    assert [id(parameter) for parameter in parameters] == [id(parameter) for parameter in one.model.parameters()]


def test_each_of_several_models_zeroes_its_own(alive):
    one = alive(Together([nn.Linear(1, 1), nn.Linear(2, 1)]))
    one.model[1].zero_grad()
    ((_, parameters, _),) = one.told
    assert [tuple(parameter.shape) for parameter in parameters] == [(1, 2), (1,)]


def test_after_detach_zero_grad_is_torchs(alive):
    one = alive()
    one.live.detach()
    one.model[0].weight.grad = torch.ones(1, 2)
    one.model.zero_grad()
    assert (one.told, one.model[0].weight.grad) == ([], None)


# Moves


def bits_of(model):
    return [(parameter.dtype, parameter.tolist()) for parameter in model.parameters()]


@pytest.mark.parametrize("method", ["half", "bfloat16", "double"])
def test_another_type_is_refused_before_anything_has_changed(alive, method):
    one = alive()
    one.model.register_buffer("scale", torch.ones(1))
    before = bits_of(one.model)
    with pytest.raises(EngineError, match=r"parameter '0\.weight' cannot get another device, type or shape.*detach"):
        getattr(one.model, method)()
    assert bits_of(one.model) == before
    assert one.model.scale.dtype is torch.float32


def test_another_device_is_refused(alive):
    with pytest.raises(EngineError, match=r"would be torch.float32 on meta"):
        alive().model.to("meta")


def test_shared_memory_is_refused(alive):
    with pytest.raises(EngineError, match=r"'0\.weight' is in a chunk and cannot be moved to shared memory"):
        alive().model.share_memory()


def test_a_part_of_the_model_is_refused_too(alive):
    with pytest.raises(EngineError, match="cannot get another device, type or shape"):
        alive().model[0].half()


@pytest.mark.parametrize(
    "move", [lambda model: model.to("cpu"), lambda model: model.float(), lambda model: model.cpu()]
)
def test_a_move_to_where_it_is_returns_the_model_and_touches_no_parameter(alive, move):
    one = alive()
    seen = [parameter._version for parameter in one.model.parameters()]
    assert move(one.model) is one.model
    assert [parameter._version for parameter in one.model.parameters()] == seen


def test_what_is_not_managed_moves(alive):
    one = alive(nn.Sequential(nn.Linear(2, 1)), left_out=("0.weight", "0.bias"))
    one.model.register_buffer("scale", torch.ones(1))
    one.model.half()
    assert (one.model[0].weight.dtype, one.model.scale.dtype) == (torch.float16, torch.float16)


def test_a_function_that_changes_values_is_applied_to_values_and_gradients(alive):
    one = alive(nn.Linear(2, 1, bias=False))
    nn.init.constant_(one.model.weight, 3.0)
    one.model.weight.grad = gradient = torch.full((1, 2), 5.0)
    one.model._apply(lambda value: value * 2)
    assert one.model.weight.tolist() == [[6, 6]]
    assert (one.model.weight.grad is gradient, gradient.tolist()) == (True, [[10, 10]])


def test_a_function_that_writes_in_place_is_applied_too(alive):
    one = alive(nn.Linear(2, 1, bias=False))
    nn.init.constant_(one.model.weight, 3.0)
    one.model._apply(lambda value: value.detach().add_(1))
    assert one.model.weight.tolist() == [[4, 4]]


def test_without_recursion_only_the_module_itself_is_changed(alive):
    one = alive(nn.Sequential(nn.Linear(1, 1, bias=False)))
    nn.init.constant_(one.model[0].weight, 3.0)
    one.model._apply(lambda value: value * 2, recurse=False)
    assert one.model[0].weight.tolist() == [[3]]


# Copies


def forward_hook(module, args, output):
    """A hook of the user's."""


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_an_ordinary_model_with_the_users_hooks_and_without_the_engines(make_copy):
    one = Alive(nn.Linear(2, 1))
    own = one.model.register_forward_hook(lambda *args: None)
    one.model.register_forward_hook(forward_hook)
    one.attach(own.id)
    one.model.patrickstar_engine, one.model.backward = "engine", "backward"
    made = make_copy(one.model)
    one.live.detach()
    assert set(made.__dict__) == set(nn.Linear(2, 1).__dict__)
    assert list(made._forward_hooks.values()) == [forward_hook]
    assert list(one.model._forward_hooks) == [own.id, own.id + 1], "the model keeps both"
    assert made.weight.tolist() == one.model.weight.tolist()


# State dictionaries


def fill(one, module=None, prefix=""):
    module = module or one.model
    found = {
        prefix + name: parameter.detach() for name, parameter in module._parameters.items() if parameter is not None
    }
    one.live.fill_state_dict(module, found, prefix, {})
    return found


def test_a_state_dictionary_has_values_that_are_handed_out(alive):
    one = alive(nn.Linear(2, 1), left_out=("bias",))
    found = fill(one, prefix="a.")
    assert found["a.weight"].tolist() == [[7, 7]]
    assert found["a.bias"].tolist() == one.model.bias.tolist()
    assert one.take() == [("hand out", "weight")]


def test_what_a_state_dictionary_leaves_out_is_not_read(alive):
    one, found = alive(nn.Linear(2, 1)), {}
    one.live.fill_state_dict(one.model, found, "", {})
    assert (found, one.take()) == ({}, [])


def test_with_keep_vars_the_parameters_themselves_stay(alive):
    one = alive(nn.Linear(2, 1))
    found = dict(one.model._parameters)
    one.live.fill_state_dict(one.model, found, "", {})
    assert found["weight"] is one.model.weight
    assert one.take() == []


class Tied(nn.Module):
    """Has one parameter that is known by two names."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Parameter(torch.ones(2))
        self.other = self.tied


def test_tied_names_share_one_tensor_as_long_as_somebody_has_it(alive):
    one = alive(Tied())
    found = fill(one)
    assert found["tied"] is found["other"]
    assert one.take() == [("hand out", "tied")]
    del found
    fill(one)
    assert one.take() == [("hand out", "tied")]


def test_tied_names_are_read_again_after_values_have_changed(alive):
    one = alive(Tied())
    first = fill(one)["tied"]
    one.manager.values.version = 1
    assert fill(one)["tied"] is not first
    assert one.take() == [("hand out", "tied")] * 2


def test_a_parameter_that_is_not_tied_is_read_each_time(alive):
    one = alive(nn.Linear(1, 1, bias=False))
    first, second = fill(one), fill(one)
    assert first["weight"] is not second["weight"]
    assert one.take() == [("hand out", "weight")] * 2


def test_all_processes_read_a_tied_parameter_even_if_one_has_it_still(alive):
    one = alive(Tied(), needs_all=True)
    found = fill(one)
    assert one.take() == [("hand out", "tied"), ("read", "tied")]
    assert found["tied"] is found["other"]


def test_while_the_model_is_saved_a_state_dictionary_has_what_is_read_later(alive):
    one = alive(nn.Linear(1, 1, bias=False))
    one.weights.saved["weight"] = later = torch.zeros(1)
    assert fill(one)["weight"] is later
    assert one.take() == []


# Saving and generating


class Saved(nn.Module):
    """Can be saved, and generates."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def save_pretrained(self, where):
        return where, [parameter.dtype for parameter in self.parameters()]

    def generate(self, *args, **kwargs):
        return args, kwargs


def test_a_model_is_saved_piece_by_piece(alive):
    one = alive(Saved())
    one.weights.saved["weight"] = torch.zeros(1, dtype=torch.float16)
    assert one.model.save_pretrained("here") == ("here", [torch.float16]), "types are those of the files"
    assert one.take() == [("begin to stream", True), ("end of stream",)]
    assert [parameter.dtype for parameter in one.model.parameters()] == [torch.float32], "and not any more"


def test_one_process_saves_and_all_meet(alive):
    told = []
    for rank in (0, 1):
        one = alive(Saved(), needs_all=True, rank=rank)
        told.append((one.model.save_pretrained("here"), one.take()))
        one.live.detach()
    (first, by_first), (second, by_second) = told
    assert (first, second) == (("here", [torch.float32]), None)
    end = [("end of stream",), ("meet", "waits until the model is saved")]
    assert by_first == [("begin to stream", True), *end]
    assert by_second == [("begin to stream", False), *end]


def test_a_save_that_fails_leaves_the_parameters_of_the_model(alive):
    one = alive(Saved())
    with pytest.raises(TypeError):
        one.model.save_pretrained()
    assert "parameters" not in one.model.__dict__


def test_processes_generate_together(alive):
    one = alive(Saved(), needs_all=True)
    assert one.model.generate(5, length=3) == ((5,), {"length": 3, "synced_gpus": True})
    assert one.take() == [("enter", "generates")]


def test_a_process_that_is_alone_generates_as_it_is(alive):
    one = alive(Saved())
    assert one.model.generate(5) == ((5,), {})
    assert one.take() == []
    assert "generate" not in one.model.__dict__


def test_a_method_that_the_user_has_put_on_a_model_stays(alive):
    model = Saved()
    model.save_pretrained = theirs = lambda where: "theirs"
    one = alive(model)
    assert one.model.save_pretrained is theirs
    one.live.detach()
    assert one.model.save_pretrained is theirs


# Merging


class Layer(nn.Module):
    """As a layer of PEFT."""

    def __init__(self):
        super().__init__()
        self.weight, self.merged = nn.Parameter(torch.ones(1)), []

    def get_base_layer(self):
        return self

    def merge(self, *names):
        self.merged.append(names)
        return "merged"


def make_layer(alive, dtype):
    one = alive(nn.Sequential(Layer()))
    (tensor,) = one.tensors.values()
    tensor.chunk = types.SimpleNamespace(dtype=dtype)
    return one, one.model[0]


def test_an_adapter_is_merged_with_all_bits(alive):
    one, layer = make_layer(alive, torch.bfloat16)
    assert layer.merge("a", "b") == "merged"
    assert layer.merged == [("a", "b")]
    assert one.take() == [("open", ["0.weight"], True, False), ("close",)]


def test_where_chunks_have_all_bits_nothing_is_opened(alive):
    one, layer = make_layer(alive, torch.float32)
    assert layer.merge("a") == "merged"
    assert one.take() == []


def test_inside_of_a_forward_an_adapter_is_merged_as_it_is_computed_with(alive):
    one, layer = make_layer(alive, torch.bfloat16)
    one.frames.stack.append(Frame(layer, Stage.FORWARD))
    assert layer.merge("a") == "merged"
    assert one.take() == []


def test_a_layer_gets_only_the_methods_that_it_has(alive):
    _, layer = make_layer(alive, torch.bfloat16)
    assert "merge" in layer.__dict__
    assert not hasattr(layer, "unmerge")
