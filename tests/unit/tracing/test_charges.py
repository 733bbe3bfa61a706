"""Where the host waits: the function that asked."""

import pytest

from hf_patrickstar.tracing.costs import caller


@pytest.mark.parametrize("name", ["hf_patrickstar.memory.meters", "hf_patrickstar.memory.streams", "torch.utils"])
def test_a_place_is_the_function_that_asked_and_not_what_it_asked_through(name):
    """The meter of a step is between a user's operator and what charges it."""
    through = {"__name__": name, "caller": caller}
    exec("def ask():\n    return caller()\n", through)
    assert through["ask"]() == f"{__name__}.test_a_place_is_the_function_that_asked_and_not_what_it_asked_through"
