"""The optimizers that a plan makes by name."""

import sys

import pytest
import torch
from accelerate import Accelerator

import hf_patrickstar
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.planner.optimizers import find_optimizer, keep_embeddings_wide, optimizer_name
from hf_patrickstar.planner.screen import describe
from hf_patrickstar.units import format_nbytes

MODEL = "llama:vocab_size=512,hidden_size=128,intermediate_size=256,num_hidden_layers=2,num_attention_heads=4"
NAMES = ("adamw", "adamw_8bit", "lion_8bit")


def test_names_of_torch():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert find_optimizer("AdamW") is find_optimizer("adamw_torch") is None
    assert type(find_optimizer("sgd")(parameters)) is torch.optim.SGD
    assert optimizer_name("AdamW") == "Adam"
    assert optimizer_name("sgd") == "SGD"


@pytest.mark.parametrize(("name", "near"), [("adamx", "adamax"), ("adamw_8bits", "adamw_8bit")])
def test_a_name_that_is_nearly_right(name, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        find_optimizer(name)


@pytest.mark.parametrize(("name", "bits"), [("AdamW_8bit", 8), ("paged_adamw_32bit", 32), ("lion_8bit", 8)])
def test_names_of_bitsandbytes(name, bits):
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 128))
    optimizer = find_optimizer(name)(model.parameters())
    assert optimizer.args.optim_bits == bits
    keep_embeddings_wide(optimizer, model)
    assert [optimizer.get_config(0, place, optimizer.param_groups[0])["optim_bits"] for place in (0, 1)] == [32, bits]
    manager = bnb.optim.GlobalOptimManager.get_instance()
    assert id(model[0].weight) not in manager.pid2config, "other optimizers of the process are not changed"


def test_bitsandbytes_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes: pip install hf_patrickstar\[bnb\]"):
        find_optimizer("adamw_8bit")


def test_bytes_of_a_plan():
    """Of each trainable parameter 2 + 4 + 1 + 1 bytes and scales; states of an embedding have 32 bits."""
    pytest.importorskip("bitsandbytes")
    settings = {"placement": "host", "chunk_numel": 8192}
    tight = {"length": 16, "settings": settings, "device_memory": "2MiB"}
    found = [hf_patrickstar.plan(MODEL, "h100", optimizer=name, **tight) for name in NAMES]
    adamw, adamw_8bit, lion_8bit = (plan.tiers["host"].owners for plan in found)
    embedding = 512 * 128
    others = embedding + 2 * (2 * 128 * 128 + 2 * 128 * 128 + 3 * 128 * 256) + 5 * 128
    small = 5 * 128  # norms, in states of 32 bits
    assert adamw_8bit["master"] == adamw["master"]
    assert adamw_8bit["state1"] == adamw_8bit["state2"] == others - small + 4 * (embedding + small)
    assert adamw_8bit["absmax1"] == 4 * (others - small) // 256
    assert lion_8bit["state1"] == adamw_8bit["state1"]
    assert "state2" not in lion_8bit
    host = next(line for line in describe(found[1]).splitlines() if line.startswith("host "))
    states = sum(adamw_8bit[name] for name in ("master", "state1", "state2", "absmax1", "absmax2"))
    assert f"optimizer states {format_nbytes(states)}" in host
    assert "other" not in host


def test_a_name_of_bitsandbytes_leaves_the_accelerator_alone():
    pytest.importorskip("bitsandbytes")
    accelerator = Accelerator(cpu=True)
    before = accelerator.mixed_precision
    assert find_optimizer("adamw_8bit")([torch.nn.Parameter(torch.zeros(2))]).args.optim_bits == 8
    assert accelerator.mixed_precision == before
