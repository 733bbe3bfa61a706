"""Adapters over packed weights: runs that are resumed, by whichever Trainer, end with the same bits."""

import pytest
import safetensors.torch
from support.models import make_rows
from support.quantized import load, saved, with_adapter
from support.same import assert_same
from support.trainers import arguments, logged, smallest_budget
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

pytest.importorskip("bitsandbytes")

ADAPTER = "adapter_model.safetensors"


def make_trainer(folder, *, is_ours, kind="nf4", adapter_seed=1, **kwargs):
    model = with_adapter(load(kind, saved(2).name), seed=adapter_seed)
    cls, args_cls = Trainer, TrainingArguments
    if is_ours:
        cls, args_cls = PatrickStarTrainer, PatrickStarTrainingArguments
        settings = {"chunk_budget": smallest_budget(model), "optimizer_format": "torch"}
        kwargs |= {"patrickstar": True, "patrickstar_config": settings}
    kwargs = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **kwargs}
    return cls(model=model, args=arguments(args_cls, folder, **kwargs), train_dataset=make_rows("llama", 32))


def adapter_of(checkpoint):
    return safetensors.torch.load_file(checkpoint / ADAPTER)


@pytest.mark.parametrize("kind", ["nf4", "fp4, double", "int8"])
def test_resuming(kind, tmp_path):
    stock, ours = (make_trainer(tmp_path / str(is_ours), is_ours=is_ours, kind=kind) for is_ours in (False, True))
    stock.train()
    ours.train()
    assert logged(ours, "loss") == logged(stock, "loss")
    for saves_ours, loads_ours in ((True, True), (False, True), (True, False)):
        folder = tmp_path / f"{saves_ours} {loads_ours}"
        resumed = make_trainer(folder, is_ours=loads_ours, kind=kind, adapter_seed=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"{saves_ours}/checkpoint-2"))
        assert logged(resumed, "loss") == logged(stock, "loss")
        assert_same(adapter_of(tmp_path / "False/checkpoint-4"), adapter_of(folder / "checkpoint-4"))
