"""Notes of a few blocks, extended, are those of all blocks; where blocks differ, the model runs in full."""

import contextlib
import logging

import pytest
import torch
from support import models
from support.models import IDS, SIZES, VOCAB
from support.oracle import SMALL, Training, compute_loss, make_training
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.planner.adapters import with_adapters
from hf_patrickstar.planner.planning import make_adamw
from hf_patrickstar.schedule.op_trace import (
    Acquire,
    Allocate,
    EnterForward,
    Free,
    Gradient,
    Kept,
    LeaveBackward,
    LeaveForward,
    LetGo,
    Need,
    Release,
    Wanted,
)
from hf_patrickstar.schedule.repeats import IrregularError, Stack, extend
from hf_patrickstar.schedule.script import Begin, Part
from hf_patrickstar.tracing import micro_batch
from hf_patrickstar.tracing.fake import as_fake
from hf_patrickstar.tracing.micro_batch import cut, find_stacks

H100 = MACHINES["h100"]
DEPTH = 12
SHALLOW = 7
WITH_ADAPTERS = {"r": 2, "target_modules": "all-linear"}


def gpt2(depth):
    return models.gpt2(n_layer=depth)


def llama(depth, **changes):
    return models.llama(num_hidden_layers=depth, **changes)


def bert(depth):
    return BertForMaskedLM(BertConfig(**{**SIZES, "num_hidden_layers": depth}))


def mixtral(depth, **changes):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, **experts, "num_hidden_layers": depth, **changes}))


def gemma2(depth, **changes):
    """Every other block attends to the last tokens alone."""
    sizes = {**SIZES, "head_dim": 8, "sliding_window": 8, "attn_implementation": "eager", **changes}
    return Gemma2ForCausalLM(Gemma2Config(**{**sizes, "num_hidden_layers": depth}))


def t5(depth):
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **IDS, num_layers=depth, num_decoder_layers=depth + 3))


def training_of(make, checkpointing=0, adapters=None, loss=compute_loss, num_micro_batches=1, **settings):
    def make_model():
        if adapters is None:
            model = make()
        else:
            with unset_fake_temporarily(), torch.device("meta"):
                base = make()
            model = as_fake(with_adapters(base, adapters))
        model.train()
        if checkpointing:
            every = {"every_n_layers": checkpointing} if checkpointing > 1 else {}
            model.gradient_checkpointing_enable({"use_reentrant": False}, **every)
        return model

    def make_optimizer(parameters):
        return make_adamw([parameter for parameter in parameters if parameter.requires_grad])

    config = {**SMALL, **settings}
    inputs = make_training("bert_mlm").make_inputs
    return Training(make_model, inputs, config, make_optimizer, loss, num_micro_batches)


@contextlib.contextmanager
def runs():
    """Lists how many blocks the models had that micro-batches ran, forwards alone included."""
    made = []
    record = micro_batch._Ready.record

    def count(ready, **how):
        made.append(len({name.rpartition(".")[0] for name in ready.names.values()}))
        return record(ready, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch._Ready, "record", count)
        yield made


def trace_in_full(training):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "find_stacks", lambda model: ())
        return training.trace(H100)


def check_extended(training):
    """What is extended is what a run of all blocks gives."""
    expected = trace_in_full(training)
    assert expected is not None
    with runs() as made:
        found = training.trace(H100)
    assert [made.count(num) for num in sorted(set(made))] == [2, 1, 1], "few blocks, one more, and all in forward"
    pairs = enumerate(zip(found.notes, expected.notes, strict=False))
    assert found == expected, next((place, *pair) for place, pair in pairs if pair[0] != pair[1])
    kept = {note.kept for note in expected.notes if isinstance(note, Kept)} - {-1}
    assert kept >= {note.kept for note in expected.notes if isinstance(note, Wanted)} > set()


@pytest.fixture
def shallow(monkeypatch):
    """Stacks of fewer blocks are cut, too, for tests that are about something else than depth."""
    monkeypatch.setattr(micro_batch, "LEAST_BLOCKS", SHALLOW - 1)


def evaluate_and_train(model, inputs):
    with torch.no_grad():
        model(**inputs)
    return compute_loss(model, inputs)


KINDS = {
    "bert": lambda: training_of(lambda: bert(SHALLOW)),  # with dropout
    "adapters, recomputed": lambda: training_of(lambda: llama(SHALLOW), True, WITH_ADAPTERS),
}
LONG_KINDS = {
    "kinds that alternate, recomputed": lambda: training_of(lambda: gemma2(2 * SHALLOW + 1, use_cache=False), True),
    "gpt2, with a mask that all blocks keep, recomputed": lambda: training_of(lambda: gpt2(SHALLOW), True),
    "every second block recomputed": lambda: training_of(lambda: llama(2 * SHALLOW), 2),
    "mixtral, recomputed": lambda: training_of(lambda: mixtral(SHALLOW), True),
    "t5, recomputed": lambda: training_of(lambda: t5(SHALLOW), True),
    "micro-batches in fp32": lambda: training_of(lambda: llama(SHALLOW), num_micro_batches=2, dtype="fp32"),
    "an evaluation inside of a loss": lambda: training_of(lambda: gpt2(SHALLOW), loss=evaluate_and_train),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_extended_notes_are_those_of_all_blocks(make, shallow):
    check_extended(make())


@pytest.mark.long
@pytest.mark.parametrize("make", LONG_KINDS.values(), ids=LONG_KINDS)
def test_extended_notes_of_more_kinds_are_those_of_all_blocks(make, shallow):
    check_extended(make())


# Where blocks differ


def widen(model):
    block, width = model.transformer.h[7].mlp, 24
    block.c_fc, block.c_proj = type(block.c_fc)(width, 32), type(block.c_proj)(32, width)
    return model


class OddBlock(torch.nn.Module):
    """A block that does more if it has a number."""

    def __init__(self, block, number):
        super().__init__()
        self.block, self.number = block, number

    def forward(self, hidden, *args, **kwargs):
        found = self.block(hidden, *args, **kwargs)
        return torch.tanh(found) if self.number == 9 else found


def make_odd(model):
    model.transformer.h = torch.nn.ModuleList(map(OddBlock, model.transformer.h, range(DEPTH)))
    return model


def count_blocks(model, inputs):
    return compute_loss(model, inputs) + torch.ones(len(model.transformer.h), device="cpu").sum()


def read_last(model, inputs):
    return compute_loss(model, inputs) + 0.0 * model.transformer.h[DEPTH - 1].ln_1.weight.sum()


IRREGULAR = {
    "a loss that reads all": (lambda: training_of(lambda: mixtral(DEPTH, output_router_logits=True)), "blocks differ"),
    "a loss that counts": (lambda: training_of(lambda: gpt2(DEPTH), loss=count_blocks), "something else than 4"),
    # Neither its parameters nor four blocks and five show it; a forward of all blocks does.
    "a number": (lambda: training_of(lambda: make_odd(gpt2(DEPTH))), "the forward of all blocks does something else"),
    "an index": (lambda: training_of(lambda: gpt2(DEPTH), loss=read_last), "IndexError"),
}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(*case, id=name, marks=() if "number" in name else pytest.mark.long)
        for name, case in IRREGULAR.items()
    ],
)
def test_a_model_whose_blocks_differ_is_run_in_full(make, why, caplog):
    training = make()
    expected = trace_in_full(training)
    with runs() as made, caplog.at_level(logging.INFO, "hf_patrickstar"):
        assert training.trace(H100) == expected
    assert not _get_current_dispatch_mode_stack()
    assert made[-1] == made[-2], "all blocks, twice"
    assert why in caplog.text
    assert "blocks repeat, but the model is run with all of them" in caplog.text


# Stacks


def nested():
    """A list inside of a block is no stack."""
    blocks = [torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12))) for _ in range(13)]
    return torch.nn.ModuleDict({"own": torch.nn.Sequential(*blocks)})


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: gpt2(DEPTH), [("transformer.h", 0, 1, 12)]),
        (lambda: t5(14), [("encoder.block", 1, 1, 13), ("decoder.block", 1, 1, 16)]),
        (lambda: gemma2(27), [("model.layers", 1, 2, 13)]),
        (lambda: widen(gpt2(24)), [("transformer.h", 8, 1, 16)]),
        (nested, [("own", 0, 1, 13)]),
    ],
)
def test_stacks_of_models(make, found):
    with FakeTensorMode():
        assert find_stacks(make()) == tuple(Stack(*fields) for fields in found)


def test_a_model_is_cut_in_place_and_names_of_blocks_are_taken_apart():
    model = widen(gpt2(24))
    cut(model, find_stacks(model), 4)
    assert len(model.transformer.h) == 12
    stack = Stack("model.layers", 1, 2, 12)
    for name in ("model.layers.0.norm", "other.model.layers.3.norm", "model.norm"):
        assert stack.split(name) is None
    parts, block = stack.split("model.layers.4.norm.weight")
    assert (parts, block) == ((1, "norm.weight"), 1)
    assert stack.join(parts, 12) == "model.layers.26.norm.weight"


def use(index):
    return [Acquire(index), Release(index, False)]


def notes_of(num_blocks):
    """A model of a parameter, so many blocks of two each, and another parameter."""
    storages = iter(range(100))
    notes = [Begin(Part.FORWARD), EnterForward((), ()), *use(0)]
    kept, made = [], []
    for block in range(num_blocks):
        made += [next(storages), next(storages)]
        notes += [*use(1 + 2 * block), Allocate(((made[-2], 8), (made[-1], 4)))]
        notes += [*use(2 + 2 * block), Free(made[-2])]
        kept.append(made[-1])
    last = 1 + 2 * num_blocks
    notes += [*use(last), LeaveForward(), Begin(Part.BACKWARD)]
    for block in reversed(range(num_blocks)):
        for place in (2, 1):
            index, gradient = place + 2 * block, next(storages)
            notes += [Need(index), Allocate(((gradient, 4),))]
            notes += [LetGo(index), Gradient(index, gradient, 4), Free(gradient)]
        notes += [Free(kept[block + 1])] if block + 1 < num_blocks else []
    notes += [Free(kept[0]), LeaveBackward()]
    names = {0: "first.weight", last: "last.weight"}
    for block in range(num_blocks):
        names |= {1 + 2 * block: f"h.{block}.a.weight", 2 + 2 * block: f"h.{block}.b.weight"}
    return tuple(notes), names


def changed(change):
    notes, names = notes_of(4)
    notes = list(notes)
    change(notes)
    return notes, names


@pytest.mark.parametrize(
    "change",
    [
        lambda notes: notes.insert(notes.index(Acquire(5)) + 1, LetGo(0)),
        lambda notes: notes.remove(LetGo(5)),
        lambda notes: notes.insert(0, Free(90)),
        lambda notes: notes.insert(notes.index(LeaveForward()), LetGo(3)),
        lambda notes: notes.remove(Free(5)),
        lambda notes: notes.insert(notes.index(Acquire(5)) + 1, Kept(-1, -1)),
        lambda notes: notes.insert(0, Kept(90, -1)),
    ],
    ids=[
        *("one block does more", "one does less", "unknown memory", "one is used elsewhere", "memory of one stays"),
        *("one keeps an operand more", "unknown memory is kept"),
    ],
)
def test_irregular_notes_are_refused(change):
    with pytest.raises(IrregularError):
        extend(*changed(change), [Stack("h", 0, 1, 4)], [9])


def test_parameters_that_are_no_blocks_one_after_the_other_are_refused():
    notes, names = notes_of(4)
    names[4], names[5] = names[5], names[4]
    with pytest.raises(IrregularError, match="block 1 of h"):
        extend(notes, names, [Stack("h", 0, 1, 4)], [9])
