"""Bytes of optimizers of bitsandbytes in the ledger: in 16-bit 2 + 4 + 1 + 1 per parameter, and scales of blocks."""

import pytest
import torch
from support import inside
from support.quantized_states import BLOCK_NUMEL, LEAST_NUMEL, begin_apart
from torch import nn

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.optim.torch_kernel import OWN_STATE

bnb = pytest.importorskip("bitsandbytes")

WIDTH, VOCAB = 500, 1000
IN_16_BIT = {"dtype": "bf16", "autocast": False}


class Words(nn.Module):
    """An embedding, large matrices that end in the middle of a block, and small vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, ids):
        x = self.embedding(ids)
        for linear, norm in zip(self.inner, self.norms, strict=True):
            x = torch.tanh(norm(linear(x)))
        return x.float().square().mean()


@pytest.fixture(autouse=True)
def _apart():
    begin_apart()
    yield
    begin_apart()


def engaged(cls, loaded=torch.float32, **config):
    model = Words().to(loaded).train()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model.embedding, "weight", {"optim_bits": 32})  # as the Trainer does it
    config = {"placement": "host", "chunk_budget": "2MiB", "cpu_embedding": False, **config}
    return PatrickStarEngine(model, config, cls(model.parameters(), lr=1e-3), device="cpu")


def train(engine, steps=2):
    for step in range(steps):
        ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
        engine.model(ids).backward()
        engine.optimizer.clip_grad_norm_(None, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def is_wide(tensor):
    return tensor.spec.numel < LEAST_NUMEL or tensor.spec.name.startswith("embedding")


def expected_of(engine, num_states):
    """Bytes of each list, and of the scales at least and at most: one for each block that a tensor has begun."""
    wanted = dict.fromkeys(("param", "master", *(f"state{number}" for number in range(1, num_states + 1))), 0)
    least = most = 0
    for chunk in inside.chunks(engine):
        numel, kinds = chunk.spec.chunk_numel, {is_wide(tensor) for tensor in chunk.tensors}
        assert len(kinds) == 1, "states of a chunk have one type"
        wanted["param"] += 2 * numel
        wanted["master"] += 4 * numel
        for number in range(1, num_states + 1):
            wanted[f"state{number}"] += (4 if True in kinds else 1) * numel
        if False in kinds:
            least += 4 * sum(-(-tensor.spec.numel // BLOCK_NUMEL) for tensor in chunk.tensors)
            most += 4 * (-(-numel // BLOCK_NUMEL) + len(chunk.tensors) + 64)  # 64: an aligned payload
    return wanted, least, most


@pytest.mark.parametrize(
    ("cls", "num_states"), [(bnb.optim.AdamW8bit, 2), (bnb.optim.PagedLion8bit, 1), (bnb.optim.PagedAdamW8bit, 2)]
)
def test_lists_of_chunks(cls, num_states):
    engine = engaged(cls, **IN_16_BIT)
    wanted, least, most = expected_of(engine, num_states)
    for when in ("before the first step", "after steps"):
        owners = engine.ledger.owners(Tier.HOST)
        assert {name: owners[name] for name in wanted} == wanted, when
        for number in range(1, num_states + 1):
            assert least <= owners[f"absmax{number}"] <= most, when
        assert owners.get(OWN_STATE, 0) == 0, "the library keeps no states of its own"
        train(engine)


def test_16_bit_weights_have_no_wider_masters():
    """As in plain torch: their states are those of fp32 weights."""
    engine = engaged(bnb.optim.AdamW8bit, torch.bfloat16)
    train(engine)
    owners, (wanted, *_) = engine.ledger.owners(Tier.HOST), expected_of(engine, 2)
    assert owners["master"] == owners["param"] == wanted["param"]
    for name in ("state1", "state2"):
        assert owners[name] == wanted[name]
