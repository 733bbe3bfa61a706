"""What is recorded of a plain model, and what is refused; tests/oracle compares recordings with what engines do."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.models import make_batch, make_model
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.errors import EngineError, TraceError
from hf_patrickstar.model.casting import Casting
from hf_patrickstar.schedule.op_trace import Allocate
from hf_patrickstar.setup.decisions import collect
from hf_patrickstar.setup.precision import choose_precision
from hf_patrickstar.tracing.fake import FakeTensors, as_fake
from hf_patrickstar.tracing.micro_batch import MicroBatch, trace
from hf_patrickstar.tracing.recorder import Recorder, Setting

SIZE = 8
CPU = torch.device("cpu")
PLAIN = {"casting": Casting(CPU, None, None), "setting": Setting()}


def total(model, x):
    return model(x).sum()


def record_one(model, shape=(3, SIZE), how=PLAIN, backward=torch.Tensor.backward, loss=total):
    """What a micro-batch of a model does that is made under fake tensors."""
    specs, _, parameters = collect(model, {})
    specs = choose_precision(model, PatrickStarConfig(), "no", parameters).assign(model, specs, parameters)
    x = torch.zeros(shape)
    with torch.set_grad_enabled(backward is not None):
        return Recorder(model, specs, [x], **how).run(lambda: loss(model, x), backward)


@pytest.fixture
def fake():
    with FakeTensors():
        yield


class TwoLayers(torch.nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(SIZE, SIZE, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x))


class Reader(TwoLayers):
    """Reads the weight of a layer beside calling it."""

    def forward(self, x):
        x = self.first(x) * self.second.weight[0]
        with torch.no_grad():
            scale = self.second.weight.abs().mean()
        return self.second(x) * scale


class Segmented(TwoLayers):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False).square()


# What is refused


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("call", [dist.all_reduce, lambda x: dist.broadcast(x, 0)])
def test_a_collective_is_refused_before_anything_is_sent(fake, alone, call):
    done = []

    def loss(model, x):
        found = model(x)
        call(found.detach())
        done.append(found)

    with pytest.raises(TraceError, match=r"the model calls the collective 'c10d\.(allreduce_|broadcast_)"):
        record_one(TwoLayers(), loss=loss)
    assert not done


class Reentrant(TwoLayers):
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class TooLongError(Exception):
    pass


def give_up():
    raise TooLongError


def stop(model, x):
    with torch.no_grad():
        model(x)
    raise KeyboardInterrupt


def ask_for_values(model, x):
    return model(x)[x.nonzero()[:, 0]].sum()


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
    modes = *_get_current_dispatch_mode_stack(), torch._C._autograd._top_saved_tensors_default_hooks(True)
    settings = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    return (
        hooks,
        [list(map(id, module._parameters.values())) for module in model.modules()],
        repr(parameters),
        modes,
        settings,
    )


AUTOCAST = {**PLAIN, "casting": Casting(CPU, torch.bfloat16, None)}
ENDS = {
    "whole": (Reader, total, PLAIN, None, ""),
    "values": (
        Reader,
        ask_for_values,
        PLAIN,
        TraceError,
        r"operator 'aten.nonzero.default', whose result depends on values",
    ),
    "interrupted": (Segmented, stop, AUTOCAST, KeyboardInterrupt, ""),
    "too long": (TwoLayers, total, {**PLAIN, "setting": Setting(check_time=give_up)}, TooLongError, ""),
    "reentrant": (Reentrant, total, PLAIN, EngineError, "use_reentrant=False"),
}


@pytest.mark.parametrize(("make", "loss", "how", "error", "message"), ENDS.values(), ids=ENDS)
def test_the_model_is_as_it_was_however_a_recording_ends(fake, make, loss, how, error, message):
    model = make()
    before = state_of(model)
    for _ in range(2):
        with contextlib.nullcontext() if error is None else pytest.raises(error, match=message or None):
            record_one(model, how=how, loss=loss)
        assert state_of(model) == before


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
        found, expected = (
            trace(MicroBatch(make, make_inputs, loss_of, {"dtype": "bf16"}), Setting()) for make in makers
        )
    assert found == expected is not None
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32}, "copies of it were given types"
    with FakeTensors(), pytest.raises(TooLongError):
        trace(MicroBatch(makers[1], make_inputs, loss_of, {}), Setting(check_time=give_up))


def test_a_product_with_a_packed_weight_takes_the_memory_of_its_values():
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(128, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    with FakeTensors():
        ops = record_one(as_fake(layer), (3, 128), backward=None)
    made = [nbytes for note in ops.notes if isinstance(note, Allocate) for _, nbytes in note.storages]
    assert 2 * 128 * 256 in made, "its bf16 values, which the kernels of bitsandbytes write before they multiply"
