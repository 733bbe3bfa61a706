"""What people do with a Trainer besides training: evaluate, predict, generate, save, resume, choose the best."""

import dataclasses
import inspect

import pytest
import torch
from support.models import make_batch, make_model, make_rows
from support.trainers import arguments, assert_same_weights, logged, make_trainer, pair, run
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from hf_patrickstar import (
    BudgetError,
    ConfigError,
    EngineError,
    PatrickStarAccelerator,
    PatrickStarArgumentsMixin,
    PatrickStarTrainer,
    PatrickStarTrainerMixin,
    PatrickStarTrainingArguments,
)

CHECKPOINTING = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
"""Older versions of transformers have the older name alone."""


def test_without_the_flag_it_is_the_stock_trainer(tmp_path):
    trainer = make_trainer(
        PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar=False, patrickstar_config=None
    )
    run(trainer)
    assert not isinstance(trainer.accelerator, PatrickStarAccelerator)
    assert trainer.patrickstar_engine is None
    assert all(not parameter.isnan().any() for parameter in trainer.model.parameters())
    with pytest.raises(EngineError, match="--patrickstar"):
        trainer.patrickstar_stats()


def test_evaluate_predict_and_generate_before_and_after_training(tmp_path):
    stock, ours = pair(tmp_path)
    assert stock.evaluate()["eval_loss"] == ours.evaluate()["eval_loss"]
    assert_same_weights(make_model("gpt2"), ours.model)
    run(stock)
    run(ours)
    rows = make_rows("gpt2", 8, seed=5)
    assert (stock.predict(rows).predictions == ours.predict(rows).predictions).all()
    prompt = make_batch("gpt2", 2, seed=9, length=5)
    del prompt["labels"]
    generated = [t.model.eval().generate(**prompt, max_new_tokens=8, do_sample=False) for t in (stock, ours)]
    assert torch.equal(*generated)
    run(ours)
    run(stock)
    assert_same_weights(stock.model, ours.model)


def test_seq2seq_trainer_with_the_mixin(tmp_path):
    class OurTrainer(PatrickStarTrainerMixin, Seq2SeqTrainer):
        pass

    @dataclasses.dataclass
    class OurArguments(PatrickStarArgumentsMixin, Seq2SeqTrainingArguments):
        pass

    stock_args = arguments(Seq2SeqTrainingArguments, tmp_path)
    stock_args.patrickstar = True
    with pytest.raises(ConfigError, match="derive it from PatrickStarArgumentsMixin"):
        OurTrainer(model=make_model("t5"), args=stock_args)

    kwargs = {"predict_with_generate": True, "generation_max_length": 8, "max_steps": 2}
    ours = make_trainer(OurTrainer, OurArguments, tmp_path / "ours", name="t5", **kwargs)
    data = make_rows("t5", 64)
    args = arguments(Seq2SeqTrainingArguments, tmp_path / "stock", **kwargs)
    stock = Seq2SeqTrainer(model=make_model("t5"), args=args, train_dataset=data, eval_dataset=data[:8])
    run(stock)
    run(ours)
    assert_same_weights(stock.model, ours.model)
    assert (stock.predict(data[:4]).predictions == ours.predict(data[:4]).predictions).all()


def test_resuming_in_a_trainer_that_has_trained_already_with_other_budgets(tmp_path):
    kwargs = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole, resumed = pair(tmp_path, **kwargs)
    run(whole)
    run(resumed)
    resumed.accelerator.patrickstar_config = type(resumed.accelerator.patrickstar_config)()
    run(resumed, resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))
    assert_same_weights(whole.model, resumed.model)


def test_offload_of_transformers_is_done_by_the_plan(tmp_path):
    """transformers would copy the inputs of recomputed blocks in the compute stream, with saved-tensors hooks."""
    names = inspect.signature(PreTrainedModel._set_gradient_checkpointing).parameters
    skipped = {"every_n_layers": 2} if "every_n_layers" in names else {}
    kwargs = {f"{CHECKPOINTING}_checkpointing": True, "max_steps": 3}
    name = f"{CHECKPOINTING}_checkpointing_kwargs"
    stock = make_trainer(Trainer, TrainingArguments, tmp_path, **kwargs, **{name: {"use_reentrant": False, **skipped}})
    ours = make_trainer(
        *(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path),
        **{**kwargs, name: {"offload": True, **skipped}, "patrickstar_config": {"device_budget": "64MiB"}},
    )
    run(stock)
    run(ours)
    assert logged(ours, "loss") == logged(stock, "loss")
    assert_same_weights(stock.model, ours.model)
    stats = ours.patrickstar_stats()
    assert stats["offloaded_nbytes"] > 0
    assert not stats["diverged_steps"]


def test_second_training_and_a_second_trainer_on_the_same_model(tmp_path):
    stock, ours = pair(tmp_path)
    for trainer in (stock, ours):
        run(trainer)
        run(trainer)
    assert_same_weights(stock.model, ours.model)
    stock2 = make_trainer(Trainer, TrainingArguments, tmp_path, model=stock.model)
    ours2 = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, model=ours.model)
    run(stock2)
    run(ours2)
    assert_same_weights(stock2.model, ours2.model)
    # The first trainer's optimizer still has its own state.
    for trainer in (stock, ours):
        run(trainer)
    assert_same_weights(stock.model, ours.model)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed"),
        *(
            (
                {f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": {"use_reentrant": True}},
                f"pass --{CHECKPOINTING}_checkpointing_kwargs '{{\"use_reentrant\": false}}'",
            )
            for name in sorted({"gradient", CHECKPOINTING})
        ),
        (
            {
                **{f"{CHECKPOINTING}_checkpointing": True, f"{CHECKPOINTING}_checkpointing_kwargs": {"offload": True}},
                "patrickstar_config": {"activation_offload": False},
            },
            "activation_offload=false",
        ),
        ({"optim": "lomo"}, "lomo"),
        ({"bf16_full_eval": True}, "--bf16 instead"),
        ({"patrickstar_config": {"device_buget": 1}}, "did you mean 'device_budget'"),
        ({"patrickstar_config": "/nowhere/config.json"}, "cannot read file '/nowhere/config.json'"),
        ({"patrickstar": False, "patrickstar_config": {}}, "add --patrickstar"),
    ],
)
def test_refused_arguments(kwargs, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        arguments(PatrickStarTrainingArguments, tmp_path, **{"patrickstar": True, **kwargs})


def test_a_trainer_that_does_not_train_in_chunks_is_refused(tmp_path):
    args = arguments(PatrickStarTrainingArguments, tmp_path, patrickstar=True)
    with pytest.raises(ConfigError, match=r"PatrickStarTrainer.* or drop --patrickstar"):
        Trainer(model=make_model("gpt2"), args=args)
    off = arguments(PatrickStarTrainingArguments, tmp_path)
    assert Trainer(model=make_model("gpt2"), args=off).args is off


def test_a_lazy_module_gets_a_sentence(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"parameter '1.weight' is lazy and has no shape yet; run one forward"):
        make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, model=model)


def test_reentrant_checkpointing_of_the_model_is_refused(tmp_path):
    model = make_model("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match=rf"model.{CHECKPOINTING}_checkpointing_enable\(.*'use_reentrant': False"):
        make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, model=model)


def test_a_failed_construction_leaves_the_model_alone(tmp_path):
    config = {"chunk_budget": 100}
    trainer = make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar_config=config)
    with pytest.raises(BudgetError, match=r"'transformer.h.0.mlp.c_fc' \(Conv1D\).*Raise chunk_budget to"):
        run(trainer)
    stock = make_trainer(Trainer, TrainingArguments, tmp_path, model=trainer.model)
    run(stock)
    expected = make_trainer(Trainer, TrainingArguments, tmp_path)
    run(expected)
    assert_same_weights(expected.model, stock.model)


def test_while_a_batch_size_is_looked_for_one_layer_repeats(tmp_path):
    """First the engine repeats; when that fails, the Trainer starts over; once it trains, the engine repeats again."""

    def failing(base, attempts, late=None):
        class Failing(base):
            def compute_loss(self, *args, **kwargs):
                attempts.append((self._train_batch_size, self.state.global_step))
                is_late = self.state.global_step == late and attempts.count(attempts[-1]) <= 2
                if self._train_batch_size > 5 or is_late:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
                return super().compute_loss(*args, **kwargs)

        return Failing

    attempts, late, kwargs = [], 3, {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    cls = failing(PatrickStarTrainer, attempts, late)
    ours = make_trainer(cls, PatrickStarTrainingArguments, tmp_path, **kwargs)
    stock = make_trainer(failing(Trainer, []), TrainingArguments, tmp_path, **kwargs)
    run(ours)
    run(stock)
    searched = [(8, 0)] * 4 + [(7, 0), (6, 0)]
    trained = [(5, step) for step in range(4) for _ in range(3 if step == late else 1)]
    assert attempts == searched + trained
    assert ours.patrickstar_stats()["retries"] == 5
    assert_same_weights(stock.model, ours.model)
