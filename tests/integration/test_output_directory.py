"""The output directory has the same entries as with the stock Trainer, during a training and after it."""

import os

import pytest
from trainers import make_trainer, run
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.report.run_record import read_run

STEPS = {"save_strategy": "steps", "save_steps": 1}
CASES = {
    "no checkpoint": {},
    "some": {**STEPS, "save_total_limit": 2},
    "the best": {
        **STEPS,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
    },
}


class Entries(TrainerCallback):
    """What lies in the output directory whenever the Trainer tells callbacks something."""

    def __init__(self):
        self.seen = []

    def note(self, args, state, control, **kwargs):
        self.seen.append((state.global_step, sorted(os.listdir(args.output_dir))))

    on_step_begin = on_step_end = on_log = on_save = on_evaluate = on_train_end = note


def train_and_list(cls, args_cls, folder, kwargs):
    """Two runs, the second resumed where the first has saved."""
    entries = Entries()
    # The arguments that the package has of its own are as they are for users.
    own = {} if cls is Trainer else {"patrickstar_report": True}
    for max_steps in (3, 5):
        trainer = make_trainer(cls, args_cls, folder, max_steps=max_steps, **kwargs, **own)
        trainer.add_callback(entries)
        run(trainer, resume_from_checkpoint=max_steps == 5 and "save_steps" in kwargs)
    trainer.save_model()
    trainer.save_state()
    return [*entries.seen, sorted(os.listdir(folder))]


@pytest.mark.parametrize("case", CASES)
def test_entries(case, tmp_path):
    expected = train_and_list(Trainer, TrainingArguments, tmp_path / "stock", CASES[case])
    ours = train_and_list(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path / "ours", CASES[case])
    assert "model.safetensors" in expected[-1]
    assert ours == expected
    assert [row["step"] for row in read_run(tmp_path / "ours").steps] == [1, 2, 3, 4, 5]
