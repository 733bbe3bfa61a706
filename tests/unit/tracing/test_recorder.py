"""What is recorded of a plain model: which parameter is used when, what is free when, and what is refused."""

import contextlib
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from models import make_batch, make_model
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from hf_patrickstar.decisions import collect
from hf_patrickstar.errors import EngineError, TraceError
from hf_patrickstar.layout.packing import pack
from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.runtime.casting import Casting
from hf_patrickstar.schedule.op_trace import (
    Acquire,
    Allocate,
    EnterForward,
    Free,
    Gradient,
    LeaveBackward,
    LeaveForward,
    LetGo,
    LookedUp,
    Need,
    Release,
)
from hf_patrickstar.schedule.script import Begin, BlockingCopy, HostWork, Kernel, Part
from hf_patrickstar.schedule.step import Places, StepRules, micro_batch
from hf_patrickstar.schedule.trace import StepKind
from hf_patrickstar.tracing.fake import FakeTensors, as_fake
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Setting, record

SIZE = 8
CPU = torch.device("cpu")
PLAIN = Setting(Casting(CPU, None, None))


def total(model, x):
    return model(x).sum()


def record_one(model, shape=(3, SIZE), setting=PLAIN, is_training=True, loss=total):
    """What a micro-batch of a model does that is made under fake tensors."""
    specs, _, _ = collect(model, {})
    x = torch.zeros(shape)
    backward = torch.Tensor.backward if is_training else None
    with torch.set_grad_enabled(is_training):
        return record(model, lambda: loss(model, x), backward, specs=specs, inputs=[x], setting=setting)


@pytest.fixture
def fake():
    with FakeTensors():
        yield


def kinds(notes, *wanted):
    """The notes of some kinds, with the parameter if there is one."""
    return [
        (type(n).__name__, n.index) if hasattr(n, "index") else type(n).__name__ for n in notes if type(n) in wanted
    ]


class TwoLayers(torch.nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(SIZE, SIZE, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x))


USES = Acquire, Release, Need, LetGo, Gradient, EnterForward, LeaveForward, LeaveBackward


def test_parameters_are_acquired_by_their_modules_and_needed_by_backward(fake):
    found = record_one(TwoLayers())
    assert kinds(found.notes, *USES, Begin) == [
        *("Begin", "EnterForward", ("Acquire", 0), ("Release", 0), ("Acquire", 1), ("Release", 1), "LeaveForward"),
        *("Begin", ("Need", 1), ("LetGo", 1), ("Gradient", 1), ("Gradient", 0), "LeaveBackward"),
    ]


def test_memory_is_free_when_the_last_tensor_is_gone(fake):
    found = record_one(TwoLayers())
    live, made, peak = {}, 0, 0
    for note in found.notes:
        if isinstance(note, Allocate):
            live.update(note.storages)
            made += len(note.storages)
        elif isinstance(note, Free):
            del live[note.storage]
        peak = max(peak, sum(live.values()))
    assert not live, "all that was made is free in the end"
    assert made > 4
    # The input of the second layer is kept for backward, and its output until the sum.
    assert peak >= 2 * 3 * SIZE * 4


def test_gradients_are_told_with_their_place(fake):
    found = record_one(TwoLayers())
    gradients = [note for note in found.notes if isinstance(note, Gradient)]
    storages = {
        number: nbytes for note in found.notes if isinstance(note, Allocate) for number, nbytes in note.storages
    }
    assert [(note.index, note.nbytes) for note in gradients] == [(1, SIZE * SIZE * 4), (0, SIZE * SIZE * 4)]
    assert all(storages[note.storage] == SIZE * SIZE * 4 for note in gradients)
    freed = [note.storage for note in found.notes if isinstance(note, Free)]
    assert all(note.storage in freed for note in gradients), "nothing keeps them: an engine takes them home"


def test_gradients_tell_whether_autograd_still_keeps_their_parameter(fake):
    model, x = TwoLayers(), torch.zeros(3, SIZE)
    specs, _, _ = collect(model, {})
    kept = {}
    for keeps in (False, True):
        found = record(
            model,
            lambda: total(model, x),
            functools.partial(torch.Tensor.backward, retain_graph=keeps),
            specs=specs,
            inputs=[x],
            setting=PLAIN,
        )
        kept[keeps] = [(note.index, note.is_kept) for note in found.notes if isinstance(note, Gradient)]
    assert kept == {False: [(1, False), (0, False)], True: [(1, True), (0, False)]}, "no input of the first has one"


def test_frozen_parameters_have_no_gradients(fake):
    model = TwoLayers()
    model.first.requires_grad_(False)
    found = record_one(model)
    assert kinds(found.notes, Gradient, Need) == [("Gradient", 1)]


class Reader(TwoLayers):
    """Reads the weight of a layer beside calling it."""

    def forward(self, x):
        x = self.first(x) * self.second.weight[0]
        with torch.no_grad():
            scale = self.second.weight.abs().mean()
        return self.second(x) * scale


def test_code_that_reads_a_parameter_of_another_module_acquires_it_for_the_call(fake):
    found = record_one(Reader())
    assert [note.index for note in found.notes if type(note) is Acquire] == [0, 1, 1, 1]
    released = [note.is_seen for note in found.notes if isinstance(note, Release) and note.index == 1]
    assert released[0] is True, "a view of it is kept for the product"
    assert released[1] is False
    assert kinds(found.notes, Release, LetGo)[1:3] == [("Release", 1), ("LetGo", 1)]


class Segmented(TwoLayers):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False).square()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_recomputation_acquires_once_more(fake, is_frozen):
    model = Segmented()
    model.first.requires_grad_(not is_frozen)
    found = record_one(model)
    backward = found.notes[found.notes.index(Begin(Part.BACKWARD)) :]
    acquired = [note.index for note in backward if isinstance(note, Acquire)]
    assert acquired == [0, *[0] * is_frozen, 1], "checkpointing keeps an alias of a frozen one"
    assert not any(isinstance(note, (EnterForward, LeaveForward)) for note in backward)


def test_reentrant_checkpointing_is_refused(fake):
    class Reentrant(TwoLayers):
        def forward(self, x):
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)

    with pytest.raises(EngineError, match="use_reentrant=False"):
        record_one(Reentrant())


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = torch.nn.Embedding(20, SIZE), torch.nn.Linear(SIZE, 20, bias=False)
        self.head.weight = self.rows.weight

    def forward(self, x):
        return self.head(self.rows(x))


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_an_embedding_that_is_looked_up_computes_on_the_host(fake, has_accelerator):
    setting = dataclasses.replace(PLAIN, looked_up=["rows.weight"], has_accelerator=has_accelerator)

    def loss(model, x):
        return model(x.long()).sum()

    found = record_one(Tied(), (2, 3), setting, loss=loss)
    uses = kinds(found.notes, LookedUp, Acquire, Gradient)
    assert uses == [("LookedUp", 0), ("Acquire", 0), ("Gradient", 0), ("Gradient", 0)]
    assert [note.is_at_home for note in found.notes if isinstance(note, Gradient)] == [False, True]
    (looked_up,) = [note for note in found.notes if isinstance(note, LookedUp)]
    assert looked_up.nbytes == 2 * 3 * SIZE * 4
    on_host = [note.name for note in found.notes if isinstance(note, HostWork)]
    assert on_host == ["aten.embedding", "aten.embedding_dense_backward"]
    assert any(isinstance(note, BlockingCopy) for note in found.notes) == has_accelerator


def test_several_uses_of_an_outer_parameter_are_one_acquisition(fake):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = torch.nn.Parameter(torch.ones(SIZE)), torch.nn.Linear(SIZE, SIZE)

        def forward(self, x):
            return self.inner(x * self.scale) * self.scale

    found = record_one(Around())
    assert kinds(found.notes, Acquire, Release)[::5] == [("Acquire", 0), ("Release", 0)]


def test_attention_computes_with_the_projection_of_its_child(fake):
    attention = torch.nn.MultiheadAttention(SIZE, 2, batch_first=True)
    found = record_one(attention, (2, 3, SIZE), loss=lambda model, x: model(x, x, x)[0].sum())
    acquired = [note.index for note in found.notes if isinstance(note, Acquire)]
    assert acquired == [0, 1, 2, 3], "once each, with those of its child, which is not called"


def types_of_products(found):
    return {note.dtype for note in found.notes if isinstance(note, Kernel) and note.name == "aten.mm"}


def test_autocast_and_narrow_inputs_are_those_of_the_engine(fake):
    autocast = Casting(CPU, torch.bfloat16, None)
    assert types_of_products(record_one(TwoLayers(), setting=Setting(autocast))) == {"bfloat16"}
    narrow = Casting(CPU, None, torch.bfloat16)
    found = record_one(TwoLayers(torch.bfloat16), setting=Setting(narrow))
    assert types_of_products(found) == {"bfloat16"}


def test_an_evaluation_keeps_nothing_and_has_no_backward(fake):
    found = record_one(TwoLayers(), is_training=False)
    assert kinds(found.notes, *USES) == [
        *("EnterForward", ("Acquire", 0), ("Release", 0), ("Acquire", 1), ("Release", 1), "LeaveForward"),
    ]


def test_an_evaluation_inside_of_a_loss_is_told_apart(fake):
    def loss(model, x):
        with torch.no_grad():
            expected = model(x)
        return (model(x) - expected).square().sum()

    found = record_one(TwoLayers(), loss=loss)
    forwards = [note.is_inner for note in found.notes if isinstance(note, (EnterForward, LeaveForward))]
    assert forwards == [True, True, False, False]
    places = Places.of(pack([TensorSpec(i, str(i), (8, 8), True) for i in range(4)], 64, frozenset(), 1, False))
    told, plain = (micro_batch(ops, places, StepRules(), StepKind.TRAINING) for ops in (found, record_one(TwoLayers())))
    visited = [[visit.chunk_index for visit in each.trace.visits] for each in (told, plain)]
    assert visited[0] == visited[1], "the evaluation is a step of its own"
    assert told.trace.forward_ends == plain.trace.forward_ends


@pytest.mark.parametrize("read", [lambda weight: weight.data, torch.Tensor.detach], ids=["data", "detach"])
def test_a_value_that_is_read_at_home_has_no_word(fake, read):
    class Peeks(TwoLayers):
        def forward(self, x):
            return super().forward(x + read(self.second.weight)[0])

    assert record_one(Peeks()) is None


# What is refused


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "name"),
    [(lambda x: dist.all_reduce(x), "c10d.allreduce_"), (lambda x: dist.broadcast(x, 0), "c10d.broadcast_")],
)
def test_a_collective_is_refused_before_anything_is_sent(fake, alone, call, name):
    done = []

    def loss(model, x):
        found = model(x)
        call(found.detach())
        done.append(found)
        return found.sum()

    with pytest.raises(TraceError, match=rf"the model calls the collective '{name}"):
        record_one(TwoLayers(), loss=loss)
    assert not done


def test_an_operator_whose_result_depends_on_values_is_refused(fake):
    with pytest.raises(TraceError, match=r"operator 'aten.nonzero.default', whose result depends on values"):
        record_one(TwoLayers(), loss=lambda model, x: model(x)[x.nonzero()[:, 0]].sum())


class TooLongError(Exception):
    pass


def give_up():
    raise TooLongError


def test_a_recording_that_takes_too_long_ends(fake):
    model = TwoLayers()
    before = state_of(model)
    with pytest.raises(TooLongError):
        record_one(model, setting=dataclasses.replace(PLAIN, check_time=give_up))
    assert state_of(model) == before


def state_of(model):
    """All that a recording may leave behind."""
    hooks = [
        {name: dict(found) for name, found in vars(module).items() if name.endswith(("_hooks", "_kwargs", "_called"))}
        for module in model.modules()
    ]
    parameters = [
        (type(parameter), dict(vars(parameter)), parameter.grad, parameter._post_accumulate_grad_hooks)
        for parameter in model.parameters()
    ]
    return hooks, [list(map(id, module._parameters.values())) for module in model.modules()], repr(parameters)


def interrupted(model, x):
    with torch.no_grad():
        model(x)
    raise KeyboardInterrupt


LOSSES = {
    "whole": lambda model, x: model(x).sum(),
    "failed": lambda model, x: model(x)[x.nonzero()[:, 0]].sum(),
    "interrupted": interrupted,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", [Reader, Segmented], ids=["reader", "segmented"])
def test_the_model_is_as_it_was(fake, make, loss):
    model = make()
    before, modes = state_of(model), list(_get_current_dispatch_mode_stack())
    for _ in range(2):
        with contextlib.suppress(TraceError, KeyboardInterrupt):
            record_one(model, loss=loss)
        assert state_of(model) == before
        assert list(_get_current_dispatch_mode_stack()) == modes


def test_a_forward_that_is_interrupted_leaves_no_context(fake):
    class Stops(TwoLayers):
        def forward(self, x):
            self.first(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_one(Stops(), setting=Setting(Casting(CPU, torch.bfloat16, None)))
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# Models that are there already


def loss_of(model, inputs):
    return model(**inputs).loss


def make_inputs():
    return {key: torch.zeros_like(value) for key, value in make_batch("gpt2").items()}


def test_a_copy_of_a_model_is_traced_like_the_model():
    model = make_model("gpt2").train()
    with FakeTensors():
        copied = as_fake(model)
        makers = (lambda: as_fake(copied)), (lambda: make_model("gpt2").train())
        found, expected = (trace(MicroBatch(make, make_inputs, loss_of, {"dtype": "bf16"})) for make in makers)
    assert found == expected is not None
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32}, "copies of it were given types"


def test_a_model_that_copies_its_layers_is_traced():
    """nn.TransformerEncoder makes copies of the layer that it is given."""

    def make():
        layer = torch.nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2).train()

    with FakeTensors():
        found = trace(MicroBatch(make, lambda: {"src": torch.zeros(2, 3, SIZE)}, lambda m, x: m(**x).sum(), {}))
    assert found is not None
    with FakeTensors():
        num_parameters = len(list(make().parameters()))
    assert {note.index for note in found.notes if isinstance(note, Acquire)} == set(range(num_parameters))


def test_an_evaluation_ends_with_its_forward():
    def make():
        return make_model("gpt2").eval()

    with FakeTensors():
        found = trace(MicroBatch(make, make_inputs, loss_of, {}, is_training=False))
    assert isinstance(found.notes[-1], LeaveForward)
    assert not kinds(found.notes, Need, Gradient)


def test_a_trace_that_takes_too_long_ends():
    micro_batch = MicroBatch(lambda: make_model("gpt2"), make_inputs, loss_of, {})
    with FakeTensors(), pytest.raises(TooLongError):
        trace(micro_batch, check_time=give_up)
