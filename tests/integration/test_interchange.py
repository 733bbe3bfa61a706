"""Checkpoints from and for the stock Trainer, models that are read late, and what is wrong with a checkpoint."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_files import (
    STATE_INDEX,
    assert_same_files,
    assert_same_tensors,
    names_in,
    tensors_in,
    write_index,
)
from support.models import make_model
from support.trainers import assert_same_weights, logged, make_trainer, run, tight
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_patrickstar import CheckpointError, PatrickStarTrainer, PatrickStarTrainingArguments, deferred_weights

SAVING = {"save_strategy": "steps", "save_steps": 2}


def stock(tmp_path, **kwargs):
    return make_trainer(Trainer, TrainingArguments, tmp_path, **{**SAVING, **kwargs})


def ours(tmp_path, **kwargs):
    return make_trainer(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path, **{**SAVING, **kwargs})


class Refusing(pickle.Unpickler):
    def find_class(self, module, name):
        raise AssertionError(f"{module}.{name} was unpickled")


def test_a_training_state_is_read_without_unpickling(tmp_path, monkeypatch):
    """A directory with the state alone, as it may come from somebody else."""
    run(ours(tmp_path / "run", patrickstar_config={**tight(), "optimizer_format": "sharded"}))
    place = tmp_path / "state"
    place.mkdir()
    for file in (tmp_path / "run/checkpoint-4").glob("*"):
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, place)
    config = {**tight(), "optimizer_format": "sharded"}
    trainer = ours(tmp_path / "other", model=make_model("gpt2", 3), max_steps=1, patrickstar_config=config)
    run(trainer)
    monkeypatch.setattr(pickle, "Unpickler", Refusing)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    trainer.patrickstar_engine.load_checkpoint(place)
    trainer.patrickstar_engine.save_checkpoint(tmp_path / "again")
    assert_same_tensors(place, tmp_path / "again")


# What may be wrong


def widen_a_tensor(place):
    file = place / next(n for n in sorted(names_in(place)) if n.startswith("model-"))
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: torch.zeros(7, 5)}, file, metadata={"format": "pt"})


def of_other_groups(place):
    index = json.loads((place / STATE_INDEX).read_text())
    first, second = index["param_groups"]
    second["params"].append(first["params"].pop(3))
    write_index(place, index)


WRONG = {
    widen_a_tensor: r"model-00001-of-.*: tensor 'transformer.*' has shape \(7, 5\), in the model it has \(\d+",
    of_other_groups: r"optimizer.index.json': param group 0 .* '.*' is only in one",
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint whose model is in several files, and a trainer that has trained something else."""
    folder = tmp_path_factory.mktemp("sharded")
    config = {**tight(), "dtype": "bf16", "optimizer_format": "sharded"}
    trainer = ours(folder / "run", patrickstar_config=config)
    run(trainer)
    place = folder / "checkpoint"
    shutil.copytree(folder / "run/checkpoint-4", place)
    (place / "model.safetensors").unlink()
    trainer.model.save_pretrained(place, max_shard_size="50KB")
    other = ours(folder / "other", model=make_model("gpt2", seed=3), patrickstar_config=config)
    run(other)
    return place, other


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_a_wrong_checkpoint_changes_nothing(damage, sharded, tmp_path):
    place, trainer = sharded
    engine = trainer.patrickstar_engine
    engine.save_checkpoint(tmp_path / "before")
    copy = tmp_path / "checkpoint-4"
    shutil.copytree(place, copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=WRONG[damage]):
        engine.load_checkpoint(copy)
    engine.save_checkpoint(tmp_path / "after")
    assert_same_files(tmp_path / "before", tmp_path / "after")
    # Nor does training begin with it.
    beginner = ours(tmp_path, model=make_model("gpt2", seed=3), patrickstar_config=trainer.args.patrickstar_config)
    with pytest.raises(CheckpointError, match=WRONG[damage]):
        run(beginner, resume_from_checkpoint=str(copy))
    assert_same_weights(make_model("gpt2", seed=3), beginner.model)


# Models that are read late


def saved(name, folder, **kwargs):
    make_model(name).save_pretrained(folder, **kwargs)
    return folder


def test_training_of_a_model_that_is_read_late(tmp_path):
    """The same losses and checkpoints as with ``from_pretrained`` alone, and the same parameter objects throughout."""
    name = "t5"
    saved(name, tmp_path / "model", max_shard_size="50KB")
    make = type(make_model(name)).from_pretrained
    plain = ours(tmp_path / "plain", name=name, model=make(tmp_path / "model"))
    run(plain)
    with deferred_weights():
        model = make(tmp_path / "model")
    parameters = dict(model.named_parameters())
    late = ours(tmp_path / "late", name=name, model=model)
    run(late)
    assert all(parameters[key] is value for key, value in late.model.named_parameters())
    assert logged(late, "loss") == logged(plain, "loss")
    assert_same_tensors(tmp_path / "plain/checkpoint-4", tmp_path / "late/checkpoint-4")
    assert names_in(tmp_path / "plain/checkpoint-4") == names_in(tmp_path / "late/checkpoint-4")
    # And such a model resumes: only the checkpoint's weights count.
    with deferred_weights():
        model = make(tmp_path / "model")
    resumed = ours(tmp_path / "resumed", name=name, model=model)
    run(resumed, resume_from_checkpoint=str(tmp_path / "late/checkpoint-2"))
    assert logged(resumed, "loss") == logged(plain, "loss")
    assert_same_weights(plain.model, resumed.model)


def test_the_type_in_the_configuration_is_that_of_the_file(tmp_path):
    """The library loads a model in the type that its configuration says: in 16-bit, training would be rounded off."""
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        trainer = ours(tmp_path, model=make_model("gpt2").to(dtype), max_steps=1, save_strategy="no", bf16=True)
        run(trainer)
        trainer.save_model(tmp_path / str(number))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert (
            loaded.dtype
            == dtype
            == getattr(torch, json.loads((tmp_path / f"{number}/config.json").read_text())["dtype"])
        )
        assert_same_weights(trainer.model, loaded)
        trainer.patrickstar_engine.detach()
        assert trainer.model.dtype == dtype


# Adapters

BEST = {
    **{"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 6},
    **{"metric_for_best_model": "loss", "greater_is_better": True},
}


def with_adapters(folder, is_late=False, seed=0):
    peft = pytest.importorskip("peft")
    with deferred_weights(is_late):
        base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True
    )
    return peft.get_peft_model(base, config)


def test_adapters(tmp_path):
    """Saved, resumed, the best ones loaded; over a base that is read late too; as with the stock Trainer."""
    base = saved("gpt2", tmp_path / "base")
    expected = stock(tmp_path / "stock", model=with_adapters(base), **BEST)
    run(expected)
    trainer = ours(tmp_path / "late", model=with_adapters(base, is_late=True), **BEST)
    run(trainer)
    assert logged(trainer, "loss") == logged(expected, "loss")
    assert_same_weights(expected.model, trainer.model)
    for step in (2, 6):
        theirs, own = (tmp_path / f"{name}/checkpoint-{step}" for name in ("stock", "late"))
        assert_same_tensors(theirs, own, "adapter_model")
        assert names_in(theirs) - {"optimizer.pt"} == {n for n in names_in(own) if not n.startswith("optimizer")}
    resumed = ours(tmp_path / "resumed", model=with_adapters(base, seed=1), **BEST)
    run(resumed, resume_from_checkpoint=str(tmp_path / "late/checkpoint-2"))
    assert logged(resumed, "loss") == logged(expected, "loss")
    assert_same_weights(expected.model, resumed.model)


# What ``save_pretrained`` of a trained model writes


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_save_pretrained_of_the_live_model(name, tmp_path):
    """The same files as of an ordinary model; where transformers cuts tensors into many, shards may end elsewhere."""
    trainer = ours(tmp_path / "run", name=name, save_strategy="no", max_steps=2)
    run(trainer)
    live, plain = trainer.model, make_model(name, seed=3)
    plain.load_state_dict(live.state_dict())
    plain.config, plain.generation_config = live.config, live.generation_config  # the Trainer has changed them
    for number, kwargs in enumerate(({}, {"max_shard_size": "40KB"}, {"variant": "mine"}, {"state_dict": None})):
        folders = tmp_path / f"live_{number}", tmp_path / f"plain_{number}"
        for model, folder in zip((live, plain), folders, strict=True):
            if "state_dict" in kwargs:
                kwargs = {"state_dict": {key: value.half() for key, value in live.state_dict().items()}}
            model.save_pretrained(folder, **kwargs)
        assert_same_tensors(folders[1], folders[0])
        if (name, number) != ("mixtral", 1):
            assert_same_files(*folders)
    assert len(list((tmp_path / "live_1").glob("*.safetensors"))) > 3
    assert all(value.dtype == torch.float16 for value in tensors_in(tmp_path / "live_3").values())
    assert_same_weights(plain, type(live).from_pretrained(tmp_path / "live_1"))
    assert_same_weights(plain, type(live).from_pretrained(tmp_path / "live_2", variant="mine"))
