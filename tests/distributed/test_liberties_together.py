"""What users do with a model that several processes share, beside training it."""

import pytest
import torch
from support.models import gpt2

from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.errors import EngineError

SETTINGS = {"chunk_numel": 4096}


def make_engine(model, optimizer=True, **settings):
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer else None
    return PatrickStarEngine(model, {**SETTINGS, **settings}, inner, device="cpu")


def make_ids(rank, step, numel=8):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(3, 96, (2, numel), generator=generator)


def train(engine, rank, step):
    ids = make_ids(rank, step)
    engine.model(input_ids=ids, labels=ids).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def wait_for_gathers(rank):
    """How often a buffer was still held by somebody when its gather had been waited for."""
    collectives = Collectives.connect(None, torch.device("cpu"))
    num_held = 0
    for _ in range(300):
        buffer = torch.full((2048,), float(rank))
        before = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
        collectives.all_gather(buffer, "parameters").wait()
        num_held += torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > before
    collectives.close()
    return num_held


def test_nobody_holds_a_buffer_that_has_arrived(pair):
    assert pair.run(wait_for_gathers) == [0, 0]


class Swapping(torch.nn.Linear):
    new = None

    def forward(self, x):
        if self.new is not None:
            torch.utils.swap_tensors(self.bias, self.new)
        return super().forward(x)


def exchange_inside(rank, is_evaluation, in_its_module):
    """A parameter of the second layer is exchanged when the forward of the model has begun, or its own."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Swapping(8, 8))
    new = torch.nn.Parameter(torch.full((8,), 2.0))
    if in_its_module:
        object.__setattr__(model[1], "new", new)  # it is none of the model's parameters
    else:
        model[0].register_forward_hook(lambda *_: torch.utils.swap_tensors(model[1].bias, new))
    engine = PatrickStarEngine(model, {}, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    try:
        with torch.set_grad_enabled(not is_evaluation):
            return (model(torch.zeros(1, 8)) - model[1].weight.detach() @ model[0].bias.detach()).mean().item()
    except EngineError as error:
        return str(error)
    finally:
        engine.detach()


@pytest.mark.parametrize("in_its_module", [False, True])
def test_a_parameter_that_is_exchanged_inside_of_a_forward_is_refused_where_its_gradient_would_stay_alone(
    pair, in_its_module
):
    for said in pair.run(exchange_inside, False, in_its_module):
        assert said.startswith("parameter '1.bias' was exchanged, or given another shape, inside of a forward")
    assert pair.run(exchange_inside, True, in_its_module) == pytest.approx([2.0, 2.0])


BUFFERS = {
    "int16": lambda value: torch.full((3,), value, dtype=torch.int16),
    "complex": lambda value: torch.full((3,), value, dtype=torch.complex64),
    "float8": lambda value: torch.full((3,), float(value)).to(torch.float8_e4m3fn),
    "scalar": lambda value: torch.tensor(value > 5),
    "expanded": lambda value: torch.full((1, 4), float(value)).expand(3, 4),
}


def broadcast_buffers(rank):
    model = torch.nn.Linear(8, 8)
    for kind, make in BUFFERS.items():
        model.register_buffer(kind, make(7 - 4 * rank))
    PatrickStarEngine(model, {}, torch.optim.AdamW(model.parameters()), device="cpu").detach()
    buffers = dict(model.named_buffers())
    return {kind: torch.equal(bits(buffers[kind]), bits(make(7))) for kind, make in BUFFERS.items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_buffers_of_every_kind_are_made_equal(pair):
    assert pair.run(broadcast_buffers) == [dict.fromkeys(BUFFERS, True)] * 2


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs):
        return self.inner(**kwargs)


def use_the_model_inside(rank, folder):
    engine = make_engine(Wrapper(gpt2()))
    train(engine, rank, 0)
    inner = engine.model.inner
    with torch.no_grad():
        text = inner.generate(make_ids(rank, 1), max_new_tokens=2 + 3 * rank, do_sample=False, eos_token_id=None)
    inner.save_pretrained(folder)
    kept = engine.model.state_dict()
    if rank == 1:
        del kept  # only the other keeps a snapshot
    tied = engine.model.state_dict()
    assert tied["inner.lm_head.weight"].data_ptr() == tied["inner.transformer.wte.weight"].data_ptr()
    train(engine, rank, 2)
    engine.detach()
    assert not {"generate", "save_pretrained"} & set(inner.__dict__)
    saved = type(inner).from_pretrained(folder)
    return text.shape[1], saved.config.n_layer


def test_generate_and_save_a_part_of_the_model_and_keep_what_others_do_not(pair, tmp_path):
    assert pair.run(use_the_model_inside, str(tmp_path)) == [(10, 3), (13, 3)]
