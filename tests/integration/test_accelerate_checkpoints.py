"""``save_state`` and ``load_state``, with all that Accelerate saves beside models, and to and from stock Accelerate."""

import copy
import os
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from support.checkpoint_files import assert_same_files, assert_same_tensors, names_in, same_bits, snapshot
from support.models import make_model, make_rows
from support.trainers import assert_same_weights, tight

from hf_patrickstar import CheckpointError, PatrickStarAccelerator
from hf_patrickstar.checkpoint import training_state
from hf_patrickstar.cli.main import main


class Counter:
    """A custom object."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Loop:
    """A training loop over Accelerate, ours or the stock one, that can be saved at any step."""

    def __init__(self, is_ours=True, config=None, seed=0, model=None, momentum=False, precision="no", **kwargs):
        cls, own = Accelerator, {}
        if is_ours:
            cls, own = PatrickStarAccelerator, {"patrickstar_config": {**tight(), **(config or {})}}
        self.accelerator = cls(cpu=True, mixed_precision=precision, **own, **kwargs)
        model = make_model("gpt2", seed) if model is None else model
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3},
        ]
        optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9) if momentum else torch.optim.AdamW(groups, 5e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = torch.utils.data.DataLoader(make_rows("gpt2", 32), 4)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, steps=2, seed=None):
        """Goes on with the data that follow; random states are seeded, or as they were loaded."""
        if seed is not None:
            torch.manual_seed(seed)
        self.model.train()
        losses = []
        loader = self.accelerator.skip_first_batches(self.loader, self.counter.count)
        for _, batch in zip(range(steps), loader, strict=False):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.count += 1
            losses.append(loss.item())
        return losses

    def whole_state(self):
        """Everything that a checkpoint has."""
        parts = self.model, self.optimizer, self.scheduler, self.counter
        return copy.deepcopy([part.state_dict() for part in parts])


@pytest.mark.parametrize(
    ("is_background", "kwargs", "is_safe"),
    [(False, {}, False), (True, {"precision": "bf16", "momentum": True}, True), (True, {}, True)],
)
def test_a_loop_goes_on_where_it_was_saved(is_background, kwargs, is_safe, tmp_path, monkeypatch):
    config = {"background_save": is_background}
    whole = Loop(config=config, **kwargs)
    whole.train()
    whole.accelerator.save_state(tmp_path / "saved", safe_serialization=is_safe)
    losses = whole.train()
    whole.accelerator.save_state(tmp_path / "end", safe_serialization=is_safe)
    other = Loop(config={"chunk_budget": 2**28}, seed=3, **kwargs)
    other.train(steps=1)
    whole.model.patrickstar_engine.checkpoints.wait()
    other.accelerator.load_state(tmp_path / "saved")
    assert other.counter.count == 2
    other.accelerator.save_state(tmp_path / "again", safe_serialization=is_safe)
    assert_same_files(tmp_path / "saved", tmp_path / "again", apart_from=_depends_on_chunks(tmp_path / "saved"))
    assert_same_tensors(tmp_path / "saved", tmp_path / "again")
    assert other.train() == losses
    assert same_bits(whole.whole_state(), other.whole_state())


def _depends_on_chunks(directory):
    """Files in which tensors are in the order of chunks, and random states, of which Accelerate has one that moves."""
    return {name for name in names_in(directory) if re.match(r"optimizer-|random_states|scheduler", name)}


def test_automatic_names_and_the_limit(tmp_path):
    """The same directories as of stock Accelerate, also after a number was set, and the newest is loaded."""
    for is_ours in (False, True):
        project = ProjectConfiguration(str(tmp_path / str(is_ours)), automatic_checkpoint_naming=True, total_limit=2)
        loop = Loop(is_ours, {"background_save": True} if is_ours else None, project_config=project)
        for _ in range(3):
            loop.train(steps=1)
            loop.accelerator.save_state()
        project.iteration = 9
        loop.train(steps=1)
        loop.accelerator.save_state()
        saved = loop.whole_state()
        loop.train(steps=1)
        loop.accelerator.load_state()
        assert same_bits(saved, loop.whole_state())
        assert sorted(os.listdir(tmp_path / str(is_ours) / "checkpoints")) == ["checkpoint_2", "checkpoint_9"]
        assert project.iteration == 10
        project.iteration = 9
        with pytest.raises(ValueError, match=r"already exists|exists already"):
            loop.accelerator.save_state()


def test_stock_accelerate_and_ours_read_what_the_other_saved(tmp_path):
    stock, ours = Loop(False), Loop()
    for loop, folder in ((stock, "stock"), (ours, "ours")):
        loop.train(seed=1)
        loop.accelerator.save_state(tmp_path / folder)
    assert main(["export", str(tmp_path / "ours"), "--output", str(tmp_path / "ours/optimizer.bin")]) == 0
    losses = stock.train(seed=2)
    assert ours.train(seed=2) == losses
    other_ours, other_stock = Loop(seed=3), Loop(False, seed=3)
    other_ours.accelerator.load_state(tmp_path / "stock")
    other_stock.accelerator.load_state(tmp_path / "ours")
    assert other_ours.counter.count == other_stock.counter.count == 2
    for loop in (other_ours, other_stock):
        assert loop.train(seed=2) == losses
        assert_same_weights(stock.model, loop.model)
        assert loop.scheduler.state_dict() == stock.scheduler.state_dict()
    theirs, own = names_in(tmp_path / "stock"), names_in(tmp_path / "ours")
    assert theirs == {name for name in own if not re.match(r"optimizer(-|\.index)|README.md", name)}


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "bf16"), (torch.bfloat16, "no")])
def test_hooks_that_save_and_load_the_model_themselves(dtype, precision, tmp_path):
    """As scripts of diffusers have them: weights are popped, the model is written and read by other means."""

    def register(loop):
        def save(models, weights, directory):
            while weights:
                weights.pop()
                models[-1].save_pretrained(os.path.join(directory, "own"))

        def load(models, directory):
            model = models.pop()
            model.load_state_dict(type(model).from_pretrained(os.path.join(directory, "own")).state_dict())

        loop.accelerator.register_save_state_pre_hook(save)
        loop.accelerator.register_load_state_pre_hook(load)
        return loop

    def make(seed):
        return register(Loop(seed=seed, model=make_model("gpt2", seed).to(dtype), precision=precision))

    whole = make(0)
    whole.train()
    whole.accelerator.save_state(tmp_path / "saved")
    assert "own/model.safetensors" in names_in(tmp_path / "saved")
    assert "model.safetensors" not in names_in(tmp_path / "saved")
    losses = whole.train()
    other = make(3)
    other.accelerator.load_state(tmp_path / "saved")
    assert other.train() == losses
    assert same_bits(whole.whole_state(), other.whole_state())


@pytest.mark.parametrize(
    ("name", "has_hooks"), [("model.safetensors", False), ("optimizer-00001-of-00001.safetensors", True)]
)
def test_a_damaged_directory_changes_nothing(name, has_hooks, tmp_path):
    loop = Loop()
    if has_hooks:
        loop.accelerator.register_load_state_pre_hook(lambda models, directory: None)
    loop.train()
    loop.accelerator.save_state(tmp_path / "saved")
    loop.train(steps=1)
    before = loop.whole_state()
    os.truncate(tmp_path / "saved" / name, 1000)
    with pytest.raises(CheckpointError, match=f"{name}' is not a complete"):
        loop.accelerator.load_state(tmp_path / "saved")
    assert same_bits(before, loop.whole_state())


@pytest.mark.parametrize("is_background", [False, True])
def test_a_directory_that_cannot_be_written(is_background, tmp_path, monkeypatch):
    loop = Loop(config={"background_save": is_background})
    loop.train(steps=1)
    loop.accelerator.save_state(tmp_path / "saved")
    loop.model.patrickstar_engine.checkpoints.wait()
    before = snapshot(tmp_path)
    state = loop.whole_state()
    loop.train(steps=1)

    write = training_state.write_safetensors

    def refuse(path, *args, **kwargs):
        if is_background and "-of-" not in path.name:  # written before the thread begins
            return write(path, *args, **kwargs)
        raise OSError(28, "No space left on device")

    if is_background:
        monkeypatch.setattr(training_state, "write_safetensors", refuse)
        loop.accelerator.save_state(tmp_path / "saved")
    else:
        monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(CheckpointError, match="No space left on device"):
        loop.accelerator.save_state(tmp_path / "saved")  # in the background: the next one says so
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    assert loop.train(steps=1)
    loop.accelerator.load_state(tmp_path / "saved")
    assert same_bits(state, loop.whole_state())
