"""Callbacks, overrides, adapters and TRL's trainers on the live model, against the same classes without chunks."""

import copy
import os

import peft
import pytest
import schedulefree
import torch
import trl
from datasets import Dataset
from support.hf import Trainers, logged, note_run, states
from support.models import make_batch, make_model
from support.texts import completions, count_sevens, make_tokenizer, preferences, prompts, words
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainerCallback
from transformers.optimization import Adafactor, AdafactorSchedule
from trl.experimental import gkd

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(params=["plain"] if os.environ.get("LIVE_PLAIN") else ["tight"])
def trainers(request, tmp_path):
    """Runs a script with a stock Trainer, and with ours at the smallest budget."""
    return Trainers(request.param, tmp_path)


def on(*events):
    """A callback that calls a function ``(event, model, optimizer, state)`` at some events."""

    def decorate(function):
        def make(event):
            def method(self, args, state, control, model=None, optimizer=None, **kwargs):
                function(event, model, optimizer, state)

            return method

        return type("Callback", (TrainerCallback,), {f"on_{event}": make(event) for event in events})()

    return decorate


EVENTS = [
    *["train_begin", "epoch_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"],
    *["log", "evaluate", "prediction_step", "save", "epoch_end", "train_end"],
]


def norms(model):
    return torch.stack([parameter.detach().norm() for parameter in model.parameters()])


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Callbacks


def test_callbacks_that_read(trainers, tmp_path):
    """Weights and gradients at every event, copies, texts, averages, and a norm in the log."""

    class Own:
        def log(self, logs, *args, **kwargs):
            squares = [parameter.detach().float().square().sum() for parameter in self.model.parameters()]
            logs["weight_norm"] = float(torch.stack(squares).sum().sqrt())
            super().log(logs, *args, **kwargs)

    def script(make, note):
        kept, before = [], {}

        @on(*EVENTS)
        def read(event, model, optimizer, state):
            gradients = {name: p.grad is not None and float(p.grad.norm()) for name, p in model.named_parameters()}
            note(event, (state.global_step, norms(model), gradients))

        @on("pre_optimizer_step", "optimizer_step")
        def compare(event, model, optimizer, state):
            if event == "pre_optimizer_step":
                before.update(values(model))
            else:
                note("along the gradient", {n: (p.grad * (p - before[n])).sum() for n, p in model.named_parameters()})

        @on("train_begin", "step_end")
        def keep(event, model, optimizer, state):
            if event == "train_begin":
                kept.append(torch.optim.swa_utils.AveragedModel(model))
                return
            kept[0].update_parameters(model)
            torch.save(model, tmp_path / "model.pt")
            for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
                with torch.no_grad():
                    note("copied", twin.eval()(**make_batch("gpt2", 2)).loss)
            model.eval()
            note("text", model.generate(make_batch("gpt2", 2)["input_ids"][:, :4], max_new_tokens=4, do_sample=True))
            model.train()

        average = trl.BEMACallback(update_freq=1, update_after=0)  # keeps references from the start of the run
        settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **EVALUATED, **SAVED}
        trainer = make(
            make_model("gpt2"), Own, trainer_kwargs={"callbacks": [read, compare, keep, average]}, **settings
        )
        trainer.train()
        note("averages", [kept[0].module.state_dict(), average.running_model.state_dict()])
        note("norms", logged(trainer, "weight_norm"))
        note_run(note, trainer)

    trainers(script)


# Overrides


class Adversarial:
    """FGM: the embedding is moved along its gradient, a second backward adds to the gradients, it is put back."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        weight = model.get_input_embeddings().weight
        backup = weight.data.clone()
        weight.data.add_(0.1 * weight.grad / torch.norm(weight.grad))
        self.accelerator.backward(self.compute_loss(model, self._prepare_inputs(inputs)))
        weight.data = backup
        return loss


class TwoForwards:
    """R-drop, with dropout on; and a teacher that is an average of the student."""

    teacher = None

    def compute_loss(self, model, inputs, **kwargs):
        first, second = model(**inputs), model(**inputs)
        left, right = first.logits.log_softmax(-1), second.logits.log_softmax(-1)
        with torch.no_grad():
            if self.teacher is None:
                self.teacher = copy.deepcopy(model).eval()
            for slow, fast in zip(self.teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            wanted = self.teacher(**inputs).logits.softmax(-1)
        return first.loss - (wanted * right).sum(-1).mean() + nn.functional.kl_div(left, right, log_target=True)


@pytest.mark.parametrize("own", [Adversarial, TwoForwards])
def test_overrides(trainers, own):
    def script(make, note):
        trainer = make(make_model("gpt2"), own, factor=2.0)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


# Optimizers


def make_adafactor(model):
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)
    return optimizer, AdafactorSchedule(optimizer)


def make_schedule_free(model):
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("make_optimizers", [make_adafactor, make_schedule_free])
def test_optimizers_given_to_the_trainer(trainers, make_optimizers):
    """The Trainer switches one that is free of schedules to evaluation where it evaluates and saves."""

    def script(make, note):
        @on("save", "evaluate")
        def read(event, model, optimizer, state):
            note(event, (norms(model), [group.get("train_mode") for group in optimizer.param_groups]))

        model = make_model("gpt2")
        kwargs = {"optimizers": make_optimizers(model), "callbacks": [read]}
        trainer = make(model, trainer_kwargs=kwargs, save_strategy="steps", save_steps=2, max_steps=4, **EVALUATED)
        trainer.train()
        note_run(note, trainer)
        saved = type(trainer.model).from_pretrained(os.path.join(trainer.args.output_dir, "checkpoint-2"))
        note("saved", saved.state_dict())

    trainers(script)


# After a run


def test_what_follows_a_run(trainers):
    """Writes to the best model, a plain loop with a stock optimizer, a stock Trainer; the engine is still attached."""

    def script(make, note):
        trainer = make(make_model("gpt2"), load_best_model_at_end=True, **SAVED, **EVALUATED)
        trainer.train()
        model = trainer.model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        trainer.save_model()
        note("saved", type(model).from_pretrained(trainer.args.output_dir).state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            loss = model(**make_batch("gpt2", seed=step)).loss
            loss.backward()
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        note("evaluated", trainer.evaluate()["eval_loss"])
        note("predictions", trainer.predict(trainer.eval_dataset).predictions)
        args = copy.deepcopy(trainer.args)
        args.load_best_model_at_end = False
        if hasattr(args, "patrickstar"):
            args.patrickstar, args.patrickstar_config = False, None
        second = Trainer(model=model, args=args, train_dataset=trainer.train_dataset, eval_dataset=trainer.eval_dataset)
        second.train()
        note_run(note, second)

    trainers(script)


# Adapters


def lora(**kwargs):
    defaults = {"r": 4, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.LoraConfig(**{**defaults, **kwargs})


def make_adapted(name="gpt2", config=None):
    model = make_model(name)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config or lora())


ADAPTERS = {
    "dora": lambda: lora(use_dora=True, modules_to_save=["ln_f"]),
    "trainable_tokens": lambda: lora(trainable_token_indices={"wte": [1, 5]}),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_under_the_trainer(trainers, kind):
    def script(make, note):
        more = {"factor": 2.0, "save_strategy": "steps", "save_steps": 3, **EVALUATED}
        trainer = make(make_adapted(config=ADAPTERS[kind]()), **more)
        trainer.train()
        note("adapter", peft.get_peft_model_state_dict(trainer.model))
        note_run(note, trainer)
        saved = peft.PeftModel.from_pretrained(make_model("gpt2"), f"{trainer.args.output_dir}/checkpoint-3")
        note("saved", saved.state_dict())

    trainers(script)


@pytest.mark.parametrize(("keeps_trainers", "bf16"), [(False, False), (True, False), (True, True)])
def test_a_trained_model_gets_adapters_is_merged_and_trained_again(trainers, keeps_trainers, bf16):
    def script(make, note):
        model, kept = make_model("gpt2"), []
        for number in range(4):
            kept.append(make(model, max_steps=2, bf16=bf16, factor=2.0))
            kept[-1].train()
            note_run(note, kept[-1])
            if not keeps_trainers:
                kept.clear()
            if number in (1, 2):  # twice, as ReLoRA does
                model = model.merge_and_unload().requires_grad_(True)
            if number < 2:
                model = peft.get_peft_model(model, lora())
        note("weights", model.state_dict())

    trainers(script)


# TRL: each case is a class, its arguments, rows, a model, and more for the trainer and its arguments.


def make_llama():
    return make_model("llama")


def make_adapted_llama():
    return make_adapted("llama", lora(target_modules=["q_proj", "v_proj"]))


def make_reward_model():
    torch.manual_seed(0)
    config = LlamaConfig(**{**make_llama().config.to_diff_dict(), "num_labels": 1, "pad_token_id": 0})
    return LlamaForSequenceClassification(config)


def make_chatting_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    )
    return tokenizer


def with_labels():
    rows = [{"prompt": words(i, 4), "completion": words(60 + i, 5), "label": i % 3 > 0} for i in range(12)]
    return Dataset.from_list(rows)


def conversations():
    roles = [("user", 0, 4), ("assistant", 50, 5)]
    return Dataset.from_list(
        [{"messages": [{"role": r, "content": words(s + i, n)} for r, s, n in roles]} for i in range(8)]
    )


def reference():
    return {"ref_model": make_model("llama", seed=4)}


RECOMPUTED = {"gradient_checkpointing": True}
GENERATED = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, "max_steps": 2}
FOLLOWED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
SFT, DPO = (trl.SFTTrainer, trl.SFTConfig, completions), (trl.DPOTrainer, trl.DPOConfig, preferences)
TRL = {
    "sft_chunked": (*SFT, make_llama, dict, {"loss_type": "chunked_nll"}),
    "sft_lora": (*SFT, make_llama, lambda: {"peft_config": lora(target_modules=["q_proj"])}, RECOMPUTED),
    "dpo_followed": (*DPO, make_llama, reference, FOLLOWED),
    "dpo_adapter": (*DPO, make_adapted_llama, dict, {}),  # the reference is a copy of it, activated under no_grad
    "kto": (trl.KTOTrainer, trl.KTOConfig, with_labels, make_llama, reference, {}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, preferences, make_reward_model, dict, {}),
    "grpo": (
        *(trl.GRPOTrainer, trl.GRPOConfig, prompts, make_adapted_llama, lambda: {"reward_funcs": count_sevens}),
        GENERATED,
    ),
    # Those that have no class of their own here: the mixins make each train in chunks.
    "gkd": (
        *(gkd.GKDTrainer, gkd.GKDConfig, conversations, make_llama),
        lambda: {"teacher_model": make_model("llama", seed=4)},
        {"max_new_tokens": 4, "lmbda": 0.5, "max_length": 32},
    ),
}


@pytest.mark.parametrize("name", TRL)
def test_trainers_of_trl(trainers, name):
    base, arguments, rows, make_trained, trainer_kwargs, more = TRL[name]

    def script(make, note):
        kwargs = {"train_dataset": rows(), "processing_class": make_chatting_tokenizer(), **trainer_kwargs()}
        more_kwargs = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 2, **more}
        model = make_trained()
        trainer = make(model, base=base, arguments=arguments, trainer_kwargs=kwargs, factor=2.0, **more_kwargs)
        trainer.train()
        if hasattr(trainer.args, "patrickstar"):
            assert trainer.patrickstar_stats()["chunk_evictions"] > 0
        keys = ["loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/chosen", "entropy", "reward", "kl"]
        note("logged", logged(trainer, *keys))
        if getattr(trainer, "ref_model", None) is not None:
            note("reference", trainer.ref_model.state_dict())
        note("states", states(trainer.optimizer))
        note_run(note, trainer)

    trainers(script)
