"""Training scripts as users write them, for the commands that run one."""

TINY = """
import torch
from models import make_model, make_rows
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
