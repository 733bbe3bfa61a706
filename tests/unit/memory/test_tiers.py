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

    def write(version, limit, usage):
        (tmp_path / f"limit{version}").write_text(limit)
        (tmp_path / f"usage{version}").write_text(usage)

    return write


def test_without_a_cgroup_it_is_what_the_machine_has(machine):
    assert available_host_nbytes() == 10_000


@pytest.mark.parametrize(
    ("limit", "usage", "available"),
    [
        ("4000\n", "1500\n", 2500),
        ("max\n", "1500\n", 10_000),
        ("9223372036854771712\n", "1500\n", 10_000),
        ("4000\n", "4000\n", 0),
        ("4000\n", "4500\n", 0),
        ("4000\n", "none\n", 10_000),
        ("\n", "1500\n", 10_000),
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_cgroup_limits_are_respected(machine, version, limit, usage, available):
    machine(version, limit, usage)
    assert available_host_nbytes() == available


def test_the_tighter_of_two_limits_counts(machine):
    machine(0, "9000", "1000")
    machine(1, "4000", "1000")
    assert available_host_nbytes() == 3000


@pytest.mark.parametrize(
    ("limit", "total"), [("4000\n", 4000), ("max\n", 20_000), ("9223372036854771712\n", 20_000), ("\n", 20_000)]
)
@pytest.mark.parametrize("version", [0, 1])
def test_all_memory_is_what_a_cgroup_allows(machine, version, limit, total):
    assert total_host_nbytes() == 20_000
    machine(version, limit, "1500\n")
    assert total_host_nbytes() == total


def test_a_limit_without_a_usage_file_is_passed_over(machine, tmp_path):
    machine(0, "4000", "1000")
    (tmp_path / "usage0").unlink()
    assert available_host_nbytes() == 10_000


def test_the_real_machine():
    assert 0 < available_host_nbytes() <= tiers.psutil.virtual_memory().total


def test_the_real_cgroup_files():
    assert [limit for limit, _ in tiers.CGROUP_FILES] == [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]


def test_budgets_of_the_cpu_tier(machine):
    assert resolve_budgets(CPU, 300, 700) == {Tier.DEVICE: 300, Tier.HOST: 700}
    assert resolve_budgets(CPU, "auto", 700) == {Tier.DEVICE: 9000, Tier.HOST: 700}
    assert resolve_budgets(CPU, 300, "auto") == {Tier.DEVICE: 300, Tier.HOST: 9000}


@pytest.fixture
def gpu(monkeypatch, machine):
    """A device of 1000 bytes with 600 free, and 100 that torch keeps for reuse."""
    monkeypatch.setattr(tiers.torch.accelerator, "get_memory_info", lambda device: (600, 1000))
    monkeypatch.setattr(tiers.torch.accelerator, "memory_reserved", lambda device: 100)


@pytest.mark.usefixtures("gpu")
def test_budgets_of_an_accelerator():
    assert resolve_budgets(CUDA, "auto", "auto") == {Tier.DEVICE: 665, Tier.HOST: 9000}
    assert resolve_budgets(CUDA, 1000, 50) == {Tier.DEVICE: 1000, Tier.HOST: 50}


@pytest.mark.usefixtures("gpu")
def test_a_budget_larger_than_the_accelerator():
    with pytest.raises(ConfigError, match="device_budget: 1001 bytes asked for, cuda:0 has 1000 bytes"):
        resolve_budgets(CUDA, 1001, "auto")
