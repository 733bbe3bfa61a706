"""Checkpoints of the Trainer: when they are made, which stay, what resuming gives, what a failed one leaves."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from support.checkpoint_files import assert_same_files, assert_same_tensors, names_in, trainer_state
from support.models import make_model
from support.trainers import assert_same_weights, logged, make_trainer, run, tight
from test_interchange import SAVING, stock
from transformers import TrainerCallback

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.checkpoint import torch_state
from hf_patrickstar.checkpoint.storage import PARTIAL, REMOVED, StagedDirectory
from hf_patrickstar.report.run_record import read_run

BEST = {"eval_strategy": "steps", "load_best_model_at_end": True, "greater_is_better": True}  # the worst loss
UNLIKE = ("training_args.bin",)  # paths


def ours(tmp_path, is_background=False, config=None, **kwargs):
    """Our trainer, with the least memory unless told otherwise."""
    config = {**(tight() if config is None else config), "background_save": is_background}
    return make_trainer(
        PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, patrickstar_config=config, **{**SAVING, **kwargs}
    )


def other_model():
    """Of other weights than those that runs begin with."""
    return make_model("gpt2", seed=3)


def bf16_model(seed):
    return make_model("gpt2", seed).to(torch.bfloat16)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps, each with a checkpoint. Tests leave its directory as it is."""
    trainer = ours(tmp_path_factory.mktemp("whole"), save_steps=1)
    run(trainer)
    return trainer


def folder_of(trainer):
    return Path(trainer.args.output_dir)


# Resuming in the same shape

SGD = {"trainer_kwargs": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 5e-2, "momentum": 0.9})}}
RUNS = {
    "bf16_model_in_background": {"bf16": True, "make": bf16_model, "is_background": True},
    "fp16": {"fp16": True, "gradient_accumulation_steps": 2},
    "momentum_bf16_in_background": {**SGD, "bf16": True, "gradient_accumulation_steps": 2, "is_background": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_saves_what_the_uninterrupted_one_saves(name, tmp_path):
    kwargs = {"is_background": False, **RUNS[name]}
    make = kwargs.pop("make", lambda seed: make_model("gpt2", seed))
    whole = ours(tmp_path / "whole", model=make(0), **kwargs)
    run(whole)
    resumed = ours(tmp_path / "resumed", model=make(3), **kwargs)
    run(resumed, resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert_same_weights(whole.model, resumed.model)
    assert_same_tensors(tmp_path / "whole/checkpoint-4", tmp_path / "resumed/checkpoint-4")
    # What is in other files too; states may be in another order.
    assert_same_files(tmp_path / "whole/checkpoint-4", tmp_path / "resumed/checkpoint-4", {*UNLIKE, "optimizer.pt"})


# Resuming at the end


@pytest.mark.parametrize(
    ("end", "steps", "limit"),
    [(4, {"max_steps": 4}, 4), (3, {"max_steps": 3}, 2), (4, {"max_steps": -1, "num_train_epochs": 0.25}, 2)],
)
def test_a_run_that_had_come_to_its_end_is_not_trained_further(end, steps, limit, whole, tmp_path, caplog):
    """Killed after its last checkpoint, with more of them than may stay, and started again."""
    folder = tmp_path / "run"
    shutil.copytree(folder_of(whole), folder)
    for left in (folder / PARTIAL / "checkpoint-4", folder / REMOVED / "checkpoint-0"):
        left.mkdir(parents=True)
    trainer = ours(folder, model=other_model(), save_steps=1, save_total_limit=limit, **steps)
    result = run(trainer, resume_from_checkpoint=True)
    assert (result.global_step, trainer.state.global_step) == (4, 4)
    assert f"checkpoint is of step 4 of {end}; to train on, raise --max_steps" in caplog.text
    assert_same_weights(whole.model, trainer.model)
    assert trainer.patrickstar_stats()["steps"] == 0
    assert trainer.state.log_history[:-1] == whole.state.log_history[:-1]
    assert set(os.listdir(folder)) == {f"checkpoint-{step}" for step in range(5 - limit, 5)}
    assert_same_files(folder_of(whole) / "checkpoint-4", folder / "checkpoint-4")


# Resuming in another shape


class SavedWhenBegun(TrainerCallback):
    """Saves what a resumed run begins with."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.patrickstar_engine.save_checkpoint(self.directory)


SHAPES = [tight(), {"chunk_numel": 8192, "device_budget": 2**23}, {"chunk_budget": 2**28, "placement": "host"}]


@pytest.mark.parametrize(("before", "precision"), [(0, {}), (1, {"bf16": True})], ids=["fp32", "bf16"])
def test_resuming_in_another_shape(before, precision, tmp_path):
    """In one process every shape gives the same bits; so the loaded state, and all that follows, is the same."""
    whole = ours(tmp_path / "whole", config=SHAPES[before], **precision)
    run(whole)
    for number, config in enumerate(SHAPES[:before] + SHAPES[before + 1 :]):
        folder = tmp_path / str(number)
        callbacks = {"callbacks": [SavedWhenBegun(folder / "begun")]}
        resumed = ours(folder, config=config, model=other_model(), trainer_kwargs=callbacks, **precision)
        run(resumed, resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
        assert_same_tensors(tmp_path / "whole/checkpoint-2", folder / "begun")
        assert logged(resumed, "loss") == logged(whole, "loss"), config
        assert_same_tensors(tmp_path / "whole/checkpoint-4", folder / "checkpoint-4")


# Which checkpoints there are

EPOCHS = {"per_device_train_batch_size": 32, "max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch"}
BY_LOSS = {**BEST, "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "loss"}
KEPT = {
    "epochs": {**EPOCHS, "save_strategy": "epoch", "save_total_limit": 2},
    "best_only": {**EPOCHS, "save_strategy": "best", "metric_for_best_model": "eval_loss"},
    "best_and_newest": {**BY_LOSS, "save_total_limit": 1},
    "best_is_not_loaded": {**BY_LOSS, "load_best_model_at_end": False, "eval_steps": 2, "save_total_limit": 1},
}


class Entries(TrainerCallback):
    """What is in the output directory at each event."""

    def __init__(self):
        self.seen = []

    def note(self, args, state, control, **kwargs):
        self.seen.append((state.global_step, sorted(os.listdir(args.output_dir))))

    on_step_begin = on_step_end = on_log = on_save = on_evaluate = on_train_end = note


@pytest.mark.parametrize("name", KEPT)
def test_the_same_checkpoints_stay_as_with_the_stock_trainer(name, tmp_path):
    """The output directory has the same entries during training, too, although a record of the run is written."""
    expected = stock(tmp_path / "stock", trainer_kwargs={"callbacks": [entries := Entries()]}, **KEPT[name])
    run(expected)
    best = expected.state.best_model_checkpoint
    for is_background in (False, True) if name == "best_and_newest" else (False,):
        folder, callbacks = tmp_path / f"ours_{is_background}", [Entries()]
        kwargs = {"trainer_kwargs": {"callbacks": callbacks}, "patrickstar_report": True, **KEPT[name]}
        actual = ours(folder, is_background, **kwargs)
        run(actual)
        assert is_background or callbacks[0].seen == entries.seen
        assert len(read_run(folder).steps) == actual.state.global_step
        assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "stock"))
        assert_same_weights(expected.model, actual.model)
        wanted = None if best is None else str(folder / os.path.basename(best))
        assert actual.state.best_model_checkpoint == wanted
        for checkpoint in folder.glob("checkpoint-*"):
            theirs = trainer_state(tmp_path / "stock" / checkpoint.name)["best_model_checkpoint"]
            wanted = None if theirs is None else str(folder / os.path.basename(theirs))
            assert trainer_state(checkpoint)["best_model_checkpoint"] == wanted


def test_the_best_checkpoint_of_a_run_that_was_moved(tmp_path):
    """Its directory is found again, as the stock Trainer finds it, and loaded at the end."""
    for make, folder in ((stock, tmp_path / "stock"), (ours, tmp_path / "ours")):
        run(make(folder / "old", **BY_LOSS))
        shutil.move(folder / "old", folder / "new")
        resumed = make(folder / "new", **BY_LOSS)
        run(resumed, resume_from_checkpoint=str(folder / "new/checkpoint-2"))
        best = str(folder / "new/checkpoint-1")
        assert resumed.state.best_model_checkpoint == best
        assert trainer_state(folder / "new/checkpoint-4")["best_model_checkpoint"] == best
        assert_same_tensors(tmp_path / "stock/new/checkpoint-1", best, "model")
        resumed.save_model(folder / "end")
        assert_same_tensors(tmp_path / "stock/new/checkpoint-1", folder / "end", "model")


def test_save_only_model(tmp_path):
    """Resuming then begins with a fresh optimizer, as with the stock Trainer."""
    run(stock(tmp_path / "stock", save_only_model=True))
    ours_ = ours(tmp_path / "ours", True, save_only_model=True)
    run(ours_)
    assert names_in(tmp_path / "stock") == names_in(tmp_path / "ours")
    resumed = []
    for make, folder in ((stock, tmp_path / "stock"), (ours, tmp_path / "ours")):
        trainer = make(folder, model=other_model())
        run(trainer, resume_from_checkpoint=str(folder / "checkpoint-2"))
        resumed.append(trainer)
    assert logged(resumed[0], "loss") == logged(resumed[1], "loss") != logged(ours_, "loss")
    assert_same_weights(resumed[0].model, resumed[1].model)


def leave_behind(folder):
    """What a kill in the middle of a checkpoint leaves."""
    rest = folder / PARTIAL / "checkpoint-3"
    rest.mkdir(parents=True)
    (rest / "model.safetensors").write_bytes(b"half of it")
    (rest / "optimizer.index.json").write_text("{}")


class Looking(TrainerCallback):
    seen = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen = os.listdir(Path(args.output_dir, PARTIAL))


def test_the_newest_checkpoint_is_found_among_leftovers_which_are_gone_when_training_begins(whole, tmp_path):
    """But not what somebody is writing just then."""
    shutil.copytree(folder_of(whole) / "checkpoint-2", tmp_path / "checkpoint-2")
    leave_behind(tmp_path)
    running = StagedDirectory(tmp_path / "mine")
    running.begin()
    resumed = ours(tmp_path, model=other_model(), trainer_kwargs={"callbacks": [look := Looking()]})
    run(resumed, resume_from_checkpoint=True)
    assert look.seen == ["mine"]
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert_same_weights(whole.model, resumed.model)
    running.commit()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "mine"]


# A signal


class Terminated(TrainerCallback):
    """Gets SIGTERM at a moment of the second step, and waits until the request for a checkpoint has arrived."""

    def __init__(self, moment):
        self.manager = None
        setattr(self, moment, self._terminate)

    def _terminate(self, args, state, control, **kwargs):
        if state.global_step == 1 and not self.manager.is_checkpoint_requested:
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 30
            while not self.manager.is_checkpoint_requested and time.monotonic() < end:
                time.sleep(0.01)


def watch_manager(trainer, monkeypatch):
    """Lets the manager of such checkpoints not wait, and looks at the checkpoint when it says that it is complete."""
    (manager,) = (c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
    manager.kill_wait, manager.completed = 0, []
    execute, write = manager.execute_jit_checkpoint, torch_state.write_torch

    def slow_write(*args, **kwargs):
        time.sleep(0.3)
        return write(*args, **kwargs)

    def watched():
        execute()
        manager.completed.append(names_in(trainer.args.output_dir))

    monkeypatch.setattr(torch_state, "write_torch", slow_write)
    manager.execute_jit_checkpoint = watched
    return manager


@pytest.mark.parametrize(("moment", "is_background"), [("on_step_begin", False), ("on_step_end", True)])
def test_checkpoint_on_sigterm(moment, is_background, whole, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    terminated = Terminated(moment)
    trainer = ours(
        tmp_path / "terminated",
        is_background,
        save_strategy="no",
        enable_jit_checkpoint=True,
        trainer_kwargs={"callbacks": [terminated]},
    )
    try:
        terminated.manager = watch_manager(trainer, monkeypatch)
        run(trainer)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.listdir(tmp_path / "terminated") == ["checkpoint-1"]
    assert terminated.manager.completed == [names_in(tmp_path / "terminated")], "when it said so, all of it was there"
    assert_same_tensors(folder_of(whole) / "checkpoint-1", tmp_path / "terminated/checkpoint-1")
    assert names_in(folder_of(whole) / "checkpoint-1") == names_in(tmp_path / "terminated/checkpoint-1")
    resumed = ours(tmp_path / "terminated", model=other_model())
    run(resumed, resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    if moment == "on_step_end":  # else dropout has used random numbers of the step that is repeated
        assert_same_weights(whole.model, resumed.model)


# Failing
