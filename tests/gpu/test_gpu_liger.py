"""Training with the kernels of Liger, whose fused loss reads the weight of the output embedding itself."""

import pytest
import torch
from support.on_gpu import DEVICE, LOSS_TOLERANCE, needs_cuda
from support.trainers import train

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_losses_are_those_of_the_stock_trainer(precision, tmp_path, at_home_on_host):
    pytest.importorskip("liger_kernel")
    told = {"use_liger_kernel": True, "bf16": precision == "bf16", "use_cpu": DEVICE == "cpu"}
    _, stock = train("llama", tmp_path / "stock", **told)
    trainer, ours = train("llama", tmp_path / "ours", {"chunk_numel": 3200, "chunk_budget": 90_000}, **told)
    assert trainer.patrickstar_stats()["chunk_loads"] > 0
    torch.testing.assert_close(ours.losses, stock.losses, **LOSS_TOLERANCE)
