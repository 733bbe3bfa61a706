"""Pushing to a hub while training: the same files arrive as from the stock Trainer."""

import pytest
import transformers.utils.hub
from huggingface_hub import HfApi, constants
from support.checkpoint_files import assert_same_tensors, names_in
from support.hub import Hub
from support.trainers import make_trainer, run, tight
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments
from hf_patrickstar.checkpoint.storage import PARTIAL


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with Hub(tmp_path / "hub") as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", HfApi(served.url, token="hf_of_nobody"))
        yield served


def train(cls, args_cls, folder, **kwargs):
    trainer = make_trainer(
        cls, args_cls, folder, save_strategy="steps", save_steps=2, push_to_hub=True, hub_token="hf_of_nobody", **kwargs
    )
    run(trainer)
    return trainer


def is_ours(path):
    return path.rsplit("/", 1)[-1].startswith(("optimizer-", "optimizer.index")) or is_read_me(path)


def is_read_me(path):
    """Whether it says what the files of a checkpoint are; that of the model is not in there."""
    return "checkpoint" in path and path.endswith("/README.md")


def shared(paths):
    """Paths that are the same with and without this package, whose optimizer files have other names."""
    return sorted(path for path in paths if not is_ours(path) and not path.endswith("optimizer.pt"))


@pytest.mark.parametrize(("strategy", "is_background"), [("checkpoint", False), ("all_checkpoints", True)])
def test_the_same_files_arrive_as_from_the_stock_trainer(strategy, is_background, hub, tmp_path):
    """Nothing of the half written checkpoint that a killed run has left does, nor of one on its way."""
    kwargs = {"hub_strategy": strategy, "hub_always_push": True}
    stock = train(Trainer, TrainingArguments, tmp_path / "stock", hub_model_id="me/stock", **kwargs)
    stock.push_to_hub()
    expected, hub.pushes[:] = list(hub.pushes), []
    rest = tmp_path / "ours" / PARTIAL / "checkpoint-9"
    rest.mkdir(parents=True)
    (rest / "model.safetensors").write_bytes(b"half of it")
    config = {**tight(), "background_save": is_background, "optimizer_format": "sharded"}
    ours = train(
        PatrickStarTrainer,
        PatrickStarTrainingArguments,
        tmp_path / "ours",
        hub_model_id="me/ours",
        patrickstar_config=config,
        **kwargs,
    )
    ours.push_to_hub()
    assert not rest.exists()
    assert [(message, shared(paths)) for message, paths in hub.pushes] == [
        (message, shared(paths)) for message, paths in expected
    ]
    places = [tmp_path / "hub/models/me" / name for name in ("stock", "ours")]
    assert shared(names_in(places[0])) == shared(names_in(places[1]))
    assert_same_tensors(*places, only="model")
    pushed = {path.rsplit("/", 1)[0] for path in names_in(places[1]) if is_ours(path)}
    wanted = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {"checkpoint-2", "checkpoint-4"}}
    assert pushed == wanted[strategy]


def test_the_live_model_is_pushed_by_save_pretrained(hub, tmp_path):
    kwargs = {"hub_strategy": "end", "hub_model_id": "me/run"}
    trainer = train(PatrickStarTrainer, PatrickStarTrainingArguments, tmp_path / "ours", **kwargs)
    trainer.model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/live", max_shard_size="50KB")
    assert names_in(tmp_path / "saved") <= names_in(tmp_path / "hub/models/me/live")
    assert_same_tensors(tmp_path / "saved", tmp_path / "hub/models/me/live")
    trainer.model.push_to_hub("me/pushed")
    assert_same_tensors(tmp_path / "saved", tmp_path / "hub/models/me/pushed")
