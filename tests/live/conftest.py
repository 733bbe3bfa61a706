import os

import pytest
from support.live import CONFIGS, Both


def pytest_generate_tests(metafunc):
    """``both`` has the tight budget; tests that ask for it, and with LIVE_ALL=1 all, have every one."""
    if "both" in metafunc.fixturenames:
        everywhere = getattr(metafunc.function, "everywhere", False) or os.environ.get("LIVE_ALL")
        metafunc.parametrize("both", list(CONFIGS) if everywhere else ["tight"], indirect=True)


@pytest.fixture
def both(request):
    """Runs a pattern on a plain model and on one in chunks; with LIVE_PLAIN=1 on two plain ones, to try the pattern."""
    return Both(None if os.environ.get("LIVE_PLAIN") else CONFIGS[request.param])
