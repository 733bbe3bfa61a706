"""Trainers of TRL that have no class of their own here: the mixins make each train in chunks, bit for bit the same."""

import peft
import pytest
import torch
import trl
from datasets import Dataset
from live.hf import Trainers, logged, note_run
from models import make_model
from texts import count_sevens, make_tokenizer, preferences, prompts, words
from trl.experimental import cpo, gkd, online_dpo, orpo, tpo


@pytest.fixture
def trainers(tmp_path):
    """Runs a script with a trainer of TRL as it is, and with the mixins at a budget that evicts."""
    return Trainers("tight", tmp_path)


def conversations(count=8):
    rows = [
        [{"role": "user", "content": words(i, 4)}, {"role": "assistant", "content": words(50 + i, 5)}]
        for i in range(count)
    ]
    return Dataset.from_list([{"messages": row} for row in rows])


def make_chatting_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    )
    return tokenizer


def make_adapted():
    model = make_model("llama")
    torch.manual_seed(3)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    )


def triples():
    return preferences(8).map(lambda row: {"reference": row["chosen"] + " w9"})


GENERATED = {"max_new_tokens": 4}
CASES = {
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, preferences, {}, {"max_length": 16}),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig, preferences, {}, {"max_length": 16}),
    "rloo": (
        *(trl.RLOOTrainer, trl.RLOOConfig, prompts, {"reward_funcs": count_sevens}),
        {"num_generations": 2, "max_completion_length": 4, "beta": 0.1},
    ),
    "online_dpo": (
        *(online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig, prompts, {"reward_funcs": count_sevens}),
        {**GENERATED, "max_length": 32, "missing_eos_penalty": None},
    ),
    "gkd": (gkd.GKDTrainer, gkd.GKDConfig, conversations, {}, {**GENERATED, "lmbda": 0.5, "max_length": 32}),
    "tpo": (tpo.TPOTrainer, tpo.TPOConfig, triples, {}, {"max_length": 16}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_of_trl_takes_the_mixins(trainers, name):
    base, arguments, rows, trainer_kwargs, more = CASES[name]

    def script(make, note):
        kwargs = {"train_dataset": rows(), "processing_class": make_chatting_tokenizer(), **trainer_kwargs}
        if name == "gkd":
            kwargs["teacher_model"] = make_model("llama", seed=4)
        model = make_adapted() if name == "rloo" else make_model("llama")
        settings = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_steps": 2}
        trainer = make(model, base=base, arguments=arguments, trainer_kwargs=kwargs, factor=2.0, **{**settings, **more})
        trainer.train()
        if hasattr(trainer.args, "patrickstar"):
            assert trainer.patrickstar_stats()["chunk_evictions"] > 0
        note("losses", logged(trainer, "loss", "grad_norm"))
        note_run(note, trainer)

    trainers(script)
