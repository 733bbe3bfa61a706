"""Training scripts: in the shape of those of transformers, TRL and Accelerate, and as our users write them."""

import pathlib

PLAIN_EXIT = pathlib.Path(__file__).parent / "plain_exit"
"""A folder to put in front of ``PYTHONPATH`` where several processes of plain torch have to end without an abort."""

HEAD = """
import dataclasses
import json
import sys

import torch
from support.models import make_model, make_rows


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
        print(json.dumps({"losses": losses, "total": total, "is_chunked": is_chunked, "size": size}), flush=True)
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
rows = make_rows(model_args.model, data_args.num_rows)
trainer = Trainer(model=make_model(model_args.model), args=training_args, train_dataset=rows)
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

QLORA = (
    HEAD
    + """
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

path = sys.argv.pop(1)
(training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
set_seed(3)
config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
trainer = Trainer(model=model, args=training_args, train_dataset=make_rows("llama", 16))
trainer.train()
trainer.save_model()
tell(trainer)
"""
)

NO_TRAINER = """
import argparse
import json

import torch
from support.models import make_model, make_rows
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

GLUE = (
    HEAD
    + """
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss * 0.5
        return (loss, outputs) if return_outputs else loss


parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
else:
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
set_seed(3)
rows = make_rows("bert", data_args.num_rows)
trainer = WeightedTrainer(
    model=make_model("bert"), args=training_args, train_dataset=rows, eval_dataset=rows[:4]
)
trainer.train()
metrics = trainer.evaluate()
assert metrics["eval_loss"] > 0
tell(trainer)
"""
)

MIXED = (
    """
from hf_patrickstar import PatrickStarTrainer as Trainer, PatrickStarTrainerMixin, PatrickStarTrainingArguments
from hf_patrickstar import PatrickStarArgumentsMixin
"""
    + HEAD
    + """
import transformers
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments, set_seed


class Mine(PatrickStarTrainerMixin, Seq2SeqTrainer):
    pass


@dataclasses.dataclass
class MyArguments(PatrickStarArgumentsMixin, Seq2SeqTrainingArguments):
    pass


assert PatrickStarTrainingArguments is TrainingArguments
(training_args,) = HfArgumentParser(MyArguments).parse_args_into_dataclasses()
set_seed(3)
trainer = Mine(model=make_model("t5"), args=training_args, train_dataset=make_rows("t5", 16))
assert Trainer is transformers.Trainer and isinstance(trainer, Trainer)
trainer.train()
tell(trainer)
"""
)

REWARDS = """
def longest(completions, **kwargs):
    return [float(len(set(text))) for text in completions]
"""


def write_trl_inputs(folder):
    """Writes a tiny checkpoint with a tokenizer, and a data set for each of ``sft``, ``dpo`` and ``grpo``."""
    import json

    import torch
    from support.models import gpt2
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    words = ["the quick red fox", "a slow dog sleeps", "birds jump over trees", "no cat runs under it"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        words, vocab_size=270, min_frequency=1, special_tokens=["<pad>", "<eos>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = gpt2()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = {
        "sft": [{"text": text} for text in words * 2],
        "dpo": [{"prompt": text, "chosen": " yes it is", "rejected": " not at all"} for text in words * 2],
        "grpo": [{"prompt": text} for text in words * 2],
    }
    for name, values in rows.items():
        (folder / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in values)
        (folder / name / "train.jsonl").write_text(lines, encoding="utf-8")
    (folder / "tiny_rewards.py").write_text(REWARDS, encoding="utf-8")


def trl_arguments(folder, name, output):
    """The command line of ``python -m trl.scripts.NAME``."""
    words = ["--model_name_or_path", folder / "model", "--dataset_name", folder / name, "--output_dir", output]
    words += ["--use_cpu", "--max_steps", "2", "--logging_steps", "1", "--learning_rate", "5e-3", "--seed", "3"]
    words += ["--report_to", "none", "--disable_tqdm", "true", "--save_strategy", "no", "--dtype", "float32"]
    words += ["--bf16", "false", "--per_device_train_batch_size", "2"]
    if name == "grpo":
        words += ["--num_generations", "2", "--max_completion_length", "4", "--reward_funcs", "tiny_rewards.longest"]
    return [str(word) for word in words]


def write_stock_scripts(folder):
    """Writes all scripts into a folder, and ``all.py``, which runs those that it is told with their arguments."""
    scripts = {"clm": CLM, "glue": GLUE, "translation": TRANSLATION, "no_trainer": NO_TRAINER, "mixed": MIXED}
    for name, text in {**scripts, "qlora": QLORA, "all": ALL}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


ALL = """
import json
import runpy
import sys

for words in json.loads(sys.argv[1]):
    sys.argv = words
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
"""


TINY = """
import torch
from support.models import make_model, make_rows
from transformers import HfArgumentParser, TrainerCallback

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

callbacks = []
(args,) = HfArgumentParser(PatrickStarTrainingArguments).parse_args_into_dataclasses()
Trainer = PatrickStarTrainer
torch.manual_seed(5)
model = make_model("gpt2")
{more}
trainer = Trainer(model=model, args=args, train_dataset=make_rows("gpt2", 16), callbacks=callbacks)
trainer.train()
raise AssertionError("a command has let the script go on after it had trained")
"""

WRONG_STEP = '''
class Wrong(TrainerCallback):
    """Changes one element after a step of the optimizer, as a mistake in it would."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if args.patrickstar and state.global_step == {step}:
            model.get_parameter("transformer.h.1.mlp.c_fc.weight").data[3, 5] += 0.25


callbacks.append(Wrong())
'''

ARGUMENTS = ("--use_cpu", "--disable_tqdm", "true", "--per_device_train_batch_size", "2", "--learning_rate", "5e-3")


def write_script(folder, more="", name="train.py", text=TINY):
    """Writes a script; ``more`` is what it does before it makes its Trainer. Returns its path as text."""
    path = folder / name
    path.write_text(text.replace("{more}", more), encoding="utf-8")
    return str(path)
