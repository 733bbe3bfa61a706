"""A step makes few calls into the package: what Python costs a model for being in chunks, on any device."""

import pytest

MOST_CALLS = {"resident": 1200, "moving": 3500, "moving, torch's clipping": 5000}
MOST_TO_COPY = 7
"""Frames from a module's hook to the copy of a chunk."""


@pytest.mark.parametrize("mode", MOST_CALLS)
def test_a_steady_step_makes_few_calls(mode, load):
    calls, loads = load("bench_calls").count_ours(mode)
    assert sum(calls.functions.values()) <= MOST_CALLS[mode], calls.functions.most_common(20)
    assert calls.to_copy <= MOST_TO_COPY
    assert (loads > 0) is (mode != "resident")
