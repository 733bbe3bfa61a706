"""Training scripts in the shape of other people's, which know nothing of this package, and what runs several.

``python unchanged_scripts.py plain|run FILE``: the file has programs as JSON, each with words for ``hf-patrickstar
run`` and words for Python alone. They run one after the other in one process, since importing takes longest.
"""

import json
import runpy
import sys

LANGUAGE = '''
"""As transformers' run_clm."""
from dataclasses import dataclass, field

import torch
from models import make_rows
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from transformers import default_data_collator, set_seed


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "The model."})


@dataclass
class DataTrainingArguments:
    max_train_samples: int | None = field(default=None, metadata={"help": "Fewer examples."})


parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
model_args, data_args, training_args = parser.parse_args_into_dataclasses()
set_seed(training_args.seed)
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=make_rows("gpt2", data_args.max_train_samples),
    data_collator=default_data_collator,
)
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
trainer.save_state()
print("has chunks:", hasattr(model, "patrickstar_engine"), "of", training_args.world_size)
'''

CLASSES = '''
"""As transformers' run_glue."""
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, HfArgumentParser, Trainer
from transformers import TrainingArguments, set_seed


@dataclass
class DataTrainingArguments:
    task_name: str | None = field(default=None, metadata={"help": "The task."})


data_args, training_args = HfArgumentParser((DataTrainingArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(training_args.seed)
sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=40, num_labels=3))
rows = [{"input_ids": torch.arange(i, i + 8), "labels": i % 3} for i in range(16)]


def compute_metrics(p: EvalPrediction):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


trainer = Trainer(
    model=model, args=training_args, train_dataset=rows, eval_dataset=rows[:8], compute_metrics=compute_metrics
)
trainer.train()
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()
'''

TRANSLATION = '''
"""As transformers' run_translation."""
import torch
from models import make_model, make_rows
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

(training_args,) = HfArgumentParser((Seq2SeqTrainingArguments,)).parse_args_into_dataclasses()
set_seed(training_args.seed)
rows = make_rows("t5", 16)
trainer = Seq2SeqTrainer(
    model=make_model("t5"),
    args=training_args,
    train_dataset=rows,
    eval_dataset=rows[:4],
    compute_metrics=lambda p: {"length": p.predictions.shape[1]},
)
trainer.train()
assert training_args.predict_with_generate
print(trainer.evaluate(max_length=6))
trainer.save_model()
'''

NO_TRAINER = '''
"""As transformers' run_clm_no_trainer."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from models import make_batch, make_model
from transformers import get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
args = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=True)
set_seed(1)
model = make_model("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
model.train()
for number in range(8):
    with accelerator.accumulate(model):
        loss = model(**make_batch("gpt2", seed=number)).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(args.output_dir, save_function=accelerator.save)
print("has chunks:", hasattr(accelerator.unwrap_model(model), "patrickstar_engine"))
'''

FILES = {"clm.py": LANGUAGE, "glue.py": CLASSES, "translation.py": TRANSLATION, "no_trainer.py": NO_TRAINER}


def run_all(kind, programs):
    """Runs programs as Python does, or by ``hf-patrickstar run``."""
    from hf_patrickstar.cli.main import main

    for program in programs:
        if kind == "run":
            assert main(["run", *program["run"]]) == 0
            continue
        is_module, words = program["plain"][0] == "-m", program["plain"]
        sys.argv = words[1:] if is_module else words
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:
        run_all(sys.argv[1], json.load(file))
