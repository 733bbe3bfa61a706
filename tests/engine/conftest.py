import pytest
from engine.small import BUDGETS


@pytest.fixture(params=BUDGETS)
def budget(request):
    """Everything stays on the device, chunks move, or every chunk leaves as soon as it can and NaN is in its place."""
    return request.param
