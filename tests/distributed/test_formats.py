"""Training states of several processes in torch's format: one writes ``optimizer.pt`` for all."""

import os

import pytest
import torch
from support.checkpoint_files import same_bits
from support.models import make_model
from support.together import copy_state, differences, engaged, heard, hf_loss, make_optimizer, train_together
from test_checkpoints import build

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.cli.main import main


def adafactor(model):
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)


MAKERS = {"adamw": make_optimizer, "adafactor": adafactor}


def save(rank, folder, kind, config):
    """Trains, saves, trains on; then goes on from what was saved, with chunks of another size."""
    config = {"optimizer_format": "torch", **config}
    model = build("gpt2", torch.float32)
    with engaged(model, config, MAKERS[kind](model)) as engine:
        train_together(engine, hf_loss("gpt2"), steps=2)
        engine.save_checkpoint(f"{folder}/c")
        weights, expected = copy_state(model), engine.optimizer.state_dict()
        losses, _ = train_together(engine, hf_loss("gpt2"), steps=1, first=2)
    model = build("gpt2", torch.float32, seed=5)
    with engaged(model, {"chunk_numel": 2048} if kind == "adamw" else {}, MAKERS[kind](model)) as engine:
        engine.load_checkpoint(f"{folder}/c")
        assert differences(weights, copy_state(model)) == {}
        assert same_bits(expected["state"], engine.optimizer.state_dict()["state"])
        assert train_together(engine, hf_loss("gpt2"), steps=1, first=2)[0] == losses
    return expected if rank == 0 else None


@pytest.mark.parametrize(("kind", "config"), [("adamw", {"chunk_numel": 2048}), ("adafactor", {})])
def test_one_file_of_all_processes(pair, tmp_path, kind, config):
    """Of parameters that are spread over processes too, and of states that have other shapes than parameters."""
    expected, _ = pair.run(save, str(tmp_path), kind, config)
    found = torch.load(tmp_path / "c/optimizer.pt", weights_only=True)
    assert same_bits(expected["state"], found["state"])
    assert not [name for name in os.listdir(tmp_path / "c") if name.startswith("optimizer") and name != "optimizer.pt"]
    model = make_model("gpt2")
    plain = MAKERS[kind](model)
    plain.load_state_dict(found)  # plain torch takes it
    model = build("gpt2", torch.float32, seed=5)
    engine = PatrickStarEngine(model, {}, MAKERS[kind](model), device="cpu")
    engine.load_checkpoint(tmp_path / "c")
    assert same_bits(expected["state"], engine.optimizer.state_dict()["state"])
    engine.detach()


def save_by_default(rank, folder):
    """Twice; returns the warnings of the package."""
    model = build("gpt2", torch.bfloat16)
    with engaged(model, {"dtype": "bf16"}, make_optimizer(model)) as engine, heard() as records:
        train_together(engine, hf_loss("gpt2"), steps=1)
        for number in range(2):
            engine.save_checkpoint(f"{folder}/{number}")
    return [record for record in records if "export" in record]


def test_the_first_save_says_how_pieces_are_exported(pair, tmp_path):
    first, second = pair.run(save_by_default, str(tmp_path))
    assert first == [
        f"patrickstar: the stock Trainer reads no pieces; for optimizer.pt run: hf-patrickstar export {tmp_path}/0"
    ]
    assert second == []
    assert main(first[0].split()[-3:][1:]) == 0
    found = torch.load(tmp_path / "0/optimizer.pt", weights_only=True)
    plain = make_optimizer(make_model("gpt2"))
    plain.load_state_dict(found)
    assert len(plain.state) == len(found["state"]) > 0
