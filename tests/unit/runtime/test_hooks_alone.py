"""ModelHooks with a manager that writes down what it is told: forwards, gradients, and changes of the model."""

import contextlib
import gc
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from unit.runtime.data_parts import CPU
from unit.runtime.parts import Fake, Parts

from hf_patrickstar.errors import EngineError
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.runtime.casting import Casting
from hf_patrickstar.runtime.chunk import ManagedTensor
from hf_patrickstar.runtime.cpu_embeddings import CpuEmbeddings
from hf_patrickstar.runtime.frames import Frames
from hf_patrickstar.runtime.hooks import ModelHooks
from hf_patrickstar.runtime.live_parameter import LiveMixin, released_type
from hf_patrickstar.runtime.live_tensor import LiveTensor
from hf_patrickstar.runtime.together import Together
from hf_patrickstar.states import Stage

FORWARD, BACKWARD, EVALUATION = Stage.FORWARD, Stage.BACKWARD, Stage.EVALUATION


def managed(index, name, parameter, *, is_group=False):
    """A parameter under management that keeps its own value, as long as nobody binds it."""
    placeholder = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
    tensor = ManagedTensor(
        TensorSpec(index, name, tuple(parameter.shape), parameter.requires_grad), parameter, index, placeholder
    )
    tensor.chunk = types.SimpleNamespace(is_group=is_group)
    return tensor


class Hooked:
    """Hooks of a model, and what they tell.

    Args:
        model: The model; by default two linear layers with an activation between them.
        tensors: Its managed tensors; by default all.
        casting: The types to compute in.
        errors: What is raised instead of an answer, by the name of what is called.
        is_alone: Whether there is one process.
    """

    def __init__(self, model=None, tensors=None, *, casting=None, errors=(), is_alone=True):
        self.model = model or nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        if tensors is None:
            named = enumerate(self.model.named_parameters())
            tensors = [managed(index, *each, is_group=not is_alone) for index, each in named]
        self.tensors, self.told, self.frames = tensors, [], Frames()
        self.calls = []
        answers = {name: _raiser(error) for name, error in dict(errors).items()}

        def fake(*silent, **found):
            names = {**dict.fromkeys(silent), **found}
            return Fake(self.told, **{**names, **{name: answers[name] for name in names if name in answers}})

        phases = fake(
            *("before_forward", "after_forward", "before_module", "gradient_ready", "backward_begin", "backward_end"),
            after_module=self.frames.end,
            unwind=self.unwind,
        )
        phases.frames, phases.turns = self.frames, fake("take", "give_up", "wait_for_calls")
        self.operands = []
        phases.operand_saved = lambda operand: self.operands.append(operand) or operand.detach()
        phases.operand_needed = lambda operand: operand
        parameters = fake("acquire", "release", "release_held_outside_forward", "check_usable")
        parameters.find = self.find
        gradients = types.SimpleNamespace(lock=contextlib.nullcontext())
        embeddings = CpuEmbeddings(parameters, gradients, fake("take_over"))
        phases.lookup_begin, phases.lookup_end = embeddings.begin, embeddings.end
        self.manager = types.SimpleNamespace(
            parameters=parameters,
            phases=phases,
            copies=None,
            tensors=self.tensors,
            find=self.find,
            tracer=types.SimpleNamespace(asks_padding=False),
            steps=types.SimpleNamespace(announced=self.announced),
            sharing=types.SimpleNamespace(is_alone=is_alone),
            gradient_mirrors=fake("follow_recorded"),
            has_new_groups=False,
        )
        casting = casting or Casting(CPU, None, None)
        self.weights = types.SimpleNamespace(needs_all=False, deferred=lambda tensor: None)
        follow = fake("follow_model").follow_model
        self.hooks = ModelHooks(self.model, self.manager, self.weights, follow, CPU, casting)
        self.before = footprint(self.model)
        self.hooks.attach()

    @contextlib.contextmanager
    def announced(self, call):
        """Writes down the calls that begin steps, each with what is told of it meanwhile."""
        begin = len(self.told)
        yield
        self.calls.append((call, [name for name, *_ in self.told[begin:]]))

    def find(self, parameter):
        return next((tensor for tensor in self.tensors if tensor.parameter is parameter), None)

    def bind(self):
        self.hooks.bind(self.tensors)

    def unwind(self):
        while self.frames.stack:
            self.frames.stack.pop().leave_contexts()

    def take(self, *left_out):
        """What was told since the last call, in words."""
        names = {module: name or "model" for name, module in self.model.named_modules()}
        found, self.told[:] = list(self.told), []
        return [(name, *(_word(it, names) for it in args)) for name, *args in found if name not in left_out]

    def phases(self):
        """The same without what belongs to the beginning of every forward."""
        return self.take("take", "follow_model", "before_forward")


def _raiser(error):
    def call(*args, **kwargs):
        raise error

    return call


def _word(value, names):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, ManagedTensor):
        return value.spec.name
    if isinstance(value, list):
        return [_word(item, names) for item in value]
    if hasattr(value, "stage"):  # a frame
        return f"{names[value.module]} {value.stage.name}"
    return value


def footprint(model):
    """What hooks may leave on a model: hooks, attributes and classes."""
    hooks = [
        (name, key, len(value))
        for name, module in model.named_modules()
        for key, value in sorted(module.__dict__.items())
        if key.endswith("_hooks")
    ]
    attributes = [sorted(module.__dict__) for module in model.modules()]
    parameters = [
        (type(parameter), parameter.requires_grad, len(parameter._post_accumulate_grad_hooks or ()))
        for parameter in model.parameters()
    ]
    return hooks, attributes, parameters


def ones(*shape):
    return torch.ones(shape)


WEIGHTS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


# Forwards


def test_a_forward_of_training_tells_each_phase_in_order():
    hooked = Hooked()
    hooked.model(ones(3, 2))
    told = hooked.take("before_forward")
    assert told == [
        ("take", "the forward of Sequential"),
        ("follow_model", True),
        ("before_module", "0 FORWARD", WEIGHTS[0], "0"),
        ("after_module", "0 FORWARD"),
        ("before_module", "2 FORWARD", WEIGHTS[1], "2"),
        ("after_module", "2 FORWARD"),
        ("after_module", "model FORWARD"),
        ("after_forward", "model FORWARD", False),
    ]


def test_a_step_begins_while_its_call_is_announced():
    hooked, inputs = Hooked(), ones(3, 2)
    hooked.model(inputs)
    with torch.no_grad():
        hooked.model[0](input=inputs)
    (whole, told), (part, _) = hooked.calls
    assert told == ["before_forward"]
    assert (whole.module, whole.args, whole.kwargs, whole.is_training) == (hooked.model, (inputs,), {}, True)
    assert (part.module, part.name, part.args, part.is_training) == (hooked.model[0], "0", (), False)
    assert part.kwargs == {"input": inputs}


def test_the_outermost_forward_is_told_before_any_module():
    hooked = Hooked()
    hooked.model(ones(3, 2))
    assert [name for name, *_ in hooked.take()][:4] == [*("take", "follow_model", "before_forward", "before_module")]


@pytest.mark.parametrize(
    ("part", "name", "shape"), [(lambda model: model, "", (3, 2)), (lambda model: model[2], "2", (5, 2))]
)
def test_a_forward_begins_with_its_module_its_inputs_and_what_is_there_already(part, name, shape):
    hooked = Hooked()
    hooked.model.register_buffer("scale", ones(1))
    part(hooked.model)(ones(*shape))
    ((stage, found, shapes, present),) = [args for name, *args in hooked.told if name == "before_forward"]
    assert (stage, found, shapes) == (FORWARD, name, (shape,))
    assert [tuple(tensor.shape) for tensor in present] == [shape, (1,)]


def test_an_evaluation_is_told_as_one():
    hooked = Hooked()
    with torch.no_grad():
        hooked.model[2](ones(3, 2))
    told = hooked.take()
    assert told[:3] == [("take", "the forward of 2"), ("follow_model", False), ("before_forward", *told[2][1:])]
    assert told[2][1:4] == (EVALUATION, "2", ((3, 2),))
    assert told[3:] == [
        ("before_module", "2 EVALUATION", WEIGHTS[1], "2"),
        ("after_module", "2 EVALUATION"),
        ("after_forward", "2 EVALUATION", False),
    ]


def test_tensors_in_mappings_and_dataclasses_are_inputs():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(ones(1))

        def forward(self, batch, more=None):
            return self.weight

    hooked = Hooked(Reads())
    hooked.model(types.MappingProxyType({"a": ones(2), "b": ones(3)}), more=[ones(4), "text"])
    (shapes,) = [args[2] for name, *args in hooked.told if name == "before_forward"]
    assert shapes == ((2,), (3,), (4,))


def test_a_module_without_parameters_is_told_nothing_about():
    hooked = Hooked()
    hooked.model[1](ones(2))
    assert hooked.take() == []


def test_inside_of_a_forward_autograd_keeps_numbers():
    hooked = Hooked(nn.Linear(2, 1))
    hooked.model(ones(1, 2))
    assert len(hooked.operands) > 0
    hooked.operands.clear()
    hooked.model.weight * hooked.model.weight
    assert hooked.operands == [], "and not outside of it"


def test_attention_computes_with_the_parameters_of_its_projection():
    hooked = Hooked(nn.MultiheadAttention(2, 1))
    hooked.model(*[ones(1, 1, 2)] * 3)
    ((_, _, own, _),) = [it for it in hooked.take() if it[0] == "before_module"]
    assert own == ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]


def test_a_module_that_calls_itself_ends_as_often_as_it_begins():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x):
            return self.inner(self.inner(x))

    hooked = Hooked(Twice())
    hooked.model(ones(1, 1))
    names = [it[0] for it in hooked.phases()]
    assert names == [*["before_module", "after_module"] * 2, "after_module", "after_forward"]
    assert hooked.frames.stack == []


@pytest.mark.parametrize("index", [0, 1])
def test_models_that_are_trained_together_are_called_by_themselves(index):
    hooked = Hooked(Together([nn.Linear(1, 1), nn.Linear(1, 1)]))
    hooked.model[index](ones(1, 1))
    assert [it for it in hooked.phases() if it[0] != "after_module"] == [
        ("before_module", f"{index} FORWARD", [f"{index}.weight", f"{index}.bias"], str(index)),
        ("after_forward", f"{index} FORWARD", False),
    ]


# Types


def test_inputs_are_narrowed_before_the_model_gets_them():
    hooked = Hooked(nn.Linear(2, 1).bfloat16(), casting=Casting(CPU, None, torch.bfloat16))
    assert hooked.model(ones(1, 2)).dtype is torch.bfloat16


def test_outputs_under_autocast_are_widened():
    seen = []
    hooked = Hooked(casting=Casting(CPU, torch.bfloat16, None))
    hooked.model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert hooked.model(ones(1, 2)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")


# Forwards that fail


class Fails(nn.Module):
    """Computes, and then raises."""

    def __init__(self, error):
        super().__init__()
        self.inner, self.error = nn.Linear(1, 1), error

    def forward(self, x):
        self.inner(x)
        raise self.error


def test_a_forward_that_raises_ends_with_all_its_modules():
    hooked = Hooked(nn.Sequential(Fails(ValueError("inside"))))
    with pytest.raises(ValueError, match="inside"):
        hooked.model(ones(1, 1))
    assert hooked.phases() == [
        ("before_module", "0.inner FORWARD", ["0.inner.weight", "0.inner.bias"], "0.inner"),
        ("after_module", "0.inner FORWARD"),
        ("after_module", "0 FORWARD"),
        ("after_module", "model FORWARD"),
        ("after_forward", "model FORWARD", True),
    ]
    assert hooked.frames.stack == []


def test_a_forward_while_an_exception_is_handled_has_not_failed():
    hooked = Hooked(nn.Linear(1, 1))
    try:
        raise ValueError("before")
    except ValueError:
        hooked.model(ones(1, 1))
    assert hooked.phases()[-1] == ("after_forward", "model FORWARD", False)


def test_a_forward_that_was_interrupted_is_unwound_by_the_next():
    hooked = Hooked(nn.Sequential(Fails(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        hooked.model(ones(1, 1))
    hooked.take()
    with pytest.raises(KeyboardInterrupt):
        hooked.model(ones(1, 1))
    assert hooked.take()[0] == ("unwind",)
    hooked.hooks.detach()
    assert hooked.frames.stack == []


@pytest.mark.parametrize("name", ["follow_model", "before_forward"])
def test_a_forward_that_cannot_begin_gives_its_turn_up(name):
    hooked = Hooked(nn.Linear(1, 1), errors={name: EngineError("no")})
    with pytest.raises(EngineError, match="no"):
        hooked.model(ones(1, 1))
    told = [it[0] for it in hooked.take()]
    assert (told[0], told[-1]) == ("take", "give_up")
    assert "before_module" not in told
    assert hooked.frames.stack == []


def test_a_forward_has_its_turn_when_modules_compute():
    hooked, seen = Hooked(nn.Sequential(nn.Linear(1, 1), nn.ReLU())), []
    hooked.model[1].register_forward_hook(lambda *args: seen.append(hooked.frames.stack[0].has_turn))
    hooked.model(ones(1, 1))
    assert seen == [True]


# Recomputation


class Checkpointed(nn.Module):
    """Recomputes its layer in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(1, 1), use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def test_a_recomputed_module_is_told_as_a_part_of_backward():
    hooked = Hooked(Checkpointed(use_reentrant=False))
    result = hooked.model(ones(1, 1)).sum()
    hooked.take()
    result.backward()
    told = hooked.take()
    first = [it for it in told if it[0] not in ("gradient_ready", "backward_begin", "backward_end")]
    assert first == [
        ("before_module", "inner BACKWARD", ["inner.weight", "inner.bias"], "inner"),
        ("after_module", "inner BACKWARD"),
        ("after_forward", "inner BACKWARD", first[2][2]),
    ]
    assert sorted(it[1] for it in told if it[0] == "gradient_ready") == ["inner.bias", "inner.weight"]


def test_reentrant_checkpointing_is_refused_in_words():
    hooked = Hooked(Checkpointed(use_reentrant=True))
    result = hooked.model(ones(1, 1).requires_grad_()).sum()
    with pytest.raises(EngineError, match=r"'inner' is recomputed by reentrant checkpointing.*use_reentrant=False"):
        result.backward()


# Function transforms


def test_copies_stand_in_for_parameters_under_a_function_transform():
    hooked, seen = Hooked(nn.Linear(1, 1)), []
    weight, bias = hooked.model.weight, hooked.model.bias
    hooked.model.register_forward_pre_hook(lambda module, args: seen.append(module.weight is weight))
    found = torch.func.grad(lambda x: hooked.model(x).sum())(ones(1, 1))
    assert found.item() == weight.item()
    assert seen == [False]
    assert (hooked.model.weight is weight, hooked.model.bias is bias) == (True, True)
    assert hooked.phases() == [
        *(("acquire", "weight", "Linear"), ("release", "weight"), ("acquire", "bias", "Linear"), ("release", "bias")),
        ("after_module", "model FORWARD"),
        ("after_forward", "model FORWARD", False),
    ]


# Embeddings that are looked up at home


def make_embedding():
    """An embedding of three rows, 0 to 5, whose weight is read at home."""
    parts = Parts()
    (tensor,) = parts.add_chunk((3, 2))
    tensor.lookup = "home"
    model = nn.Embedding(3, 2, _weight=tensor.parameter.data)
    model.weight = tensor.parameter
    return Hooked(model, [tensor]), tensor


def test_an_embedding_at_home_reads_its_rows_there():
    hooked, tensor = make_embedding()
    hooked.bind()
    found = hooked.model(torch.tensor([2, 0]))
    assert found.tolist() == [[4, 5], [0, 1]]
    assert "before_module" not in [it[0] for it in hooked.take()]
    assert tensor.lookup_nbytes == 8, "two rows of two elements"


def test_an_evaluation_counts_no_rows():
    hooked, tensor = make_embedding()
    hooked.bind()
    with torch.no_grad():
        hooked.model(torch.tensor([2, 0]))
    assert tensor.lookup_nbytes == 0


def test_the_gradient_of_an_embedding_at_home_is_at_home():
    hooked, tensor = make_embedding()
    hooked.bind()
    result = hooked.model(torch.tensor([2, 2])).sum()
    tensor.unbind()
    hooked.take()
    result.backward()
    assert hooked.take() == [
        ("backward_begin",),
        ("gradient_ready", "t0", [[0, 0], [0, 0], [2, 2]], True),
        ("backward_end",),
    ]
    assert tensor.parameter.grad is None


def test_a_gradient_at_home_that_comes_after_detach_is_the_parameters_own():
    hooked, tensor = make_embedding()
    hooked.bind()
    result = hooked.model(torch.tensor([1, 1])).sum()
    hooked.hooks.detach()
    tensor.unbind()
    hooked.take()
    result.backward()
    assert hooked.take("backward_begin", "backward_end") == []
    assert tensor.parameter.grad.tolist() == [[0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize(
    "add",
    [
        lambda weight: weight.register_hook(lambda gradient: gradient),
        lambda weight: weight.register_post_accumulate_grad_hook(lambda weight: None),
    ],
)
def test_an_embedding_whose_gradient_the_user_has_a_hook_on_is_computed_with_like_others(add):
    hooked, tensor = make_embedding()
    add(tensor.parameter)
    hooked.model(torch.tensor([2, 0]))
    assert ("before_module", "model FORWARD", ["t0"], "Embedding") in hooked.take()


def test_an_embedding_with_a_buffer_is_computed_with_like_others():
    parts = Parts()
    (tensor,) = parts.add_chunk((3, 2))
    tensor.lookup = "home"
    model = nn.Embedding(3, 2)
    model.weight = tensor.parameter
    model.register_buffer("scale", ones(1))
    hooked = Hooked(model, [tensor])
    hooked.model(torch.tensor([2]))
    assert "before_module" in [it[0] for it in hooked.take()]


# Gradients


def test_gradients_are_handed_on_and_parameters_keep_none():
    hooked = Hooked(nn.Linear(2, 1))
    result = hooked.model(torch.tensor([[3.0, 4.0]]))
    hooked.take()
    result.backward()
    told = hooked.take()
    assert (told[0], told[-1]) == (("backward_begin",), ("backward_end",))
    assert sorted(told[1:-1]) == [("gradient_ready", "bias", [1]), ("gradient_ready", "weight", [[3, 4]])]
    assert (hooked.model.weight.grad, hooked.model.bias.grad) == (None, None)


def test_frozen_parameters_have_no_gradient_to_hand_on():
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    hooked = Hooked(model)
    hooked.model(ones(1, 2)).backward()
    assert [it[1] for it in hooked.take() if it[0] == "gradient_ready"] == ["bias"]


def test_a_parameter_that_is_frozen_for_the_moment_stays_frozen_and_is_listened_to():
    model = nn.Linear(2, 1)
    tensors = [managed(index, *named) for index, named in enumerate(model.named_parameters())]
    model.weight.requires_grad_(False)
    hooked = Hooked(model, tensors)
    assert not model.weight.requires_grad
    model.weight.requires_grad_(True)
    hooked.model(ones(1, 2)).backward()
    assert sorted(it[1] for it in hooked.take() if it[0] == "gradient_ready") == ["bias", "weight"]


def test_the_gradient_of_a_parameter_that_is_not_managed_is_torchs():
    hooked = Hooked(nn.Linear(2, 1), [])
    hooked.model(ones(1, 2)).backward()
    assert hooked.model.weight.grad.tolist() == [[1, 1]]
    assert "gradient_ready" not in [it[0] for it in hooked.take()]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_is_recorded_is_stored_without_its_graph_and_followed():
    hooked = Hooked(nn.Linear(1, 1, bias=False))
    result = (hooked.model(torch.tensor([[3.0]])) ** 2).sum()
    hooked.told.clear()
    result.backward(create_graph=True)
    found = {name: args[1] for name, *args in hooked.told if name in ("gradient_ready", "follow_recorded")}
    assert (found["gradient_ready"].requires_grad, found["follow_recorded"].requires_grad) == (False, True)
    assert found["gradient_ready"].tolist() == found["follow_recorded"].tolist()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_with_several_processes_nobody_follows_a_recorded_gradient():
    hooked = Hooked(nn.Linear(1, 1, bias=False), is_alone=False)
    (hooked.model(ones(1, 1)) ** 2).sum().backward(create_graph=True)
    assert "follow_recorded" not in [it[0] for it in hooked.take()]


def test_hooks_that_are_gone_take_no_gradient():
    """Parameters outlive what listens to them, and do not keep it alive."""
    hooked = Hooked(nn.Linear(1, 1, bias=False), [])
    parameter = nn.Parameter(ones(1))
    hooked.hooks.take_in([managed(0, "new", parameter)])
    parameter.__class__, told = nn.Parameter, hooked.told
    hooked.hooks.detach()
    del hooked
    gc.collect()
    told.clear()
    parameter.grad = None
    (parameter * 2).sum().backward()
    assert (parameter.grad.tolist(), told) == ([2], [])


# Attach and detach


def test_detach_leaves_nothing_on_the_model():
    hooked = Hooked()
    assert footprint(hooked.model) != hooked.before
    hooked.hooks.detach()
    assert footprint(hooked.model) == hooked.before
    hooked.hooks.detach()
    assert footprint(hooked.model) == hooked.before, "twice"


def test_after_detach_nothing_is_told():
    hooked = Hooked()
    hooked.hooks.detach()
    assert hooked.take() == [("unwind",), ("release_held_outside_forward",)]
    hooked.model(ones(1, 2)).backward()
    assert hooked.take() == []
    assert hooked.model[0].weight.grad is not None


def test_detach_leaves_the_users_hooks():
    hooked, seen = Hooked(), []
    hooked.model[0].register_forward_hook(lambda *args: seen.append("forward"))
    hooked.model[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("gradient"))
    hooked.hooks.detach()
    hooked.model(ones(1, 2)).backward()
    assert seen == ["forward", "gradient"]


def test_attach_after_detach_tells_again_and_once():
    hooked = Hooked(nn.Linear(1, 1))
    hooked.hooks.detach()
    hooked.hooks.attach()
    hooked.take()
    hooked.model(ones(1, 1)).backward()
    names = [it[0] for it in hooked.take()]
    assert (names.count("before_module"), names.count("gradient_ready")) == (1, 2)
    hooked.hooks.detach()
    assert footprint(hooked.model) == hooked.before


def test_casts_of_inputs_are_removed_too():
    hooked = Hooked(nn.Linear(2, 1), casting=Casting(CPU, None, torch.bfloat16))
    hooked.hooks.detach()
    assert hooked.model(ones(1, 2)).dtype is torch.float32


def test_bound_parameters_answer():
    hooked = Hooked(nn.Linear(2, 1))
    assert not isinstance(hooked.model.weight, LiveMixin)
    hooked.bind()
    for tensor in hooked.tensors:
        assert type(tensor.parameter) is released_type(nn.Parameter)
        assert isinstance(tensor.live, LiveTensor)
        assert tensor.live.tensor is tensor


def test_somebody_is_running_inside_of_a_forward_and_of_a_backward():
    hooked = Hooked(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    seen = []
    hooked.model[1].register_forward_hook(lambda *args: seen.append(hooked.hooks.is_running))
    result = hooked.model(ones(1, 1))
    seen.append(hooked.hooks.is_running)
    result.register_hook(lambda gradient: seen.append(hooked.hooks.is_running))
    result.backward()
    seen.append(hooked.hooks.is_running)
    assert seen == [True, False, True, False]


# Changes of the model


def test_a_model_that_is_as_it_was_has_not_changed():
    assert not Hooked().hooks.may_have_changed(True)


def replace_parameter(model):
    model[0].weight = nn.Parameter(ones(2, 2))


def replace_module(model):
    model[0] = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        replace_module,
        lambda model: model.append(nn.Linear(1, 1)),
        lambda model: model[0].register_parameter("new", nn.Parameter(ones(1))),
        lambda model: delattr(model[2], "bias"),
        lambda model: setattr(model[2], "bias", None),
    ],
)
def test_changes_are_seen_until_hooks_are_registered_anew(change):
    hooked = Hooked()
    change(hooked.model)
    assert hooked.hooks.may_have_changed(False)
    hooked.hooks.refresh()
    assert not hooked.hooks.may_have_changed(False)


def test_a_parameter_that_was_given_up_is_a_change():
    hooked = Hooked()
    hooked.tensors[1].is_given_up = True
    assert hooked.hooks.may_have_changed(False)


def test_a_parameter_whose_class_is_not_the_engines_is_a_change():
    hooked = Hooked()
    hooked.bind()
    assert not hooked.hooks.may_have_changed(False)
    hooked.tensors[1].parameter.__class__ = nn.Parameter
    assert hooked.hooks.may_have_changed(False)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_frozen_parameter_that_is_unfrozen_is_a_change_for_training(is_training):
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    hooked = Hooked(model)
    model.weight.requires_grad_(True)
    assert hooked.hooks.may_have_changed(is_training) is is_training


def test_new_groups_are_a_change_until_the_refresh():
    hooked = Hooked()
    hooked.manager.has_new_groups = True
    assert hooked.hooks.may_have_changed(False)
    hooked.hooks.refresh()
    assert hooked.manager.has_new_groups is False


def test_a_module_that_is_gone_has_no_hooks_and_one_that_has_come_has():
    hooked = Hooked()
    gone = hooked.model[0]
    replace_module(hooked.model)
    hooked.tensors += [managed(9, "new", hooked.model[0].weight)]
    hooked.hooks.refresh()
    gone(ones(1, 2))
    assert hooked.take() == []
    hooked.model[0](ones(1, 2))
    assert ("before_module", "0 FORWARD", ["new"], "0") in hooked.take()


def test_a_module_computes_with_the_parameters_that_it_has_after_the_refresh():
    hooked = Hooked(nn.Linear(2, 1))
    hooked.model.weight = nn.Parameter(ones(1, 2))
    hooked.tensors[0] = managed(9, "new", hooked.model.weight)
    hooked.hooks.refresh()
    hooked.model(ones(1, 2))
    told = [it for it in hooked.take() if it[0] == "before_module"]
    assert told == [("before_module", "model FORWARD", ["new", "bias"], "Linear")], "once"


def test_detach_after_a_refresh_leaves_nothing_on_what_was_there_and_what_has_come():
    hooked = Hooked()
    gone = hooked.model[0]
    replace_module(hooked.model)
    hooked.hooks.refresh()
    hooked.hooks.detach()
    fresh = footprint(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    assert footprint(hooked.model) == fresh
    assert footprint(gone)[:2] == footprint(nn.Linear(2, 2))[:2]


def test_a_parameter_that_is_taken_in_answers_and_its_gradient_arrives():
    hooked = Hooked(nn.Linear(1, 1, bias=False))
    parameter = nn.Parameter(ones(1))
    tensor = managed(1, "new", parameter)
    hooked.tensors.append(tensor)
    hooked.hooks.take_in([tensor])
    assert isinstance(tensor.live, LiveTensor)
    parameter.__class__ = nn.Parameter  # it has its own value here
    (parameter * 3).sum().backward()
    assert ("gradient_ready", "new", [3]) in hooked.take()


def test_a_parameter_that_is_let_go_keeps_its_gradient():
    hooked = Hooked(nn.Linear(1, 1, bias=False))
    (tensor,) = hooked.tensors
    hooked.hooks.let_go(tensor)
    hooked.hooks.let_go(tensor)  # twice
    hooked.model(torch.tensor([[3.0]])).backward()
    assert "gradient_ready" not in [it[0] for it in hooked.take()]
    assert tensor.parameter.grad.tolist() == [[3]]
