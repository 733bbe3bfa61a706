"""Checkpoints of optimizers of bitsandbytes: the stock Trainer goes on from ours, and we from its, in other chunks."""

import shutil

import pytest
import torch
from support.checkpoint_files import STATE_INDEX, names_in, same_bits
from support.quantized_states import flat, make, trained
from support.trainers import assert_same_weights, logged

from hf_patrickstar.cli.main import main

pytest.importorskip("bitsandbytes")

SHAPES = (
    {"placement": "host", "chunk_numel": 8448, "chunk_budget": 2**18},
    {"placement": "host", "chunk_numel": 30_000, "debug_evict_all": True},
    {},
)
"""Chunks of other sizes, on the host and on the device."""


def run(tmp_path, config=None, dtype=torch.float32, seed=0, place=None, **kwargs):
    """Four steps with a checkpoint after the second; or the last two of them, from a checkpoint."""
    resumes = {} if place is None else {"train_kwargs": {"resume_from_checkpoint": str(place)}}
    return trained(
        tmp_path, make("llama", dtype, seed), config, save_strategy="steps", save_steps=2, **resumes, **kwargs
    )


def assert_same_end(expected, found):
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(found, key) == logged(expected, key)
    assert_same_weights(expected.model, found.model)
    left, right = (flat(trainer.optimizer.state_dict()) for trainer in (expected, found))
    assert same_bits(left, right)


@pytest.mark.parametrize(
    ("optim", "precision"),
    [
        *(("adamw_bnb_8bit", "fp32"), ("adamw_bnb_8bit", "autocast")),
        *(("paged_lion_8bit", "bf16"), ("paged_adamw_32bit", "autocast")),
    ],
)
def test_each_trainer_goes_on_from_the_file_of_the_other(optim, precision, tmp_path):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    kwargs = {"dtype": dtype, "optim": optim, "bf16": precision == "autocast"}
    theirs = run(tmp_path / "stock", **kwargs)
    for form in ("torch", "sharded"):
        run(tmp_path / form, {**SHAPES[0], "optimizer_format": form}, **kwargs)
    original, own, exported = (tmp_path / name / "checkpoint-2" for name in ("stock", "torch", "sharded"))
    assert STATE_INDEX in names_in(exported)
    assert main(["export", str(exported)]) == 0
    wanted, *files = (torch.load(folder / "optimizer.pt", weights_only=True) for folder in (original, own, exported))
    for found in files:
        assert list(found["state"]) == list(wanted["state"])
        assert same_bits(flat(wanted), found["state"])
        assert same_bits(wanted["param_groups"], found["param_groups"])
    cut = shutil.copytree(exported, tmp_path / "cut")  # states are cut as in chunks that do not read them
    (cut / "optimizer.pt").unlink()
    places = (None, own), (None, exported), (SHAPES[0], original), (SHAPES[1], own), (SHAPES[1], cut), (SHAPES[2], cut)
    for number, (config, place) in enumerate(places):
        assert_same_end(theirs, run(tmp_path / str(number), config, seed=3, place=place, **kwargs))
