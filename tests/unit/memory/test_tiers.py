import types

import pytest
import torch

from hf_patrickstar.errors import ConfigError
from hf_patrickstar.memory import tiers
from hf_patrickstar.memory.tiers import Tier, available_host_nbytes, resolve_budgets, total_host_nbytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 10 000 bytes available and no cgroup; returns a function that writes cgroup files."""
    monkeypatch.setattr(tiers.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=10_000, total=20_000))
    files = tuple((str(tmp_path / f"limit{number}"), str(tmp_path / f"usage{number}")) for number in range(2))
    monkeypatch.setattr(tiers, "CGROUP_FILES", files)

    def write(version, limit, usage, reclaimable=None):
        (tmp_path / f"limit{version}").write_text(limit)
        if usage is not None:
            (tmp_path / f"usage{version}").write_text(usage)
        if reclaimable is not None:
            (tmp_path / "memory.stat").write_text(f"anon 7\n{reclaimable} 300\n")

    return write


@pytest.mark.parametrize(
    ("limit", "usage", "reclaimable", "available", "total"),
    [
        ("4000\n", "1500\n", None, 2500, 4000),
        ("4000\n", "1500\n", "inactive_file", 2800, 4000),
        ("4000\n", "1500\n", "total_inactive_file", 2800, 4000),
        ("max\n", "1500\n", None, 10_000, 20_000),
        ("9223372036854771712\n", "1500\n", None, 10_000, 20_000),
        ("4000\n", "4500\n", None, 0, 4000),
        ("4000\n", "none\n", None, 10_000, 4000),
        ("4000\n", None, None, 10_000, 4000),
        ("\n", "1500\n", None, 10_000, 20_000),
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_memory_is_what_the_machine_has_and_a_cgroup_allows(
    machine, version, limit, usage, reclaimable, available, total
):
    assert (available_host_nbytes(), total_host_nbytes()) == (10_000, 20_000)
    machine(version, limit, usage, reclaimable)
    assert (available_host_nbytes(), total_host_nbytes()) == (available, total)
    machine(1 - version, "9000", "1000")
    assert available_host_nbytes() == min(available, 8000 + 300 * bool(reclaimable)), "the tighter of two limits counts"


@pytest.mark.parametrize(
    ("device", "asked", "given"),
    [
        (CPU, (300, 700), (300, 700)),
        (CPU, ("auto", 700), (9000, 700)),
        (CPU, (300, "auto"), (300, 9000)),
        (CPU, ("auto", "auto", 2), (4500, 4500)),
        (CUDA, ("auto", "auto"), (665, 9000)),
        (CUDA, (1000, 50), (1000, 50)),
    ],
)
def test_budgets(machine, monkeypatch, device, asked, given):
    """A device of 1000 bytes with 600 free, and 100 that torch keeps for reuse."""
    monkeypatch.setattr(tiers.torch.accelerator, "get_memory_info", lambda device: (600, 1000))
    monkeypatch.setattr(tiers.torch.accelerator, "memory_reserved", lambda device: 100)
    assert resolve_budgets(device, *asked) == dict(zip((Tier.DEVICE, Tier.HOST), given, strict=True))
    with pytest.raises(
        ConfigError, match="1001 bytes asked for, cuda:0 has 1000 bytes; set device_budget to at most 1000"
    ):
        resolve_budgets(CUDA, 1001, "auto")


def test_the_real_machine():
    assert 0 < available_host_nbytes() <= total_host_nbytes() <= tiers.psutil.virtual_memory().total
    assert [limit for limit, _ in tiers.CGROUP_FILES] == [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]
