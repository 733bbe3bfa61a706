"""What fits in some memory fits in more of it."""

import pytest

from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.planner.planning import arrange, plan_and_simulate

MIXTRAL = (
    "mixtral:num_hidden_layers=4,hidden_size=128,num_attention_heads=4,num_key_value_heads=2,intermediate_size=256,"
    "num_local_experts=4,vocab_size=1000"
)


@pytest.mark.parametrize("device_memory", ["38.5MiB", "39.5MiB"])
def test_where_all_but_the_scratch_space_of_two_processes_fits_chunks_leave_the_device(device_memory):
    """From 38.8 MiB to 40 MiB all model data fits beside activations, and not what arrives from the other process."""
    subject, given = arrange(
        MIXTRAL,
        CPU_TIER.shared_by(2),
        **{"batch_size": 4, "length": 128, "world_size": 2, "settings": {"cpu_embedding": False}},
        **{"device_memory": device_memory, "host_memory": "8GiB"},
    )
    assert plan_and_simulate(subject, given)[0].fits
