"""Notes of a few blocks, extended, are those of all blocks; where blocks differ, the model runs in full."""

import contextlib
import dataclasses
import logging

import pytest
import torch
from models import IDS, VOCAB
from oracle.training import SMALL, Training, compute_loss, make_training
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    Qwen2Config,
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
    LeaveBackward,
    LeaveForward,
    LetGo,
    Need,
    Release,
)
from hf_patrickstar.schedule.repeats import IrregularError, Stack, extend
from hf_patrickstar.schedule.script import Begin, Part
from hf_patrickstar.tracing import micro_batch, stacks
from hf_patrickstar.tracing.fake import as_fake
from hf_patrickstar.tracing.stacks import cut, find_stacks

H100 = MACHINES["h100"]
DEPTH = 12
SHALLOW = 7
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, **IDS}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "decoder_start_token_id": 0}
WITH_ADAPTERS = {"r": 2, "target_modules": "all-linear"}


def gpt2(depth):
    return AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=depth, n_head=2, **IDS)
    )


def llama(depth, **changes):
    return AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, num_hidden_layers=depth, **changes))


def tied_qwen2(depth):
    return AutoModelForCausalLM.from_config(Qwen2Config(**LLAMA, num_hidden_layers=depth, tie_word_embeddings=True))


def bert(depth):
    return BertForMaskedLM(BertConfig(**SIZES, num_hidden_layers=depth, max_position_embeddings=32))


def mixtral(depth, **changes):
    sizes = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
    return AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_hidden_layers=depth))


def phi(depth):
    """Attention and the rest of a block are beside each other."""
    return AutoModelForCausalLM.from_config(PhiConfig(**SIZES, num_hidden_layers=depth, use_cache=False))


def gemma2(depth, **changes):
    """Every other block attends to the last tokens alone."""
    sizes = {**LLAMA, "head_dim": 8, "sliding_window": 8, "attn_implementation": "eager", **changes}
    return AutoModelForCausalLM.from_config(Gemma2Config(**sizes, num_hidden_layers=depth))


def t5(depth):
    sizes = {**T5, "pad_token_id": 0, "eos_token_id": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, num_layers=depth, num_decoder_layers=depth + 3))


def training_of(make, checkpointing=False, adapters=None, loss=compute_loss, num_micro_batches=1, **settings):
    def make_model():
        if adapters is None:
            model = make()
        else:
            with unset_fake_temporarily(), torch.device("meta"):
                base = make()
            model = as_fake(with_adapters(base, adapters))
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
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
        paths = {name.rpartition(".")[0] for name in ready.names.values()}
        made.append(len(paths))
        return record(ready, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch._Ready, "record", count)
        yield made


def trace_in_full(training, machine=H100):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "find_stacks", lambda model: ())
        return training.trace(machine)


def differing(found, expected):
    """The first note that differs, for the message of a test that fails."""
    pairs = enumerate(zip(found.notes, expected.notes, strict=False))
    return next((place, *pair) for place, pair in pairs if pair[0] != pair[1])


def check_extended(training):
    """What is extended is what a run of all blocks gives."""
    expected = trace_in_full(training)
    assert expected is not None
    with runs() as made:
        found = training.trace(H100)
    assert [made.count(num) for num in sorted(set(made))] == [2, 1, 1], "few blocks, one more, and all in forward"
    assert found == expected, differing(found, expected)


def check_fallback(training, caplog):
    """The model runs in full, and the notes are the same."""
    expected = trace_in_full(training)
    with runs() as made, caplog.at_level(logging.INFO, "hf_patrickstar"):
        found = training.trace(H100)
    assert not _get_current_dispatch_mode_stack()
    assert made[-1] == made[-2], "all blocks, twice"
    assert found == expected
    return caplog.text


@pytest.fixture
def shallow(monkeypatch):
    """Stacks of fewer blocks are cut, too, for tests that are about something else than depth."""
    monkeypatch.setattr(stacks, "LEAST_BLOCKS", SHALLOW - 1)


def test_extended_notes_of_many_blocks_are_those_of_all_blocks():
    check_extended(training_of(lambda: llama(32), checkpointing=True))


KINDS = {"gpt2": gpt2, "llama": llama, "tied qwen2": tied_qwen2, "bert": bert, "mixtral": mixtral, "phi": phi, "t5": t5}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_extended_notes_are_those_of_all_blocks(make, checkpointing, shallow):
    check_extended(training_of(lambda: make(SHALLOW), checkpointing))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make", [gpt2, llama, bert], ids=["gpt2", "llama", "bert"])
def test_so_are_those_of_adapters(make, checkpointing, shallow):
    check_extended(training_of(lambda: make(SHALLOW), checkpointing, WITH_ADAPTERS))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_so_are_those_of_kinds_that_alternate(checkpointing, shallow):
    check_extended(training_of(lambda: gemma2(2 * SHALLOW + 1, use_cache=False), checkpointing))


def test_so_are_those_of_some_micro_batches_of_a_step_and_of_a_cpu():
    check_extended(training_of(lambda: llama(DEPTH), num_micro_batches=2, dtype="fp32"))


def freeze_first(model):
    model.transformer.h[:3].requires_grad_(False)
    model.enable_input_require_grads()
    return model


def test_so_are_those_of_blocks_after_frozen_ones():
    check_extended(training_of(lambda: freeze_first(gpt2(DEPTH + 3))))


def test_an_optimizer_may_know_parameters_by_their_order():
    """As that of a script, which is copied."""

    def make_optimizer(parameters):
        with FakeTensorMode():
            names = [name for name, _ in llama(DEPTH).named_parameters()]
        found = list(zip(names, parameters, strict=True))
        matrices = [parameter for name, parameter in found if "norm" not in name and "layers.9." not in name]
        norms = [parameter for name, parameter in found if "norm" in name]
        last = [parameter for name, parameter in found if "norm" not in name and "layers.9." in name]
        groups = {"params": matrices}, {"params": norms, "weight_decay": 0.0}, {"params": last, "lr": 0.01}
        return torch.optim.AdamW(groups, fused=True)

    check_extended(dataclasses.replace(training_of(lambda: llama(DEPTH)), make_optimizer=make_optimizer))


# Where blocks differ


def widen(model):
    block, width = model.transformer.h[7].mlp, 24
    block.c_fc, block.c_proj = type(block.c_fc)(width, 32), type(block.c_proj)(32, width)
    return model


def test_a_block_of_another_width_is_run(caplog):
    check_fallback(training_of(lambda: widen(gpt2(DEPTH))), caplog)


def test_a_loss_that_reads_all_blocks_is_run(caplog):
    text = check_fallback(training_of(lambda: mixtral(DEPTH, output_router_logits=True)), caplog)
    assert "blocks repeat, but the model is run with all of them: IrregularError('blocks differ" in text


def test_a_loss_that_counts_blocks_is_run(caplog):
    def loss(model, inputs):
        return compute_loss(model, inputs) + torch.ones(len(model.transformer.h), device="cpu").sum()

    text = check_fallback(training_of(lambda: gpt2(DEPTH), loss=loss), caplog)
    assert "5 blocks do something else than 4, extended by one" in text


def test_a_cache_for_all_layers_of_the_configuration_is_made_in_full(caplog, shallow):
    text = check_fallback(training_of(lambda: gemma2(2 * SHALLOW)), caplog)
    assert "blocks repeat, but the model is run with all of them: IrregularError('blocks differ" in text


def test_kinds_without_a_pattern_are_run(caplog):
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 3 + ["sliding_attention"] * 4 + ["full_attention"]
    check_fallback(training_of(lambda: gemma2(len(kinds), layer_types=kinds, use_cache=False)), caplog)


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


def test_a_block_that_asks_for_its_number_is_run(caplog):
    """Neither its parameters nor four blocks and five show it; a forward of all blocks does."""
    text = check_fallback(training_of(lambda: make_odd(gpt2(DEPTH))), caplog)
    assert "the forward of all blocks does something else" in text


def test_a_model_that_counts_on_all_blocks_is_run(caplog):
    def loss(model, inputs):
        return compute_loss(model, inputs) + 0.0 * model.transformer.h[DEPTH - 1].ln_1.weight.sum()

    assert "IndexError" in check_fallback(training_of(lambda: gpt2(DEPTH), loss=loss), caplog)


def test_blocks_of_a_model_that_is_evaluated_in_its_loss_are_told_again():
    def loss(model, inputs):
        with torch.no_grad():
            model(**inputs)
        return compute_loss(model, inputs)

    check_extended(training_of(lambda: gpt2(DEPTH), loss=loss))


def test_a_script_whose_trainer_keeps_its_model_sees_all_blocks_last():
    made = []

    def make():
        made.append(llama(DEPTH))
        return made[-1]

    training_of(make).trace(H100)
    assert [len(model.model.layers) for model in made] == [DEPTH, 4, 5, DEPTH]


# Stacks


def stacks_of(make):
    with FakeTensorMode():
        return find_stacks(make())


def test_stacks_of_models():
    assert stacks_of(lambda: gpt2(DEPTH)) == (Stack("transformer.h", 0, 1, 12),)
    assert stacks_of(lambda: gpt2(11)) == ()
    assert stacks_of(lambda: t5(14)) == (Stack("encoder.block", 1, 1, 13), Stack("decoder.block", 1, 1, 16))
    assert stacks_of(lambda: gemma2(27)) == (Stack("model.layers", 1, 2, 13),)
    assert stacks_of(lambda: widen(gpt2(24))) == (Stack("transformer.h", 8, 1, 16),)
    assert stacks_of(lambda: widen(gpt2(18))) == ()


def test_a_list_inside_of_a_block_is_none():
    def make():
        blocks = [torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12))) for _ in range(13)]
        return torch.nn.Sequential(*blocks)

    assert stacks_of(lambda: torch.nn.ModuleDict({"own": make()})) == (Stack("own", 0, 1, 13),)


def test_a_model_is_cut_in_place():
    model = widen(gpt2(24))
    cut(model, find_stacks(model), 4)
    assert len(model.transformer.h) == 12


def test_names_of_blocks():
    stack = Stack("model.layers", 1, 2, 12)
    assert stack.split("model.layers.0.norm") is None
    assert stack.split("other.model.layers.3.norm") is None
    assert stack.split("model.norm") is None
    parts, block = stack.split("model.layers.4.norm.weight")
    assert (parts, block) == ((1, "norm.weight"), 1)
    assert stack.join(parts, 12) == "model.layers.26.norm.weight"


# Notes


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


@pytest.mark.parametrize("num_blocks", [4, 5, 9])
def test_notes_are_extended_to_any_depth(num_blocks):
    stack = Stack("h", 0, 1, 4)
    assert extend(*notes_of(4), [stack], [num_blocks]) == notes_of(num_blocks)
    assert extend(*notes_of(6), [dataclasses.replace(stack, num_blocks=6)], [9]) == notes_of(9)


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
    ],
    ids=["one block does more", "one does less", "unknown memory", "one is used elsewhere", "memory of one stays"],
)
def test_irregular_notes_are_refused(change):
    with pytest.raises(IrregularError):
        extend(*changed(change), [Stack("h", 0, 1, 4)], [9])


def test_parameters_that_are_no_blocks_one_after_the_other_are_refused():
    notes, names = notes_of(4)
    names[4], names[5] = names[5], names[4]
    with pytest.raises(IrregularError, match="block 1 of h"):
        extend(notes, names, [Stack("h", 0, 1, 4)], [9])
