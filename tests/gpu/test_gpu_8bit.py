"""8-bit states of bitsandbytes: its CUDA kernels update chunks that live on the device, its CPU kernels the others."""

import pytest
import torch
from support.on_gpu import DEVICE, LOSS_TOLERANCE
from support.trainers import train

pytestmark = pytest.mark.gpu
pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("config", [{}, {"chunk_numel": 3200, "chunk_budget": 90_000}], ids=["resident", "moving"])
def test_losses_are_those_of_the_stock_trainer(config, precision, optim, tmp_path, at_home_on_host, exact):
    told = {"optim": optim, "bf16": precision == "bf16", "use_cpu": DEVICE == "cpu", "max_steps": 6}
    _, stock = train("llama", tmp_path / "stock", **told)
    trainer, ours = train("llama", tmp_path / "ours", {"keep_fp32": "auto", **config}, **told)
    assert (trainer.patrickstar_stats()["chunk_loads"] > 0) is bool(config)
    torch.testing.assert_close(ours.losses, stock.losses, **LOSS_TOLERANCE)
