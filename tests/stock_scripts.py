"""Training scripts of other people, in the shape of those of transformers, TRL and Accelerate."""

HEAD = """
import dataclasses
import json
import sys

import torch
from models import make_model, make_rows


@dataclasses.dataclass
class ModelArguments:
    model: str = dataclasses.field(default="gpt2", metadata={"help": "Which model."})


@dataclasses.dataclass
class DataArguments:
    num_rows: int = dataclasses.field(default=16)


def tell(trainer):
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    total = sum(float(value.detach().double().sum()) for value in trainer.model.state_dict().values())
    stats = getattr(trainer, "patrickstar_stats", None)
    is_chunked = getattr(trainer.args, "patrickstar", False) and bool(stats())
    size = trainer.accelerator.num_processes
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses, "total": total, "is_chunked": is_chunked, "size": size}))
"""

CLM = (
    HEAD
    + """
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
model_args, data_args, training_args = parser.parse_args_into_dataclasses()
assert repr(training_args).startswith("TrainingArguments(")
set_seed(3)
trainer = Trainer(
    model=make_model(model_args.model), args=training_args, train_dataset=make_rows(model_args.model, data_args.num_rows)
)
assert transformers.Trainer is Trainer and transformers.trainer.Trainer is Trainer
trainer.train()
trainer.save_model()
tell(trainer)
"""
)

TRANSLATION = (
    HEAD
    + """
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, set_seed

parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
model_args, data_args, training_args = parser.parse_args_into_dataclasses()
set_seed(3)
trainer = Seq2SeqTrainer(
    model=make_model("t5"), args=training_args, train_dataset=make_rows("t5", data_args.num_rows)
)
assert isinstance(trainer, Trainer)
trainer.train()
tell(trainer)
"""
)

NO_TRAINER = """
import argparse
import json

import torch
from models import make_model, make_rows
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=5e-3)
args = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
set_seed(3)
model = make_model("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
rows = [{name: torch.as_tensor(value) for name, value in row.items()} for row in make_rows("gpt2", 8)]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps({"losses": losses, "is_chunked": hasattr(model, "patrickstar_engine")}))
"""
