import os

import pytest
from live.both import CONFIGS, Both


@pytest.fixture(params=["plain"] if os.environ.get("LIVE_PLAIN") else list(CONFIGS))
def both(request):
    """Runs a pattern on a plain model and on one in chunks: at a tenth of its bytes, when all fits, and poisoned."""
    return Both(CONFIGS.get(request.param))
