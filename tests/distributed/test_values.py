"""What users read, write, save and evaluate while several processes train; and what is said when they differ."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import inside
from support.models import make_batch, make_model
from support.together import (
    alone,
    copy_state,
    differences,
    engaged,
    heard,
    hf_loss,
    launched,
    make_optimizer,
    on_one_rank,
    train_as_alone,
    train_together,
)
from support.trainers import train
from test_branches import SMALL, chain_loss, make_chain
from transformers import GPT2LMHeadModel

from hf_patrickstar import PatrickStarAccelerator, PatrickStarEngine, deferred_weights
from hf_patrickstar.errors import CollectiveError, ConfigError
from hf_patrickstar.optim.scaler import ChunkedGradScaler

DROPPED = {"reshard_after_forward": True}


# Uneven data


def uneven_loss(model, step, micro, rank):
    """Rank 1 has other batches: smaller, shorter, and larger than any before."""
    size, length = [(2, 8), (1, 5), (3, 12), (2, 8)][step] if rank == 1 else (2, 8)
    return hf_loss("gpt2", size, length)(model, step, micro, rank)


def train_unevenly(rank, config):
    expected = on_one_rank(lambda: alone(lambda: make_model("gpt2"), uneven_loss, steps=4))
    with engaged(make_model("gpt2"), config) as engine:
        train_as_alone(engine, expected, uneven_loss, steps=4)


@pytest.mark.parametrize("config", [{}, DROPPED], ids=str)
def test_uneven_batches(pair, config):
    pair.run(train_unevenly, config)


# Evaluation, generation, reading


def evaluate_in_between(rank, config):
    """After a step, and between backward and step; ``expected`` is a plain model in the same state."""
    expected = make_model("gpt2")
    expected_optimizer = make_optimizer(expected)
    model = make_model("gpt2")
    batch = make_batch("gpt2", 1 + rank, 77, 6 + rank)
    with engaged(model, config) as engine:
        for step in range(2):
            for turn in range(2):
                expected.train()
                loss = None
                for other in range(2 * turn):
                    loss = hf_loss("gpt2")(expected, step, 0, other)
                    loss.backward()
                if turn:
                    model.train()
                    engine.backward(hf_loss("gpt2")(model, step, 0, rank))
                expected.eval()
                model.eval()
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        assert torch.equal(model(**batch).loss, expected(**batch).loss)
                prompt = batch["input_ids"][:, : 3 + rank]
                kwargs = {"do_sample": False, "max_new_tokens": 2 + 3 * rank, "pad_token_id": 0}
                kwargs["attention_mask"] = torch.ones_like(prompt)
                assert torch.equal(model.generate(prompt, **kwargs), expected.generate(prompt, **kwargs))
                assert differences(copy_state(expected), model.state_dict()) == {}
            for parameter in expected.parameters():
                parameter.grad.div_(2)
            with engine.full_parameters(with_grads=True):
                for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    assert torch.equal(ours, theirs)
                    assert torch.equal(ours.grad, theirs.grad)
            expected_optimizer.step()
            expected_optimizer.zero_grad()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert differences(copy_state(expected), model.state_dict()) == {}


def test_evaluation_in_between(pair):
    pair.run(evaluate_in_between, DROPPED)


# 16-bit


def overflow(rank, culprit):
    model = make_model("gpt2")
    scaler = ChunkedGradScaler("cpu", init_scale=256.0, growth_interval=1000)
    found = []
    with engaged(model, DROPPED, precision="fp16") as engine:
        for step in range(3):
            before = copy_state(model)
            loss = hf_loss("gpt2")(model, step, 0, rank)
            engine.backward(scaler.scale(loss) * (1e9 if step == 1 and rank == culprit else 1))
            scaler.step(engine.optimizer)
            scaler.update()
            engine.optimizer.zero_grad()
            after = copy_state(model)
            assert (differences(before, after) == {}) == (step == 1)
            found.append((scaler.get_scale(), {key: value.sum().item() for key, value in after.items()}))
        assert engine.stats()["skipped_steps"] == 1
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_both(pair):
    first, second = pair.run(overflow, 1)
    assert first == second
    assert [scale for scale, _ in first] == [256.0, 128.0, 128.0]


# Mismatches


def step_once_more(rank):
    model = make_chain(2)
    engine = PatrickStarEngine(model, SMALL, make_optimizer(model), device="cpu")
    train_together(engine, chain_loss, 1)
    if rank == 0:
        engine.optimizer.step()
    with pytest.raises(CollectiveError, match=r"the processes do not do the same: rank 0 .*; rank 1 ") as caught:
        chain_loss(model, 1, 0, rank)
    return str(caught.value)


def test_a_step_of_one_rank_alone_is_named(pair):
    for text in pair.run(step_once_more):
        for rank, change in ((0, 2), (1, 1)):
            assert f"rank {rank} begins 'training' after change {change}" in text


def make_different(rank, what):
    model = make_chain(2, depth=3 if what != "models" else 3 + rank)
    if what == "frozen":
        model.layers[rank].requires_grad_(False)
    if what == "loaded":
        model.to(torch.bfloat16 if rank else torch.float32)
    if what == "buffers":
        model.register_buffer("cache", torch.zeros(4 + rank))
    config = {**SMALL, "prefetch_depth": rank} if what == "settings" else {**SMALL, "dtype": "fp32"}
    with pytest.raises(ConfigError) as caught:
        PatrickStarEngine(model, config, make_optimizer(model), device="cpu")
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("models", "models"),
        ("frozen", "models"),
        ("settings", "settings"),
        ("loaded", "types before training"),
        ("buffers", "buffers"),
    ],
)
def test_different_constructions_are_refused(pair, what, word):
    for text in pair.run(make_different, what):
        assert f"the processes have different {word}: rank 1 and rank 0" in text


def start_differently(rank):
    model, expected = make_model("gpt2", seed=rank), make_model("gpt2", seed=0)
    with heard() as texts, engaged(model):
        assert differences(copy_state(expected), model.state_dict()) == {}
    return texts


def test_values_of_rank_0_win(pair):
    for texts in pair.run(start_differently):
        assert len(texts) == 1
        assert "differ between processes; those of rank 0 are taken" in texts[0]


# The Trainer


def train_by_trainer(rank, folder, is_ours, resume, kwargs):
    """Losses and weights of the Trainer, and the files that it leaves."""
    defaults = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "eval_strategy": "steps"}
    defaults |= {"eval_steps": 2, "load_best_model_at_end": True, "ddp_backend": "gloo", "seed": 7}
    with launched(rank):
        config = {"reshard_after_forward": True} if is_ours else None
        more = {"train_kwargs": {"resume_from_checkpoint": f"{folder}/checkpoint-2"}} if resume else {}
        trainer, recorder = train("gpt2", folder, config, **defaults, **more, **kwargs)
        assert trainer.args.world_size == 2
        assert (trainer.model.__dict__.get("patrickstar_engine") is not None) == is_ours
        predictions = trainer.predict(trainer.eval_dataset).predictions
        evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        state = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        if is_ours:
            trainer.patrickstar_engine.detach()
        dist.barrier()
        files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
        return recorder.losses, recorder.norms, evaluations, state, files, predictions.tolist()


def test_the_trainer_trains_as_over_ddp(pair, tmp_path):
    kwargs = {"per_device_train_batch_size": 2, "max_grad_norm": 0.5, "max_steps": 4}
    stock = pair.run(train_by_trainer, str(tmp_path / "stock"), False, False, kwargs, timeout=120)
    ours = pair.run(train_by_trainer, str(tmp_path / "ours"), True, False, kwargs, timeout=120)
    for expected, actual in zip(stock, ours, strict=True):
        if expected[0]:
            assert len(expected[0]) == 4
        assert actual[0] == expected[0]
        assert actual[2] == pytest.approx(expected[2], rel=1e-5)
        assert max(differences(expected[3], actual[3]).values(), default=0.0) < 1e-5
        shards = [f"optimizer-0000{number}-of-00002.safetensors" for number in (1, 2)]
        own = [*shards, "optimizer-others.safetensors", "optimizer.index.json", "README.md"]
        state_files = {f"checkpoint-{step}/{name}" for step in (2, 4) for name in own}
        stock_files = {name for name in expected[4] if not name.endswith("optimizer.pt")}
        assert set(actual[4]) == stock_files | state_files
        assert any(name.startswith("checkpoint-4/") for name in actual[4])
        assert torch.allclose(torch.tensor(actual[5]), torch.tensor(expected[5]), atol=1e-4)
    resumed = pair.run(train_by_trainer, str(tmp_path / "ours"), True, True, kwargs, timeout=120)
    for before, after in zip(ours, resumed, strict=True):
        assert before[0][2:] == after[0]
        assert differences(before[3], after[3]) == {}


def read_originals(rank, directory, is_deferred, is_lost):
    """Frozen fp32 weights in bf16, each rank with a copy of the file; that of rank 1 is written to."""
    own = Path(directory) / str(rank)
    with deferred_weights(is_deferred):
        model = GPT2LMHeadModel.from_pretrained(own)
    expected = copy_state(make_model("gpt2"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name)
    with engaged(model, {"dtype": "bf16", "chunk_numel": 1024, **DROPPED}) as engine:
        rounded = [tensor for tensor in inside.tensors(engine) if tensor.is_rounded]
        assert {tensor.is_split for tensor in rounded} == {True, False}
        if is_lost and rank == 1:
            os.truncate(own / "model.safetensors", 1000)
        for tensor in rounded if is_lost else ():
            start, stop = tensor.parts[1]
            value = expected[tensor.spec.name].view(-1)[start:stop]
            value.copy_(value.bfloat16().float())
        for _ in range(2):
            for found in (model.state_dict(), dict(model.named_parameters(remove_duplicate=False))):
                assert {value.dtype for value in found.values()} == {torch.float32}
                frozen = [name for name in expected if "ln_" not in name]
                assert not [name for name in frozen if (found[name] != expected[name]).any()]
            train_together(engine, hf_loss("gpt2"), 1)
        weight = model.transformer.h[0].mlp.c_fc.weight
        with engine.full_parameters([weight]):
            weight += 1e-6
        weight.data.add_(1e-6)
        name = "transformer.h.0.mlp.c_fc.weight"
        expected[name].add_(1e-6).add_(1e-6)
        assert torch.equal(model.state_dict()[name], expected[name])
        model.save_pretrained(Path(directory) / "saved")
        saved = GPT2LMHeadModel.from_pretrained(Path(directory) / "saved").state_dict()
        assert not [name for name, value in expected.items() if "ln_" not in name and (saved[name] != value).any()]
        model.transformer.h[1].mlp.c_fc.weight.requires_grad_(True)
        train_together(engine, hf_loss("gpt2"), 1)
        assert inside.find(engine, model.transformer.h[1].mlp.c_fc.weight).chunk.spec.trainable


@pytest.mark.parametrize(("is_deferred", "is_lost"), [(True, False), (False, True)])
def test_frozen_weights_are_read_from_the_files_of_all(pair, tmp_path, is_deferred, is_lost):
    for rank in range(2):
        make_model("gpt2").save_pretrained(tmp_path / str(rank))
    pair.run(read_originals, str(tmp_path), is_deferred, is_lost)


def train_without_being_told(rank):
    with launched(rank), pytest.raises(ConfigError, match="2 processes were launched, but Accelerate lets each"):
        PatrickStarAccelerator(patrickstar_config=DROPPED)


def test_processes_that_would_train_alone_are_refused(pair):
    pair.run(train_without_being_told)
