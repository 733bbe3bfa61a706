"""Resuming from a checkpoint that lacks a file: nothing begins anew without a word."""

import logging
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.checkpoint_files import STATE_INDEX, same_bits
from support.models import make_batch, make_model
from support.trainers import logged, run, tight
from test_accelerate_checkpoints import Loop
from test_interchange import ours, stock

from hf_patrickstar import CheckpointError, PatrickStarEngine
from hf_patrickstar.checkpoint.torch_state import export

SHARD = "optimizer-00001-of-00001.safetensors"
OTHERS = "optimizer-others.safetensors"


def without(directory, *patterns):
    for pattern in patterns:
        paths = list(directory.glob(pattern))
        assert paths, pattern
        for path in paths:
            path.unlink()
    return directory


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of a run with both formats of the optimizer's state. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("saved")
    run(ours(folder, patrickstar_config={**tight(), "optimizer_format": "sharded"}))
    export(folder / "checkpoint-2")
    return folder / "checkpoint-2"


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run" / "checkpoint-2")


# The training state of this package


def make_engine(seed=0, optimizers=None, model=None, **settings):
    model = make_model("gpt2", seed) if model is None else model
    optimizers = torch.optim.AdamW(model.parameters(), 1e-2) if optimizers is None else optimizers(model)
    return PatrickStarEngine(model, {**tight(), **settings}, optimizers, device="cpu")


def halves(model, *beside):
    """Two optimizers, the second also over parameters that no model has."""
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[:4], 1e-2), torch.optim.AdamW([*beside, *parameters[4:]], 1e-2)]


def step(engine):
    engine.model(**make_batch("gpt2", 2, 1)).loss.backward()
    for optimizer in engine.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def by_the_trainer(checkpoint, is_on):
    trainer = ours(checkpoint.parent, patrickstar=is_on, patrickstar_config=tight() if is_on else None)
    run(trainer, resume_from_checkpoint=str(checkpoint))


NO_INDEX = rf"{STATE_INDEX}' is missing.*delete every optimizer-\*"


@pytest.mark.parametrize(("is_on", "has_torch"), [(True, True), (False, False), (False, True)])
def test_a_trainer_finds_no_index_while_its_files_are_there(is_on, has_torch, checkpoint):
    without(checkpoint, STATE_INDEX, *(() if has_torch else ("optimizer.pt",)))
    if is_on or not has_torch:  # else it is the stock Trainer, which resumes from optimizer.pt
        with pytest.raises(CheckpointError, match=NO_INDEX):
            by_the_trainer(checkpoint, is_on)
        without(checkpoint, "optimizer-*")  # the remedy
    by_the_trainer(checkpoint, is_on)


@pytest.mark.parametrize("has_torch", [False, True])
def test_an_engine_finds_no_index_while_its_files_are_there(has_torch, tmp_path, caplog):
    engine = make_engine(optimizer_format="sharded")
    step(engine)
    engine.save_checkpoint(tmp_path / "c")
    if has_torch:
        export(tmp_path / "c")
    step(other := make_engine(seed=1))
    before = other.optimizer.state_dict()
    without(tmp_path / "c", STATE_INDEX)
    with pytest.raises(CheckpointError, match=NO_INDEX):
        other.load_checkpoint(tmp_path / "c")
    assert same_bits(before, other.optimizer.state_dict())
    without(tmp_path / "c", "optimizer-*")  # the remedy
    other.load_checkpoint(tmp_path / "c")
    assert same_bits((engine if has_torch else other).optimizer.state_dict(), other.optimizer.state_dict())
    expected = f"'{tmp_path / 'c'}' has neither {STATE_INDEX} nor optimizer.pt: the optimizer keeps the state"
    assert [expected in text for text in warnings_in(caplog)] == ([] if has_torch else [True])


def test_the_others_that_are_gone(tmp_path):
    """States of parameters in no chunk, and the settings of groups, have a file of their own."""

    beside = torch.nn.Parameter(torch.ones(3))
    engine = make_engine(optimizers=lambda model: halves(model, beside), optimizer_format="sharded")
    engine.save_checkpoint(tmp_path / "first")
    beside.square().sum().backward()
    step(engine)
    engine.save_checkpoint(tmp_path / "c")
    again = make_engine(seed=1, optimizers=lambda model: halves(model, torch.nn.Parameter(torch.zeros(3))))
    again.load_checkpoint(tmp_path / "first")
    before = [optimizer.state_dict() for optimizer in again.optimizers]
    without(tmp_path / "c", OTHERS)
    with pytest.raises(CheckpointError, match=f"{OTHERS}' is missing"):
        again.load_checkpoint(tmp_path / "c")
    assert same_bits(before, [optimizer.state_dict() for optimizer in again.optimizers])


def test_the_first_of_two_files_in_the_format_of_torch_is_gone(tmp_path):
    engine = make_engine(optimizers=halves, optimizer_format="torch")
    step(engine)
    engine.save_checkpoint(tmp_path / "c")
    without(tmp_path / "c", "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer.pt' is missing"):
        make_engine(optimizers=halves).load_checkpoint(tmp_path / "c")


def test_an_adapter_that_is_gone(tmp_path):
    def with_adapters(seed):
        torch.manual_seed(seed)
        lora = LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.0, fan_in_fan_out=True)
        model = get_peft_model(make_model("gpt2"), lora)
        model.add_adapter("second", lora)
        return model

    def trained(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    engine = make_engine(model=with_adapters(0), optimizers=trained)
    engine.save_checkpoint(tmp_path / "c")
    other = make_engine(model=with_adapters(1), optimizers=trained)
    other.load_checkpoint(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "second")
    with pytest.raises(CheckpointError, match=r"second/adapter_model.safetensors' is missing"):
        other.load_checkpoint(tmp_path / "c")


# What the stock Trainer goes on without


@pytest.mark.parametrize(
    ("gone", "lost"),
    [
        (["optimizer*"], "the optimizer and the schedule of learning rates begin anew"),
        (["optimizer*", "scheduler.pt", "rng_state.pth"], "begin anew, random numbers will differ"),
    ],
    ids=["optimizer", "all"],
)
def test_the_trainer_goes_on_as_the_stock_one_and_says_what_is_lost(gone, lost, checkpoint, tmp_path, caplog):
    theirs = shutil.copytree(checkpoint, tmp_path / "stock" / "checkpoint-2")
    caplog.clear()
    without(checkpoint, *gone)
    without(theirs, *gone)
    resumed = ours(checkpoint.parent, model=make_model("gpt2", seed=3))
    run(resumed, resume_from_checkpoint=str(checkpoint))
    (warning,) = [text for text in warnings_in(caplog) if "patrickstar" in text]
    assert lost in warning
    assert all(f"{name.replace('*', '.index.json')}" in warning for name in gone)
    expected = stock(theirs.parent, model=make_model("gpt2", seed=3))
    run(expected, resume_from_checkpoint=str(theirs))
    assert logged(resumed, "loss") == logged(expected, "loss")


def test_random_numbers_that_are_damaged(checkpoint):
    path = checkpoint / "rng_state.pth"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"rng_state.pth' has no random numbers: .* The file is damaged"):
        run(ours(checkpoint.parent), resume_from_checkpoint=str(checkpoint))


def test_a_whole_checkpoint_is_resumed_without_a_warning(checkpoint, caplog):
    run(ours(checkpoint.parent), resume_from_checkpoint=str(checkpoint))
    assert [text for text in warnings_in(caplog) if "patrickstar" in text] == []


@pytest.mark.parametrize("is_on", [False, True])
def test_a_trainer_finds_no_schedule_while_the_optimizer_is_there(is_on, checkpoint):
    without(checkpoint, "optimizer.pt", "scheduler.pt")
    with pytest.raises(CheckpointError, match=r"scheduler.pt' is missing; .*delete every optimizer-\*"):
        by_the_trainer(checkpoint, is_on)
    without(checkpoint, "optimizer*")  # the remedy
    by_the_trainer(checkpoint, is_on)


def test_the_loss_scale_is_missed_too(tmp_path, caplog):
    run(ours(tmp_path, fp16=True))
    run(ours(tmp_path, fp16=True), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [text for text in warnings_in(caplog) if "lacks" in text] == []
    without(tmp_path / "checkpoint-2", "scaler.pt")
    run(ours(tmp_path, fp16=True), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (warning,) = [text for text in warnings_in(caplog) if "lacks" in text]
    assert "scaler.pt: the loss scale begins anew" in warning


# Accelerate


@pytest.mark.parametrize(
    ("gone", "missing", "has_hooks"),
    [
        (STATE_INDEX, STATE_INDEX, False),
        (SHARD, SHARD, True),
        ("optimizer*", "optimizer.bin", True),
        ("scheduler.bin", "scheduler.bin", False),
    ],
)
def test_accelerate_loads_nothing_of_what_is_incomplete(gone, missing, has_hooks, tmp_path):
    loop = Loop()
    if has_hooks:
        loop.accelerator.register_load_state_pre_hook(lambda models, directory: None)
    loop.train()
    loop.accelerator.save_state(tmp_path / "saved")
    loop.train(steps=1)
    before = loop.whole_state()
    without(tmp_path / "saved", gone)
    with pytest.raises(CheckpointError, match=f"{missing}' is missing"):
        loop.accelerator.load_state(tmp_path / "saved")
    assert same_bits(before, loop.whole_state())


def test_accelerate_says_that_random_numbers_are_lost(tmp_path, caplog):
    loop = Loop()
    loop.train()
    loop.accelerator.save_state(tmp_path / "saved")
    loop.accelerator.load_state(tmp_path / "saved")
    assert warnings_in(caplog) == []
    without(tmp_path / "saved", "random_states*")
    loop.accelerator.load_state(tmp_path / "saved")
    (warning,) = warnings_in(caplog)
    assert "random_states_0.pkl: random numbers will differ from those of an uninterrupted run" in warning
