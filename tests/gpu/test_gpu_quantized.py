"""Adapters over weights that bitsandbytes has packed: the base is loaded and packed on the host, and streams."""

import pytest
import torch
from support.models import make_rows
from support.on_gpu import DEVICE, LOSS_TOLERANCE
from support.quantized import load, packed_nbytes, with_adapter, without_packing
from support.trainers import LossRecorder, arguments
from transformers import Trainer, TrainingArguments

from hf_patrickstar import PatrickStarTrainer, PatrickStarTrainingArguments

pytestmark = pytest.mark.gpu
pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("kind", ["nf4", "nf4, double", "int8"])
def test_losses_are_those_of_the_stock_trainer(kind, tmp_path, at_home_on_host, exact):
    recorders = [LossRecorder(), LossRecorder()]
    stock, ours = (with_adapter(without_packing(load(kind, dtype=torch.bfloat16))) for _ in recorders)
    told = {"bf16": True, "use_cpu": DEVICE == "cpu", "max_steps": 4}
    config = {"chunk_budget": packed_nbytes(ours) // 4}
    settings = arguments(
        PatrickStarTrainingArguments, tmp_path / "ours", patrickstar=True, patrickstar_config=config, **told
    )
    trainer = PatrickStarTrainer(
        model=ours, args=settings, train_dataset=make_rows("llama", 32), callbacks=recorders[:1]
    )
    trainer.train()
    assert trainer.patrickstar_stats()["chunk_evictions"] > 0
    stock = stock.to(DEVICE)
    stock.base_model.model.hf_device_map = {"": torch.device(DEVICE)}
    args = arguments(TrainingArguments, tmp_path / "stock", **told)
    Trainer(model=stock, args=args, train_dataset=make_rows("llama", 32), callbacks=recorders[1:]).train()
    torch.testing.assert_close(recorders[0].losses, recorders[1].losses, **LOSS_TOLERANCE)
