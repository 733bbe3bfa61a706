"""Callbacks, overrides, adapters and TRL's trainers on the live model, against the same classes without chunks."""

import copy
import os

import peft
import pytest
import schedulefree
import torch
import trl
from datasets import Dataset
from live.hf import Trainers, logged, note_run, states
from models import make_batch, make_model
from texts import completions, count_sevens, make_tokenizer, preferences, prompts, words
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainerCallback
from transformers.optimization import Adafactor, AdafactorSchedule

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(params=["plain"] if os.environ.get("LIVE_PLAIN") else ["tight", "roomy"])
def trainers(request, tmp_path):
    """Runs a script with a stock Trainer, and with ours at the smallest budget and when all fits."""
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


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def norms(model):
    return torch.stack([parameter.detach().norm() for parameter in model.parameters()])


def gradient_norms(model):
    return {name: p.grad is not None and float(p.grad.norm()) for name, p in model.named_parameters()}


# Callbacks


def test_weights_and_gradients_read_at_every_event(trainers):
    def script(make, note):
        @on(*EVENTS)
        def read(event, model, optimizer, state):
            note(event, (state.global_step, norms(model), gradient_norms(model)))

        trainer = make(
            make_model("gpt2"),
            trainer_kwargs={"callbacks": [read]},
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=2,
            max_grad_norm=0.5,
            **EVALUATED,
        )
        trainer.train()
        note_run(note, trainer)

    trainers(script)


@pytest.mark.parametrize("event", ["train_begin", "step_begin", "step_end", "log", "evaluate", "save", "train_end"])
def test_weights_written_at_an_event(trainers, event):
    def script(make, note):
        @on(event)
        def write(event, model, optimizer, state):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            model.transformer.wpe.weight.data.clamp_(-0.01, 0.01)
            note("written", norms(model))

        more = {"save_strategy": "steps", "save_steps": 1, **EVALUATED}
        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [write]}, **more)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_gradients_clipped_by_hand_before_the_step(trainers):
    """The Trainer's own clipping is off; the callback clips layer by layer, and takes noise out of one."""

    def script(make, note):
        @on("pre_optimizer_step")
        def clip(event, model, optimizer, state):
            for layer in model.transformer.h:
                note("norm", nn.utils.clip_grad_norm_(layer.parameters(), 0.1))
            nn.utils.clip_grad_value_(model.transformer.wte.parameters(), 1e-3)
            model.transformer.wpe.weight.grad[4:] = 0.0
            model.transformer.ln_f.bias.grad = None

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [clip]}, max_grad_norm=0.0)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_gradients_are_still_there_after_the_step(trainers):
    """Between the step and zero_grad a callback sees what the optimizer used, and what it made of it."""

    def script(make, note):
        before = {}

        @on("pre_optimizer_step", "optimizer_step")
        def compare(event, model, optimizer, state):
            if event == "pre_optimizer_step":
                before.update({name: p.detach().clone() for name, p in model.named_parameters()})
                return
            updates = {name: (p.detach() - before[name]).norm() for name, p in model.named_parameters()}
            note("updates", updates)
            note("along the gradient", {n: (p.grad * (p - before[n])).sum() for n, p in model.named_parameters()})

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [compare]})
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_an_average_of_the_weights_that_is_evaluated(trainers):
    """The average is swapped in before an evaluation and out after it, and is the model in the end."""

    class Average(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

        def on_step_end(self, args, state, control, model, **kwargs):
            for name, parameter in model.named_parameters():
                self.average[name].mul_(0.8).add_(parameter.data, alpha=0.2)
            self.saved = {name: p.detach().clone() for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.data.copy_(self.average[name])

        def on_evaluate(self, args, state, control, model, **kwargs):
            for name, parameter in model.named_parameters():
                parameter.data.copy_(self.saved[name])

        def on_train_end(self, args, state, control, model, **kwargs):
            model.load_state_dict(self.average, strict=False)

    def script(make, note):
        average = Average()
        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [average]}, **EVALUATED)
        trainer.train()
        note("average", average.average)
        note_run(note, trainer)

    trainers(script)


def test_an_averaged_model_made_when_training_begins(trainers):
    def script(make, note):
        kept = []

        @on("train_begin", "step_end", "train_end")
        def average(event, model, optimizer, state):
            if event == "train_begin":
                kept.append(torch.optim.swa_utils.AveragedModel(model))
            elif event == "step_end":
                kept[0].update_parameters(model)
            else:
                note("average", kept[0].module.state_dict())

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [average]})
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_copies_made_while_it_trains(trainers, tmp_path):
    def script(make, note):
        @on("step_end", "train_end")
        def snapshot(event, model, optimizer, state):
            twin = copy.deepcopy(model).eval()
            with torch.no_grad():
                note("copied", twin(**make_batch("gpt2", 2)).loss)
            torch.save(model, tmp_path / "model.pt")
            read = torch.load(tmp_path / "model.pt", weights_only=False).eval()
            with torch.no_grad():
                note("read", read(**make_batch("gpt2", 2)).loss)

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [snapshot]})
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_text_generated_while_it_trains(trainers):
    def script(make, note):
        @on("step_end", "evaluate")
        def sample(event, model, optimizer, state):
            was_training = model.training
            model.eval()
            prompt = make_batch("gpt2", 2)["input_ids"][:, :4]
            note("text", model.generate(prompt, max_new_tokens=4, do_sample=True))
            model.train(was_training)

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [sample]}, **EVALUATED)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_layers_unfrozen_by_a_callback(trainers):
    class Own:
        """All parameters are in the optimizer from the start, also those that are frozen."""

        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    def script(make, note):
        model = make_model("gpt2")
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)

        @on("step_begin")
        def unfreeze(event, model, optimizer, state):
            if state.global_step > 0:
                model.transformer.h[-state.global_step].requires_grad_(True)
            note("trainable", sum(p.requires_grad for p in model.parameters()))

        trainer = make(model, Own, trainer_kwargs={"callbacks": [unfreeze]})
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_random_layers_active_at_each_step(trainers):
    def script(make, note):
        @on("step_begin")
        def choose(event, model, optimizer, state):
            generator = torch.Generator().manual_seed(state.global_step)
            model.transformer.h.requires_grad_(False)
            for place in torch.randperm(3, generator=generator)[:1].tolist():
                model.transformer.h[place].requires_grad_(True)

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [choose]}, max_steps=4)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_frozen_around_an_evaluation(trainers):
    class Own:
        def evaluation_loop(self, *args, **kwargs):
            self.model.requires_grad_(False)
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                self.model.requires_grad_(True)

    def script(make, note):
        trainer = make(make_model("gpt2"), Own, **EVALUATED)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_weights_pruned_while_it_trains(trainers):
    def script(make, note):
        masks = {}

        @on("train_begin", "optimizer_step")
        def prune(event, model, optimizer, state):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "mlp" in name and parameter.dim() > 1:
                        if event == "train_begin":
                            masks[name] = parameter.abs() > parameter.abs().median()
                        parameter.mul_(masks.get(name, 1.0))

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [prune]})
        trainer.train()
        note("zeros", [int((p == 0).sum()) for p in trainer.model.parameters()])
        note_run(note, trainer)

    trainers(script)


def test_the_optimizer_in_the_hands_of_a_callback(trainers):
    """Its state is read and written, and its rates."""

    def script(make, note):
        @on("step_end")
        def change(event, model, optimizer, state):
            weight = model.transformer.h[0].attn.c_attn.weight
            note("average", optimizer.state[weight]["exp_avg"])
            optimizer.state[weight]["exp_avg"].mul_(0.5)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * state.global_step
                note("rate", group["lr"])

        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [change]})
        trainer.train()
        note_run(note, trainer)

    trainers(script)


# Overrides


def test_a_weight_penalty_in_compute_loss(trainers):
    class Own:
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + 1e-3 * sum(parameter.pow(2).sum() for parameter in model.parameters())
            return (loss, outputs) if return_outputs else loss

    def script(make, note):
        trainer = make(make_model("gpt2"), Own, **EVALUATED)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_elastic_weight_consolidation(trainers):
    """Fisher information and the old weights are collected in one run, and hold the weights in the next."""

    class Own:
        fisher, star = None, None

        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            if self.fisher is not None and model.training:
                terms = [
                    (self.fisher[name] * (parameter - self.star[name]).square()).sum()
                    for name, parameter in model.named_parameters()
                ]
                loss = loss + 10.0 * torch.stack(terms).sum()
            return loss

    def script(make, note):
        trainer = make(make_model("gpt2"), Own)
        trainer.train()
        model = trainer.model
        model.zero_grad()
        model(**make_batch("gpt2")).loss.backward()
        trainer.fisher = {name: p.grad.detach().clone().square() for name, p in model.named_parameters()}
        trainer.star = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.zero_grad()
        trainer.train()
        note("fisher", trainer.fisher)
        note_run(note, trainer)

    trainers(script)


def test_a_loss_from_a_weight_that_is_read_directly(trainers):
    """Hidden states times ``lm_head.weight``, as fused losses compute it."""

    class Own:
        def compute_loss(self, model, inputs, **kwargs):
            hidden = model.transformer(input_ids=inputs["input_ids"]).last_hidden_state[:, :-1]
            logits = hidden @ model.lm_head.weight.T
            return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())

    def script(make, note):
        trainer = make(make_model("gpt2"), Own, factor=2.0)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_adversarial_training_of_the_embeddings(trainers):
    """FGM: the embedding is moved along its gradient, a second backward adds to the gradients, it is put back."""

    class Own:
        def training_step(self, model, inputs, *args, **kwargs):
            loss = super().training_step(model, inputs, *args, **kwargs)
            weight = model.get_input_embeddings().weight
            backup = weight.data.clone()
            norm = torch.norm(weight.grad)
            weight.data.add_(0.1 * weight.grad / norm)
            other = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(other)
            weight.data = backup
            return loss

    def script(make, note):
        trainer = make(make_model("gpt2"), Own, factor=1.5)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_two_forwards_in_one_loss(trainers):
    """R-drop, with dropout on."""

    class Own:
        def compute_loss(self, model, inputs, **kwargs):
            first, second = model(**inputs), model(**inputs)
            left, right = first.logits.log_softmax(-1), second.logits.log_softmax(-1)
            return first.loss + second.loss + nn.functional.kl_div(left, right, log_target=True)

    def script(make, note):
        trainer = make(make_model("gpt2"), Own)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_a_teacher_that_is_an_average_of_the_student(trainers):
    class Own:
        teacher = None

        def compute_loss(self, model, inputs, **kwargs):
            outputs = model(**inputs)
            with torch.no_grad():
                if self.teacher is None:
                    self.teacher = copy.deepcopy(model).eval()
                for slow, fast in zip(self.teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
                wanted = self.teacher(**inputs).logits.softmax(-1)
            return outputs.loss - (wanted * outputs.logits.log_softmax(-1)).sum(-1).mean()

    def script(make, note):
        trainer = make(make_model("gpt2"), Own)
        trainer.train()
        note("teacher", trainer.teacher.state_dict())
        note_run(note, trainer)

    trainers(script)


def test_an_optimizer_with_a_rate_for_each_layer(trainers):
    class Own:
        def create_optimizer(self, *args, **kwargs):
            groups = [{"params": [*self.model.transformer.wte.parameters(), *self.model.transformer.ln_f.parameters()]}]
            for depth, layer in enumerate(self.model.transformer.h):
                groups.append({"params": list(layer.parameters()), "lr": 1e-3 * 0.8**depth, "name": f"layer{depth}"})
            self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)  # positions are in no group
            return self.optimizer

    def script(make, note):
        trainer = make(make_model("gpt2"), Own)
        trainer.train()
        note("groups", [(group["lr"], group.get("name")) for group in trainer.optimizer.param_groups])
        note_run(note, trainer)

    trainers(script)


def test_an_optimizer_and_a_schedule_given_to_the_trainer(trainers):
    def script(make, note):
        model = make_model("gpt2")
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=6)
        trainer = make(model, trainer_kwargs={"optimizers": (optimizer, scheduler)})
        trainer.train()
        note("rates", scheduler.get_last_lr())
        note_run(note, trainer)

    trainers(script)


def test_the_norm_of_weights_in_the_log(trainers):
    class Own:
        def log(self, logs, *args, **kwargs):
            squares = [parameter.detach().float().square().sum() for parameter in self.model.parameters()]
            logs["weight_norm"] = float(torch.stack(squares).sum().sqrt())
            super().log(logs, *args, **kwargs)

    def script(make, note):
        trainer = make(make_model("gpt2"), Own)
        trainer.train()
        note("norms", logged(trainer, "weight_norm"))
        note_run(note, trainer)

    trainers(script)


# Optimizers with more than a step


def test_adafactor_logs_its_rate(trainers):
    def script(make, note):
        model = make_model("gpt2")
        optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)
        trainer = make(model, trainer_kwargs={"optimizers": (optimizer, AdafactorSchedule(optimizer))}, max_steps=4)
        trainer.train()
        note("rates", logged(trainer, "learning_rate"))
        note_run(note, trainer)

    trainers(script)


def test_schedule_free_under_the_trainer(trainers):
    """The Trainer switches the optimizer to evaluation mode where it evaluates and saves."""

    def script(make, note):
        model = make_model("gpt2")
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

        @on("save", "evaluate")
        def read(event, model, optimizer, state):
            note(event, (norms(model), [group["train_mode"] for group in optimizer.param_groups]))

        trainer = make(
            model,
            trainer_kwargs={"optimizers": (optimizer, scheduler), "callbacks": [read]},
            save_strategy="steps",
            save_steps=2,
            max_steps=4,
            **EVALUATED,
        )
        trainer.train()
        note_run(note, trainer)
        saved = type(trainer.model).from_pretrained(os.path.join(trainer.args.output_dir, "checkpoint-2"))
        note("saved", saved.state_dict())

    trainers(script)


# Before and after a run


def test_a_plain_loop_after_the_trainer(trainers):
    """The engine is still attached; what trains now is a stock optimizer."""

    def script(make, note):
        trainer = make(make_model("gpt2"))
        trainer.train()
        model = trainer.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            loss = model(**make_batch("gpt2", seed=step)).loss
            loss.backward()
            note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
            note("loss", loss.detach())
        note("evaluated", trainer.evaluate()["eval_loss"])
        note("predictions", trainer.predict(trainer.eval_dataset).predictions)
        note_run(note, trainer)

    trainers(script)


def test_a_stock_trainer_over_the_model_of_another(trainers):
    def script(make, note):
        trainer = make(make_model("gpt2"))
        trainer.train()
        args = copy.deepcopy(trainer.args)
        if hasattr(args, "patrickstar"):
            args.patrickstar, args.patrickstar_config = False, None
        second = Trainer(model=trainer.model, args=args, train_dataset=trainer.train_dataset)
        second.train()
        note_run(note, second)

    trainers(script)


def test_trained_twice_with_a_change_between(trainers):
    """The optimizer is made anew, as it must be when a weight has another shape."""

    def script(make, note):
        trainer = make(make_model("gpt2"), factor=1.5)
        trainer.train()
        trainer.model.resize_token_embeddings(100)
        trainer.model.transformer.h = trainer.model.transformer.h[:2]
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_trained_twice_with_the_same_optimizer(trainers):
    def script(make, note):
        trainer = make(make_model("gpt2"))
        trainer.train()
        trainer.model.transformer.h = trainer.model.transformer.h[:2]
        with torch.no_grad():
            trainer.model.transformer.h[0].mlp.c_proj.weight.normal_(0.0, 0.02)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_the_best_model_after_it_was_written_to(trainers):
    def script(make, note):
        more = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, **EVALUATED}
        trainer = make(make_model("gpt2"), **more)
        trainer.train()
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(0.01)
        trainer.save_model()
        saved = type(trainer.model).from_pretrained(trainer.args.output_dir)
        note("saved", saved.state_dict())
        note("evaluated", trainer.evaluate()["eval_loss"])

    trainers(script)


def test_noise_on_the_embeddings(trainers):
    def script(make, note):
        trainer = make(make_model("gpt2"), neftune_noise_alpha=0.5)
        trainer.train()
        note_run(note, trainer)

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
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "modules_to_save": lambda: lora(modules_to_save=["ln_f"]),
    "trainable_tokens": lambda: lora(trainable_token_indices={"wte": [1, 5]}),
    "ia3": lambda: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_under_the_trainer(trainers, kind):
    def script(make, note):
        @on("step_end")
        def read(event, model, optimizer, state):
            note("norms", norms(model))

        trainer = make(
            make_adapted(config=ADAPTERS[kind]()),
            trainer_kwargs={"callbacks": [read]},
            factor=2.0,
            save_strategy="steps",
            save_steps=3,
            **EVALUATED,
        )
        trainer.train()
        note("adapter", peft.get_peft_model_state_dict(trainer.model))
        note_run(note, trainer)
        saved = peft.PeftModel.from_pretrained(make_model("gpt2"), f"{trainer.args.output_dir}/checkpoint-3")
        note("saved", saved.state_dict())

    trainers(script)


def test_an_adapter_merged_after_the_run(trainers, tmp_path):
    def script(make, note):
        trainer = make(make_adapted())
        trainer.train()
        trainer.model.merge_adapter()
        note("merged", trainer.evaluate()["eval_loss"])
        trainer.model.unmerge_adapter()
        merged = trainer.model.merge_and_unload()
        note("state", merged.state_dict())
        merged.save_pretrained(tmp_path)
        note("saved", type(merged).from_pretrained(tmp_path).state_dict())

    trainers(script)


def test_adalora_under_the_trainer(trainers):
    """Its penalty is in the loss, and a callback allocates ranks from the gradients after the step."""

    def script(make, note):
        config = peft.AdaLoraConfig(
            target_modules=["c_attn"],
            init_r=4,
            target_r=2,
            tinit=1,
            tfinal=1,
            deltaT=1,
            total_step=5,
            task_type="CAUSAL_LM",
        )

        @on("optimizer_step")
        def allocate(event, model, optimizer, state):
            model.base_model.update_and_allocate(state.global_step)
            note("importance", dict(model.base_model.rankallocator.exp_avg_ipt))

        model = make_adapted(config=config)
        trainer = make(model, trainer_kwargs={"callbacks": [allocate]}, max_steps=5, factor=1.5)
        trainer.train()
        note("ranks", trainer.model.peft_config["default"].rank_pattern)
        note_run(note, trainer)

    trainers(script)


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_lora_on_experts(trainers, recomputed):
    def script(make, note):
        config = lora(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        trainer = make(
            make_adapted("mixtral", config),
            name="mixtral",
            factor=2.5,
            gradient_checkpointing=recomputed,
            gradient_checkpointing_kwargs={"use_reentrant": False} if recomputed else None,
        )
        trainer.train()
        note("parameters", [name for name, _ in trainer.model.named_parameters()])
        note("buffers", [name for name, _ in trainer.model.named_buffers()])
        note_run(note, trainer)
        note("merged", trainer.model.merge_and_unload().state_dict())

    trainers(script)


def test_a_second_adapter_for_a_second_run(trainers):
    def script(make, note):
        model = make_adapted()
        trainer = make(model, factor=1.5)
        trainer.train()
        model.add_adapter("second", lora(r=2, target_modules=["c_fc"], fan_in_fan_out=True))
        model.set_adapter("second")
        second = make(model, factor=1.5)
        second.train()
        note("first", logged(trainer))
        note_run(note, second)
        with model.disable_adapter():
            note("without", second.evaluate()["eval_loss"])

    trainers(script)


# TRL


def trl_trainer(make, model, base, arguments, data, kwargs=None, **more):
    more = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 2, **more}
    kwargs = {"train_dataset": data, "processing_class": make_tokenizer(), **(kwargs or {})}
    return make(model, base=base, arguments=arguments, trainer_kwargs=kwargs, **{"factor": 2.0, **more})


@pytest.mark.parametrize(
    ("adapter", "more"),
    [
        pytest.param(None, {}, id="full"),
        pytest.param(None, {"gradient_checkpointing": True}, id="recomputed"),
        pytest.param(None, {"loss_type": "chunked_nll"}, id="chunked"),
        pytest.param(lora, {"gradient_checkpointing": True}, id="lora"),
    ],
)
def test_supervised_fine_tuning(trainers, adapter, more):
    def script(make, note):
        data = completions()
        kwargs = {"peft_config": adapter and adapter(target_modules=["q_proj", "v_proj"])}
        trainer = trl_trainer(make, make_model("llama"), trl.SFTTrainer, trl.SFTConfig, data, kwargs, **more)
        trainer.train()
        note("accuracy", logged(trainer, "mean_token_accuracy", "entropy"))
        note_run(note, trainer)

    trainers(script)


REWARDS = ["loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"]


def preferring(trainers, make_trained, trainer_kwargs=dict, **more):
    def script(make, note):
        model = make_trained()
        more_kwargs = trainer_kwargs()
        trainer = trl_trainer(make, model, trl.DPOTrainer, trl.DPOConfig, preferences(), more_kwargs, **more)
        trainer.train()
        note("rewards", logged(trainer, *REWARDS))
        if trainer.ref_model is not None:
            note("reference", trainer.ref_model.state_dict())
        note_run(note, trainer)

    trainers(script)


def make_llama():
    return make_model("llama")


def make_adapted_llama():
    return make_adapted("llama", lora(target_modules=["q_proj", "v_proj"]))


def make_references():
    return {"ref_model": make_model("llama", seed=4)}


def test_preference_optimisation(trainers):
    preferring(trainers, make_llama, make_references)


def test_preference_optimisation_with_a_reference_that_follows(trainers):
    preferring(
        trainers, make_llama, make_references, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3
    )


def test_preference_optimisation_with_references_computed_before(trainers):
    preferring(trainers, make_llama, make_references, precompute_ref_log_probs=True)


def test_preference_optimisation_of_an_adapter(trainers):
    """The reference is the model with its adapter disabled."""
    preferring(
        trainers,
        make_llama,
        lambda: {"peft_config": lora(target_modules=["q_proj", "v_proj"], init_lora_weights=True)},
        gradient_checkpointing=True,
    )


def test_preference_optimisation_of_an_adapter_that_was_trained(trainers):
    """The reference is a second adapter, a copy, that is activated under no_grad."""
    preferring(trainers, make_adapted_llama)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "ref_adapter"])
def test_kto(trainers, adapted):
    def script(make, note):
        rows = [{"prompt": words(i, 4), "completion": words(60 + i, 5), "label": i % 3 > 0} for i in range(12)]
        model = make_adapted_llama() if adapted else make_llama()
        kwargs = {} if adapted else make_references()
        trainer = trl_trainer(make, model, trl.KTOTrainer, trl.KTOConfig, Dataset.from_list(rows), kwargs)
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_a_reward_model(trainers):
    def script(make, note):
        torch.manual_seed(0)
        config = LlamaConfig(**{**make_llama().config.to_diff_dict(), "num_labels": 1, "pad_token_id": 0})
        model = LlamaForSequenceClassification(config)
        trainer = trl_trainer(make, model, trl.RewardTrainer, trl.RewardConfig, preferences())
        trainer.train()
        note_run(note, trainer)

    trainers(script)


def test_group_relative_policy_optimisation(trainers):
    """Text is generated from the live model in every step; the reference is the model without its adapter."""

    def script(make, note):
        data = prompts()
        trainer = trl_trainer(
            make,
            make_adapted_llama(),
            trl.GRPOTrainer,
            trl.GRPOConfig,
            data,
            {"reward_funcs": count_sevens},
            num_generations=2,
            max_completion_length=4,
            beta=0.1,
            max_steps=2,
        )
        trainer.train()
        note("rewards", logged(trainer, "loss", "reward", "kl"))
        note_run(note, trainer)

    trainers(script)


def test_an_average_that_is_corrected_for_its_lag(trainers):
    """TRL's BEMA callback keeps references to the parameters from the start of the run."""

    def script(make, note):
        average = trl.BEMACallback(update_freq=1, update_after=0)
        trainer = make(make_model("gpt2"), trainer_kwargs={"callbacks": [average]})
        trainer.train()
        note("average", average.running_model.state_dict())
        note("states", states(trainer.optimizer))
        note_run(note, trainer)

    trainers(script)
