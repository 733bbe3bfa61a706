"""States in bf16 beside masters that are not fp32."""

import pytest
import torch
from support import inside
from support.streams import streams_of
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.kernel import WORKSPACE

pytestmark = pytest.mark.own_streams


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("fused", [True, None])
def test_bf16_states_of_masters_that_are_not_fp32_on_a_device(dtype, fused):
    """The scratch space there is fp32."""
    with streams_of("simulated:1"):
        model = nn.Linear(70, 70).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        config = {"machine": MACHINES["rtx4090"], "pin_memory": False, "state_dtype": "bf16"}
        engine = PatrickStarEngine(model, config, optimizer, device="cpu")
        assert inside.homes(engine) == {Tier.DEVICE}
        for seed in range(2):
            model(torch.full((2, 70), seed + 1.0, dtype=dtype)).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert WORKSPACE not in engine.ledger.owners(Tier.DEVICE), "it would not be used"


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_has_none(cls):
    model, options = nn.Linear(2, 2), {"amsgrad": True} if cls is torch.optim.AdamW else {}
    with pytest.raises(ConfigError, match=rf"without amsgrad.* \({cls.__name__}\) is not"):
        PatrickStarEngine(model, {"state_dtype": "bf16"}, cls(model.parameters(), **options))
