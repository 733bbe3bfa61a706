"""Adapters over weights that bitsandbytes has packed: the base is loaded and packed on the host, and streams."""

import pytest
import torch
from support.on_gpu import DEVICE, LOSS_TOLERANCE
from support.quantized import load, packed_nbytes, with_adapter, without_packing
from support.trainers import train

pytestmark = pytest.mark.gpu
pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("kind", ["nf4", "nf4, double", "int8"])
def test_losses_are_those_of_the_stock_trainer(kind, tmp_path, at_home_on_host, exact):
    stock, model = (with_adapter(without_packing(load(kind, dtype=torch.bfloat16))) for _ in range(2))
    told = {"bf16": True, "use_cpu": DEVICE == "cpu", "rows": 32}
    trainer, ours = train("llama", tmp_path / "ours", {"chunk_budget": packed_nbytes(model) // 4}, model=model, **told)
    assert trainer.patrickstar_stats()["chunk_evictions"] > 0
    stock = stock.to(DEVICE)
    stock.base_model.model.hf_device_map = {"": torch.device(DEVICE)}
    _, expected = train("llama", tmp_path / "stock", model=stock, **told)
    torch.testing.assert_close(ours.losses, expected.losses, **LOSS_TOLERANCE)
