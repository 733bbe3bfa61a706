"""``chunked_loss``: the losses of a language model whose logits are never whole."""

import copy
import dataclasses
import pickle
import re

import peft
import pytest
import torch
from support import inside
from support.models import SIZES, llama, make_batch, make_model
from support.streams import simulated_streams
from support.trainers import assert_same_weights, logged, make_trainer, pair, run, train
from support.watch import non_model_peak
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.machine import find_machine
from hf_patrickstar.model.chunked_loss import Logits, _tell_whole, chunk_losses, find_heads

NAMES = ("gpt2", "llama", "mixtral", "opt", "bert_mlm", "t5")
VOCAB = 4096
HIDDEN = 64
TOKENS = (4, 128)


def without_dropout(model):
    for key, value in vars(model.config).items():
        if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            setattr(model.config, key, 0.0)
    return type(model)(model.config)


def chunked(model):
    chunk_losses(find_heads(model))
    return model


def make_llama(tied=False, **fields):
    """A model whose logits take most of the memory."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "max_position_embeddings": 256}
    return llama(**sizes, tie_word_embeddings=tied, **fields)


def tokens(seed=1, shape=TOKENS):
    ids = torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def learn(model, batch):
    model(**batch).loss.backward()


@pytest.fixture(autouse=True)
def _told():
    _tell_whole.cache_clear()


def said(caplog):
    """What was said of losses that save nothing."""
    return [text for text in caplog.messages if "chunked_loss" in text]


@dataclasses.dataclass
class Case:
    loss: torch.Tensor
    gradients: list


def outcome(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return Case(loss.detach(), [p.grad for p in model.parameters() if p.grad is not None])


def assert_close(expected, found, tolerance=1e-6):
    assert abs(found.loss - expected.loss) <= tolerance * abs(expected.loss)
    assert len(found.gradients) == len(expected.gradients)
    for one, other in zip(expected.gradients, found.gradients, strict=True):
        assert (one - other).norm() <= 10 * tolerance * one.norm() + 1e-9


# What is computed


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_stock(name, caplog):
    torch.manual_seed(0)
    model = without_dropout(make_model(name))
    batch = make_batch(name, length=24)
    batch["labels"][:, 3:7] = -100
    expected = outcome(copy.deepcopy(model), batch)
    model = chunked(model)
    assert_close(expected, outcome(model, batch))
    assert not said(caplog)


@pytest.mark.parametrize("given", ["num_items_in_batch", "shift_labels", "both", "a tuple"])
def test_what_trainers_pass_counts(given):
    model, batch = make_llama(), tokens()
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, :9] = -100
    if given in ("num_items_in_batch", "both"):
        batch["num_items_in_batch"] = torch.tensor(777)
    if given in ("shift_labels", "both"):
        batch["shift_labels"] = batch["labels"].roll(-1, 1)
    if given == "a tuple":
        batch["return_dict"] = False
        expected, found = model(**batch)[0], chunked(copy.deepcopy(model))(**batch)[0]
        assert abs(found - expected) <= 1e-6 * expected
        return
    assert_close(outcome(copy.deepcopy(model), batch), outcome(chunked(model), batch))


def test_a_head_with_a_bias_and_a_frozen_body():
    model = make_llama()
    model.lm_head = nn.Linear(HIDDEN, VOCAB)
    model.model.requires_grad_(False)
    expected = outcome(copy.deepcopy(model), tokens())
    assert len(expected.gradients) == 2
    assert_close(expected, outcome(chunked(model), tokens()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_losses_in_16_bits_are_as_exact_as_those_of_stock(dtype, is_autocast):
    """torch's own function gives a loss in bf16, which is off by a part in 100."""
    model, batch = make_llama(), tokens()
    model = model if is_autocast else model.to(dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=is_autocast):
        expected = outcome(copy.deepcopy(model), batch)
        found = outcome(chunked(model), batch)
    assert found.loss.dtype is torch.float32
    assert abs(found.loss - expected.loss) < 1e-6 * expected.loss
    for one, other in zip(expected.gradients, found.gradients, strict=True):
        assert (one - other).norm() < 2e-2 * one.norm()


@pytest.mark.parametrize("name", ["t5", "bert_mlm"])
def test_autocast_gives_losses_of_32_bits_to_models_that_leave_logits_as_they_are(name):
    """Of the loss, and of its gradient, which is that of a part of a batch."""
    model, batch = without_dropout(make_model(name)), make_batch(name)
    found = []
    for each in (copy.deepcopy(model), chunked(model)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(**batch).loss
        (loss / 3).backward()
        found.append((loss, [p.grad for p in each.parameters() if p.grad is not None]))
    (expected, gradients), (loss, others) = found
    assert loss.dtype is expected.dtype is torch.float32
    assert abs(loss - expected) < 1e-6 * expected
    for one, other in zip(gradients, others, strict=True):
        assert (one - other).norm() < 2e-2 * one.norm()


def test_backward_can_run_twice_and_over_a_scaled_loss():
    model, other = make_llama(), chunked(make_llama())
    for each in (model, other):
        loss = 3 * each(**tokens()).loss
        loss.backward(retain_graph=True)
        loss.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad - two.grad).norm() <= 1e-5 * one.grad.norm()


@pytest.mark.parametrize("ignored", ["all", "the last rows", "all of a micro-batch", "all, in a sum"])
def test_rows_without_a_label_have_gradients_of_zero(ignored):
    """Of a mean over none of them the loss is NaN, and its gradient infinite: no weight may become NaN by it."""
    model, other = make_llama(), chunked(make_llama())
    batches = [tokens(), tokens(2)] if ignored == "all of a micro-batch" else [tokens()]
    labels = batches[0]["labels"] = batches[0]["labels"].clone()
    labels.flatten()[200 if ignored == "the last rows" else 0 :].fill_(-100)
    if ignored == "all, in a sum":
        batches[0]["num_items_in_batch"] = torch.tensor(0)
    for each in (model, other):
        for batch in batches:
            learn(each, batch)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad - two.grad).norm() <= 1e-5 * one.grad.norm()


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_gradient_penalty_has_its_second_derivatives(in_chunks, caplog):
    def penalised(model):
        embedded = model.get_input_embeddings()(tokens(shape=(2, 16))["input_ids"]).detach().requires_grad_(True)
        loss = model(inputs_embeds=embedded, labels=tokens(shape=(2, 16))["input_ids"]).loss
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        (loss + 10 * gradient.pow(2).sum()).backward()
        return Case(loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])

    model = make_llama(attn_implementation="eager")
    expected, other = penalised(copy.deepcopy(model)), chunked(model)
    if in_chunks:
        PatrickStarEngine(other, {"chunked_loss": True, "debug_evict_all": True}, torch.optim.SGD(other.parameters()))
    assert_close(expected, penalised(other))
    assert any("create_graph" in text for text in said(caplog))


# Logits that somebody uses


def test_logits_of_training_are_there_for_whoever_uses_them(caplog):
    model, batch = make_llama(), tokens()
    expected = model(**batch).logits
    logits = chunked(model)(**batch).logits
    assert logits.shape == expected.shape
    assert logits.dtype is expected.dtype
    assert not said(caplog)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    (text,) = said(caplog)
    assert "argmax" in text
    assert torch.equal(logits[..., :-1, :].contiguous(), expected[..., :-1, :])
    first, second = (torch.autograd.grad(x.square().mean(), model.lm_head.weight)[0] for x in (expected, logits))
    assert torch.equal(first, second)


def test_a_model_that_changes_its_logits_before_the_loss_computes_as_always(caplog):
    sizes = {
        **SIZES,
        "vocab_size": VOCAB,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "final_logit_softcapping": 0.5,
    }
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager"))
    expected = outcome(copy.deepcopy(model), tokens())
    found = outcome(chunked(model), tokens())
    assert torch.equal(found.loss, expected.loss)
    assert all(map(torch.equal, found.gradients, expected.gradients))
    assert "div" in said(caplog)[0]


def test_a_loss_of_the_user_over_logits_is_computed_in_chunks(caplog):
    model, batch = make_llama(), tokens()
    labels = batch.pop("labels")

    def loss_of(model):
        logits = model(**batch).logits
        return nn.CrossEntropyLoss()(logits.view(-1, VOCAB), labels.view(-1))

    expected, found = loss_of(model), loss_of(chunked(copy.deepcopy(model)))
    assert abs(found - expected) <= 1e-6 * expected
    assert not said(caplog)


def test_a_loss_that_goes_around_torch_is_refused():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return logits.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(*TOKENS, VOCAB)

    loss = Own.apply(chunked(make_llama())(**tokens()).logits)
    with pytest.raises(EngineError, match="set chunked_loss to false"):
        loss.backward()


@pytest.mark.parametrize("how", ["eval", "no_grad", "generate"])
def test_evaluation_has_its_logits_as_always(how, caplog):
    model = make_llama()
    other = chunked(copy.deepcopy(model))
    results = []
    for each in (model, other):
        each.train(how != "eval")
        if how == "generate":
            results.append(each.generate(**{"input_ids": tokens()["input_ids"][:, :5]}, max_new_tokens=3))
        else:
            with torch.set_grad_enabled(how == "eval"):
                results.append(each(**tokens()).logits)
    assert type(results[1]) is torch.Tensor
    assert torch.equal(*results)
    assert not said(caplog)


# In chunks of model data


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_is_that_of_a_chunk_and_bits_are_those_of_the_same_loss_on_a_plain_model(tied):
    whole_nbytes = TOKENS[0] * TOKENS[1] * VOCAB * 4
    plain, model = chunked(make_llama(tied)), make_llama(tied)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (plain, model)]
    config = {"device_budget": "9MiB", "chunked_loss": True, "placement": "host"}
    engine = PatrickStarEngine(model, config, optimizers[1], device="cpu")
    optimizers[1] = engine.optimizer
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            learn(each, tokens(step))
            optimizer.step()
            optimizer.zero_grad()
    (traced,) = (trace for trace in inside.traces(engine).values() if trace.kind.is_training)
    assert engine.stats()["device_total_peak_nbytes"] <= 9 * 2**20
    engine.detach()
    assert_same_weights(plain, model)
    peak = non_model_peak(plain, lambda each: learn(each, tokens()))
    gradient_nbytes = plain.lm_head.weight.nbytes  # the engine counts those on their own
    assert peak - gradient_nbytes <= traced.non_model_peak_nbytes <= peak
    assert traced.non_model_peak_nbytes < whole_nbytes
    assert non_model_peak(make_llama(tied), lambda each: learn(each, tokens())) > 2 * whole_nbytes


@pytest.mark.parametrize(("name", "precision"), [("gpt2", "no"), ("llama", "bf16"), ("mixtral", "no")])
def test_the_trainer_trains_with_it(tmp_path, name, precision):
    """Against the stock Trainer, with several micro-batches, whose items it counts."""
    told = {"gradient_accumulation_steps": 2, "bf16": precision == "bf16", "eval_strategy": "epoch", "max_steps": 3}
    _, stock = train(name, tmp_path / "stock", change=_drop_nothing, **told)
    config = {"device_budget": "1MiB", "chunked_loss": True, "placement": "host"}
    trainer, found = train(name, tmp_path / "ours", config, change=_drop_nothing, **told)
    tolerance = 1e-6 if precision == "no" else 2e-3
    assert len(found.losses) == 3
    for one, other in zip(stock.losses, found.losses, strict=True):
        assert abs(one - other) <= tolerance * one
    assert trainer.patrickstar_stats()["device_total_peak_nbytes"] <= 2**20


def _drop_nothing(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def test_label_smoothing_has_its_logits_and_its_bits(tmp_path, caplog):
    told = {"label_smoothing_factor": 0.1, "max_steps": 2}
    stock, ours = pair(tmp_path, name="llama", **told)
    ours = make_trainer(
        type(ours), type(ours.args), tmp_path, name="llama", patrickstar_config={"chunked_loss": True}, **told
    )
    run(stock)
    run(ours)
    assert logged(stock, "loss") == logged(ours, "loss")
    assert_same_weights(stock.model, ours.model)
    assert "log_softmax" in said(caplog)[0]


def test_adapters_over_a_frozen_model(tmp_path):
    def make():
        return peft.get_peft_model(make_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    plain = chunked(plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    engine = PatrickStarEngine(model, {"device_budget": "9MiB", "chunked_loss": True}, optimizer, device="cpu")
    losses = [each(**tokens()).loss for each in (plain, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    with engine.full_parameters(with_grads=True):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert one.grad is None or torch.equal(one.grad, other.grad)
    assert find_heads(plain)[0].weight.grad is None
    engine.detach()


def test_logits_that_were_used_without_a_graph_have_one_afterwards():
    plain, ours = make_llama(), chunked(make_llama())
    for model in (plain, ours):
        found = model(**tokens())
        with torch.no_grad():
            assert found.logits.argmax(-1).shape == tokens()["labels"].shape
        assert torch.zeros_like(found.logits).shape == found.logits.shape
        (found.loss + found.logits.square().mean()).backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_logits_are_refused_once_the_output_embedding_has_changed():
    """They would be those of the new weight."""
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    engine = PatrickStarEngine(model, {"chunked_loss": True}, optimizer, device="cpu")
    found = model(**tokens())
    found.loss.backward()
    engine.optimizer.step()
    with pytest.raises(EngineError, match=r"use them before optimizer.step\(\)"):
        found.logits.sum()


CHANGES = {
    "to a type by name": lambda logits: logits.to(dtype=torch.float64),
    "to a device and a type": lambda logits: logits.to("cpu", torch.float64),
    "a copy": lambda logits: logits.to(torch.float32, copy=True),
    "to a device by name": lambda logits: logits.to(device="cpu"),
    "a memory format": lambda logits: logits.contiguous(memory_format=torch.contiguous_format),
    "a shape by name": lambda logits: torch.Tensor.reshape(logits, shape=(-1, VOCAB)),
    "another type of the same bits": lambda logits: logits.view(torch.int32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_logits_change_as_tensors_do(change):
    plain, ours = make_llama(), chunked(make_llama())
    assert torch.equal(*(change(model(**tokens()).logits).detach() + 0 for model in (plain, ours)))


@pytest.mark.parametrize("detach", [torch.detach_, torch.Tensor.detach_])
def test_logits_that_are_detached_in_place_lead_to_no_gradient(detach):
    for model in (make_llama(), chunked(make_llama())):
        logits = model(**tokens()).logits
        for each in (detach(logits), logits):
            loss = torch.nn.functional.cross_entropy(each.view(-1, VOCAB), tokens()["labels"].view(-1))
            assert not loss.requires_grad


# What is around it


def test_a_model_without_a_plain_output_embedding_is_refused():
    for model, word in (
        (nn.Sequential(nn.Linear(4, 4)), "no output embedding"),
        (peft.get_peft_model(make_llama(), peft.LoraConfig(r=2, modules_to_save=["lm_head"])), "ModulesToSaveWrapper"),
    ):
        parameters = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(ConfigError, match=f"(?s)chunked_loss.*{word}.*set chunked_loss to false"):
            PatrickStarEngine(model, {"chunked_loss": True}, torch.optim.AdamW(parameters), device="cpu")
        assert not hasattr(model, "patrickstar_engine")


def test_copies_and_the_model_after_detach_are_ordinary():
    model = make_llama()
    engine = PatrickStarEngine(model, {"chunked_loss": True}, torch.optim.AdamW(model.parameters()), device="cpu")
    assert isinstance(model(**tokens()).logits, Logits)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.lm_head) is nn.Linear
        assert torch.equal(other(**tokens()).loss, make_llama()(**tokens()).loss)
    engine.detach()
    assert type(model.lm_head) is nn.Linear


def test_logs_say_once_per_use_that_nothing_is_saved(caplog):
    model = chunked(make_llama())
    for _ in range(3):
        model(**tokens()).logits.sum()
    assert len(said(caplog)) == 1


# A run says where it would pay


SLOW_HOST = dataclasses.replace(find_machine("h100"), name="a slow host", host_bandwidth=1e6, memory_bandwidth=0.0)


@pytest.mark.own_streams
@pytest.mark.parametrize(
    ("settings", "is_said"),
    [({}, True), ({"machine": "h100", "device_budget": "64MiB"}, False), ({"chunked_loss": True}, False)],
    ids=["logits take room", "there is room", "chunked already"],
)
def test_a_run_says_if_steps_would_be_faster_with_it(settings, is_said, caplog):
    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 32, "n_head": 2, "vocab_size": 3000, "n_positions": 64}
    model = without_dropout(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))).train()
    config = {"dtype": "bf16", "device_budget": "12MiB", "machine": SLOW_HOST, "updates": "host", **settings}
    ids = torch.randint(0, 3000, (4, 64))
    with simulated_streams(), caplog.at_level("INFO", "hf_patrickstar"):
        engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), fused=True))
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        said = [line for line in caplog.messages if "chunked_loss=true would make a step about" in line]
        assert len(said) == is_said, "once"
        assert not said or re.search(r"about \d+(\.\d+)? times as fast: logits take 7\.32 MiB of the device", said[0])
        assert ("loss" in engine.manager.evictor.reasons) is is_said
        engine.detach()
