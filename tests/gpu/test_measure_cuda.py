"""The rates of a CUDA device are in the order in which they are on every one."""

import pytest
import torch

from hf_patrickstar.report.measure import Effort, measure_machine
from hf_patrickstar.units import MIB

pytestmark = pytest.mark.gpu


def test_rates_of_a_device():
    machine = measure_machine(Effort(nbytes=256 * MIB, seconds=0.3))
    assert machine.name == torch.cuda.get_device_name()
    assert machine.flops["bfloat16"] > machine.flops["float32"] > machine.host_flops
    assert machine.device_bandwidth > machine.host_bandwidth
    assert machine.device_bandwidth > machine.to_device_bandwidth > machine.pageable_bandwidth
    assert machine.kernel_s < machine.copy_latency_s < 1e-3
    assert machine.operator_s < 1e-3
