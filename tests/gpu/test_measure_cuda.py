"""``hf-patrickstar env --measure`` on a device: rates are in the order in which they are on every one."""

import os

import pytest
from support.on_gpu import DEVICE, needs_cuda

from hf_patrickstar.cli.main import main
from hf_patrickstar.machine import find_machine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Is kept in the file that ``scripts/gpu_check.py`` names."""
    file = os.environ.get("MACHINE_JSON") or str(tmp_path_factory.mktemp("rates") / "machine.json")
    assert main(["env", "--measure", "--json", file]) == 0
    return find_machine(file)


def test_what_was_measured_is_a_machine(machine):
    assert machine.has_accelerator == (DEVICE != "cpu")
    assert machine.num_cores >= 1


@needs_cuda
def test_rates_of_a_device(machine):
    assert machine.flops["bfloat16"] > machine.flops["float32"] > machine.host_flops
    assert machine.device_bandwidth > machine.host_bandwidth
    assert machine.device_bandwidth > machine.to_device_bandwidth > machine.pageable_bandwidth
    assert machine.kernel_s < machine.copy_latency_s < 1e-3
    assert machine.operator_s < 1e-3
